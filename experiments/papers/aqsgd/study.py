"""What every part of the paper's repetition is made from: trainings, timings and links."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from experiments.framework.study import Scale
from experiments.papers.aqsgd import tasks
from experiments.papers.aqsgd.methods import FP32, Method
from experiments.papers.aqsgd.tasks import FineTuning
from experiments.papers.aqsgd.timing import Computed, OverLinks, PipelineTiming
from experiments.papers.aqsgd.trainings import FirstTraining, Trained, Trainings
from thinwire_tools.compare.data import standard_library

_COMPUTE_ROUNDS = 5
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
class AQSGDScale(Scale):
    """``rounds`` turns of every method that is timed. Up to ``margin`` of the loss may be lost, and a training still
    ends at the same."""

    small: FineTuning = tasks.SMALL
    scratch: FineTuning = tasks.SCRATCH
    large: FineTuning = tasks.LARGE
    labels: FineTuning = tasks.LABELS
    deep: FineTuning = tasks.DEEP
    timed: FineTuning = tasks.TIMED
    to_loss: FineTuning = tasks.TO_LOSS
    margin: float = 0.01
    rounds: int = 6
    rates: tuple[str, ...] = ("100mbit", "300mbit", "500mbit", "1gbit", "10gbit")
    """The paper's, the slowest first; links have them scaled (`OverLinks.scaled`)."""
    breakdown_rates: tuple[str, ...] = ("100mbit", "200mbit", "300mbit", "500mbit")
    slow_rates: tuple[str, ...] = ("100mbit", "500mbit")
    """Of figure 4."""
    kills: int = 2
    """Of each kind of store."""

    def adapted(self, **options: Any) -> Self:
        if options.get("rate") is not None:
            raise ValueError("--rate: links have the paper's rates, scaled")
        return super().adapted(**options)

    def task(self, name: TaskName) -> FineTuning:
        if name in ("bf16", "fp16"):
            return replace(self.small, half=name)
        task: FineTuning = getattr(self, name)
        return task

    def steps(self, name: TaskName, methods: Sequence[Method]) -> int:
        """Of a training by each method from every seed, and of the one that they start from."""
        task = self.task(name)
        return task.steps * len(methods) * self.seeds + task.first_steps

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
    rounds=1,
    rates=("100mbit", "10gbit"),
    breakdown_rates=("100mbit", "500mbit"),
    slow_rates=("100mbit",),
    kills=1,
)


@dataclass
class AQSGDStudy(OverLinks[AQSGDScale]):
    """Trainings and timings, which parts share."""

    prefix: ClassVar[str] = "aqsgd-"

    @property
    def timed(self) -> FineTuning:
        return self.scale.timed

    def computed(self) -> Computed:
        """In a step: messages over loopback take the cores, too, and links are what is left to make the proportion."""
        if self._computed is None:
            alone = super().computed()
            (times,) = self.timing().times_by_rate(
                self.model, (FP32,), rounds=_COMPUTE_ROUNDS, steps=1, rates=[None], on_turn=lambda *_: None
            )
            share = times.step_s(FP32.name) / (self.timed.num_micro + NUM_STAGES - 1) / alone.seconds
            self._computed = Computed(share * alone.forward_s, share * alone.backward_s)
        return self._computed

    def first(self) -> FirstTraining:
        """Weights that trainings start from."""
        folder = self.kept("folder", lambda: tempfile.TemporaryDirectory(prefix="thinwire-aqsgd-"))
        return self.kept("first", lambda: nullcontext(FirstTraining(Path(folder))))

    def trainings(self, num_stages: int = NUM_STAGES) -> Trainings:
        """Ranks that train, over loopback."""
        return self.kept(num_stages, lambda: Trainings(num_stages, self.first(), cache=self.cache))

    def train(self, name: TaskName, method: Method, num_stages: int = NUM_STAGES) -> list[Trained]:
        """A training from every seed, unless it has been.

        Raises:
            RankFailed: a rank did not make it.
        """
        task = self.scale.task(name)
        made, title = self.trainings(num_stages), f"{TITLES[name]}, {method.title}"
        return [made.train(task, method, seed, self.reporter(title)) for seed in self.seeds]

    def timing(self) -> PipelineTiming:
        """Ranks that are timed."""
        return self.kept("timing", lambda: PipelineTiming(emulated=self.emulated, num_ranks=NUM_STAGES))
