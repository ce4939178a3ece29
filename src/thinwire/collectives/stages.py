"""Arguments of one call of a collective other than its tensors: its number, the keys of its random draws, a clock."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol

from thinwire.compressors import Key, State
from thinwire.kernels import derive_key

WORKER, OWNER = 1, 2
"""Stages in which a rank encodes. Their random draws are independent of each other."""

_SHARED = -1
"""Number in the place of the rank in the key of draws that all ranks share."""


class Clock(Protocol):
    """Times the stages of a collective."""

    def stage(self, name: str) -> AbstractContextManager[None]:
        """Time the body as stage ``encode``, ``reduce``, ``decode`` or ``wire``."""
        ...


class NoClock:
    """A clock that measures nothing."""

    def stage(self, name: str) -> AbstractContextManager[None]:
        return nullcontext()


@dataclass(frozen=True)
class CollectiveCall:
    """Arguments of one call of a collective other than its tensors.

    All ranks pass the same, except for ``state`` and ``clock``.
    """

    seed: int
    """Seed of the random draws."""
    step: int
    """Number of the call. A message of another call is an error."""
    scale: float | None = None
    """Factor of the sum over all ranks; None for the mean."""
    state: State | None = None
    """Slots of the layers, if their compressors have any."""
    clock: Clock = field(default_factory=NoClock)
    draw: int | None = None
    """Number in place of ``step`` in the keys of random draws: calls with the same value draw the same."""

    def key(self, stage: int, rank: int) -> Key:
        """Return the key of the draws with which ``rank`` encodes, as `WORKER` or as `OWNER`."""
        return Key(derive_key(self.seed, self._draw, stage, rank), derive_key(self.seed, self._draw, stage, _SHARED))

    def sum_key(self, rank: int) -> Key:
        """Return the key of the draws for ``rank``'s contribution to native all-reduces."""
        return Key(derive_key(self.seed, self._draw, WORKER, rank), derive_key(self.seed, self._draw, _SHARED))

    def factor(self, num_ranks: int) -> float:
        """Return the factor of the sum over ``num_ranks`` ranks."""
        return 1.0 / num_ranks if self.scale is None else self.scale

    @property
    def _draw(self) -> int:
        return self.step if self.draw is None else self.draw


def complete(collective: Iterator[None]) -> None:
    """Run a collective to its end."""
    for _ in collective:
        pass
