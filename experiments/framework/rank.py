"""A rank: it calls the functions that its parent names, each with the rank's lasting objects.

A function that ranks call takes its `Rank` first and returns plain values, which go back as JSON. Whatever trains is an
attachment: replicas under DDP (`replicas`), shards under FSDP2 (`qsdp.trainings`), stages of a pipeline
(`aqsgd.trainings`). Models of all three take turns here.
"""

from __future__ import annotations

import gc
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch.distributed as dist

from experiments.framework.replay import Clock, pin
from thinwire_tools.ranks import Channel


class Timed(ABC):
    """A model that takes turns with others, and the method that sends what it communicates."""

    stages: ClassVar[tuple[str, ...]] = ("encode_s", "wire_s", "reduce_s", "decode_s")
    """Names of the counters that are seconds in each stage of communication."""

    @abstractmethod
    def train(self, steps: int) -> None:
        """Train ``steps`` steps."""

    def counters(self) -> dict[str, Any]:
        """Return the counters so far; empty where nothing counts."""
        return {}

    def payload_bytes(self) -> float | None:
        """Return the bytes that this rank hands to the network in a step, where that is known."""
        return None

    def layers(self) -> list[dict[str, Any]]:
        """Return each layer's compressor, bucket and bytes, where layers are compressed."""
        return []

    @abstractmethod
    def close(self) -> None:
        """Release handles, files and groups."""


class Rank:
    """The rank's lasting objects over all calls: the process group, and the models that take turns."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.rank, self.num_ranks = dist.get_rank(), dist.get_world_size()
        self.timed: list[Timed] = []
        self.slowdown, self.clock = 1, Clock(1)

    def pin(self, cores: Sequence[int], slowdown: int) -> dict[str, Any]:
        """Keep to one of ``cores``; time runs slower by ``slowdown``."""
        pin(cores[self.rank % len(cores)])
        self.slowdown = slowdown
        return {}

    def entered(self, timed: Sequence[Timed]) -> dict[str, Any]:
        """Let these models take turns; return the bytes that each sends in a step."""
        self.timed += timed
        return {"payload_bytes": [one.payload_bytes() for one in timed], "layers": [one.layers() for one in timed]}

    def turn(self, which: int, steps: int) -> dict[str, Any]:
        """Train ``steps`` steps of a model; return the mean seconds of one, those in each stage of communication, and
        the processor's."""
        timed, count = self.timed[which], steps * self.slowdown
        before = timed.counters()
        self.channel.hold("turn")
        self.clock.start()
        started, cpu = time.perf_counter(), time.process_time()
        timed.train(steps)
        seconds, cpu_s = (time.perf_counter() - started) / count, (time.process_time() - cpu) / steps
        self.channel.hold("turned")
        after = timed.counters()
        stages = {name: (after[name] - before[name]) / count for name in timed.stages if name in after}
        return {"seconds": seconds, "stages": stages, "cpu_s": cpu_s}

    def leave(self) -> dict[str, Any]:
        """Release all models."""
        for timed in self.timed:
            timed.close()
        self.timed.clear()
        gc.collect()
        return {}

    def share(self, run: Callable[..., dict[str, Any]], jobs: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return this rank's share of the results of ``jobs``, by number; ``run`` takes a job and reports steps."""

        def teller(number: int) -> Callable[[int, float], None]:
            return lambda step, loss: self.channel.send("step", job=number, step=step, loss=loss)

        mine = range(self.rank, len(jobs), self.num_ranks)
        return {"results": {number: run(jobs[number], teller(number)) for number in mine}}


Call = Callable[..., dict[str, Any]]
