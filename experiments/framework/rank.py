"""A rank: it trains models, lets them take turns, and calls the functions that its parent names, each with the rank's
lasting objects.

A function that ranks call takes its `Rank` first and returns plain values, which go back as JSON. Whatever trains is an
attachment, which a method makes of a task: replicas under DDP (`replicas`), shards under FSDP2 (`qsdp.sharding`), or
the stages of a pipeline (`aqsgd.stages`).
"""

from __future__ import annotations

import gc
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle, islice
from typing import Any, ClassVar, Protocol

import torch
import torch.distributed as dist

import thinwire
from experiments.framework.replay import Clock, Compute, ReplayedTask, gradients_along, pin
from thinwire_tools.compare.tasks import probe_steps
from thinwire_tools.ranks import Channel

_BATCHES = 4


class Attached(ABC):
    """A model on this rank, and the method that sends what it communicates."""

    stages: ClassVar[tuple[str, ...]] = ("encode_s", "wire_s", "reduce_s", "decode_s")
    """Names of the counters that are seconds in each stage of communication."""
    task: Any
    optimizer: torch.optim.Optimizer
    wire: thinwire.Wire | None = None

    def __init__(self) -> None:
        self.rank, self.num_ranks = dist.get_rank(), dist.get_world_size()

    @property
    def probes(self) -> Sequence[int]:
        """Steps of a training after which it is scored; the last is its end."""
        return probe_steps(self.task)

    def batches(self, seed: int) -> Iterator[Any]:
        """Return this rank's batches of a training, at least as many as its steps."""
        return iter(self.task.batches(seed, self.rank, self.num_ranks))

    def rate(self, step: int) -> float:
        """Return the learning rate of ``step`` (from 0)."""
        return self.task.rate(step)

    @abstractmethod
    def step(self, batch: Any) -> float | None:
        """Train one step; return the loss, where this rank knows it."""

    @abstractmethod
    def score(self) -> Any:
        """Return sums over this rank's share of what is probed; None where another rank has them."""

    @property
    def sent_bytes(self) -> float:
        """Bytes that this rank has sent, without TCP's headers."""
        return self.wire.stats.payload_sent_bytes if self.wire else 0

    @abstractmethod
    def result(self) -> dict[str, Any]:
        """Return what a training leaves; ``digests`` are hashes, by name, that are equal on all ranks that have one."""

    def counters(self) -> dict[str, Any]:
        """Return the counters so far; empty where nothing counts."""
        return self.wire.stats.to_dict() if self.wire else {}

    def settled(self) -> dict[str, Any]:
        """Return the ``payload_bytes`` that this rank hands to the network in a step, where that is known, and each
        layer's compressor, bucket and bytes, where ``layers`` are compressed."""
        return {"payload_bytes": None, "layers": []}

    def close(self) -> None:
        """Release handles, files and groups."""
        if self.wire is not None:
            self.wire.detach()


class Attaching(Protocol):
    """A method: a dataclass of plain values, which rank processes get a copy of."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def name(self) -> str: ...

    @property
    def title(self) -> str: ...

    @property
    def kind(self) -> str:
        """Kind of the method; ``ddp`` is plain DDP, which sends what a ring does."""
        ...

    @property
    def warm_up_steps(self) -> int:
        """Steps that take longer than later ones."""
        ...

    def attached(self, task: Any, seed: int, **options: Any) -> Attached:
        """Build the model of ``task`` on this rank, and send what it communicates by this method."""
        ...


class Rank:
    """The rank's lasting objects over all calls: the process group, and the models that take turns."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.rank, self.num_ranks = dist.get_rank(), dist.get_world_size()
        self.timed: list[Attached] = []
        self.slowdown, self.clock = 1, Clock(1)
        self.batches: list[Iterator[Any]] = []

    def train(self, task: Any, method: Attaching, seed: int, **options: Any) -> dict[str, Any]:
        """Train ``task`` from ``seed`` by ``method``; return the seconds, loss and bytes of every step, the scores at
        the start and after each of the probed steps, and `Attached.result`."""
        model = method.attached(task, seed, **options)
        scores, steps, taken = [model.score()], self._steps(model, seed), []
        for until in model.probes:
            self.channel.hold("train")
            taken += islice(steps, until - len(taken))
            self.channel.hold("trained")
            scores.append(model.score())
        found = dict(zip(("step_s", "losses", "step_bytes"), map(list, zip(*taken, strict=True)), strict=True))
        found |= {"scores": scores, **model.result()}
        model.close()
        del model, steps
        gc.collect()
        return found

    def _steps(self, model: Attached, seed: int) -> Iterator[tuple[float, float | None, float]]:
        """Train step by step; yield the seconds, loss and bytes of each."""
        # Random draws of training (dropout) are the same for every method.
        torch.manual_seed(seed * self.num_ranks + self.rank)
        for step, batch in enumerate(model.batches(seed)):
            sent, started = model.sent_bytes, time.perf_counter()
            for group in model.optimizer.param_groups:
                group["lr"] = model.rate(step)
            loss = model.step(batch)
            seconds = time.perf_counter() - started
            self.channel.send("step", step=step + 1, loss=loss)
            yield seconds, loss, model.sent_bytes - sent

    def pin(self, cores: Sequence[int], slowdown: int) -> dict[str, Any]:
        """Keep to one of ``cores``; time runs slower by ``slowdown``."""
        pin(cores[self.rank % len(cores)])
        self.slowdown = slowdown
        return {}

    def enter(
        self, task: Any, methods: Sequence[Attaching], compute: Compute | None = None, **options: Any
    ) -> dict[str, Any]:
        """Let a model for each of ``methods`` take turns, past its first steps; return what `Attached.settled` says.

        ``compute``: the result of `replicas.record`, to be replayed instead of computing.
        """
        # A policy's first plan needs gradients that differ.
        count = max([_BATCHES, *(method.warm_up_steps for method in methods)])
        if compute is not None:
            self.clock = Clock(self.slowdown)
            recorded = gradients_along(task, islice(task.batches(0, self.rank, self.num_ranks), count))
            task = ReplayedTask(task, compute, self.clock, task.bucket_cap_mb, recorded)
        for method in methods:
            self.timed.append(method.attached(task, 0, **options))
            self.batches.append(cycle(list(islice(self.timed[-1].batches(0), count))))
            self.take(-1, method.warm_up_steps)
        return {"settled": [model.settled() for model in self.timed]}

    def take(self, which: int, steps: int) -> None:
        """Train ``steps`` steps of a model that takes turns."""
        for batch in islice(self.batches[which], steps):
            self.timed[which].step(batch)

    def turn(self, which: int, steps: int) -> dict[str, Any]:
        """Train ``steps`` steps of a model; return the mean seconds of one, those in each stage of communication, and
        the processor's."""
        model, count = self.timed[which], steps * self.slowdown
        before = model.counters()
        self.channel.hold("turn")
        self.clock.start()
        started, cpu = time.perf_counter(), time.process_time()
        self.take(which, steps)
        seconds, cpu_s = (time.perf_counter() - started) / count, (time.process_time() - cpu) / steps
        self.channel.hold("turned")
        after = model.counters()
        stages = {name: (after[name] - before[name]) / count for name in model.stages if name in after}
        return {"seconds": seconds, "stages": stages, "cpu_s": cpu_s}

    def leave(self) -> dict[str, Any]:
        """Release all models."""
        for model in self.timed:
            model.close()
        self.timed.clear()
        self.batches.clear()
        gc.collect()
        return {}

    def share(self, run: Callable[..., dict[str, Any]], jobs: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return this rank's share of the results of ``jobs``, by number; ``run`` takes a job and reports steps."""

        def teller(number: int) -> Callable[[int, float], None]:
            return lambda step, loss: self.channel.send("step", job=number, step=step, loss=loss)

        mine = range(self.rank, len(jobs), self.num_ranks)
        return {"results": {number: run(jobs[number], teller(number)) for number in mine}}


Call = Callable[..., dict[str, Any]]
