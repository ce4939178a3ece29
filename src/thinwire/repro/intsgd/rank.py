"""One rank of the IntSGD paper's timings: holds a model for every way of sending gradients, which take turns.

Commands: ``setup`` (first), ``enter`` (build and warm up), ``turn`` (some steps of one of them), ``leave``.
"""

# No `from __future__ import annotations` here: DDP checks the annotations of a communication hook as objects.

import gc
import time
from collections.abc import Iterator, Sequence
from itertools import cycle, islice
from typing import Any

from thinwire.repro.demo_rank import Channel, join, run_rank
from thinwire.repro.intsgd.ways import WAYS, Attached, Task
from thinwire.repro.tasks import restore

_WARM_UP_STEPS = 3
_BATCHES = 4


class _Contestant:
    def __init__(self, task: Any, kind: Task, way: str, batches: Iterator[Any]) -> None:
        self._task, self._batches = task, batches
        self._ddp = task.distribute(task.build(0))
        self._optimizer = task.optimizer(self._ddp.module)
        self.attached = Attached(self._ddp, next(w for w in WAYS if w.name == way), kind)
        self.train(_WARM_UP_STEPS)

    def train(self, steps: int) -> dict[str, list[float]]:
        """Seconds of every step: in all, of communication, and of what compression adds to computing."""
        found: dict[str, list[float]] = {"total": [], "communication": [], "overhead": []}
        self.attached.take()
        for batch in islice(self._batches, steps):
            started = time.perf_counter()
            self._optimizer.zero_grad(set_to_none=True)
            self._task.loss(self._ddp, batch).backward()
            self._optimizer.step()
            seconds = time.perf_counter() - started, *self.attached.take()
            for values, value in zip(found.values(), seconds, strict=True):
                values.append(value)
        return found


class Rank:
    """What stays alive over all contests: the process group."""

    def __init__(self, setup: dict[str, Any], channel: Channel) -> None:
        self.channel = channel
        self.rank, self.num_ranks = join(setup)
        self.contestants: list[_Contestant] = []

    def enter(self, described: dict[str, Any], kind: Task, ways: Sequence[str]) -> dict[str, Any]:
        """Build a model for each of ``ways`` and train it for a few steps."""
        task: Any = restore(described)
        for way in ways:
            batches = cycle(list(islice(task.batches(0, self.rank, self.num_ranks), _BATCHES)))
            self.contestants.append(_Contestant(task, kind, way, batches))
            self.channel.send("entered", way=way)
        return {}

    def turn(self, which: int, steps: int) -> dict[str, Any]:
        self.channel.hold("turn")
        return dict(self.contestants[which].train(steps))

    def leave(self) -> dict[str, Any]:
        for contestant in self.contestants:
            contestant.attached.detach()
        self.contestants.clear()
        gc.collect()
        return {}


def _serve(channel: Channel) -> None:
    rank = Rank(channel.receive(), channel)
    channel.send("done")
    while True:
        command = channel.receive()
        match command["do"]:
            case "enter":
                answer = rank.enter(command["task"], command["kind"], command["ways"])
            case "turn":
                answer = rank.turn(int(command["which"]), int(command["steps"]))
            case _:
                answer = rank.leave()
        channel.send("done", **answer)


def main() -> None:
    run_rank(_serve)
