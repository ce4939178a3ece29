"""``thinwire bench allreduce``: one all-reduce over a slow link, beside what it has to beat and its own limit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from thinwire.collectives.algorithms import parse_algorithm
from thinwire.compressors import parse
from thinwire_tools import lab
from thinwire_tools.bench.ranks import run_ranks
from thinwire_tools.bench.tables import figures_table
from thinwire_tools.exits import ends_command
from thinwire_tools.results import OutputFile, Results

Kind = Literal["group", "shared", "auto"]


def allreduce(
    *,
    rate: str = "1gbit",
    rtt: str | None = None,
    ranks: int = 2,
    ranks_per_node: int = 1,
    size_mb: float = 25.0,
    compressor: str = "minmax(bits=4, bucket=128)",
    algorithm: tuple[str, ...] = ("sra",),
    transport: Kind = "group",
    repeats: int = 7,
    json: OutputFile = None,
) -> int:
    """Time an all-reduce of one gradient over an emulated link.

    Several methods take turns in one run: gloo's fp32 all-reduce, thinwire by each collective algorithm, and the bare
    messages of each: the same in the same order, without encoding and decoding, which is the limit that the link sets.

    Examples:
      thinwire bench allreduce --rate 100mbit
      thinwire bench allreduce --rate 1gbit --ranks 4 --compressor 'minmax(bits=8, bucket=1024)'
      thinwire bench allreduce --rate 1gbit --ranks 4 --algorithm sra ring tree
      thinwire bench allreduce --ranks 4 --ranks-per-node 2 --algorithm sra hierarchical --transport auto

    Args:
        rate: of each node's link, both ways (100mbit, 1gbit ...), or none.
        rtt: round-trip time added between nodes, as 20ms.
        ranks: number of ranks.
        ranks_per_node: how many of them share a node: its network namespace, its link, its memory.
        size_mb: size of the gradient in fp32, in MB (10^6 bytes).
        compressor: its spec.
        algorithm: the collective algorithms to time: sra, ring, tree, allgather, parameter_server, hierarchical ...
        transport: inside a node, by gloo (group) or through shared memory (shared, or auto where there is any).
        repeats: measurements of each method; the median counts.
        json: write the figures to this file.
    """
    console = Console(highlight=False)
    with ends_command():
        methods = [(str(parse_algorithm(spec)), transport) for spec in algorithm]
        parse(compressor)
        if not 0 < size_mb <= 1e6 or repeats < 1:
            raise ValueError(f"--size-mb {size_mb:g} --repeats {repeats}: both must be above 0")
        shaped = None if rate == "none" else rate
        lab.Network(ranks, rate=shaped, rtt=rtt, ranks_per_node=ranks_per_node).close()
    with console.status(f"{ranks} ranks, {rate}: {repeats} rounds of {size_mb:g} MB ..."):
        [answer], about = measure(
            methods, [size_mb], ranks=ranks, ranks_per_node=ranks_per_node, rate=rate, rtt=rtt, compressor=compressor,
            repeats=repeats,
        )  # fmt: skip
    parameters = {"rate": rate, "rtt": rtt, "ranks": ranks, "ranks_per_node": ranks_per_node, "size_mb": size_mb}
    results = Results("thinwire bench allreduce", about={"link": about, **parameters, "compressor": compressor})
    add(results, answer)
    console.print(f"All-reduce of {size_mb:g} MB, {ranks} ranks, {rate}, {compressor}")
    console.print(_table(answer))
    console.print(
        "ms: median; MB: what the busiest rank sends; gloo: in multiples of gloo's speed; bare: the method's messages "
        "without encoding and decoding, and its time in multiples of theirs; error: relative, of the mean."
    )
    if json:
        results.write(json)
    return 0


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
    """Add what was measured of one size: seconds, speed-ups and bytes of each method."""
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


def _table(answer: dict[str, Any]) -> Table:
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
