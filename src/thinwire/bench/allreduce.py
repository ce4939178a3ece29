"""``thinwire bench allreduce``: one all-reduce over a slow link, beside what it has to beat and its own limit."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console
from rich.table import Table

from thinwire import lab
from thinwire.bench.ranks import run_ranks
from thinwire.results import Results

_LABELS = {
    "gloo": "gloo all-reduce, fp32",
    "thinwire": "thinwire",
    "bare": "bare exchange, same bytes",
}


def allreduce(
    *,
    rate: str = "1gbit",
    ranks: int = 2,
    size_mb: float = 25.0,
    compressor: str = "minmax(bits=4, bucket=128)",
    repeats: int = 7,
    json: Annotated[Path | None, tyro.conf.arg(metavar="PATH")] = None,
) -> int:
    """Time an all-reduce of one gradient over an emulated link.

    Three ways in turn, in one run: gloo's fp32 all-reduce, thinwire, and an exchange of thinwire's bytes with nothing
    done to them, which is the limit that the link sets.

    Examples:
      thinwire bench allreduce --rate 100mbit
      thinwire bench allreduce --rate 1gbit --ranks 4 --compressor 'minmax(bits=8, bucket=1024)'

    Args:
        rate: of each rank's link, both ways (100mbit, 1gbit ...).
        ranks: number of ranks, each in a network namespace of its own.
        size_mb: size of the gradient in fp32, in MB (10^6 bytes).
        compressor: its spec.
        repeats: measurements of each way; the median counts.
        json: write the figures to this file.
    """
    console = Console(highlight=False)
    missing = lab.unavailable()
    if missing:
        Console(stderr=True, highlight=False).print(f"No slow network can be made here: {missing}")
        return 1
    numel = int(size_mb * 1e6 / 4)
    with lab.Network(ranks, rate=rate) as network:
        about = network.describe()
        with console.status(f"{ranks} ranks, {rate}: {repeats} rounds of {size_mb:g} MB ..."):
            answer = run_ranks("thinwire.bench.allreduce_rank", [str(numel), compressor, str(repeats)], ranks, network)
    results = _results(answer, about, rate=rate, ranks=ranks, size_mb=size_mb, compressor=compressor)
    _print(console, answer, results, rate, ranks, size_mb, compressor)
    if json:
        results.write(json)
    return 0


def _results(answer: dict[str, Any], about: dict[str, Any], **parameters: Any) -> Results:
    results = Results("thinwire bench allreduce", about={"link": about, **parameters})
    seconds = answer["seconds"]
    for name, value in seconds.items():
        results.add(f"seconds/{name}", value, "s", all=answer["all"][name])
    results.add("speedup_over_gloo", seconds["gloo"] / seconds["thinwire"], "x")
    results.add("times_bare_exchange", seconds["thinwire"] / seconds["bare"], "x")
    results.add("payload_bytes/thinwire", answer["message_bytes"], "B")
    results.add("payload_bytes/gloo", answer["gloo_bytes"], "B")
    results.add("relative_error", answer["relative_error"], "")
    results.add("replicas_identical", float(answer["replicas_identical"]), "")
    return results


def _print(
    console: Console,
    answer: dict[str, Any],
    results: Results,
    rate: str,
    ranks: int,
    size_mb: float,
    compressor: str,
) -> None:
    console.print(f"All-reduce of {size_mb:g} MB, {ranks} ranks, {rate}, {compressor}")
    table = Table()
    for column in ("way", "median ms", "min .. max", "MB sent", "vs gloo"):
        table.add_column(column, justify="left" if column == "way" else "right", no_wrap=True)
    for name, label in _LABELS.items():
        median, times = answer["seconds"][name], answer["all"][name]
        sent = answer["gloo_bytes" if name == "gloo" else "message_bytes"]
        spread = f"{min(times) * 1e3:.1f} .. {max(times) * 1e3:.1f}"
        faster = f"{answer['seconds']['gloo'] / median:.2f}x"
        table.add_row(label, f"{median * 1e3:.1f}", spread, f"{sent / 1e6:.2f}", faster)
    console.print(table)
    identical = "bit-identical on all ranks" if answer["replicas_identical"] else "[red]DIFFERENT between ranks[/]"
    console.print(
        f"thinwire takes {results.value('times_bare_exchange'):.2f}x the bare exchange of its bytes; "
        f"relative error of the mean {answer['relative_error']:.4f}; result {identical}."
    )
