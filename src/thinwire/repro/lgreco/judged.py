"""What trainings say: quality lost to uncompressed training, and bytes once plans are chosen."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from thinwire.repro.comparison import Comparison, Side
from thinwire.repro.findings import no_worse, points, share
from thinwire.repro.report import Run
from thinwire.repro.statistics import Estimate, relative_differences


@dataclass(frozen=True)
class Lost:
    """What a variant loses of the baseline's quality: a share of its loss, or points of accuracy."""

    estimate: Estimate
    within: bool | None
    """Whether at most the margin is lost; None where too few seeds were trained to say."""
    text: str


def lost(runs: Sequence[Run], baseline: Sequence[Run], margin: float) -> Lost:
    """By accuracy, of a task that counts right answers, as a share of the baseline's; else by held-out loss."""
    ours, theirs = _accuracies(runs), _accuracies(baseline)
    if ours and theirs:
        base = fmean(theirs)
        differences = [other - mine for mine, other in zip(ours, theirs, strict=True)]
        found, within = no_worse(differences, margin * base)
        return Lost(found, within, f"accuracy {fmean(ours):.2%} against {base:.2%}, lost: {points(found)}")
    losses, others = [run.val_loss for run in runs], [run.val_loss for run in baseline]
    found, within = no_worse(relative_differences(losses, others), margin)
    shown = f"{fmean(losses):.4f} against {fmean(others):.4f}"
    perplexity = f"perplexity {math.exp(fmean(losses)):.1f} against {math.exp(fmean(others)):.1f}"
    return Lost(found, within, f"held-out loss {shown}: {share(found)}; {perplexity}")


def sensitive(found: Comparison) -> bool:
    """Whether the control surely fails, so that a quality that is kept says something."""
    control = found.control
    return control is not None and lost(control.runs, found.baseline.runs, found.margin).within is False


def bytes_from(run: Run, step: int) -> float:
    """Payload that rank 0 sends in a step, from ``step`` on as far as probes tell."""
    steps = [0, *run.probe_steps]
    at = min(next((i for i, probed in enumerate(steps) if probed >= step), 0), len(steps) - 2)
    return (run.payload_bytes[-1] - run.payload_bytes[at]) / (steps[-1] - steps[at])


def first_plan(runs: Sequence[Run]) -> int:
    """The step from which a policy's plans hold; 0 without a policy."""
    return max((run.plans[0]["step"] for run in runs if run.plans), default=0)


def gains(runs: Sequence[Run], uniform: Sequence[Run]) -> list[float]:
    """By seed, how many times fewer bytes than ``uniform`` are sent once a plan is chosen."""
    step = first_plan(runs)
    return [bytes_from(other, step) / bytes_from(run, step) for run, other in zip(runs, uniform, strict=True)]


def at_least(values: Sequence[float], bound: float) -> bool | None:
    """Whether all ``values`` are; None where some are and some are not."""
    above = [value >= bound for value in values]
    return True if all(above) else False if not any(above) else None


def kept_within(runs: Sequence[Run]) -> tuple[int, int, float]:
    """Decisions with an error that is known, how many of them are within the reference's, and the largest share."""
    shares = [
        plan["error"] / plan["reference_error"]
        for run in runs
        for plan in run.plans
        if plan["error"] is not None and plan["reference_error"]
    ]
    return len(shares), sum(share <= 1 + 1e-9 for share in shares), max(shares, default=math.nan)


def side_named(found: Comparison, name: str) -> Side:
    return next(side for side in found.variants if side.name == name)


def _accuracies(runs: Sequence[Run]) -> list[float]:
    return [run.accuracy for run in runs if run.accuracy is not None]
