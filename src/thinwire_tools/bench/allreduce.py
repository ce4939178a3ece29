"""The command ``thinwire bench allreduce``: one all-reduce over a slow link, compared to fp32 and to its own limit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Table

from thinwire_tools import lab
from thinwire_tools.bench.ranks import run_ranks
from thinwire_tools.bench.tables import figures_table
from thinwire_tools.results import Results


def measure(
    methods: Sequence[tuple[str, str]],
    sizes_mb: Sequence[float],
    *,
    ranks: int,
    rate: str,
    compressor: str,
    repeats: int,
    ranks_per_node: int = 1,
    rtt: str | None = None,
    budget_s: float = 600.0,
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Run the benchmark. Returns the figures of each size, from rank 0, and a description of the link.

    ``methods`` are pairs of algorithm and transport. After ``budget_s`` seconds a size gets no further round.
    """
    config = {
        "methods": list(methods),
        "numels": [int(size * 1e6 / 4) for size in sizes_mb],
        "compressor": compressor,
        "ranks_per_node": ranks_per_node,
        "repeats": repeats,
        "budget_s": budget_s,
    }
    shaped = None if rate == "none" else rate
    with lab.Network(ranks, rate=shaped, rtt=rtt, ranks_per_node=ranks_per_node) as network:
        about = network.describe()
        answer: Any = run_ranks("thinwire_tools.bench.allreduce_rank", config, ranks, network)
    return answer, about


def add(results: Results, answer: dict[str, Any], prefix: str = "") -> None:
    """Add the figures of one size: seconds, speed-ups and bytes of each method."""
    seconds = answer["seconds"]
    for name, value in seconds.items():
        results.add(f"{prefix}seconds/{name}", value, "s", all=answer["all"][name])
    results.add(f"{prefix}payload_bytes/gloo", answer["gloo_bytes"], "B")
    if "fp32" in seconds:
        results.add(f"{prefix}speedup_over_gloo/fp32", seconds["gloo"] / seconds["fp32"], "x")
    for name, about in answer["about"].items():
        results.add(f"{prefix}speedup_over_gloo/{name}", seconds["gloo"] / seconds[name], "x")
        if (bare := seconds.get(f"bare/{name}")) is not None:
            results.add(f"{prefix}times_bare/{name}", seconds[name] / bare, "x")
        results.add(f"{prefix}formula_bytes/{name}", sum(about["formula_bytes"]), "B", by_rank=about["formula_bytes"])
        for what in ("crossing_bytes", "interface_bytes"):
            results.add(f"{prefix}{what}/{name}", sum(about[what]), "B", by_node=about[what])
        results.add(f"{prefix}relative_error/{name}", about["relative_error"], "")
        results.add(f"{prefix}variance/{name}", about["variance"], "")
        results.add(f"{prefix}replicas_identical/{name}", float(about["replicas_identical"]), "")


def table_of(answer: dict[str, Any]) -> Table:
    table = figures_table("method", ("ms", "min .. max", "MB", "gloo", "bare, ms", "bare", "error"))
    seconds, times = answer["seconds"], answer["all"]
    gloo = seconds["gloo"]
    table.add_row("gloo, fp32", *_times(gloo, times["gloo"]), f"{answer['gloo_bytes'] / 1e6:.2f}", "1.00x")
    if (fp32 := seconds.get("fp32")) is not None:
        size = f"{answer['gloo_bytes'] / 1e6:.2f}"
        table.add_row("thinwire, fp32", *_times(fp32, times["fp32"]), size, f"{gloo / fp32:.2f}x")
    for name, about in answer["about"].items():
        bare = seconds.get(f"bare/{name}")
        table.add_row(
            name,
            *_times(seconds[name], times[name]),
            f"{max(about['formula_bytes']) / 1e6:.2f}",
            f"{gloo / seconds[name]:.2f}x",
            *((f"{bare * 1e3:.1f}", f"{seconds[name] / bare:.2f}x") if bare is not None else ("", "")),
            f"{about['relative_error']:.4f}",
        )
        if not about["replicas_identical"]:
            table.add_row("[red]  ranks got DIFFERENT results[/]")
    return table


def _times(seconds: float, every: Sequence[float]) -> tuple[str, str]:
    return f"{seconds * 1e3:.1f}", f"{min(every) * 1e3:.1f} .. {max(every) * 1e3:.1f}"
