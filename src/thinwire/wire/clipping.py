"""Watches how many values are clipped to fit into integers, and says so when it is too many."""

from __future__ import annotations

import warnings

_WINDOW_STEPS = 20
_LIMIT = 0.01


class Clipping:
    """Counts of this rank over some steps. What is clipped is lost: beyond 1 % of the values it warns, once."""

    def __init__(self) -> None:
        self._steps = self._clipped = self._rounded = 0
        self._told = False

    def add(self, clipped: int, rounded: int) -> None:
        """Count one bucket."""
        self._clipped += clipped
        self._rounded += rounded

    def warn(self) -> None:
        """Begin a step; every so many of them look back, and warn if too much was clipped."""
        self._steps += bool(self._rounded)
        if self._steps < _WINDOW_STEPS or self._told:
            return
        share = self._clipped / self._rounded
        self._steps = self._clipped = self._rounded = 0
        if share > _LIMIT:
            self._told = True
            warnings.warn(
                f"{share:.1%} of the gradients' values were clipped in the last {_WINDOW_STEPS} steps, so that sums of "
                "integers fit: take bits=32, or fewer ranks; wire.stats.clipped says how it goes on",
                stacklevel=2,
            )
