"""``python -m experiments bench peers``: local updates beside another library's, over the same slow links."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from importlib.util import find_spec
from statistics import fmean, median
from typing import Any

from rich.console import Console
from rich.table import Table

from thinwire.local.fragments import FEW_BITS
from thinwire_tools import lab
from thinwire_tools.bench.ranks import run_ranks
from thinwire_tools.compare.gpt import GPTConfig
from thinwire_tools.compare.statistics import estimate, relative_differences
from thinwire_tools.compare.tasks import GPTTask
from thinwire_tools.lab.units import format_rate, parse_rate
from thinwire_tools.results import OutputFile, Results

PEER, OTHER = "torchft", "hivemind"
COMPRESSORS = {"thinwire, fp32": "raw", "thinwire, 2 bits": FEW_BITS}
"""Ways of thinwire, and the compressor of their exchanges."""


def peers(
    *,
    rates: tuple[str, ...] = ("100mbit", "10mbit"),
    steps: int = 500,
    every: int = 25,
    seeds: int = 3,
    json: OutputFile = None,
) -> int:
    """Train a small GPT with torchft's DiLoCo and with thinwire's on two workers: loss, bytes on the link, seconds.

    Model, batches, inner optimizer (AdamW), outer optimizer and the steps between exchanges are the same. torchft sends
    fp32 over gloo, as on any machine without GPUs. Where hivemind is installed, too, its averager takes the place of
    the all-reduce, in fp32. Methods take turns, in another order with every seed; what is timed and counted begins
    after the first exchange, in which workers connect. Takes about six minutes.

    Examples:
      python -m experiments bench peers --json benchmarks/peers.json

    Args:
        rates: of each worker's link, both ways.
        steps: training steps of 4 windows of 64 bytes a worker.
        every: steps from one exchange to the next; a divisor of ``steps``.
        seeds: of the initial weights and the batches.
        json: write the figures to this file.
    """
    console = Console(highlight=False)
    if find_spec(PEER) is None:
        console.print(f"{PEER} is not installed: pip install {PEER}")
        return 1
    methods = (PEER, *COMPRESSORS)
    if find_spec(OTHER) is None:
        console.print(f"{OTHER} is not installed, and left out: pip install {OTHER}")
    else:
        methods = (PEER, OTHER, *COMPRESSORS)
    lab.need_network()
    task = GPTTask(
        model=GPTConfig(width=64, layers=2, context=64), steps=steps, batch=4, learning_rate=4e-3, held_out_windows=2048
    )
    results = Results("python -m experiments bench peers")
    results.about = {"rates": list(rates), "every": every, "seeds": seeds, "task": asdict(task)}
    for rate in rates:
        runs: dict[str, list[dict[str, Any]]] = {method: [] for method in methods}
        for seed in range(seeds):
            for method in methods[seed % len(methods) :] + methods[: seed % len(methods)]:
                runs[method].append(_run(method, task, every, seed, rate))
                console.print(f"{format_rate(parse_rate(rate))}, {method}, seed {seed}: {runs[method][-1]}")
        _add(results, rate, runs)
        console.print(_table(results, rate, methods))
        if json is not None:
            results.write(json)
    return 0


def _run(method: str, task: GPTTask, every: int, seed: int, rate: str) -> dict[str, Any]:
    config = {"method": method, "compressor": COMPRESSORS.get(method, "")}
    config |= {"task": asdict(task), "every": every, "seed": seed}
    with lab.Network(2, rate=rate) as network:
        return run_ranks("experiments.bench.peers_rank", config, 2, network)


def _add(results: Results, rate: str, runs: dict[str, list[dict[str, Any]]]) -> None:
    losses = {method: [run["loss"] for run in runs[method]] for method in runs}
    for method in runs:
        seconds = [run["seconds"] for run in runs[method]]
        of_peer = [one / other["seconds"] for one, other in zip(seconds, runs[PEER], strict=True)]
        results.add(f"{rate}/loss/{method}", fmean(losses[method]), "nats/byte", by_seed=losses[method])
        results.add(f"{rate}/seconds/{method}", median(seconds), "s", by_seed=seconds)
        results.add(f"{rate}/seconds_of_peer/{method}", median(of_peer), "x", by_seed=of_peer)
        results.add(f"{rate}/sent_bytes/{method}", fmean(run["sent_bytes"] for run in runs[method]), "B/step")
        results.add(f"{rate}/replicas_differ/{method}", sum(run["replicas_differ"] for run in runs[method]), "runs")
        above = estimate(relative_differences(losses[method], losses[PEER]))
        bounds = {} if len(seconds) == 1 or method == PEER else {"lower": above.lower, "upper": above.upper}
        results.add(f"{rate}/loss_above_peer/{method}", above.mean, "", **bounds)


def _table(results: Results, rate: str, methods: Sequence[str]) -> Table:
    table = Table(f"over {format_rate(parse_rate(rate))}", "sent per step", "seconds", f"of {PEER}'s", "loss", "above")
    for method in methods:
        table.add_row(
            method,
            f"{results.value(f'{rate}/sent_bytes/{method}') / 1e3:.2f} kB",
            f"{results.value(f'{rate}/seconds/{method}'):.1f}",
            f"{results.value(f'{rate}/seconds_of_peer/{method}'):.2f}x",
            f"{results.value(f'{rate}/loss/{method}'):.4f}",
            f"{results.value(f'{rate}/loss_above_peer/{method}'):+.2%}",
        )
    return table
