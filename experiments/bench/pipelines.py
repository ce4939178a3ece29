"""``python -m experiments bench pipelines``: steps of pipelines over emulated links."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from rich.console import Console
from rich.table import Table

from thinwire_tools import lab
from thinwire_tools.bench.ranks import run_ranks
from thinwire_tools.lab.units import format_rate, parse_rate
from thinwire_tools.results import OutputFile, Results

RANKS, CHUNKS, BATCH, LENGTH, WIDTH = 4, 8, 2, 128, 512
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero-bubble")
METHODS: dict[str, list[str] | None] = {
    "PyTorch": None,
    "raw": ["raw", "raw"],
    "fw3 bw6": ["delta(maxabs(bits=3))", "maxabs(bits=6)"],
}
LAYER_MS = (5.0, 10.0, 5.0)
"""Of each of eight layers: forward, backward, and the part of that which is the weights'."""
LINKS = (("100mbit", 1.0), ("1gbit", 4.0))
"""Rates, and how many times `LAYER_MS` layers take there: 1F1B cannot hide its messages, and nearly can."""


def pipelines(*, steps: int = 5, json: OutputFile = None) -> int:
    """Steps of four stages over emulated links: PyTorch's stages and thinwire's, under four schedules.

    Stages sleep as if an accelerator computed, so that four fit on two cores. Layers take as long as a small
    accelerator's on the slow link, and four times as long on the fast one, which leaves a schedule room to hide its
    messages.

    Examples:
      python -m experiments bench pipelines --json benchmarks/pipelines.json

    Args:
        steps: of each run; the median counts.
        json: write the figures to this file.
    """
    lab.need_network()
    results = Results("python -m experiments bench pipelines")
    results.about = {"ranks": RANKS, "micro_batches": CHUNKS, "activation_bytes": 4 * BATCH * LENGTH * WIDTH}
    results.about |= {"steps": steps, "layer_ms": list(LAYER_MS), "times": dict(LINKS)}
    table = Table("links", "schedule", *METHODS)
    for rate, times in LINKS:
        with lab.Network(RANKS, rate=rate) as network:
            for schedule in SCHEDULES:
                cells = []
                for name, method in METHODS.items():
                    taken = run(method, schedule, even_stages(schedule, times), steps, network)
                    results.add(f"step_s/{name}/{schedule}/{rate}", median(taken), "s", all=taken)
                    cells.append(f"{1e3 * median(taken):.0f} ms")
                table.add_row(format_rate(parse_rate(rate)), schedule, *cells)
    Console(highlight=False).print(table)
    if json is not None:
        results.write(json)
    return 0


def even_stages(schedule: str, times: float) -> list[list[list[float]]]:
    """By stage and layer the seconds to sleep: two layers on each rank, which take ``times`` `LAYER_MS`."""
    layer = [times * ms / 1e3 for ms in LAYER_MS]
    return [[layer]] * (2 * RANKS) if schedule == "interleaved" else [[layer, layer]] * RANKS


def run(
    method: list[str] | None,
    schedule: str,
    stages: Sequence[Sequence[Sequence[float]]],
    steps: int,
    network: lab.Network | None,
) -> list[float]:
    """Return the seconds of the steps that `pipelines_rank.run` takes; ``network`` None: over loopback."""
    config = {"method": method, "schedule": schedule, "stages": stages, "chunks": CHUNKS, "batch": BATCH}
    config |= {"length": LENGTH, "width": WIDTH, "steps": steps}
    return run_ranks("experiments.bench.pipelines_rank", config, RANKS, network)["step_s"]
