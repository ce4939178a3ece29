"""``python -m experiments bench doctor``: steps that doctor predicted beside steps that were taken."""

from __future__ import annotations

from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from thinwire.plan import DEFAULT_RULES
from thinwire_tools import lab
from thinwire_tools.bench.ranks import run_ranks
from thinwire_tools.results import OutputFile, Results

_RATES = ("100mbit", "200mbit", "500mbit", "1gbit")
_RTTS = ("0ms", "10ms")
_SPECS = ("cast(bf16)", DEFAULT_RULES)
_CLAIMED = 0.15


def doctor(
    *,
    rates: tuple[str, ...] = _RATES,
    rtts: tuple[str, ...] = _RTTS,
    specs: tuple[str, ...] | None = None,
    ranks: int = 2,
    batch: int = 8,
    bucket_cap_mb: float = 5.0,
    watched: int = 14,
    rounds: int = 5,
    steps: int = 2,
    sharded: bool = False,
    json: OutputFile = None,
) -> int:
    """Let doctor predict training steps of the demo's GPT over emulated links, then take these steps and compare.

    Predictions come from a model that is watched while it trains uncompressed, and from probes of links and codecs;
    none of the steps that they are held against is known to them. Methods take turns. Takes about ten minutes.

    Examples:
      python -m experiments bench doctor --json doctor.json
      python -m experiments bench doctor --rates 1gbit --rtts 0ms
      python -m experiments bench doctor --sharded --json doctor-fsdp.json

    Args:
        rates: of each rank's link, in both directions.
        rtts: round-trip times to add.
        specs: compressors, beside fp32 and nothing sent; by default bf16 and 4 bits, or none where SHARDED.
        ranks: number of ranks.
        batch: windows of 64 tokens a rank.
        bucket_cap_mb: DDP's bucket size.
        watched: steps that doctor looks at.
        rounds: turns of each method.
        steps: steps a turn.
        sharded: a model under FSDP2, in place of one under DDP; with doctor's own methods beside SPECS.
        json: write the figures to this file.
    """
    console = Console(highlight=False)
    lab.need_network()
    config = {
        "specs": list(specs if specs is not None else () if sharded else _SPECS),
        "cap_mb": bucket_cap_mb,
        "batch": batch,
        "watched": watched,
        "rounds": rounds,
        "steps": steps,
        "sharded": sharded,
    }
    results = Results(
        "python -m experiments bench doctor",
        about={"ranks": ranks, "batch": batch, "sharded": sharded, "claimed": _CLAIMED, "cells": {}},
    )
    table = Table(title="A step, predicted and taken")
    for column in ("link", "", "predicted", "range", "taken", "error"):
        table.add_column(column, justify="right" if column not in ("link", "") else "left", no_wrap=True)
    for rtt in rtts:
        for rate in rates:
            shape: dict[str, Any] = {"rate": rate} | ({} if rtt in ("0ms", "0") else {"rtt": rtt})
            cell = f"{rate}/{rtt}"
            with lab.Network(ranks, **shape) as network, console.status(f"{rate}, +{rtt} ..."):
                answer = run_ranks("experiments.bench.doctor_rank", config, ranks, network)
            results.about["cells"][cell] = {k: v for k, v in answer.items() if k not in ("predictions", "times")}
            _add(results, table, cell, answer)
    console.print(table)
    worst = max(abs(row["value"]) for row in results.results if row["name"].startswith("error/"))
    results.add("largest_error", worst, "")
    inside = [row for row in results.results if row["name"].startswith("error/")]
    close = sum(abs(row["value"]) <= _CLAIMED for row in inside)
    results.add("within_claimed", close / len(inside), "")
    console.print(f"{close} of {len(inside)} within {_CLAIMED:.0%}; the largest error is {worst:.1%}.")
    if json is not None:
        results.write(json)
    return 0


def _add(results: Results, table: Table, cell: str, answer: dict[str, Any]) -> None:
    for title, times in answer["times"].items():
        step = answer["predictions"][title]["step"]
        taken = median(times)
        error = step["value"] / taken - 1
        results.add(f"predicted_step_s/{title}/{cell}", step["value"], "s", low=step["low"], high=step["high"])
        results.add(f"step_s/{title}/{cell}", taken, "s", all=times)
        results.add(f"error/{title}/{cell}", error, "")
        shown = (step["value"], taken)
        predicted, took = (f"{value * 1e3:.0f} ms" for value in shown)
        bounds = f"{step['low'] * 1e3:.0f} – {step['high'] * 1e3:.0f}"
        table.add_row(cell, title, predicted, bounds, took, f"{error:+.1%}", end_section=title == "nothing sent")
