"""What every part of the thesis's chapter is made from: trainings, contests, gradients, the folder, the progress."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from thinwire.repro.cgx.contest import Contest, shown_rate
from thinwire.repro.cgx.models import Model
from thinwire.repro.comparison import Comparison
from thinwire.repro.fft.task import ImageTask
from thinwire.repro.lgreco.gradients import Snapshot, along
from thinwire.repro.lgreco.tasks import PICTURES, PICTURES_SMOKE, WORDS, WORDS_SMOKE, Name, WordsTask, timed
from thinwire.repro.paired import Runs, compare_runs
from thinwire.repro.parts import Parted
from thinwire.repro.progress import Screen
from thinwire.repro.report import Run
from thinwire.repro.train import CONTROL_RULES
from thinwire.repro.variants import Variant

NUM_RANKS = 2
"""Of trainings, each with a core of its own."""
CONTROL = str(Variant.parse(CONTROL_RULES))
"""One bit with one scale for a layer, unless it is huge: training must suffer from it."""
NAMES: tuple[Name, ...] = ("gpt", "cnn")
TITLES: dict[Name, str] = {"gpt": "GPT", "cnn": "CNN"}


@dataclass(frozen=True)
class Scale:
    """How much is measured: ``seeds`` trainings of what quality is judged of, ``rounds`` turns of ``steps`` steps of
    every way that is timed. Up to ``margin`` of the loss or the accuracy may be lost, and a training still ends at the
    same. A policy decides whenever a task is probed."""

    gpt: WordsTask = WORDS
    cnn: ImageTask = PICTURES
    seeds: int = 3
    margin: float = 0.01
    rounds: int = 8
    steps: int = 2
    worlds: tuple[int, ...] = (2, 4)
    rates: tuple[str, ...] = ("100mbit", "1gbit")
    ranks: tuple[int, ...] = (8, 16, 32)
    """Of PowerSGD in figure 4.2; the middle one is the family's reference."""
    warm_up: int = 24
    """Dense steps after which a plan is made for what is timed."""
    snapshots: int = 5
    window: int = 4
    """Steps whose gradients a snapshot sums."""
    trials: int = 16
    """Plans that the time-aware policy tries before it knows what each bucket costs; at least twice the buckets."""
    trial_steps: int = 12
    metric_steps: int = 40
    metric_start: int = 40
    metric_layers: int = 8

    def task(self, name: Name) -> WordsTask | ImageTask:
        return self.gpt if name == "gpt" else self.cnn

    def every(self, name: Name) -> int:
        """Steps between two decisions."""
        return self.task(name).probe_every


SMOKE = Scale(
    WORDS_SMOKE,
    PICTURES_SMOKE,
    seeds=1,
    rounds=1,
    steps=1,
    worlds=(2,),
    rates=("1gbit",),
    ranks=(4, 16),
    warm_up=4,
    snapshots=2,
    window=2,
    trials=6,
    trial_steps=5,
    metric_steps=2,
    metric_start=2,
    metric_layers=3,
)


Training = tuple[Name, str | None, int]
"""Network, variant and seed."""


@dataclass(frozen=True)
class Work:
    """What a part makes: trainings and snapshots, which parts share, and further steps of its own."""

    trainings: frozenset[Training] = frozenset()
    snapshots: frozenset[Name] = frozenset()
    steps: int = 0

    def __or__(self, other: Work) -> Work:
        return Work(self.trainings | other.trainings, self.snapshots | other.snapshots, self.steps + other.steps)

    def steps_after(self, scale: Scale, done: Work) -> int:
        """Steps that it takes where ``done`` is there already."""
        new: list[Name] = [name for name, _, _ in self.trainings - done.trainings]
        new += self.snapshots - done.snapshots
        return self.steps + sum(scale.task(name).steps for name in new)


class _Watcher:
    """Shows runs as steps of a part."""

    def __init__(self, study: Study, title: str) -> None:
        self._study, self._of, self._title, self._done = study, title, "", 0

    def plan(self, num_runs: int) -> None:
        pass

    def begin(self, title: str) -> None:
        self._title, self._done = f"{self._of}, {title}", 0

    def step(self, step: int, loss: float) -> None:
        self._study.advance(step - self._done, f"{self._title}: loss {loss:.2f}")
        self._done = step

    def end(self, run: Run) -> None:
        pass


@dataclass
class Study(Parted):
    """One run of the command; a context manager. ``emulated``: slow links are, so that times over them mean something.

    ``rate``: of the links, where one was asked for, instead of the scale's.
    """

    scale: Scale
    out: Path
    screen: Screen
    emulated: bool
    rate: str | None = None
    _runs: dict[Name, Runs] = field(default_factory=dict)
    _contests: dict[int, Contest] = field(default_factory=dict)
    _snapshots: dict[Name, list[Snapshot]] = field(default_factory=dict)
    _stack: ExitStack = field(default_factory=ExitStack)

    def close(self) -> None:
        self._stack.close()
        self._runs.clear()
        self._contests.clear()

    def picture(self, name: str) -> Path:
        return self.out / f"lgreco-{name}.svg"

    @property
    def seeds(self) -> range:
        return range(self.scale.seeds)

    @property
    def rates(self) -> tuple[str | None, ...]:
        """Of the links that times are taken over; None for loopback."""
        if not self.emulated:
            return (None,)
        return (self.rate,) if self.rate else self.scale.rates

    def verdict(self, holds: bool | None) -> bool | None:
        """``holds`` where it rests on times over links that are really slow."""
        return holds if self.emulated else None

    @property
    def model(self) -> Model:
        """What is timed."""
        return timed(self.scale.gpt)

    def train(self, name: Name, variant: str | None, seed: int) -> Run:
        """One training by a variant (None: uncompressed), unless it has been.

        Raises:
            RankFailed: a rank did not make it.
            ParityError: ranks ended with different parameters.
        """
        runs = self._trainings(name)
        known = None if variant is None else str(Variant.parse(variant))
        return runs.run(known, seed, runs.task.learning_rate, shaped=False)

    def compare(self, name: Name, variants: Sequence[str]) -> Comparison:
        """Paired trainings of ``variants``, of uncompressed gradients and of the control, from every seed."""
        return compare_runs(
            self._trainings(name), variants, seeds=self.seeds, margin=self.scale.margin, control=CONTROL
        )

    def contest(self, num_ranks: int) -> Contest:
        """So many ranks that are timed, each behind a link of its own."""
        if num_ranks not in self._contests:
            made = Contest("links", emulated=self.emulated and num_ranks > 1, num_ranks=num_ranks)
            self._contests[num_ranks] = self._stack.enter_context(made)
        return self._contests[num_ranks]

    def snapshots(self, name: Name) -> list[Snapshot]:
        """Gradients along an uncompressed training in this process."""
        if name not in self._snapshots:
            task, scale = self.scale.task(name), self.scale
            self._snapshots[name] = along(
                task,
                count=scale.snapshots,
                window=scale.window,
                on_step=lambda: self.advance(1, f"{TITLES[name]}: gradients along a training"),
            )
        return self._snapshots[name]

    def _trainings(self, name: Name) -> Runs:
        if name not in self._runs:
            made = Runs(self.scale.task(name), NUM_RANKS, None, _Watcher(self, TITLES[name]))
            self._runs[name] = self._stack.enter_context(made)
        return self._runs[name]


def where(rate: str | None) -> str:
    """A link, for people."""
    return "over loopback" if rate is None else f"over {shown_rate(rate)}"
