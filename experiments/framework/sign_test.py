"""Whether measurements that took turns say what is claimed: a sign test, which a few disturbed rounds do not turn."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import comb

CONFIDENCE = 0.95


def above(values: Sequence[float], bound: float = 1.0) -> bool | None:
    """Whether ``values`` (one a round) lie above ``bound``, in the median: True or False with 95 %, else None.

    Were it not so, each round would be above with a chance of one half at most; what is counted is how often it is.
    """
    over, under = sum(value > bound for value in values), sum(value < bound for value in values)
    if _chance(over, len(values)) <= 1 - CONFIDENCE:
        return True
    return False if _chance(under, len(values)) <= 1 - CONFIDENCE else None


def all_hold(verdicts: Iterable[bool | None]) -> bool | None:
    """False if one is; else None if one is; else True."""
    found = list(verdicts)
    return False if False in found else None if None in found else True


def _chance(successes: int, rounds: int) -> float:
    """Of at least so many heads among so many throws of a coin."""
    return sum(comb(rounds, k) for k in range(successes, rounds + 1)) / 2**rounds
