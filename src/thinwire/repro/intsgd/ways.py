"""The ways that gradients travel in the IntSGD paper's section 5: the one list of them."""

# No `from __future__ import annotations` here: DDP checks the annotations of a communication hook as objects.

import time
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import thinwire

Task = Literal["pictures", "words"]


@dataclass(frozen=True)
class Way:
    """``kind``: a plain fp32 all-reduce, a plain fp32 all-gather, or ``spec`` through `thinwire.compress`. ``words``:
    the spec for the language task where it is another."""

    name: str
    title: str
    colour: str
    kind: Literal["all-reduce", "all-gather", "thinwire"] = "thinwire"
    spec: str = ""
    topology: str = "sra"
    words: str = ""

    def spec_for(self, task: Task) -> str | None:
        """None for a way without a compressor."""
        if self.kind != "thinwire":
            return None
        return self.words if self.words and task == "words" else self.spec


SGD = Way("sgd", "SGD, all-reduce", "#555555", "all-reduce")
SGD_GATHERED = Way("sgd all-gather", "SGD, all-gather", "#aaaaaa", "all-gather")
QSGD = Way("qsgd", "QSGD", "#d98a00", spec="qsgd(levels=64, bucket=layer)", topology="allgather")
NATSGD = Way("natsgd", "NatSGD", "#8250c4", spec="natural()", topology="allgather")
POWERSGD = Way("powersgd", "PowerSGD (EF)", "#3b6fb6", spec="powersgd(rank=2)", words="powersgd(rank=4)")
DETERM = Way("intsgd determ", "IntSGD (determ.)", "#7fb800", spec="intsgd(bits=8, rounding=determ)")
RANDOM = Way("intsgd", "IntSGD (random)", "#0a7d4f", spec="intsgd(bits=8)")
RANDOM_32 = Way("intsgd 32", "IntSGD, int32", "#00b3a4", spec="intsgd(bits=32)")
HEURISTIC = Way("heuristic", "Heuristic IntSGD, int8", "#c0392b", spec="heuristic_intsgd(bits=8)")
HEURISTIC_32 = Way("heuristic 32", "Heuristic IntSGD, int32", "#e58a80", spec="heuristic_intsgd(bits=32)")

TABLE = (SGD_GATHERED, QSGD, NATSGD, SGD, POWERSGD, DETERM, RANDOM)
"""Of tables 2 and 3, in their order."""
WAYS = (*TABLE, RANDOM_32, HEURISTIC, HEURISTIC_32)
TRAINED = tuple(way for way in WAYS if way is not SGD_GATHERED)
"""An all-gather of fp32 has the mean of an all-reduce: it is only timed."""


def sensitive(beta: float, eps: float) -> str:
    """IntSGD with other constants than its default ones (C.4)."""
    return f"intsgd(bits=8, beta={beta:g}, eps={eps:g})"


class Attached:
    """Gradients of a DDP model that travel ``way``, and what of their time is communication and what is overhead."""

    def __init__(self, ddp: DistributedDataParallel, way: Way, task: Task) -> None:
        self._seconds = 0.0
        self._wire: thinwire.Wire | None = None
        spec = way.spec_for(task)
        if spec is not None:
            self._wire = thinwire.compress(ddp, spec, decline=False, parity=0, topology=way.topology)
        else:
            ddp.register_comm_hook(self, _all_reduce if way.kind == "all-reduce" else _all_gather)

    def take(self) -> tuple[float, float]:
        """Seconds of communication and of encoding and decoding since it was last asked."""
        if self._wire is not None:
            stats = self._wire.stats
            self._wire.reset_stats()
            return stats.wire_s, stats.encode_s + stats.reduce_s + stats.decode_s
        seconds, self._seconds = self._seconds, 0.0
        return seconds, 0.0

    def detach(self) -> None:
        if self._wire is not None:
            self._wire.detach()

    def note(self, seconds: float) -> None:
        self._seconds += seconds


def _all_reduce(state, bucket):
    started = time.perf_counter()
    buffer = bucket.buffer()
    dist.all_reduce(buffer)
    state.note(time.perf_counter() - started)
    return _done(buffer.div_(dist.get_world_size()))


def _all_gather(state, bucket):
    started = time.perf_counter()
    buffer = bucket.buffer()
    gathered = [torch.empty_like(buffer) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, buffer)
    state.note(time.perf_counter() - started)
    return _done(buffer.copy_(torch.stack(gathered).mean(0)))


def _done(value: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(value)
    return future
