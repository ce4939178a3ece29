"""Trainings of the paper's figures, as rank processes make them and as their parent asks for them."""

# No `from __future__ import annotations` here: methods and tasks are made of plain values.

import gc
import math
import tempfile
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar

import torch
from torch import Tensor

from experiments.framework.rank import Rank
from experiments.framework.ranks import OnStep, Ranks, RunCache, described, telling
from experiments.papers.aqsgd.methods import Method
from experiments.papers.aqsgd.stages import Pipe
from experiments.papers.aqsgd.tasks import FineTuning
from thinwire.runtime import ParityError
from thinwire_tools import lab

_PROMPTS, _PROMPT_SHARE = 8, 0.5
BURST_BYTES = 2 * 1514
"""Of the token buckets of slow links: two full frames, so that no part of a message is free."""

# --- on a rank


@dataclass(frozen=True)
class Asked:
    """Of a training, what is wanted beside it: loss on what is held out, at both ends, and completions."""

    held_out: bool = True
    completions: bool = False


def train(
    rank: Rank,
    kind: type[Pipe],
    task: FineTuning,
    method: Method,
    seed: int,
    weights: Path | None,
    folder: Path,
    asked: Asked,
) -> dict[str, Any]:
    """Losses of every step and on what is held out (where the last stage is), seconds of every step, what the
    stage counted, hashes of what it keeps at each boundary."""
    pipe = kind(task, method, seed, weights, folder / "store")
    record: dict[str, Any] = {"losses": [], "held_out": [], "right": [], "step_s": []}
    if asked.held_out:
        _look(pipe, record)
    rank.channel.hold("train")
    batches = [ids for epoch in range(task.epochs) for ids in pipe.order(seed, epoch)]
    for step, ids in enumerate(batches):
        started = time.perf_counter()
        loss = pipe.step(ids, task.rate(step))
        record["step_s"].append(time.perf_counter() - started)
        record["losses"].append(loss)
        rank.channel.send("step", step=step + 1, loss=loss)
    if asked.held_out:
        _look(pipe, record)
    record["stats"] = pipe.stats()
    record["kept"] = pipe.kept()
    if asked.completions:
        tokens, at = _prompts(task)
        record["completions"] = pipe.complete(tokens, at)[:_PROMPTS].tolist()
        record["prompted"] = at
        record["text"] = tokens[:_PROMPTS].tolist()
    pipe.close()
    del pipe
    gc.collect()
    return record


def _look(pipe: Pipe, record: dict[str, Any]) -> None:
    score = pipe.held_out()
    if score is not None:
        record["held_out"].append(score[0])
        record["right"].append(score[1])


def _prompts(task: FineTuning) -> tuple[Tensor, int]:
    """Windows that are held out, and from where on they are to be completed."""
    tokens, _ = next(task.held_out())
    return tokens, round(_PROMPT_SHARE * task.model.context)


# --- in the parent


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


class Trainings(Ranks):
    """``num_ranks`` processes on a network (None: loopback), and what they have trained; a context manager.

    ``cache``: where finished trainings are kept, in memory by default.
    """

    _pipe: ClassVar[type[Pipe]] = Pipe

    def __init__(
        self, num_ranks: int, first: FirstTraining, network: lab.Network | None = None, cache: RunCache | None = None
    ) -> None:
        super().__init__(num_ranks, nullcontext(network), cache)
        self._first = first

    def train(self, task: FineTuning, method: Method, seed: int, on_step: OnStep, asked: Asked = Asked()) -> Trained:
        """Train, unless it has been.

        Raises:
            RankFailedError: a rank did not make it.
            ParityError: both sides of a boundary, or replicas, do not hold the same.
        """
        arguments: dict[str, Any] = {"kind": self._pipe, "task": task, "method": method, "seed": seed, "asked": asked}

        def make() -> list[dict[str, Any]]:
            weights = self._first.weights(task, on_step)
            options: dict[str, Any] = {"hear": telling(on_step), "teller": self.num_ranks - 1}
            with tempfile.TemporaryDirectory(prefix="thinwire-aqsgd-") as own:
                return self._trained(**options, **arguments, weights=weights, folder=Path(own))

        key = {"task": described(task), "method": described(method), "seed": seed, "asked": asdict(asked)}
        return _trained(task, method, self.kept(key, make))

    def _trained(self, **arguments: Any) -> list[dict[str, Any]]:
        """What ranks answer that train."""
        return self.call(train, **arguments)


def _trained(task: FineTuning, method: Method, answers: Sequence[dict[str, Any]]) -> Trained:
    last = answers[-1]
    kept: dict[str, set[str]] = {}
    for answer in answers:
        for boundary, content in answer["kept"].items():
            kept.setdefault(boundary, set()).add(content)
    if math.isfinite(last["losses"][-1]) and any(len(contents) > 1 for contents in kept.values()):
        raise ParityError(f"{method.title}: ranks hold different messages or parameters after {task.steps} steps")
    return Trained(
        steps_per_epoch=task.steps_per_epoch,
        losses=tuple(map(_finite, last["losses"])),
        held_out=tuple(map(_finite, last["held_out"])),
        right=tuple(last["right"]),
        step_s=tuple(max(seconds) for seconds in zip(*(answer["step_s"] for answer in answers), strict=True)),
        sent_bytes=sum(answer["stats"]["sent_bytes"] for answer in answers),
        dense_bytes=sum(answer["stats"]["dense_bytes"] for answer in answers),
        epochs=tuple(answers[0]["stats"]["epochs"]),
        completions=tuple(bytes(row) for row in last.get("completions", ())),
        text=tuple(bytes(row) for row in last.get("text", ())),
        prompted=last.get("prompted", 0),
    )


def _finite(loss: float) -> float:
    return loss if math.isfinite(loss) else math.inf


def _mean(losses: Sequence[float]) -> float:
    return fmean(losses) if all(map(math.isfinite, losses)) else math.inf
