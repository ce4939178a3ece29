"""Trainings: rank processes, their link, and every run that they have made."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from experiments.framework.rank import Attaching, Rank
from experiments.framework.ranks import OnStep, Ranks, described
from experiments.framework.replicas import ScoredTask
from thinwire.runtime import ParityError
from thinwire_tools.compare.tasks import probe_steps

_FIRST_STEPS = 5


def by_rank(answers: Sequence[dict[str, Any]], key: str) -> Iterator[tuple[Any, ...]]:
    """Yield what all ranks have of each step, or of each probe."""
    return zip(*(answer[key] for answer in answers), strict=True)


def slowest(answers: Sequence[dict[str, Any]]) -> tuple[float, ...]:
    """Return the slowest rank's seconds of every step."""
    return tuple(map(max, by_rank(answers, "step_s")))


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
    def of(cls, task: ScoredTask, answers: Sequence[dict[str, Any]]) -> Self:
        """Return what replicas told of their training (`Rank.train`)."""
        first = answers[0]
        held_out_loss, accuracy = zip(*map(_pooled, by_rank(answers, "scores")), strict=True)
        final_loss, final_accuracy = _pooled([answer["held_out"] for answer in answers])
        return cls(
            step_s=slowest(answers),
            train_loss=tuple(map(fmean, by_rank(answers, "losses"))),
            probe_steps=tuple(probe_steps(task)),
            accuracy=accuracy,
            held_out_loss=held_out_loss,
            payload_bytes=sum(first["step_bytes"]),
            final_accuracy=final_accuracy,
            final_loss=final_loss,
            alpha=tuple((step, value) for step, value in first["alpha"]),
        )

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


class Trainings(Ranks):
    """Rank processes, and what they have trained; a context manager."""

    def train(
        self,
        task: Any,
        method: Attaching,
        seed: int,
        on_step: OnStep,
        *,
        rate: str | None = None,
        teller: int = 0,
        more: Callable[[], dict[str, Any]] = dict,
        **options: Any,
    ) -> list[dict[str, Any]]:
        """Return each rank's answer to `Rank.train`, unless the training is known; over links of ``rate``.

        Args:
            task: what is trained.
            method: the method that sends what it communicates.
            seed: seed of weights, batches and rounding.
            on_step: is called with the steps of rank ``teller``.
            rate: rate of the links; None for no limit.
            teller: the rank that knows the loss.
            more: makes options of `Attaching.attached` that do not change the training.
            options: others, which do.

        Raises:
            RankFailedError: a rank failed.
            ParityError: ranks ended with different parameters, or messages.
        """
        link = rate if self.network is not None else None
        key = {"task": described(task), "method": described(method), "seed": seed, "link": link, **options}

        def hear(event: dict[str, Any]) -> None:
            on_step(event["step"], event["loss"])

        def make() -> list[dict[str, Any]]:
            arguments = {"task": task, "method": method, "seed": seed, **options, **more()}
            self.shape(link)
            return self.call(Rank.train, hear=hear, teller=teller, **arguments)

        answers = self.kept(key, make)
        digests = {(name, value) for answer in answers for name, value in answer["digests"].items()}
        if math.isfinite(answers[teller]["losses"][-1]) and len(digests) > len({name for name, _ in digests}):
            raise ParityError(f"{method.title}: ranks hold different parameters or messages after {task.steps} steps")
        return answers


def record(task: ScoredTask, seed: int, num_ranks: int, at: Collection[int], on_step: OnStep) -> Gradients:
    """Train uncompressed, on all ranks' batches in this process, and keep every rank's own gradient at the steps
    ``at``."""
    model, kept = task.build(seed), []
    optimizer, (names, parameters) = task.optimizer(model), zip(*model.named_parameters(), strict=True)
    # The filter is thinwire's own: the other layers are sent raw.
    taken = [i for i, parameter in enumerate(parameters) if parameter.ndim > 1 and parameter.numel() >= 1024]
    by_rank = (task.batches(seed, rank, num_ranks) for rank in range(num_ranks))
    for step, batches in enumerate(zip(*by_rank, strict=True)):
        losses = [task.loss(model, batch) for batch in batches]
        own = [torch.autograd.grad(loss, parameters) for loss in losses]
        if step in at:
            kept.append(tuple(tuple(gradients[i] for i in taken) for gradients in own))
        for parameter, *gradients in zip(parameters, *own, strict=True):
            parameter.grad = torch.stack(gradients).mean(0)
        for group in optimizer.param_groups:
            group["lr"] = task.rate(step)
        optimizer.step()
        on_step(step + 1, losses[0].item())
    return Gradients(tuple(sorted(at)), tuple(names[i] for i in taken), tuple(kept))


def _pooled(parts: Sequence[tuple[float, int, int]]) -> tuple[float, float]:
    """Return mean loss and accuracy from every rank's sums."""
    count = sum(images for _, _, images in parts)
    return math.fsum(total for total, _, _ in parts) / count, sum(right for _, right, _ in parts) / count
