"""The range of a prediction that follows from the variation of the measurements."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

_DRAWS = 60
_RANGE = (0.05, 0.95)
_P = TypeVar("_P")
_L = TypeVar("_L")


@dataclass(frozen=True)
class Range:
    """A prediction and its uncertainty by the measurements: 5 % of what they allow lies below ``low``, and above
    ``high``."""

    value: float
    low: float
    high: float

    @staticmethod
    def from_values(values: Sequence[float]) -> Range:
        ordered = sorted(values)
        return Range(_quantile(ordered, 0.5), *(_quantile(ordered, share) for share in _RANGE))

    def times(self, by: float) -> Range:
        return replace(self, value=by * self.value, low=by * self.low, high=by * self.high)


def _quantile(ordered: Sequence[float], share: float) -> float:
    at = share * (len(ordered) - 1)
    low = math.floor(at)
    return ordered[low] + (at - low) * (ordered[min(low + 1, len(ordered) - 1)] - ordered[low])


def draws(paces: Sequence[_P], links: Sequence[_L]) -> list[tuple[_P, _L]]:
    """Draw pairs of measured steps and measured links at random, but always the same ones, for ranges."""
    pick = random.Random(0)
    return [(pick.choice(paces), pick.choice(links)) for _ in range(_DRAWS)]
