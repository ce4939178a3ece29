"""Trainings: rank processes, their link, and every run that they have made."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import fmean, median
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from experiments.framework import rank as rank_module
from experiments.framework.methods import Method
from experiments.framework.rank import ScoredTask
from experiments.framework.run_cache import RunCache
from thinwire.runtime import ParityError
from thinwire_tools import lab
from thinwire_tools.compare.rank_processes import launch_ranks
from thinwire_tools.compare.tasks import describe, probe_steps

_TIMEOUT_S = 180.0
_FIRST_STEPS = 5

OnStep = Callable[[int, float], None]


@dataclass(frozen=True)
class Trained:
    """One training. ``accuracy``, ``held_out_loss`` and ``seconds`` are at the start and after each of
    ``probe_steps``; ``train_loss`` is the mean over ranks of every step's, ``step_s`` the slowest rank's."""

    step_s: tuple[float, ...]
    train_loss: tuple[float, ...]
    probe_steps: tuple[int, ...]
    accuracy: tuple[float, ...]
    held_out_loss: tuple[float, ...]
    payload_bytes: float
    final_accuracy: float
    final_loss: float
    alpha: tuple[tuple[int, float], ...]

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """The training of which `dataclasses.asdict` made ``values``, perhaps by way of JSON."""
        plain = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
        return cls(**{**plain, "alpha": tuple((step, alpha) for step, alpha in values["alpha"])})

    @property
    def seconds(self) -> list[float]:
        """Of training until each probe."""
        return [sum(self.step_s[:step]) for step in (0, *self.probe_steps)]

    @property
    def step_seconds(self) -> float:
        """Of the median step, without the first ones, in which DDP arranges its buckets."""
        return median(self.step_s[min(_FIRST_STEPS, len(self.step_s) // 2) :])

    @property
    def last_train_loss(self) -> float:
        """Mean over the last tenth of the steps."""
        return fmean(self.train_loss[-max(1, len(self.train_loss) // 10) :])


@dataclass(frozen=True)
class Gradients:
    """Local gradients along one training, by layer: those layers that are compressed.

    ``layers`` holds a tensor for each step, rank and layer: ``[step][rank][layer]``.
    """

    steps: tuple[int, ...]
    names: tuple[str, ...]
    layers: tuple[tuple[tuple[Tensor, ...], ...], ...]


def lost_accuracy(baseline: Sequence[Trained], runs: Sequence[Trained]) -> list[float]:
    """Accuracy that each seed's run lost against its pair."""
    return [base.final_accuracy - run.final_accuracy for base, run in zip(baseline, runs, strict=True)]


def added_loss(baseline: Sequence[Trained], runs: Sequence[Trained]) -> list[float]:
    """By how much, relatively, each seed's training loss is above its pair's; infinity where either diverged."""
    pairs = [(base.last_train_loss, run.last_train_loss) for base, run in zip(baseline, runs, strict=True)]
    return [own / base - 1 if base > 0 and math.isfinite(own) else math.inf for base, own in pairs]


def curves(runs: Sequence[Trained]) -> dict[str, object]:
    """What a JSON row keeps of runs: final figures by seed, and the mean curves over steps."""
    return {
        "final_accuracy": [run.final_accuracy for run in runs],
        "final_loss": [run.final_loss for run in runs],
        "train_loss": [run.last_train_loss for run in runs],
        "steps": [0, *runs[0].probe_steps],
        "accuracy_curve": np.mean([run.accuracy for run in runs], axis=0).tolist(),
        "held_out_loss_curve": np.mean([run.held_out_loss for run in runs], axis=0).tolist(),
    }


class Runs:
    """Rank processes on a link of ``rate`` (None: loopback), and what they have trained; a context manager."""

    def __init__(self, task: ScoredTask, num_ranks: int, rate: str | None, cache: RunCache | None = None) -> None:
        self.task, self.num_ranks, self.rate = task, num_ranks, rate
        self.link: dict[str, Any] | str = "loopback"
        self._cache = cache or RunCache()
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self._network = stack.enter_context(lab.Network(self.num_ranks)) if self.rate is not None else None
            started = launch_ranks(rank_module, None, self.num_ranks, self._network, timeout_s=_TIMEOUT_S)
            self._ranks, self._folder = stack.enter_context(started)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.close()

    def train(self, method: Method, seed: int, on_step: OnStep, *, measure: int = 0, shaped: bool = False) -> Trained:
        """Train, unless it has been; ``shaped``: over the slow link.

        Raises:
            RankFailed: a rank did not make it.
            ParityError: ranks ended with different parameters.
        """
        shaped = shaped and self._network is not None
        task, sent = describe(self.task), dataclasses.asdict(method)
        # Neither name nor colour changes a run.
        run = {name: value for name, value in sent.items() if name not in ("name", "title", "colour")}
        link = self.rate if shaped else None
        key = {"task": task, "method": run, "seed": seed, "measure": measure, "link": link, "num_ranks": self.num_ranks}
        known = self._cache.get(key)
        if known is None:
            self._set_link(shaped)
            command = {"do": "train", "task": task, "method": sent, "seed": seed, "measure": measure}
            known = dataclasses.asdict(self._trained(self._ranks.run(command, _reporter(on_step), _nothing), method))
            self._cache.put(key, known)
        return Trained.from_dict(known)

    def record(self, seed: int, at: Sequence[int], on_step: OnStep) -> Gradients:
        """Train uncompressed and keep every rank's own gradient at the steps ``at``."""
        self._set_link(False)
        command = {
            "do": "gradients",
            "task": describe(self.task),
            "seed": seed,
            "at": sorted(at),
            "folder": str(self._folder),
        }
        self._ranks.run(command, _reporter(on_step), _nothing)
        shapes = {name: parameter.shape for name, parameter in self.task.build(seed).named_parameters()}
        # As thinwire's own filter: the other layers are sent raw.
        taken = [name for name, shape in shapes.items() if len(shape) > 1 and shape.numel() >= 1024]
        by_rank = []
        for rank in range(self.num_ranks):
            flat = torch.from_numpy(np.load(self._folder / f"gradients-{rank}.npy", allow_pickle=False))
            parts = flat.split([shape.numel() for shape in shapes.values()], dim=1)
            layers = dict(zip(shapes, parts, strict=True))
            by_rank.append([[layers[name][i].view(shapes[name]) for name in taken] for i in range(len(at))])
        by_step = tuple(tuple(tuple(by_rank[rank][i]) for rank in range(self.num_ranks)) for i in range(len(at)))
        return Gradients(tuple(sorted(at)), tuple(taken), by_step)

    def _trained(self, answers: list[dict[str, Any]], method: Method) -> Trained:
        first = answers[0]
        probes = [_pooled([answer["scores"][at] for answer in answers]) for at in range(len(first["scores"]))]
        final_loss, final_accuracy = _pooled([answer["held_out"] for answer in answers])
        same = len({answer["digest"] for answer in answers}) == 1
        if not same and method.kind != "nothing" and math.isfinite(final_loss):
            raise ParityError(f"{method.title}: ranks hold different parameters after {self.task.steps} steps")
        return Trained(
            step_s=tuple(max(seconds) for seconds in zip(*(answer["step_s"] for answer in answers), strict=True)),
            train_loss=tuple(fmean(losses) for losses in zip(*(answer["losses"] for answer in answers), strict=True)),
            probe_steps=tuple(probe_steps(self.task)),
            accuracy=tuple(accuracy for _, accuracy in probes),
            held_out_loss=tuple(loss for loss, _ in probes),
            payload_bytes=first["payload_bytes"][-1],
            final_accuracy=final_accuracy,
            final_loss=final_loss,
            alpha=tuple((step, value) for step, value in first["alpha"]),
        )

    def _set_link(self, shaped: bool) -> None:
        if self._network is None or self.rate is None:
            return
        if shaped:
            self._network.shape(self.rate)
            self.link = self._network.describe()
        else:
            self._network.unshape()


def _pooled(parts: Sequence[tuple[float, int, int]]) -> tuple[float, float]:
    """Mean loss and accuracy from every rank's sums."""
    count = sum(images for _, _, images in parts)
    return math.fsum(total for total, _, _ in parts) / count, sum(right for _, right, _ in parts) / count


def _reporter(on_step: OnStep) -> Callable[[int, dict[str, Any]], None]:
    def show(rank: int, event: dict[str, Any]) -> None:
        if rank == 0 and event["event"] == "step":
            on_step(event["step"], event["loss"])

    return show


def _nothing(*_: Any) -> None:
    """Ignore the arguments."""
