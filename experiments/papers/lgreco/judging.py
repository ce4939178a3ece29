"""What trainings say: quality lost to uncompressed training, and bytes once plans are chosen."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from experiments.framework.verdicts import Judgment, matches
from thinwire_tools.compare.comparison import Comparison, Run, Side
from thinwire_tools.compare.statistics import Estimate, estimate, relative_differences


def lost(runs: Sequence[Run], baseline: Sequence[Run], margin: float) -> dict[str, Any]:
    """What ``runs`` lose of the baseline's quality, for a row: points of accuracy, of a task that counts right answers;
    else a share of its held-out loss. ``margin`` is a share of the baseline's."""
    ours, theirs = _accuracies(runs), _accuracies(baseline)
    if ours and theirs:
        difference, allowed = estimate([b - a for a, b in zip(ours, theirs, strict=True)]), margin * fmean(theirs)
    else:
        ours, theirs = [run.val_loss for run in runs], [run.val_loss for run in baseline]
        difference, allowed = estimate(relative_differences(ours, theirs)), margin
    return {
        "lost": difference.mean,
        "lower": difference.lower,
        "upper": difference.upper,
        "ours": fmean(ours),
        "theirs": fmean(theirs),
        "margin": allowed,
        "counts_right": bool(_accuracies(runs)),
    }


def kept(row: Mapping[str, Any], margin: float | None = None) -> Judgment:
    """Whether a row's `lost`, in points of accuracy or as a share of perplexity, is at most the margin."""
    allowed = row["margin"] if margin is None else margin
    # The loss is the logarithm of perplexity: a difference of 0.01 is 1 % of it.
    nats = 1.0 if row["counts_right"] else row["theirs"]
    lost = _estimate(row)
    difference = Estimate(nats * lost.mean, lost.deviation, nats * lost.lower, nats * lost.upper, 2)
    return matches(difference, allowed, "points" if row["counts_right"] else "%")


def _estimate(row: Mapping[str, Any]) -> Estimate:
    # JSON keeps what is not finite as null: bounds of one seed, or a run that diverged.
    mean = math.inf if row["lost"] is None else row["lost"]
    lower = row["lower"] if row["lower"] is not None else math.inf if math.isinf(mean) else -math.inf
    return Estimate(mean, math.nan, lower, math.inf if row["upper"] is None else row["upper"], 2)


def bytes_from(run: Run, step: int) -> float:
    """Payload that rank 0 sends in a step, from ``step`` on as far as there are probes."""
    steps = [0, *run.probe_steps]
    at = min(next((i for i, probed in enumerate(steps) if probed >= step), 0), len(steps) - 2)
    return (run.payload_bytes[-1] - run.payload_bytes[at]) / (steps[-1] - steps[at])


def first_plan(runs: Sequence[Run]) -> int:
    """The step from which a policy's plans hold; 0 without a policy."""
    return max((run.plans[0]["step"] for run in runs if run.plans), default=0)


def gains(runs: Sequence[Run], uniform: Sequence[Run]) -> list[float]:
    """By seed, how many times fewer bytes than ``uniform`` are sent once both have chosen a plan."""
    step = max(first_plan(runs), first_plan(uniform))
    return [bytes_from(other, step) / bytes_from(run, step) for run, other in zip(runs, uniform, strict=True)]


def side_named(comparison: Comparison, name: str) -> Side:
    return next(side for side in comparison.variants if side.name == name)


def _accuracies(runs: Sequence[Run]) -> list[float]:
    return [run.accuracy for run in runs if run.accuracy is not None]
