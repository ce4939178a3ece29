"""Sites of the random draws of a collective: who draws, and at which stage."""

from __future__ import annotations

from thinwire.compressors import Key
from thinwire.kernels import derive_key

WORKER, OWNER = 1, 2
"""The owner of a chunk never reuses a draw of a worker."""

SHARED = -1
"""In place of the rank in the key of a draw that all ranks share."""


def stage_key(seed: int, step: int, site: int, rank: int) -> Key:
    """The key of what ``rank`` encodes in a step, as worker or as owner."""
    return Key(derive_key(seed, step, site, rank), derive_key(seed, step, site, SHARED))


def sum_key(seed: int, step: int, rank: int) -> Key:
    """The key of what ``rank`` adds to the sums of a step."""
    return Key(derive_key(seed, step, WORKER, rank), derive_key(seed, step, SHARED))
