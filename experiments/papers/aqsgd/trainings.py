"""What is known of a training in stages, and the weights that it starts from."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Self

import torch

from experiments.framework.ranks import OnStep
from experiments.framework.training import slowest
from experiments.papers.aqsgd.tasks import FineTuning


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
    completions: tuple[bytes, ...] = ()
    text: tuple[bytes, ...] = ()
    prompted: int = 0

    @classmethod
    def of(cls, task: FineTuning, answers: Sequence[dict[str, Any]]) -> Self:
        """Return what stages told of their training (`Rank.train`); the last one knows the losses."""
        last = answers[-1]
        held_out, right = zip(*last["scores"], strict=True)
        return cls(
            steps_per_epoch=task.steps_per_epoch,
            losses=tuple(map(_finite, last["losses"])),
            held_out=tuple(map(_finite, held_out)),
            right=right,
            step_s=slowest(answers),
            sent_bytes=sum(answer["stats"]["sent_bytes"] for answer in answers),
            dense_bytes=sum(answer["stats"]["dense_bytes"] for answer in answers),
            epochs=tuple(answers[0]["stats"]["epochs"]),
            completions=tuple(bytes(row) for row in last.get("completions", ())),
            text=tuple(bytes(row) for row in last.get("text", ())),
            prompted=last.get("prompted", 0),
        )

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


def _finite(loss: float) -> float:
    return loss if math.isfinite(loss) else math.inf


def _mean(losses: Sequence[float]) -> float:
    return fmean(losses) if all(map(math.isfinite, losses)) else math.inf
