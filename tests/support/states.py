"""States that somebody changed on purpose: their checksums are right."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from thinwire.runtime.checkpoint import sealed


def resealed(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A state of a Wire with checksums of what it holds now."""
    entries = dict(state)
    for name in [
        name for name in state if name == "checksums" or (name.startswith("rank") and name.endswith("/checksums"))
    ]:
        prefix = name.removesuffix("checksums")
        keys = [key for key in state if (key.startswith(prefix) if prefix else "/" not in key) and key != name]
        entries |= sealed({key: state[key] for key in keys if isinstance(state[key], Tensor)}, name)
    return entries
