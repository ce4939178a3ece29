"""The time that a byte of each bucket costs: the regression behind time-aware plans (thesis, section 4.5)."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

import numpy as np

from thinwire.policies.policy import Sync

_PLANS_PER_BUCKET = 2
_MOST_PLANS_PER_BUCKET = 4
"""Plans to try at most: some turn out like others, and more would not help."""
_LEAST_STEPS = 3
_SKIPPED_STEPS = 2
"""Number of steps of a new plan that do not count, because they allocate messages."""


def more_plans_help(num_buckets: int, trials: int) -> bool:
    """Whether to try another plan as long as times are not known, after so many. One bucket has nothing to compare."""
    return num_buckets > 1 and trials < _MOST_PLANS_PER_BUCKET * num_buckets


def seconds_per_byte(syncs: Sequence[Sync]) -> list[float] | None:
    """By bucket, the seconds that a byte of it adds to the time from the first bucket's start to the last one's end.

    A non-negative linear regression with a constant, of the median time of every plan that was seen for long enough.
    None as long as too few different plans were: two for each bucket.
    """
    seen: dict[tuple[int, ...], list[float]] = {}
    for sync in syncs:
        seen.setdefault(sync.bucket_bytes, []).append(sync.seconds)
    # DDP forms its buckets anew after the first steps: only those count that it has now.
    num_buckets = len(syncs[-1].bucket_bytes) if syncs else 0
    plans = {
        sizes: median(seconds[_SKIPPED_STEPS:])
        for sizes, seconds in seen.items()
        if len(sizes) == num_buckets and len(seconds) >= _SKIPPED_STEPS + _LEAST_STEPS
    }
    if not num_buckets or len(plans) < _PLANS_PER_BUCKET * num_buckets:
        return None
    from scipy.optimize import nnls

    sizes = np.array(list(plans), dtype=np.float64)
    columns = np.concatenate([sizes / sizes.max(), np.ones((len(plans), 1))], axis=1)
    coefficients, _ = nnls(columns, np.array(list(plans.values())))
    return [float(value) / float(sizes.max()) for value in coefficients[:-1]]
