"""What every part of the paper's repetition is made from: trainings and what they say, timings and links."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, Literal

from experiments.framework.claims import known
from experiments.framework.timing import rate_text
from experiments.framework.verdicts import Course
from experiments.papers.aqsgd import tasks
from experiments.papers.aqsgd.methods import FP32, Method
from experiments.papers.aqsgd.tasks import FineTuning
from experiments.papers.aqsgd.timing import Computed, LinkedScale, OverLinks, PipelineTiming
from experiments.papers.aqsgd.trainings import Trained
from thinwire_tools.compare.data import standard_library
from thinwire_tools.compare.statistics import Estimate, estimate, relative_differences
from thinwire_tools.lab import parse_rate


def held_out(run: Trained) -> float:
    """Loss at the end on what is held out."""
    return run.held_out[-1]


def lost(ours: Sequence[float], others: Sequence[float]) -> Estimate:
    """How much higher losses are, seed by seed, as shares of the others' loss."""
    return estimate(relative_differences(ours, others))


def facts(runs: Sequence[Trained]) -> dict[str, Any]:
    """What a row's JSON keeps of trainings, by seed."""
    return {
        "losses": [run.loss for run in runs],
        "epoch_losses": [run.epoch_losses for run in runs],
        "held_out": [run.held_out for run in runs],
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


_COMPUTE_ROUNDS = 5
_PAPER_FP32 = 3.8 / 0.5
"""Table 2: FP32's throughput over the fastest link, over that over the slowest."""
NUM_STAGES = 2
"""Each with a core of its own; tables and figures are of so many unless they say more."""
MORE_STAGES = 4
MOST_STAGES = 8

TaskName = Literal["small", "scratch", "large", "bf16", "fp16", "labels", "deep", "to_loss"]
TITLES: dict[TaskName, str] = {
    "small": "fine-tuning",
    "scratch": "from scratch",
    "large": "a larger GPT",
    "bf16": "in bf16",
    "fp16": "in fp16",
    "labels": "classification",
    "deep": "a deeper GPT",
    "to_loss": "the GPT that is timed",
}


@dataclass(frozen=True, kw_only=True)
class AQSGDScale(LinkedScale):
    """Up to ``margin`` of the loss may be lost, and a training still ends at the same. ``runs`` separate runs of
    ``rounds`` turns are timed."""

    runs: int = 5
    small: FineTuning = tasks.SMALL
    scratch: FineTuning = tasks.SCRATCH
    large: FineTuning = tasks.LARGE
    labels: FineTuning = tasks.LABELS
    deep: FineTuning = tasks.DEEP
    to_loss: FineTuning = tasks.TO_LOSS
    margin: float = 0.01
    breakdown_rates: tuple[str, ...] = ("100mbit", "200mbit", "300mbit", "500mbit")
    slow_rates: tuple[str, ...] = ("100mbit", "500mbit")
    """Of figure 4."""

    def task(self, name: TaskName) -> FineTuning:
        if name in ("bf16", "fp16"):
            return replace(self.small, half=name)
        task: FineTuning = getattr(self, name)
        return task

    def about(self) -> dict[str, Any]:
        standard_library()
        return {"num_stages": [NUM_STAGES, MORE_STAGES, MOST_STAGES]}


SMOKE = AQSGDScale(
    small=tasks.SMALL_SMOKE,
    scratch=tasks.SCRATCH_SMOKE,
    large=tasks.LARGE_SMOKE,
    labels=tasks.LABELS_SMOKE,
    deep=tasks.DEEP_SMOKE,
    timed=tasks.TIMED_SMOKE,
    to_loss=tasks.TO_LOSS_SMOKE,
    seeds=1,
    runs=1,
    rounds=1,
    rates=("100mbit", "10gbit"),
    breakdown_rates=("100mbit", "500mbit"),
    slow_rates=("100mbit",),
)


@dataclass
class AQSGDStudy(OverLinks[AQSGDScale]):
    """Trainings and timings, which parts share."""

    _slowdown: float | None = None

    def computed(self) -> Computed:
        """In a step: messages over loopback take the cores, too, and links are what is left to make the proportion."""
        if self._computed is None:
            alone = super().computed()
            share = self._fp32_s(None)[0] / (self.timed.num_micro + NUM_STAGES - 1) / alone.seconds
            self._computed = Computed(share * alone.forward_s, share * alone.backward_s)
        return self._computed

    @property
    def slowdown(self) -> float:
        """What the paper's rates are divided by, so that FP32 loses as much over the slowest as in table 2."""
        if self._slowdown is None:
            self._slowdown = self._calibrated(super().slowdown) if self.emulated else super().slowdown
        return self._slowdown

    def _calibrated(self, guess: float) -> float:
        """Return the slowdown, from FP32's steps over the slowest and the fastest link at a first ``guess`` of it."""
        slow, fast = (parse_rate(self.scale.rates[which]) for which in (0, -1))
        slow_s, fast_s = self._fp32_s(rate_text(slow / guess), rate_text(fast / guess))
        # Seconds are a + sent / rate, in units of the slowest rate; `sent` is to be what makes them the paper's.
        sent = (slow_s - fast_s) / (1 - slow / fast)
        a = slow_s - sent
        return guess * a * (_PAPER_FP32 - 1) / (sent * (1 - _PAPER_FP32 * slow / fast))

    def _fp32_s(self, *rates: str | None) -> list[float]:
        """Return the seconds of FP32's step over links of each rate."""
        times = self.timing().times(
            self.model, (FP32,), rounds=_COMPUTE_ROUNDS, steps=1, rates=rates, on_turn=lambda *_: None
        )
        return [at_rate.step_s(FP32.name) for at_rate in times]

    def train(
        self, name: TaskName, method: Method, num_stages: int = NUM_STAGES, *, completions: bool = False
    ) -> list[Trained]:
        """A training from every seed, unless it has been."""
        title = f"{TITLES[name]}, {method.title}"
        return self.run(num_stages, self.scale.task(name), method, title, completions=completions)

    def timing(self) -> PipelineTiming:
        """Ranks that are timed."""
        return self.kept("timing", lambda: PipelineTiming(emulated=self.emulated, num_ranks=NUM_STAGES))
