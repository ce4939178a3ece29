"""``python -m experiments bench bursts``: what local updates ask of a link in its busiest second."""

from __future__ import annotations

import bisect
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rich.console import Console
from rich.table import Table

from thinwire_tools import lab
from thinwire_tools.bench.ranks import run_ranks
from thinwire_tools.lab.units import format_rate, parse_rate
from thinwire_tools.results import OutputFile, Results

_SAMPLE_S = 0.02
_MODES = {"at once": {"fragments": 1, "overlap": 0}, "streaming": {"fragments": 4, "overlap": 2}}


def bursts(
    *,
    rate: str = "100mbit",
    size_mb: float = 21.0,
    every: int = 24,
    step_ms: float = 250.0,
    rounds: int = 2,
    json: OutputFile = None,
) -> int:
    """Count the bytes on a link while two workers exchange local updates, the whole model at once or in fragments.

    Steps take their time asleep, as if an accelerator computed them, and move weights at random. Bytes are those of
    the interface, with headers, in 2 bits for a weight. Takes about half a minute.

    Examples:
      python -m experiments bench bursts
      python -m experiments bench bursts --rate 10mbit --step-ms 500

    Args:
        rate: of each worker's link, both ways.
        size_mb: megabytes (10^6 bytes) of fp32 weights, in layers of 1.05 MB: four fragments are alike of 21 MB.
        every: steps from one exchange of a weight to its next.
        step_ms: milliseconds of a step.
        rounds: exchanges of the whole model.
        json: write the figures to this file.
    """
    console = Console(highlight=False)
    lab.need_network()
    results = Results("python -m experiments bench bursts")
    results.about = {"rate": rate, "size_mb": size_mb, "every": every, "step_ms": step_ms, "rounds": rounds}
    table = Table(f"over {format_rate(parse_rate(rate))}", "sent", "in the busiest second", "a step of")
    for mode, options in _MODES.items():
        config = {"size_mb": size_mb, "every": every, "step_s": step_ms / 1e3, "rounds": rounds, **options}
        step_s, samples = _watched(config, rate)
        most, sent = busiest_second(samples), samples[-1][1] - samples[0][1]
        results.add(f"busiest_second_bytes/{mode}", most, "B")
        results.add(f"sent_bytes/{mode}", sent, "B")
        results.add(f"step_s/{mode}", step_s, "s")
        table.add_row(mode, f"{sent / 1e6:.2f} MB", f"{most / 1e6:.3f} MB", f"{1e3 * step_s:.0f} ms")
    whole, streamed = (results.value(f"busiest_second_bytes/{mode}") for mode in _MODES)
    results.add("busiest_second_of_at_once", streamed / whole, "x")
    console.print(table)
    console.print(f"The busiest second of streaming has {streamed / whole:.2f} times the bytes of that without.")
    if json is not None:
        results.write(json)
    return 0


def _watched(config: dict[str, Any], rate: str) -> tuple[float, list[tuple[float, int]]]:
    """Seconds of a step, and when how many bytes had left the first worker's interface."""
    samples: list[tuple[float, int]] = []
    with lab.Network(2, rate=rate) as network, ThreadPoolExecutor(1) as training:
        done = training.submit(run_ranks, "experiments.bench.bursts_rank", config, 2, network)
        while not done.done():
            samples.append((time.monotonic(), network.interface_bytes(0)[0]))
            time.sleep(_SAMPLE_S)
        answer = done.result()
        samples.append((time.monotonic(), network.interface_bytes(0)[0]))
    # time.monotonic() is the same clock in all processes of a machine. Nothing is missed by a sample that comes late.
    first = bisect.bisect_right([when for when, _ in samples], answer["started"]) - 1
    return answer["step_s"], samples[max(first, 0) :]


def busiest_second(samples: list[tuple[float, int]]) -> int:
    """The most bytes between two samples that are at most a second apart. ``samples``: ascending times and counts."""
    times = [when for when, _ in samples]
    ends = (bisect.bisect_right(times, when + 1.0) - 1 for when in times)
    return max(samples[end][1] - count for end, (_, count) in zip(ends, samples, strict=True))
