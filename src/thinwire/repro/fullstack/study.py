"""What the parts of the full stack's repetition are made from: trainings, contests, the folder, the progress."""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import ClassVar

from thinwire import lab
from thinwire.repro.aqsgd.contest import PipelineContest
from thinwire.repro.aqsgd.links import OverLinks
from thinwire.repro.aqsgd.tasks import FineTuning
from thinwire.repro.aqsgd.trainings import FirstTraining, Trained, Trainings
from thinwire.repro.crew import Crew
from thinwire.repro.fullstack import rank as rank_module
from thinwire.repro.fullstack import tasks
from thinwire.repro.fullstack.split import Splitting
from thinwire.repro.fullstack.tasks import Stacked
from thinwire.repro.fullstack.ways import Way
from thinwire.repro.progress import Screen

NUM_STAGES = 2
NUM_RANKS = NUM_STAGES * Stacked.replicas


@dataclass(frozen=True)
class Scale:
    """How much is measured: ``seeds`` trainings of what quality is judged of, ``rounds`` turns of every way that is
    timed. Up to ``margin`` of the loss may be lost, and a training still ends at the same."""

    small: Stacked = tasks.SMALL
    timed: Stacked = tasks.TIMED
    to_loss: Stacked = tasks.TO_LOSS
    replicated: Stacked = tasks.REPLICATED
    split: Splitting = field(default_factory=Splitting)
    online: FineTuning = tasks.ONLINE
    sums: FineTuning = tasks.SUMS
    seeds: int = 3
    margin: float = 0.01
    rounds: int = 6
    rates: tuple[str, ...] = ("100mbit", "300mbit", "500mbit", "1gbit", "10gbit")
    """The paper's, the slowest first; links have them scaled (`OverLinks.scaled`)."""
    kills: int = 2


SMOKE = Scale(
    tasks.SMALL_SMOKE,
    tasks.TIMED_SMOKE,
    tasks.TO_LOSS_SMOKE,
    tasks.REPLICATED_SMOKE,
    Splitting(most_images=48, clients=3, rounds=2),
    tasks.ONLINE_SMOKE,
    tasks.SUMS_SMOKE,
    seeds=1,
    rounds=1,
    rates=("100mbit", "10gbit"),
    kills=1,
)


class StackContest(PipelineContest):
    """A contest of ways in which all of this travels; others use its network, too."""

    _ranks: ClassVar[ModuleType] = rank_module

    @property
    def crew(self) -> Crew:
        return self._crew

    @property
    def network(self) -> lab.Network | None:
        return self._network

    def shape(self, rate: str | None) -> None:
        """Give links that rate; None for no limit."""
        self._shape(rate)


class StackTrainings(Trainings):
    """Trainings in replicas of a pipeline. Process groups of a part of the world stay until their processes end, and
    each wakes up a hundred times a second."""

    _ranks: ClassVar[ModuleType] = rank_module
    _lasting = False


@dataclass
class Study(OverLinks):
    """One run of the command; a context manager.

    ``emulated``: slow links are, so that times over them mean something.
    """

    scale: Scale
    out: Path
    screen: Screen
    emulated: bool
    _trainings: StackTrainings | None = None
    _contest: StackContest | None = None
    _first: FirstTraining | None = None
    _stack: ExitStack = field(default_factory=ExitStack)

    def close(self) -> None:
        self._stack.close()
        self._trainings = self._contest = self._first = None

    def picture(self, name: str) -> Path:
        return self.out / f"fullstack-{name}.svg"

    @property
    def timed(self) -> Stacked:
        return self.scale.timed

    def first(self) -> FirstTraining:
        """Weights that trainings start from."""
        if self._first is None:
            folder = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="thinwire-fullstack-"))
            self._first = FirstTraining(Path(folder))
        return self._first

    def trainings(self, rate: str | None = None) -> StackTrainings:
        """Training over the links of those that are timed, of that rate, or without a limit."""
        contest = self.contest()
        contest.shape(rate)
        if self._trainings is None:
            made = StackTrainings(NUM_RANKS, self.first(), network=contest.network)
            self._trainings = self._stack.enter_context(made)
        return self._trainings

    def new_trainings(self) -> StackTrainings:
        """Ranks of their own, over loopback."""
        return StackTrainings(NUM_RANKS, self.first())

    def train(self, way: Way, task: Stacked | None = None) -> list[Trained]:
        """A training of ``task`` (of `Scale.small` if None) from every seed, unless it has been.

        Raises:
            RankFailed: a rank did not make it.
        """
        made = self.trainings()
        return [made.train(task or self.scale.small, way, seed, self.shower(way.title)) for seed in self.seeds]

    def contest(self) -> StackContest:
        """Ranks that are timed."""
        if self._contest is None:
            self._contest = self._stack.enter_context(StackContest(emulated=self.emulated, num_ranks=NUM_RANKS))
        return self._contest
