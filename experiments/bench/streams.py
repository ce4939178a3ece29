"""``python -m experiments bench streams``: all-reduces over several TCP connections to each rank, on long links."""

from __future__ import annotations

import random
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from experiments.framework.pages import show
from thinwire.collectives import ProcessGroupTransport
from thinwire_tools import lab
from thinwire_tools.bench.allreduce import Method, Stopwatch
from thinwire_tools.ranks import TIMEOUT, run_ranks
from thinwire_tools.results import OutputFile, Results

PAUSES_S = (0.0, 1.0)


def streams(
    *,
    links: tuple[str, ...] = ("1gbit/50ms", "1gbit/100ms", "200mbit/50ms/0.1%", "200mbit/100ms/0.1%"),
    size_mb: float = 25.0,
    compressor: str = "minmax(bits=4, bucket=128)",
    numbers: tuple[int, ...] = (1, 2, 4, 8),
    repeats: int = 5,
    json: OutputFile = None,
) -> int:
    """Time all-reduces between two ranks over one TCP connection and over several, with the kernel's own buffers.

    Right after another all-reduce, and after a second in which the link was idle: TCP then begins slowly again. Takes
    about fifteen minutes, most of them over links with losses.

    Examples:
      python -m experiments bench streams
      python -m experiments bench streams --links 1gbit/50ms --numbers 1 4

    Args:
        links: rate, round-trip time and, if there are any, losses (of links of 200mbit at most) of each link.
        size_mb: size of the gradient in fp32, in MB (10^6 bytes).
        compressor: its spec.
        numbers: of connections to each rank; the others are set against the first.
        repeats: measurements of each, of which the median counts.
        json: write the figures to this file.
    """
    lab.need_network()
    about = {"size_mb": size_mb, "compressor": compressor, "repeats": repeats, "numbers": list(numbers)}
    results = Results("python -m experiments bench streams", about=about)
    config = {"numel": int(size_mb * 1e6 / 4), "compressor": compressor, "repeats": repeats}
    config |= {"numbers": numbers, "pauses_s": PAUSES_S}
    for link in links:
        rate, rtt, *loss = link.split("/")
        with lab.Network(2, rate=rate, rtt=rtt, loss=loss[0] if loss else None) as network:
            answer: Any = run_ranks(measure, config, 2, network)
            results.about[link] = network.describe()
        for pause_s in PAUSES_S:
            times = {number: seconds for number, paused_s, seconds in answer if paused_s == pause_s}
            for number, seconds in times.items():
                gain = median(times[numbers[0]]) / median(seconds)
                results.add(f"{link}/{pause_s:g} s/{number}", median(seconds), "s", all=seconds, gain=gain)
        if json is not None:
            results.write(json)
    show("streams", results, json)
    return 0


# --- on a rank


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
