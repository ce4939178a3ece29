"""``python -m experiments bench auto``: the choices of ``auto`` over several networks, beside stock DDP."""

from __future__ import annotations

from contextlib import ExitStack
from statistics import median
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from thinwire.plan import DEFAULT_RULES
from thinwire_tools import lab
from thinwire_tools.bench.ranks import run_ranks
from thinwire_tools.results import OutputFile, Results

_LINKS = (
    "2x1@100mbit",
    "2x1@1gbit",
    "2x1@none",
    "2x2@100mbit",
    "2x2@1gbit",
    "4x1@100mbit",
    "4x1@500mbit,500mbit,500mbit,50mbit",
)


class NetworkSpec(NamedTuple):
    """A network: how many nodes, how many ranks on each, and the rates of the nodes' links."""

    nodes: int
    ranks: int
    rate: str | None

    @staticmethod
    def parse(text: str) -> NetworkSpec:
        """``2x4@1gbit``: two nodes of four ranks. Raises ``ValueError`` if it is none."""
        shape, at, rate = text.partition("@")
        nodes, times, ranks = shape.partition("x")
        if not (at and times and nodes.isdigit() and ranks.isdigit()):
            raise ValueError(f"{text!r} is no network: write 2x4@1gbit for two nodes of four ranks, or 2x1@none")
        return NetworkSpec(int(nodes), int(ranks), None if rate == "none" else rate)


def auto(
    *,
    links: tuple[str, ...] = _LINKS,
    spec: str = DEFAULT_RULES,
    batch: int = 2,
    bucket_cap_mb: float = 5.0,
    rounds: int = 5,
    steps: int = 2,
    json: OutputFile = None,
) -> int:
    """Train the demo's GPT over several networks: stock DDP, one compressor for all, and what ``auto`` decides.

    Once ``auto`` may choose the collective algorithm, once it may not (``sra`` alone). Methods take turns; shares
    are medians over rounds. Takes about fifteen minutes.

    Examples:
      python -m experiments bench auto --json auto.json
      python -m experiments bench auto --links 2x2@100mbit 2x1@none

    Args:
        links: networks: nodes, ranks on each, and the rates of the nodes' links, for all or for each; none leaves them
            unshaped.
        spec: the fixed choice.
        batch: windows of 64 tokens a rank.
        bucket_cap_mb: DDP's bucket size.
        rounds: turns of each method.
        steps: steps a turn.
        json: write the figures to this file.
    """
    console = Console(highlight=False)
    lab.need_network()
    try:
        places = {text: NetworkSpec.parse(text) for text in links}
    except ValueError as error:
        Console(stderr=True, highlight=False).print(str(error))
        return 2
    config = {"spec": spec, "cap_mb": bucket_cap_mb, "batch": batch, "rounds": rounds, "steps": steps}
    results = Results("python -m experiments bench auto", about={"spec": spec, "batch": batch, "cells": {}})
    table = Table(title="A step")
    for column in ("network", "fp32 ms", "fixed", "auto, sra alone", "auto", "by"):
        table.add_column(column, justify="left" if column in ("network", "by") else "right", overflow="fold")
    for text, place in places.items():
        num_ranks = place.nodes * place.ranks
        with ExitStack() as stack:
            network = stack.enter_context(lab.Network(num_ranks, ranks_per_node=place.ranks, rate=place.rate))
            stack.enter_context(console.status(f"{text}: {rounds} turns of each method ..."))
            answer = run_ranks("experiments.bench.auto_rank", config, num_ranks, network)
        results.about["cells"][text] = {"decided": answer["decided"], "algorithm": answer["algorithm"]}
        by = answer["algorithm"] if answer["decided"]["auto"].startswith("on") else "off"
        table.add_row(text, *_add(results, text, answer["times"]), by)
    console.print(table)
    if json is not None:
        results.write(json)
    return 0


def _add(results: Results, text: str, times: dict[str, list[float]]) -> list[str]:
    shown = [f"{median(times['fp32']) * 1e3:.0f}"]
    for name, seconds in times.items():
        results.add(f"step_s/{name}/{text}", median(seconds), "s", all=seconds)
        if name != "fp32":
            gain = median(f / t for f, t in zip(times["fp32"], seconds, strict=True))
            results.add(f"over_fp32/{name}/{text}", gain, "x")
            shown.append(f"{gain:.2f}x")
    gain = median(a / b for a, b in zip(times["one way"], times["auto"], strict=True))
    results.add(f"over_one_way/{text}", gain, "x")
    best = median(min(others) / a for *others, a in zip(*times.values(), strict=True))
    results.add(f"over_best_other/{text}", best, "x")
    return shown
