"""``python -m experiments bench stores``: what keeping messages of samples costs a pipeline's step."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Literal

from experiments.bench.pipelines import CHUNKS, LAYER_MS, RANKS, even_stages, run
from experiments.framework.pages import show
from thinwire_tools import lab
from thinwire_tools.compare.statistics import estimate, relative_differences
from thinwire_tools.results import OutputFile, Results

SCHEDULES = ("gpipe", "1f1b")
RATES = ("100mbit", "300mbit", "1gbit")
DIRECT = "nothing kept"
METHODS = {DIRECT: "maxabs(bits=3)", "in memory": "delta(maxabs(bits=3))", "on disk": "delta(maxabs(bits=3))"}
_BACKWARD = "maxabs(bits=6)"


def stores(
    *,
    rates: tuple[Literal["100mbit", "300mbit", "1gbit", "10gbit"], ...] = RATES,
    steps: int = 5,
    rounds: int = 5,
    json: OutputFile = None,
) -> int:
    """Steps of four stages that keep each sample's last message in memory, on disk, or not at all, in as many bytes.

    Activations are sent in 3 bits and their gradients in 6, as they are or as changes of what is kept (AQ-SGD). Stages
    sleep as if an accelerator computed. Methods take turns, and each is compared with what its round took without.

    Examples:
      python -m experiments bench stores --json benchmarks/stores.json
      python -m experiments bench stores --rates 1gbit --rounds 3

    Args:
        rates: of each rank's link.
        steps: of each run; the median counts.
        rounds: turns of all methods.
        json: write the figures to this file.
    """
    lab.need_network()
    results = Results("python -m experiments bench stores")
    results.about = {"ranks": RANKS, "micro_batches": CHUNKS, "layer_ms": list(LAYER_MS), "rates": list(rates)}
    results.about |= {"steps": steps, "rounds": rounds}
    for rate in rates:
        with lab.Network(RANKS, rate=rate) as network:
            for schedule in SCHEDULES:
                seconds: dict[str, list[float]] = {name: [] for name in METHODS}
                for _ in range(rounds):
                    for name, own in seconds.items():
                        own.append(_step_s(name, schedule, steps, network))
                for name, own in seconds.items():
                    results.add(f"step_s/{name}/{schedule}/{rate}", median(own), "s", all=own)
                    if name != DIRECT:
                        difference = estimate(relative_differences(own, seconds[DIRECT]))
                        cell = f"difference/{name}/{schedule}/{rate}"
                        results.add(cell, difference.mean, "", lower=difference.lower, upper=difference.upper)
    show("stores", results, json)
    return 0


def _step_s(name: str, schedule: str, steps: int, network: lab.Network) -> float:
    with TemporaryDirectory() as folder:
        method = [METHODS[name], _BACKWARD]
        if name == "on disk":
            method.append(str(Path(folder, "messages")))
        return median(run(method, schedule, even_stages(schedule, 1.0), steps, network))
