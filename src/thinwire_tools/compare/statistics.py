"""Statistics of paired runs, which decide whether a variant's loss is within a margin of the baseline's.

Pure functions of numbers. A pair is two runs from one seed: what they share (initial weights, batches) cancels in their
relative difference, and what is left is judged by Student's t over the seeds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from typing import Any

CONFIDENCE = 0.95
"""Confidence of each bound: a variant that is worse than the margin is called within it in at most 5 % of cases."""

POWER = 0.8

CONTROL = "minmax(bits=1, bucket=8192, rounding=nearest)"
"""Compressor that must fail, or equal losses mean nothing: one bit, few scales, a biased rounding and no error
feedback."""

_MOST_SEEDS = 1000


class Verdict(StrEnum):
    """Whether a variant is worse than the baseline by no more than the margin."""

    WITHIN = "yes"
    BEYOND = "no"
    UNDECIDED = "undecided"


@dataclass(frozen=True)
class Estimate:
    """Mean of the relative differences, and bounds of the true one.

    The true one is at least ``lower`` and at most ``upper``, each with `CONFIDENCE` by itself.
    """

    mean: float
    deviation: float
    """Standard deviation between seeds (with n − 1); NaN for one seed, or where a run diverged."""
    lower: float
    upper: float
    num_pairs: int


def need_scipy() -> Any:
    """Return ``scipy.stats``. Raises ``ImportError`` that says how to install it."""
    try:
        from scipy import stats
    except ImportError as error:
        raise ImportError("comparing runs requires scipy: pip install scipy") from error
    return stats


def relative_differences(losses: Sequence[float], baseline: Sequence[float]) -> list[float]:
    """Return ``losses / baseline − 1`` seed by seed; infinity where a run's loss is not finite.

    Raises ``ValueError`` if a baseline is not finite and positive: nothing can be compared to it.
    """
    for value in baseline:
        if not (math.isfinite(value) and value > 0):
            raise ValueError(f"the baseline's loss is {value}: it diverged, so tune its learning rate first")
    return [loss / other - 1 if math.isfinite(loss) else math.inf for loss, other in zip(losses, baseline, strict=True)]


def estimate(differences: Sequence[float]) -> Estimate:
    """Return bounds of the true mean by the paired t-test, one-sided each; infinite for a single pair.

    Where a difference is infinite, because a run diverged, so are the mean and both bounds. Raises ``ValueError``
    without any pair.
    """
    count = len(differences)
    if count == 0:
        raise ValueError("no pairs of runs to compare: give at least one seed")
    if not all(math.isfinite(difference) for difference in differences):
        return Estimate(math.inf, math.nan, math.inf, math.inf, count)
    mean = math.fsum(differences) / count
    if count == 1:
        return Estimate(mean, math.nan, -math.inf, math.inf, count)
    deviation = math.sqrt(math.fsum((difference - mean) ** 2 for difference in differences) / (count - 1))
    half = float(need_scipy().t.ppf(CONFIDENCE, count - 1)) * deviation / math.sqrt(count)
    return Estimate(mean, deviation, mean - half, mean + half, count)


def judge(difference: Estimate, margin: float) -> Verdict:
    """Return "within" where even the upper bound is within the margin, "beyond" where even the lower bound is not."""
    if difference.upper <= margin:
        return Verdict.WITHIN
    return Verdict.BEYOND if difference.lower > margin else Verdict.UNDECIDED


def seeds_needed(difference: Estimate, margin: float) -> int | None:
    """Estimate how many seeds would decide, with a chance of `POWER`, if mean and deviation are as given.

    The least n with ``(t_confidence + t_power) · deviation / √n ≤ |margin − mean|``, quantiles of n − 1 degrees of
    freedom. None where that is unknown (a single seed) or is over a thousand.
    """
    distance = abs(margin - difference.mean)
    if not math.isfinite(difference.deviation) or distance == 0:
        return None
    quantile = need_scipy().t.ppf

    def enough(count: int) -> bool:
        sum_of_quantiles = quantile(CONFIDENCE, count - 1) + quantile(POWER, count - 1)
        return sum_of_quantiles * difference.deviation <= distance * math.sqrt(count)

    if not enough(_MOST_SEEDS):
        return None
    low, high = 2, _MOST_SEEDS
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle + 1, high)
    return low


def smoothed(values: Sequence[float]) -> list[float]:
    """Return the mean of each value and the two before it, where there are as many."""
    parts = [values[max(0, end - 3) : end] for end in range(1, len(values) + 1)]
    return [math.fsum(part) / len(part) for part in parts]


def reached(at: Sequence[float], losses: Sequence[float], loss: float) -> float | None:
    """Return the first of ``at``, steps or seconds, at which ``losses`` are at ``loss``, interpolated linearly; None if
    they never are."""
    if losses and losses[0] <= loss:
        return at[0]
    for (before_at, before), (after_at, after) in pairwise(zip(at, losses, strict=True)):
        if after <= loss:
            return before_at + (before - loss) / (before - after) * (after_at - before_at)
    return None


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return a confidence interval of the median that assumes no distribution: two order statistics of ``values``.

    With n values the k-th smallest and the k-th largest enclose the median with probability
    1 − 2 P(Binomial(n, 1/2) < k); k is the largest that keeps it at `CONFIDENCE`. Fewer than six values do not reach
    95 %: their whole range is returned then.
    """
    ordered, count = sorted(values), len(values)
    below = 0.0
    depth = 0
    while depth < count // 2:
        below += math.comb(count, depth) / 2**count
        if 1 - 2 * below < CONFIDENCE:
            break
        depth += 1
    depth = max(depth, 1)
    return ordered[depth - 1], ordered[count - depth]
