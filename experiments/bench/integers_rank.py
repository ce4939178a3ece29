"""One rank of ``python -m experiments bench integers``."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire import Plan, Wire
from thinwire.collectives import ProcessGroupTransport, ring_bytes
from thinwire.plan import Filter
from thinwire.runtime import BucketEngine
from thinwire_tools.bench.allreduce_rank import same_everywhere, sent_on_interface
from thinwire_tools.bench.rank import TIMEOUT, serve

_ROWS = 1000
_WARM = 2
"""Steps that are not timed: the first is exact and opens messages, the second opens those of integers."""


def measure(specs: list[str], numel: int, repeats: int) -> dict[str, dict[str, Any]]:
    """Seconds, bytes and bits of a gradient's all-reduce by gloo in fp32 and by each compressor, in turns.

    Seconds are those of the slowest rank. Bits are those of a ring all-reduce's coordinates, of which a rank sends
    2(n−1)/n.
    """
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    layers = (("weight", (_ROWS, numel // _ROWS)),)
    numel = numel // _ROWS * _ROWS
    wires = {spec: _wire(spec, dict(layers)) for spec in specs}

    def by_gloo(x: Tensor) -> Tensor:
        dist.all_reduce(x)
        return x

    def by(wire: Wire) -> Callable[[Tensor], Tensor]:
        def run(x: Tensor) -> Tensor:
            wire.engine.begin_step()
            return wire.engine.reduce(x, layers).wait()

        return run

    runs = {"fp32": by_gloo, **{spec: by(wire) for spec, wire in wires.items()}}
    found: dict[str, dict[str, Any]] = {name: {"all": [], "replicas_identical": True} for name in runs}
    for step in range(_WARM + repeats):
        gradient = torch.randn(numel, generator=torch.Generator().manual_seed(100 * step + rank))
        # What comes right after a long transfer finds the link's queues full: none may always be the one.
        for name in random.Random(step).sample(list(runs), len(runs)):
            x, own = gradient.clone(), found[name]
            if step == _WARM and name in wires:
                wires[name].reset_stats()
            dist.barrier()
            before, started = sent_on_interface(), time.perf_counter()
            mean = runs[name](x)
            seconds = torch.tensor(time.perf_counter() - started)
            # The kernel counts what it has sent: wait until the last messages have left.
            time.sleep(0.05)
            own["interface_bytes"] = sent_on_interface() - before
            dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
            own["replicas_identical"] &= same_everywhere(mean)
            if step >= _WARM:
                own["all"].append(float(seconds))
    for name, own in found.items():
        own["seconds"] = median(own["all"])
        own["sent_bytes"], own["codec_s"] = ring_bytes(4 * numel, num_ranks), 0.0
        if (wire := wires.get(name)) is not None:
            stats = wire.stats
            own["sent_bytes"] = stats.payload_sent_bytes / repeats
            own["codec_s"] = (stats.encode_s + stats.reduce_s + stats.decode_s) / repeats
            wire.detach()
        own["bits"] = 8 * own["sent_bytes"] / (2 * (num_ranks - 1) / num_ranks * numel)
    return found


def _wire(spec: str, shapes: dict[str, tuple[int, ...]]) -> Wire:
    group, lane = dist.new_group(timeout=TIMEOUT), dist.new_group(timeout=TIMEOUT)
    assert isinstance(group, dist.ProcessGroup)
    assert isinstance(lane, dist.ProcessGroup)
    return Wire(BucketEngine(Plan.build(shapes, spec, Filter()), shapes, ProcessGroupTransport(group, TIMEOUT, lane)))


def main() -> None:
    serve(measure)
