"""What every part of the paper's repetition is made from: trainings, contests, the folder, the progress."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from thinwire.repro.aqsgd import tasks
from thinwire.repro.aqsgd.contest import Computed, PipelineContest
from thinwire.repro.aqsgd.links import OverLinks
from thinwire.repro.aqsgd.tasks import FineTuning
from thinwire.repro.aqsgd.trainings import FirstTraining, Trained, Trainings
from thinwire.repro.aqsgd.ways import FP32, Way
from thinwire.repro.progress import Screen

_COMPUTE_ROUNDS = 5
NUM_STAGES = 2
"""Each with a core of its own; tables and figures are of so many unless they say more."""
MORE_STAGES = 4
MOST_STAGES = 8

TaskName = Literal["small", "scratch", "large", "bf16", "fp16", "labels", "deep"]
TITLES: dict[TaskName, str] = {
    "small": "fine-tuning",
    "scratch": "from scratch",
    "large": "a larger GPT",
    "bf16": "in bf16",
    "fp16": "in fp16",
    "labels": "classification",
    "deep": "a deeper GPT",
}


@dataclass(frozen=True)
class Scale:
    """How much is measured: ``seeds`` trainings of what quality is judged of, ``rounds`` turns of every way that is
    timed. Up to ``margin`` of the loss may be lost, and a training still ends at the same."""

    small: FineTuning = tasks.SMALL
    scratch: FineTuning = tasks.SCRATCH
    large: FineTuning = tasks.LARGE
    labels: FineTuning = tasks.LABELS
    deep: FineTuning = tasks.DEEP
    timed: FineTuning = tasks.TIMED
    to_loss: FineTuning = tasks.TO_LOSS
    seeds: int = 3
    margin: float = 0.01
    rounds: int = 6
    rates: tuple[str, ...] = ("100mbit", "300mbit", "500mbit", "1gbit", "10gbit")
    """The paper's, the slowest first; links have them scaled (`Study.scaled`)."""
    breakdown_rates: tuple[str, ...] = ("100mbit", "200mbit", "300mbit", "500mbit")
    slow_rates: tuple[str, ...] = ("100mbit", "500mbit")
    """Of figure 4."""
    kills: int = 2
    """Of each kind of store."""

    def task(self, name: TaskName) -> FineTuning:
        if name in ("bf16", "fp16"):
            return replace(self.small, half=name)
        found: FineTuning = getattr(self, name)
        return found


SMOKE = Scale(
    tasks.SMALL_SMOKE,
    tasks.SCRATCH_SMOKE,
    tasks.LARGE_SMOKE,
    tasks.LABELS_SMOKE,
    tasks.DEEP_SMOKE,
    tasks.TIMED_SMOKE,
    tasks.TO_LOSS_SMOKE,
    seeds=1,
    rounds=1,
    rates=("100mbit", "10gbit"),
    breakdown_rates=("100mbit", "500mbit"),
    slow_rates=("100mbit",),
    kills=1,
)

Training = tuple[TaskName, int, Way, int]
"""Task, number of stages, way and seed."""


def trainings(scale: Scale, name: TaskName, ways: Sequence[Way], num_stages: int = NUM_STAGES) -> frozenset[Training]:
    """Of each way from every seed."""
    return frozenset((name, num_stages, way, seed) for way in ways for seed in range(scale.seeds))


@dataclass(frozen=True)
class Work:
    """What a part makes: trainings, which parts share, as they do the first trainings that these start from (`firsts`,
    with those of trainings of its own); and further steps."""

    trainings: frozenset[Training] = frozenset()
    steps: int = 0
    own: frozenset[FineTuning] = frozenset()

    def firsts(self, scale: Scale) -> frozenset[FineTuning]:
        """What is trained first, once each."""
        of = {scale.task(name) for name, *_ in self.trainings} | self.own
        return frozenset(task.first for task in of if task.first_steps)

    def steps_after(self, scale: Scale, done: Work) -> int:
        """Steps that it takes where what ``done`` makes is there already."""
        new = sum(scale.task(name).steps for name, *_ in self.trainings - done.trainings)
        return self.steps + new + sum(task.first_steps for task in self.firsts(scale) - done.firsts(scale))

    def with_more(self, other: Work) -> Work:
        return Work(self.trainings | other.trainings, 0, self.own | other.own)


@dataclass
class Study(OverLinks):
    """One run of the command; a context manager.

    ``emulated``: slow links are, so that times over them mean something.
    """

    scale: Scale
    out: Path
    screen: Screen
    emulated: bool
    _trainings: dict[int, Trainings] = field(default_factory=dict)
    _contest: PipelineContest | None = None
    _first: FirstTraining | None = None
    _stack: ExitStack = field(default_factory=ExitStack)

    def close(self) -> None:
        self._stack.close()
        self._trainings.clear()
        self._contest = self._first = None

    def picture(self, name: str) -> Path:
        return self.out / f"aqsgd-{name}.svg"

    @property
    def timed(self) -> FineTuning:
        return self.scale.timed

    def computed(self) -> Computed:
        """Of a step over loopback by the micro-batches that follow one another in it, in the proportion of a stage's
        two passes alone. Alone they take longer, where cores are shared."""
        if self._computed is None:
            alone = super().computed()
            (times,) = self.contest().times_by_rate(
                self.model, (FP32,), rounds=_COMPUTE_ROUNDS, steps=1, rates=[None], on_turn=lambda *_: None
            )
            share = times.step_s(FP32.name) / (self.timed.num_micro + NUM_STAGES - 1) / alone.seconds
            self._computed = Computed(share * alone.forward_s, share * alone.backward_s)
        return self._computed

    def first(self) -> FirstTraining:
        """Weights that trainings start from."""
        if self._first is None:
            folder = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="thinwire-aqsgd-"))
            self._first = FirstTraining(Path(folder))
        return self._first

    def trainings(self, num_stages: int = NUM_STAGES) -> Trainings:
        """Ranks that train, over loopback."""
        if num_stages not in self._trainings:
            self._trainings[num_stages] = self._stack.enter_context(Trainings(num_stages, self.first()))
        return self._trainings[num_stages]

    def train(self, name: TaskName, way: Way, num_stages: int = NUM_STAGES) -> list[Trained]:
        """A training from every seed, unless it has been.

        Raises:
            RankFailed: a rank did not make it.
        """
        task = self.scale.task(name)
        made, title = self.trainings(num_stages), f"{TITLES[name]}, {way.title}"
        return [made.train(task, way, seed, self.shower(title)) for seed in self.seeds]

    def contest(self) -> PipelineContest:
        """Ranks that are timed."""
        if self._contest is None:
            made = PipelineContest(emulated=self.emulated, num_ranks=NUM_STAGES)
            self._contest = self._stack.enter_context(made)
        return self._contest


def union(works: Iterable[Work]) -> Work:
    """Of several parts."""
    made = Work()
    for work in works:
        made = made.with_more(work)
    return made
