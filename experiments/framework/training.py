"""Trainings: rank processes, their link, and every run that they have made."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, median
from typing import Any

import numpy as np
import torch
from torch import Tensor

from experiments.framework import replicas
from experiments.framework.methods import Method
from experiments.framework.ranks import OnStep, Ranks, RunCache, described, telling
from experiments.framework.replicas import ScoredTask
from thinwire.runtime import ParityError
from thinwire_tools import lab
from thinwire_tools.compare.tasks import probe_steps

_FIRST_STEPS = 5


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

    @property
    def seconds(self) -> list[float]:
        """Seconds of training until each probe."""
        return [sum(self.step_s[:step]) for step in (0, *self.probe_steps)]

    @property
    def step_seconds(self) -> float:
        """Seconds of the median step, without the first ones, in which DDP arranges its buckets."""
        return median(self.step_s[min(_FIRST_STEPS, len(self.step_s) // 2) :])

    @property
    def last_train_loss(self) -> float:
        """Mean training loss over the last tenth of the steps."""
        return fmean(self.train_loss[-max(1, len(self.train_loss) // 10) :])


@dataclass(frozen=True)
class Gradients:
    """Local gradients along one training, by layer: those layers that are compressed.

    ``layers`` has a tensor for each step, rank and layer: ``[step][rank][layer]``.
    """

    steps: tuple[int, ...]
    names: tuple[str, ...]
    layers: tuple[tuple[tuple[Tensor, ...], ...], ...]


def lost_accuracy(baseline: Sequence[Trained], runs: Sequence[Trained]) -> list[float]:
    """Return the accuracy that each seed's run lost against its pair."""
    return [base.final_accuracy - run.final_accuracy for base, run in zip(baseline, runs, strict=True)]


def added_loss(baseline: Sequence[Trained], runs: Sequence[Trained]) -> list[float]:
    """Return each seed's relative excess of training loss over its pair's; infinity where either diverged."""
    pairs = [(base.last_train_loss, run.last_train_loss) for base, run in zip(baseline, runs, strict=True)]
    return [own / base - 1 if base > 0 and math.isfinite(own) else math.inf for base, own in pairs]


def curves(runs: Sequence[Trained]) -> dict[str, object]:
    """Return the values of runs that a JSON row keeps: final figures by seed, and the mean curves over steps."""
    return {
        "final_accuracy": [run.final_accuracy for run in runs],
        "final_loss": [run.final_loss for run in runs],
        "train_loss": [run.last_train_loss for run in runs],
        "steps": [0, *runs[0].probe_steps],
        "accuracy_curve": np.mean([run.accuracy for run in runs], axis=0).tolist(),
        "held_out_loss_curve": np.mean([run.held_out_loss for run in runs], axis=0).tolist(),
    }


class Runs(Ranks):
    """Rank processes on a link of ``rate`` (None: loopback), and what they have trained; a context manager."""

    def __init__(self, task: ScoredTask, num_ranks: int, rate: str | None, cache: RunCache | None = None) -> None:
        super().__init__(num_ranks, lab.Network(num_ranks) if rate is not None else None, cache)
        self.task, self.rate = task, rate

    def train(self, method: Method, seed: int, on_step: OnStep, *, measure: int = 0, shaped: bool = False) -> Trained:
        """Train, unless the run is known; ``shaped``: over the slow link.

        Raises:
            RankFailedError: a rank failed.
            ParityError: ranks ended with different parameters.
        """
        link = self.rate if shaped and self.network is not None else None
        arguments: dict[str, Any] = {"task": self.task, "method": method, "seed": seed, "measure": measure}
        # Neither name nor color changes a run.
        run = {name: value for name, value in asdict(method).items() if name not in ("name", "title", "color")}
        key = {**arguments, "task": described(self.task), "method": run, "link": link}

        def make() -> list[dict[str, Any]]:
            self.shape(link)
            return self.call(replicas.train, hear=telling(on_step), **arguments)

        return self._trained(self.kept(key, make), method)

    def record(self, seed: int, at: Sequence[int], on_step: OnStep) -> Gradients:
        """Train uncompressed and keep every rank's own gradient at the steps ``at``."""
        self.shape(None)
        arguments: dict[str, Any] = {"task": self.task, "seed": seed, "at": sorted(at), "folder": self.folder}
        self.call(replicas.gradients, hear=telling(on_step), **arguments)
        shapes = {name: parameter.shape for name, parameter in self.task.build(seed).named_parameters()}
        # The filter is thinwire's own: the other layers are sent raw.
        taken = [name for name, shape in shapes.items() if len(shape) > 1 and shape.numel() >= 1024]
        by_rank = []
        for rank in range(self.num_ranks):
            flat = torch.from_numpy(np.load(self.folder / f"gradients-{rank}.npy", allow_pickle=False))
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


def _pooled(parts: Sequence[tuple[float, int, int]]) -> tuple[float, float]:
    """Return mean loss and accuracy from every rank's sums."""
    count = sum(images for _, _, images in parts)
    return math.fsum(total for total, _, _ in parts) / count, sum(right for _, right, _ in parts) / count
