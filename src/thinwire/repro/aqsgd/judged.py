"""What trainings say: loss lost to the baseline, seed by seed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from thinwire.repro.aqsgd.trainings import Trained
from thinwire.repro.aqsgd.ways import Way
from thinwire.repro.findings import no_worse, share
from thinwire.repro.statistics import Estimate, relative_differences


@dataclass(frozen=True)
class Lost:
    """How much higher a way's loss is, as a share of another's."""

    estimate: Estimate
    within: bool | None
    """Whether at most the margin, at 95 %; None where too few seeds were trained to say."""
    text: str
    differences: tuple[float, ...]

    @property
    def beyond(self) -> bool | None:
        """The opposite."""
        return None if self.within is None else not self.within


def end(run: Trained) -> float:
    """Loss of the last epoch, in which each sample is visited once."""
    return run.loss


def held_out(run: Trained) -> float:
    """Loss at the end on what is held out."""
    return run.held_out[-1]


def lost(
    runs: Sequence[Trained],
    others: Sequence[Trained],
    margin: float,
    of: Callable[[Trained], float] = end,
    whole: float | None = None,
) -> Lost:
    """By the loss that ``of`` takes of a training; differences are shares of ``whole``, or of the others' loss."""
    ours, theirs = [of(run) for run in runs], [of(run) for run in others]
    if whole is None:
        differences = relative_differences(ours, theirs)
    else:
        differences = [(a - b) / whole for a, b in zip(ours, theirs, strict=True)]
    found, within = no_worse(differences, margin)
    text = f"loss {fmean(ours):.3f} against {fmean(theirs):.3f}: {share(found)}"
    if not math.isfinite(found.mean):
        text = f"diverges, against a loss of {fmean(theirs):.3f}"
    return Lost(found, within, text, tuple(differences))


def bands(runs: Sequence[Trained]) -> tuple[list[float], list[float], list[float]]:
    """Mean, least and greatest loss of each epoch over seeds; up to where one diverged."""
    columns = list(zip(*(run.epoch_losses for run in runs), strict=True))
    shown = [column for column in columns if all(map(math.isfinite, column))]
    return [fmean(column) for column in shown], [min(column) for column in shown], [max(column) for column in shown]


def draw_runs(axes: Any, way: Way, runs: Sequence[Trained]) -> None:
    """Loss by step: the seeds' mean, in a band from the least to the greatest."""
    mean, low, high = bands(runs)
    steps = [runs[0].steps_per_epoch * (epoch + 1) for epoch in range(len(mean))]
    axes.plot(steps, mean, color=way.colour, marker=".", label=way.title)
    axes.fill_between(steps, low, high, color=way.colour, alpha=0.2, linewidth=0)


def facts(runs: Sequence[Trained]) -> dict[str, object]:
    """What a row's JSON keeps of trainings, by seed."""
    return {
        "losses": [run.loss for run in runs],
        "epoch_losses": [run.epoch_losses for run in runs],
        "held_out": [run.held_out for run in runs],
        "alike": [run.alike for run in runs],
        "sent_bytes": runs[0].sent_bytes,
        "dense_bytes": runs[0].dense_bytes,
    }
