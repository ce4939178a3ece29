"""Trainings of the paper's figures: rank processes, their link, and every run they have made."""

from __future__ import annotations

import dataclasses
import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from types import ModuleType, TracebackType
from typing import Any, ClassVar, Self

import torch

from experiments.framework.run_cache import RunCache
from experiments.papers.aqsgd import rank as rank_module
from experiments.papers.aqsgd.methods import Method
from experiments.papers.aqsgd.rank import Asked
from experiments.papers.aqsgd.tasks import FineTuning
from thinwire_tools import lab
from thinwire_tools.compare.rank_processes import RankProcesses, launch_ranks

_TIMEOUT_S = 120.0
BURST_BYTES = 2 * 1514
"""Of the token buckets of slow links: two full frames, so that no part of a message is free."""

OnStep = Callable[[int, float], None]
"""Called with every step's number and loss."""


@dataclass(frozen=True)
class Trained:
    """One training. ``losses`` are those of every step, ``held_out`` at the start and at the end, ``step_s`` the
    slowest rank's seconds of every step; ``right`` is the share
    classified right at both times; ``epochs`` are mean magnitudes of activations and changes at the first
    boundary, by visit."""

    steps_per_epoch: int
    losses: tuple[float, ...]
    held_out: tuple[float, ...]
    right: tuple[float, ...]
    step_s: tuple[float, ...]
    sent_bytes: float
    """By all stages."""
    dense_bytes: float
    epochs: tuple[dict[str, float], ...]
    alike: bool
    """Whether both sides of every boundary kept the same."""
    start: int
    kept_samples: int
    links: tuple[dict[str, dict[str, Any]], ...] = ()
    """By boundary and direction, what was chosen for its link, and why."""
    kept: tuple[tuple[str, str], ...] = ()
    """Hashes of what several ranks hold at the end, by what it is."""
    completions: tuple[bytes, ...] = ()
    text: tuple[bytes, ...] = ()
    prompted: int = 0

    @property
    def epoch_losses(self) -> list[float]:
        """Means over each epoch, in which every sample is visited once."""
        each = self.steps_per_epoch
        return [_mean(self.losses[at : at + each]) for at in range(0, len(self.losses), each)]

    @property
    def loss(self) -> float:
        """Of the last epoch; infinite where training diverged."""
        return self.epoch_losses[-1]

    @property
    def seconds(self) -> list[float]:
        """Of training until the end of each epoch."""
        each = self.steps_per_epoch
        return [math.fsum(self.step_s[: at + each]) for at in range(0, len(self.step_s), each)]


class FirstTraining:
    """Weights that fine-tunings start from, made once each in this process; ``folder`` holds them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: dict[FineTuning, Path] = {}

    def weights(self, task: FineTuning, on_step: OnStep) -> Path | None:
        """The file with them; None where training starts from random ones."""
        if not task.first_steps:
            return None
        key = task.first
        if key not in self._known:
            gpt = key.build(0)
            for step, loss in enumerate(key.first_training(gpt), 1):
                on_step(step, loss)
            path = self._folder / f"first{len(self._known)}.pt"
            torch.save(gpt.state_dict(), path)
            self._known[key] = path
        return self._known[key]


class Trainings:
    """``num_ranks`` processes on a link of ``rate`` (None: loopback), and what they have trained; a context manager."""

    _program: ClassVar[ModuleType] = rank_module
    """What they run."""
    _lasting: ClassVar[bool] = True
    """Whether the same processes train again and again, or each training has new ones."""

    def __init__(
        self,
        num_ranks: int,
        first: FirstTraining,
        rate: str | None = None,
        network: lab.Network | None = None,
        cache: RunCache | None = None,
    ) -> None:
        """``network``: one that is there already, whatever its rate, instead of one of ``rate``; ``cache``: where
        finished trainings are kept, in memory by default, for their times are those of this machine now."""
        self.num_ranks, self._first, self._rate, self._network = num_ranks, first, rate, network
        self._ranks: RankProcesses | None = None
        self._cache = cache or RunCache()
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            if self._network is None and self._rate is not None:
                made = lab.Network(self.num_ranks, rate=self._rate, burst_bytes=BURST_BYTES)
                self._network = stack.enter_context(made)
            if self._lasting:
                self._ranks = stack.enter_context(self._started())
            self._stack = stack.pop_all()
        return self

    @contextmanager
    def _started(self) -> Iterator[RankProcesses]:
        with launch_ranks(self._program, None, self.num_ranks, self._network, timeout_s=_TIMEOUT_S) as (ranks, _):
            yield ranks

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.close()

    def train(
        self,
        task: FineTuning,
        method: Method,
        seed: int,
        on_step: OnStep,
        asked: Asked = Asked(),  # noqa: B008 - frozen
        folder: Path | None = None,
    ) -> Trained:
        """Train, unless it has been; ``folder`` is for checkpoints and stores on disk.

        Raises:
            RankFailed: a rank did not make it.
        """
        key = {
            "task": dataclasses.asdict(task),
            "method": dataclasses.asdict(method),
            "seed": seed,
            "asked": dataclasses.asdict(asked),
            "num_ranks": self.num_ranks,
        }
        if folder is None and (known := self._cache.get(key)) is not None:
            return trained(task, known["answers"])
        weights = self._first.weights(task, on_step)
        with tempfile.TemporaryDirectory(prefix="thinwire-aqsgd-") as own:
            command = {
                "do": "train",
                "weights": None if weights is None else str(weights),
                "folder": str(folder or own),
                **key,
            }
            with nullcontext(self._ranks) if self._ranks is not None else self._started() as ranks:
                answers = ranks.run(command, reporter(on_step, self.num_ranks - 1), _nothing)
        self._cache.put(key, {"answers": answers})
        return trained(task, answers)


def trained(task: FineTuning, answers: Sequence[dict[str, Any]]) -> Trained:
    last = answers[-1]
    kept: dict[str, set[str]] = {}
    for answer in answers:
        for boundary, content in answer["kept"].items():
            kept.setdefault(boundary, set()).add(content)
    return Trained(
        steps_per_epoch=task.steps_per_epoch,
        losses=tuple(map(_finite, last["losses"])),
        held_out=tuple(map(_finite, last["held_out"])),
        right=tuple(last["right"]),
        step_s=tuple(max(seconds) for seconds in zip(*(answer["step_s"] for answer in answers), strict=True)),
        sent_bytes=sum(answer["stats"]["sent_bytes"] for answer in answers),
        dense_bytes=sum(answer["stats"]["dense_bytes"] for answer in answers),
        epochs=tuple(answers[0]["stats"]["epochs"]),
        alike=all(len(contents) == 1 for contents in kept.values()),
        start=last["start"],
        kept_samples=answers[0]["stats"]["kept_samples"],
        links=tuple(last["links"]),
        kept=tuple(sorted((name, content) for name, contents in kept.items() for content in contents)),
        completions=tuple(bytes(row) for row in last.get("completions", ())),
        text=tuple(bytes(row) for row in last.get("text", ())),
        prompted=last.get("prompted", 0),
    )


def reporter(on_step: OnStep, rank: int) -> Callable[[int, dict[str, Any]], None]:
    """Tells steps of the rank that has losses."""

    def show(reporting: int, event: dict[str, Any]) -> None:
        if reporting == rank and event["event"] == "step":
            on_step(event["step"], event["loss"])

    return show


def _finite(loss: float) -> float:
    return loss if math.isfinite(loss) else math.inf


def _mean(losses: Sequence[float]) -> float:
    return fmean(losses) if all(map(math.isfinite, losses)) else math.inf


def _nothing(*_: Any) -> None:
    """Ignore the arguments."""
