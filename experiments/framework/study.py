"""The base of measurements of a paper's parts: rank processes, trainings, progress in a terminal, and pictures."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

from rich.console import Console
from rich.markup import escape
from rich.status import Status

from experiments.framework.claims import Row
from experiments.framework.methods import Method
from experiments.framework.ranks import OnStep, RunCache
from experiments.framework.replicas import ScoredTask
from experiments.framework.timing import where
from experiments.framework.training import Trained, Trainings
from thinwire_tools import lab
from thinwire_tools.compare.paired import Watcher
from thinwire_tools.lab.units import parse_rates


def draw_bars(axes: Any, shown: Sequence[tuple[str, str, float]]) -> None:
    """Draw horizontal bars, ``(label, color, value)`` each, the first on top."""
    labels, colors, values = zip(*shown, strict=True)
    axes.barh(range(len(shown)), values, color=colors)
    axes.set_yticks(range(len(shown)), labels)
    axes.invert_yaxis()
    axes.set_axisbelow(True)
    axes.set(xlabel=axes.get_ylabel(), ylabel="")
    axes.grid(visible=False, axis="y")


def plain_log(axis: Any) -> None:
    """Give a log ``axis`` (``axes.xaxis`` or ``axes.yaxis``) ticks at 1, 2 and 5 of each decade, as plain numbers."""
    from matplotlib.ticker import LogLocator, NullLocator

    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter("{x:g}")


ResourceT = TypeVar("ResourceT")


@dataclass(frozen=True, kw_only=True)
class Scale:
    """The scale at which a paper is measured: number of seeds, and rate of links (None: the paper's own choice).

    Further fields are what else a paper's command can change: ``rounds`` (turns of each method that is timed),
    ``steps``, ``data``.
    """

    seeds: int = 3
    rate: str | None = None

    def adapted(self, **options: Any) -> Self:
        """Return this scale with the command line's options that are not None.

        Raises:
            ImportError, OSError, ValueError: an option is not one of this paper's, or has no such value.
        """
        given = {name: value for name, value in options.items() if value is not None}
        for name in given.keys() - {known.name for known in fields(self)}:
            raise ValueError(f"--{name}: this paper has no such option")
        for name, least in (("seeds", 1), ("rounds", 1), ("steps", 2)):
            if given.get(name, least) < least:
                raise ValueError(f"--{name} {given[name]}: at least {least}")
        if "rate" in given:
            parse_rates(given["rate"], 1)
        return replace(self, **given)

    def about(self) -> dict[str, Any]:
        """Return facts for the JSON file other than the fields; loads the data, whose errors must come before anything
        is started."""
        return {}


ScaleT = TypeVar("ScaleT", bound=Scale)


@dataclass
class Study(Generic[ScaleT]):
    """One run of a command; a context manager. ``emulated``: there are slow links, so that times over them mean
    something."""

    scale: ScaleT
    out: Path
    console: Console
    emulated: bool
    cache: RunCache = field(default_factory=RunCache)
    measured: dict[tuple[str, str], Row] = field(default_factory=dict)
    """Findings of the parts before this one, and of an earlier run whose times are taken, by figure and name."""
    _resources: dict[Any, Any] = field(default_factory=dict)
    _stack: ExitStack = field(default_factory=ExitStack)
    _title: str = ""
    _done: int = 0
    _status: Status | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all ranks; a later part starts new ones."""
        self._stack.close()
        self._resources.clear()

    @contextmanager
    def part(self, title: str) -> Iterator[None]:
        """Show progress under ``title`` while the body runs."""
        self._title, self._done = title, 0
        with self.console.status(escape(title)) as self._status:
            yield

    def advance(self, steps: int, now: str) -> None:
        """Add ``steps`` done steps of this part; ``now`` is the present activity."""
        self._done += steps
        if self._status is not None:
            self._status.update(escape(f"{self._title}, step {self._done}: {now}"))

    def reporter(self, title: str) -> OnStep:
        """Return a function that shows steps of a training, by number and loss, as steps of the part."""
        return lambda _, loss: self.advance(1, f"{title}: loss {loss:.2f}")

    def about(self) -> dict[str, Any]:
        """Return facts about the run for the JSON file, known at its end."""
        return {}

    @property
    def rate(self) -> str | None:
        """Rate of the slow links; None for loopback, or for the paper's own choice."""
        return self.scale.rate if self.emulated else None

    @property
    def seeds(self) -> range:
        return range(self.scale.seeds)

    @property
    def over(self) -> str:
        """Description of the link, for people."""
        return where(self.rate)

    def picture(self, figure: str) -> Path:
        return self.out / f"{figure}.svg"

    def kept(self, key: Any, make: Callable[[], AbstractContextManager[ResourceT]]) -> ResourceT:
        """Return the entered context of ``make``, or the earlier one under ``key``; it lives until a part fails or all
        end."""
        if key not in self._resources:
            self._resources[key] = self._stack.enter_context(make())
        return self._resources[key]

    def train_task(
        self, task: ScoredTask, method: Method, seed: int, *, num_ranks: int, measure: int = 0, shaped: bool = False
    ) -> Trained:
        """Train replicas, with progress; ``shaped``: over the slow link, ``measure``: as of `Replica`."""
        if ("trainings", num_ranks) not in self._resources:
            # Ranks that wait would still share the cores.
            self.close()
        trainings, rate = self.trainings(num_ranks), self.rate if shaped else None
        on_step = self.reporter(method.title)
        return Trained.of(task, trainings.train(task, method, seed, on_step, rate=rate, measure=measure))

    def trainings(self, num_ranks: int) -> Trainings:
        """Return ranks that train, on links of the study's rate where it has one."""

        def make() -> Trainings:
            return Trainings(num_ranks, None if self.rate is None else lab.Network(num_ranks), self.cache)

        return self.kept(("trainings", num_ranks), make)


class PartWatcher(Watcher):
    """Shows the runs of `thinwire_tools.compare.compare_training` as steps of a study's part."""

    def __init__(self, study: Study[Any]) -> None:
        self._study, self._title, self._done = study, "", 0

    def begin(self, title: str) -> None:
        self._title, self._done = title, 0

    def step(self, step: int, loss: float) -> None:
        self._study.advance(step - self._done, f"{self._title}: loss {loss:.2f}")
        self._done = step
