"""What every part of the IntSGD paper's experiments is made from: how much of them, the ranks, the folder, progress."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from thinwire.repro.fft.runs import Runs, Trained
from thinwire.repro.intsgd.convex import Source
from thinwire.repro.intsgd.tasks import LanguageTask, Pictures
from thinwire.repro.intsgd.timing import Contest, Times
from thinwire.repro.intsgd.ways import WAYS, Task, Way
from thinwire.repro.parts import Parted
from thinwire.repro.progress import Screen

TASKS: tuple[Task, ...] = ("pictures", "words")


@dataclass(frozen=True)
class Scale:
    """How much of parts (b) and (c). What is timed is larger than what is trained, so that its bytes outweigh a link's
    delays: ``rounds`` turns of ``turn_steps`` steps of every way."""

    trained: dict[Task, Pictures | LanguageTask]
    timed: dict[Task, Pictures | LanguageTask]
    num_ranks: int = 4
    seeds: int = 3
    rounds: int = 8
    turn_steps: int = 2
    betas: tuple[float, ...] = (0.0, 0.5, 0.99)
    epss: tuple[float, ...] = (1e-4, 1e-6)
    """Beside the default ones, 0.9 and 1e-8."""


FULL = Scale(
    {"pictures": Pictures(), "words": LanguageTask()},
    {"pictures": Pictures(width=64, batch=4), "words": LanguageTask(words=4096, width=192, batch=1)},
)
SMOKE = Scale(
    {
        "pictures": Pictures(width=8, steps=6, batch=4, warm_up=2, probe_every=3, probe_images=40),
        "words": LanguageTask(
            words=64, width=16, context=8, steps=6, warm_up=2, probe_every=3, held_out_windows=32, probe_windows=16
        ),
    },
    {
        "pictures": Pictures(width=8, batch=4),
        "words": LanguageTask(words=64, width=16, context=8, batch=1),
    },
    num_ranks=2,
    seeds=1,
    rounds=1,
    turn_steps=1,
    betas=(0.0,),
    epss=(1e-4,),
)


def with_images(scale: Scale, data: str | None) -> Scale:
    """The same on CIFAR-10's folder ``data``."""
    found = {}
    for name, tasks in (("trained", scale.trained), ("timed", scale.timed)):
        pictures = tasks["pictures"]
        assert isinstance(pictures, Pictures)
        found[name] = {**tasks, "pictures": replace(pictures, data=data)}
    return replace(scale, **found)


@dataclass
class Study(Parted):
    """One run of the command; a context manager. ``rate`` is that of the slow links, None where none can be made."""

    out: Path
    screen: Screen
    sources: Sequence[Source]
    smoke: bool = False
    scale: Scale = FULL
    rate: str | None = None
    link: Any = "loopback"
    datasets: dict[str, Any] = field(default_factory=dict)
    _runs: dict[Task, Runs] = field(default_factory=dict)
    _stack: ExitStack = field(default_factory=ExitStack)

    def close(self) -> None:
        self._stack.close()
        self._runs.clear()

    @property
    def seeds(self) -> range:
        return range(self.scale.seeds)

    def picture(self, figure: str) -> Path:
        return self.out / f"fig{figure}.svg"

    def job_done(self, title: str) -> None:
        """One more of part (a)'s runs is over."""
        self.advance(1, title)

    def train(self, task: Task, spec: str | None, seed: int, title: str, topology: str = "sra") -> Trained:
        """Train over loopback, unless it has been."""
        if task not in self._runs:
            self._runs[task] = self._stack.enter_context(Runs(self.scale.trained[task], self.scale.num_ranks, None))
        before = self._done

        def on_step(step: int, loss: float) -> None:
            self._done = before + step
            self.screen.advance(self._part, self._done, f"{title}, seed {seed}: loss {loss:.2f}")

        found = self._runs[task].train(spec, seed, on_step, topology=topology)
        self._done = before + self.scale.trained[task].steps
        return found

    def times(self) -> dict[Task, dict[str, Times]]:
        """Of every way over the slow links, by task."""
        scale, found = self.scale, {}

        def on_turn(title: str) -> None:
            self.advance(scale.turn_steps, f"times of {title}")

        with Contest(scale.num_ranks, self.rate) as contest:
            for task in TASKS:
                found[task] = contest.times(
                    scale.timed[task], task, WAYS, rounds=scale.rounds, steps=scale.turn_steps, on_turn=on_turn
                )
            self.link = contest.link
        return found


def steps_of_b(scale: Scale, ways: Sequence[Way]) -> int:
    """Training steps of part (b): of quality and of times."""
    quality = sum(task.steps for task in scale.trained.values()) * scale.seeds * len(ways)
    return quality + len(TASKS) * len(WAYS) * (1 + scale.rounds) * scale.turn_steps


def steps_of_c(scale: Scale) -> int:
    """Training steps of part (c)."""
    return sum(task.steps for task in scale.trained.values()) * (1 + len(scale.betas) + len(scale.epss))
