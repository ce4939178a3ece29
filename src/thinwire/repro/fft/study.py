"""What every figure of the FFT paper is made from: the runs, the folder, the progress."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from thinwire.repro.fft.runs import Gradients, Runs, Trained
from thinwire.repro.fft.task import ImageTask
from thinwire.repro.progress import Screen

NUM_RANKS = 2


@dataclass(frozen=True)
class Scale:
    """How much is measured. ``buffer_bytes`` is the size on which primitives are timed, ``scaling_steps`` those of a
    run of Fig. 16 at each of ``world_sizes``. Up to ``margin`` of accuracy may be lost, or the training loss be above
    by a share of ``loss_margin``, and a run is still the same."""

    task: ImageTask
    seeds: int
    buffer_bytes: int = 25_000_000
    repeats: int = 7
    measure_every: int = 10
    scaling_steps: int = 60
    world_sizes: tuple[int, ...] = (1, 2, 3, 4)
    margin: float = 0.01
    loss_margin: float = 0.1


@dataclass
class Study:
    """One run of the command. ``timed``: a slow link is emulated, so that times mean something."""

    scale: Scale
    runs: Runs
    out: Path
    screen: Screen
    timed: bool
    _gradients: Gradients | None = None
    _figure: str = ""
    _done_steps: int = field(default=0)

    @property
    def task(self) -> ImageTask:
        return self.scale.task

    @property
    def seeds(self) -> range:
        return range(self.scale.seeds)

    def picture(self, figure: str) -> Path:
        return self.out / f"fig{figure}.svg"

    @contextmanager
    def figure(self, figure: str) -> Iterator[None]:
        """While the body runs, progress is that figure's."""
        self._figure, self._done_steps = figure, 0
        with self.screen.phase(figure):
            yield

    def train(self, spec: str | None, seed: int, **options: Any) -> Trained:
        """`Runs.train`, with progress."""
        return self.train_on(self.runs, spec, seed, **options)

    def train_on(self, runs: Runs, spec: str | None, seed: int, **options: Any) -> Trained:
        """The same on other ranks."""
        found = runs.train(spec, seed, self._step, **options)
        self._done_steps += runs.task.steps
        self.screen.advance(self._figure, self._done_steps, found.train_loss[-1])
        return found

    def gradients(self) -> Gradients:
        """Recorded ten times, evenly, along an uncompressed training (the paper: every ten epochs)."""
        if self._gradients is None:
            steps = self.task.steps
            at = sorted({steps * i // 10 for i in range(10)})
            self._gradients = self.runs.record(0, at, self._step)
        return self._gradients

    def _step(self, step: int, loss: float) -> None:
        self.screen.advance(self._figure, self._done_steps + step, loss)
