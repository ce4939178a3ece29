"""One rank of ``python -m experiments bench streams``."""

from __future__ import annotations

import random

import torch
import torch.distributed as dist

from thinwire.collectives import ProcessGroupTransport
from thinwire_tools.bench.allreduce_rank import Method, Stopwatch
from thinwire_tools.bench.rank import TIMEOUT, serve


def _transport(streams: int) -> ProcessGroupTransport:
    first, *others = [dist.new_group(timeout=TIMEOUT) for _ in range(streams)]
    assert isinstance(first, dist.ProcessGroup)
    transport = ProcessGroupTransport(first, TIMEOUT)
    transport.add_streams([group for group in others if isinstance(group, dist.ProcessGroup)])
    return transport


def measure(
    numel: int, compressor: str, numbers: list[int], pauses_s: list[float], repeats: int
) -> list[tuple[int, float, list[float]]]:
    """Seconds of all-reduces by each number of streams, right after another one and after pauses, in turns."""
    methods = {number: Method(numel, compressor, "sra", _transport(number)) for number in numbers}
    x, stopwatch = torch.randn(numel, generator=torch.Generator().manual_seed(dist.get_rank())), Stopwatch()
    times: dict[tuple[int, float], list[float]] = {(n, pause_s): [] for n in numbers for pause_s in pauses_s}
    for turn in range(repeats):
        for number, pause_s in random.Random(turn).sample(list(times), len(times)):
            values = x.clone()
            times[number, pause_s].append(stopwatch.time(lambda n=number, v=values: methods[n].run(v), pause_s))
    return [(number, pause_s, seconds) for (number, pause_s), seconds in times.items()]


def main() -> None:
    serve(measure)
