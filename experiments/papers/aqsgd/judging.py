"""What trainings say: loss lost to the baseline, seed by seed, and their course."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from experiments.framework.time_to_loss import Course
from experiments.papers.aqsgd.methods import Method
from experiments.papers.aqsgd.trainings import Trained
from thinwire_tools.compare.statistics import Estimate, estimate, relative_differences


def held_out(run: Trained) -> float:
    """Loss at the end on what is held out."""
    return run.held_out[-1]


def lost(ours: Sequence[float], others: Sequence[float], whole: float | None = None) -> Estimate:
    """How much higher losses are, seed by seed, as shares of ``whole``, or of the others' loss."""
    return estimate(differences(ours, others, whole))


def differences(ours: Sequence[float], others: Sequence[float], whole: float | None = None) -> list[float]:
    """Seed by seed, as shares of ``whole``, or of the others' loss."""
    if whole is None:
        return relative_differences(ours, others)
    return [(a - b) / whole for a, b in zip(ours, others, strict=True)]


def known(losses: Sequence[float | None]) -> list[float]:
    """Losses of a row; JSON keeps those of trainings that diverged as null."""
    return [math.inf if loss is None else loss for loss in losses]


def facts(runs: Sequence[Trained]) -> dict[str, Any]:
    """What a row's JSON keeps of trainings, by seed."""
    return {
        "losses": [run.loss for run in runs],
        "epoch_losses": [run.epoch_losses for run in runs],
        "held_out": [run.held_out for run in runs],
        "alike": [run.alike for run in runs],
        "sent_bytes": runs[0].sent_bytes,
        "dense_bytes": runs[0].dense_bytes,
    }


def ends(row: Mapping[str, Any]) -> list[float]:
    """Losses at the end on what is held out, of a row's `facts`."""
    return known([losses[-1] for losses in row["held_out"]])


# --- time to a loss


def course(runs: Sequence[Trained], *pace: tuple[int, str]) -> Course:
    """Of trainings, epoch by epoch; ``pace``: as of `Course`."""
    each = runs[0].steps_per_epoch
    losses = [run.epoch_losses for run in runs]
    return Course([each * (epoch + 1) for epoch in range(len(losses[0]))], losses, pace)


# --- pictures


def bands(runs: Sequence[Trained]) -> tuple[list[float], list[float], list[float]]:
    """Mean, least and greatest loss of each epoch over seeds; up to where one diverged."""
    columns = list(zip(*(run.epoch_losses for run in runs), strict=True))
    shown = [column for column in columns if all(map(math.isfinite, column))]
    return [fmean(column) for column in shown], [min(column) for column in shown], [max(column) for column in shown]


def draw_runs(axes: Any, method: Method, runs: Sequence[Trained]) -> None:
    """Loss by step: the seeds' mean, in a band from the least to the greatest."""
    mean, low, high = bands(runs)
    steps = [runs[0].steps_per_epoch * (epoch + 1) for epoch in range(len(mean))]
    axes.plot(steps, mean, color=method.color, marker=".", label=method.title)
    axes.fill_between(steps, low, high, color=method.color, alpha=0.2, linewidth=0)
