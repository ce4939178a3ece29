"""Trainings of the chapter's tables under FSDP2, as rank processes make them and as their parent asks for them."""

# No `from __future__ import annotations` here: PyTorch looks at what its custom collectives take.

import gc
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice
from statistics import median
from typing import Any, ClassVar

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from experiments.framework.rank import Call, Rank, Timed
from experiments.framework.ranks import OnStep, Ranks, RunCache, described, telling
from experiments.framework.timing import Place, Timing
from experiments.papers.qsdp.methods import Method
from experiments.papers.qsdp.sharding import Batch, backward, shard
from experiments.tasks.images import Model
from thinwire_tools import lab
from thinwire_tools.compare.gpt import GPT
from thinwire_tools.compare.tasks import GPTTask, probe_steps
from thinwire_tools.compare.train import learning_rate

_BATCHES, _WARM_UP_STEPS = 4, 3

# --- on a rank


class Shards(Timed):
    """One model under FSDP2, and the method that sends its weights and gradients."""

    def __init__(self, task: GPTTask, method: Method, mesh: Any, batches: Iterator[Batch], num_micro: int) -> None:
        self._task, self._num_micro, self._batches = task, num_micro, batches
        self._model = shard(task, mesh, 0, half=method.half)
        self.wire = method.attach(self._model)
        self._optimizer = task.optimizer(self._model)
        self.train(_WARM_UP_STEPS)

    def train(self, steps: int) -> None:
        for batch in islice(self._batches, steps):
            self._optimizer.zero_grad(set_to_none=True)
            backward(self._task, self._model, batch, self._num_micro)
            self._optimizer.step()

    def counters(self) -> dict[str, Any]:
        return self.wire.stats.to_dict() if self.wire else {}

    def payload_bytes(self) -> float | None:
        """By formula, of a step of several micro-batches."""
        if self.wire is None:
            return None
        return (self._num_micro + 1) * self.wire.sent_bytes("weights") + self.wire.sent_bytes()

    def close(self) -> None:
        if self.wire is not None:
            self.wire.detach()


def train(rank: Rank, task: GPTTask, method: Method, seed: int, num_micro: int) -> dict[str, Any]:
    """Train from ``seed``; seconds of every step without the evaluations between them, this rank's sums of the
    held-out loss with their numbers of tokens (of the probe along the method; of all at the end, through weights as
    they are gathered, and as the optimizer keeps them), seconds of learning levels, bytes that this rank sent in
    every step, and what each layer is sent by in the end."""
    model = shard(task, _mesh(rank), seed, half=method.half)
    wire = method.attach(model, seed)
    optimizer = task.optimizer(model)
    torch.manual_seed(seed * rank.num_ranks + rank.rank)
    probes, step_s, step_bytes = [_evaluate(rank, task, model, probe=True)], [], []
    batches = task.batches(seed, rank.rank, rank.num_ranks)
    for until in probe_steps(task):
        rank.channel.hold("train")
        for batch in islice(batches, until - len(step_s)):
            before = wire.stats.payload_sent_bytes if wire else 0
            step, started = len(step_s), time.perf_counter()
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(task.learning_rate, step, task.steps)
            optimizer.zero_grad(set_to_none=True)
            loss = backward(task, model, batch, num_micro)
            optimizer.step()
            step_s.append(time.perf_counter() - started)
            step_bytes.append(wire.stats.payload_sent_bytes - before if wire else 0)
            rank.channel.send("step", step=step + 1, loss=loss)
        rank.channel.hold("trained")
        probes.append(_evaluate(rank, task, model, probe=True))
    result = {
        "step_s": step_s,
        "probes": probes,
        "held_out": _evaluate(rank, task, model, probe=False),
        "master": _evaluate(rank, task, _whole(task, model), probe=False),
        "learn_s": wire.stats.learn_s if wire else 0.0,
        "step_bytes": step_bytes if wire else [],
        "plan": {name: str(compressor) for name, compressor in wire.plan.layers.items()} if wire else {},
    }
    if wire:
        wire.detach()
    del model, optimizer, wire
    gc.collect()
    return result


def enter(rank: Rank, task: GPTTask, methods: Sequence[Method], num_micro: int) -> dict[str, Any]:
    """Build a model for each of ``methods`` and train it for a few steps."""
    mesh, batches = _mesh(rank), list(islice(task.batches(0, rank.rank, rank.num_ranks), _BATCHES))
    return rank.entered([Shards(task, method, mesh, cycle(batches), num_micro) for method in methods])


@torch.no_grad()
def _evaluate(rank: Rank, task: GPTTask, model: GPT, *, probe: bool) -> tuple[float, int]:
    return task.evaluate(model, rank.rank, rank.num_ranks, probe=probe)


def _whole(task: GPTTask, model: GPT) -> GPT:
    """The model with all its weights, as the optimizer keeps them."""
    whole = task.build(0)
    shards = {name: value for name, value in model.state_dict().items() if isinstance(value, DTensor)}
    whole.load_state_dict({name: shard.full_tensor() for name, shard in shards.items()})
    return whole


def _mesh(rank: Rank) -> DeviceMesh:
    return init_device_mesh("cpu", (rank.num_ranks,))


# --- in the parent


@dataclass(frozen=True)
class Trained:
    """One training. ``probes`` are perplexities on a part of the held-out text, at the start and after each of
    ``probe_steps``; ``step_s`` the slowest rank's seconds of every step."""

    probe_steps: tuple[int, ...]
    probes: tuple[float, ...]
    step_s: tuple[float, ...]
    perplexity: float
    """On all held-out text, of the network that ranks compute with: of weights as they are gathered."""
    master_perplexity: float
    """Of weights as the optimizer keeps them."""
    learn_s: float
    """Seconds that learning levels took, on the slowest rank."""
    step_bytes: tuple[int, ...] = ()
    """Sent by rank 0 in every step, where something counts."""
    plan: Mapping[str, str] = field(default_factory=dict)
    """The compressor of each layer's weights and gradients in the end."""

    @property
    def learn_share(self) -> float:
        """Of the training without it, at the median step's pace."""
        return self.learn_s / (median(self.step_s) * len(self.step_s))


class Trainings(Ranks):
    """Rank processes on a link of ``rate`` (None: loopback), and what they have trained; a context manager.

    What is in ``cache`` is not trained again.
    """

    def __init__(self, num_ranks: int, rate: str | None = None, cache: RunCache | None = None) -> None:
        super().__init__(num_ranks, lab.Network(num_ranks, rate=rate) if rate is not None else None, cache)
        self._rate = rate

    def train(self, task: GPTTask, method: Method, seed: int, on_step: OnStep, *, num_micro: int = 1) -> Trained:
        """Train, unless it has been; ``num_micro``: micro-batches of a step.

        Raises:
            RankFailedError: a rank did not make it.
        """
        arguments: dict[str, Any] = {"task": task, "method": method, "seed": seed, "num_micro": num_micro}
        key = {**arguments, "task": described(task), "method": described(method), "rate": self._rate}
        return _trained(task, self.kept(key, lambda: self.call(train, hear=telling(on_step), **arguments)))


class ShardedTiming(Timing):
    """A `Timing` of methods under FSDP2, in steps of ``num_micro`` micro-batches."""

    _enters: ClassVar[Call] = staticmethod(enter)

    def __init__(self, place: Place, *, emulated: bool, num_ranks: int, num_micro: int) -> None:
        super().__init__(place, emulated=emulated, num_ranks=num_ranks)
        self._num_micro = num_micro

    def _entering(self, model: Model) -> dict[str, Any]:
        return {"num_micro": self._num_micro}


def _trained(task: GPTTask, answers: Sequence[dict[str, Any]]) -> Trained:
    count = len(answers[0]["probes"])
    return Trained(
        probe_steps=tuple(probe_steps(task)),
        probes=tuple(_perplexity([answer["probes"][at] for answer in answers]) for at in range(count)),
        step_s=tuple(max(seconds) for seconds in zip(*(answer["step_s"] for answer in answers), strict=True)),
        perplexity=_perplexity([answer["held_out"] for answer in answers]),
        master_perplexity=_perplexity([answer["master"] for answer in answers]),
        learn_s=max(answer["learn_s"] for answer in answers),
        step_bytes=tuple(answers[0]["step_bytes"]),
        plan=answers[0]["plan"],
    )


def _perplexity(parts: Sequence[tuple[float, int]]) -> float:
    """Of every rank's sum of the loss and number of tokens; infinite where training diverged."""
    loss = math.fsum(total for total, _ in parts) / sum(count for _, count in parts)
    return math.exp(loss) if math.isfinite(loss) else math.inf
