"""The report as tables in the terminal."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table

from thinwire_tools.lab.units import duration, format_bytes, format_rate

_SHOWN = 5


def count(number: float, what: str) -> str:
    """Format as ``1 core`` or ``2 cores``."""
    return f"{number:g} {what}" if number == 1 else f"{number:g} {what}s"


def show(console: Console, record: dict[str, Any]) -> None:
    """Print the verdict, the recommendations, the prediction of each setting, and the measurements."""
    about = record["about"]
    console.print(Panel(escape(about["verdict"]), title="[bold]thinwire doctor[/]", expand=False))
    for i, advice in enumerate(about["advice"][:_SHOWN], 1):
        console.print(f"{i}. [bold]{escape(advice['title'])}[/]: {escape(advice['why'])}")
        # The first one's lines are complete, to paste; the others' are the calls that differ.
        calls = [line for line in advice["lines"] if "thinwire.compress(" in line]
        for line in advice["lines"] if i == 1 else calls or advice["lines"]:
            console.print(f"       {line}", markup=False, highlight=False, soft_wrap=True)
    console.print(predictions(about))
    if about["elsewhere"]:
        console.print(elsewhere(about))
    console.print(links(about))
    console.print(codecs(about))
    console.print(escape(how(about)), style="dim")


def _table(title: str, *heads: str) -> Table:
    """Return an empty table; on a narrow terminal names, whose column has no head, give way before figures do."""
    table = Table(title=title, title_justify="left")
    for head in heads:
        table.add_column(head, justify="right" if head else "left", no_wrap=bool(head), overflow="fold")
    return table


def predictions(about: dict[str, Any]) -> Table:
    priced = [f"a million\n{about['prices']['unit']}"] if about["prices"] else []
    table = _table("A step of the same batch", "", "a step", "between", "speed-up", "waits", "sent", *priced)
    today = about["today_s"]
    measured = [duration(today), f"{duration(min(about['steps_s']))} – {duration(max(about['steps_s']))}", "1.00x"]
    cost = [""] if about["prices"] else []
    table.add_row("now, measured", *measured, f"{about['exposed_share']:.0%}", "", *cost, style="bold")
    for row in about["predictions"]:
        cells = [
            duration(row["step_s"]),
            f"{duration(row['low_s'])} – {duration(row['high_s'])}",
            f"{today / row['step_s']:.2f}x",
            f"{row['wait_share']:.0%}",
            format_bytes(row["sent_bytes"]),
        ]
        table.add_row(_titled(row), *cells, *([f"{row['cost']:.4g}"] if about["prices"] else []))
    compute = about["compute_s"]
    table.add_row(
        "nothing sent",
        duration(compute["value"]),
        f"{duration(compute['low'])} – {duration(compute['high'])}",
        f"{today / compute['value']:.2f}x",
        "",
        "",
        *cost,
        style="dim",
    )
    return table


def elsewhere(about: dict[str, Any]) -> Table:
    rates = [format_rate(8 * other["rate"]) for other in about["elsewhere"]]
    table = _table("A step over other links, predicted", "", "here", *rates)
    here = {row["title"]: row["step_s"] for row in about["predictions"]}
    for i, row in enumerate(about["elsewhere"][0]["predictions"]):
        steps = [other["predictions"][i]["step_s"] for other in about["elsewhere"]]
        today = [other["predictions"][0]["step_s"] for other in about["elsewhere"]]
        gains = [f"{duration(s)} ({t / s:.1f}x)" for s, t in zip(steps, today, strict=True)]
        table.add_row(_titled(row), duration(here[row["title"]]), *gains)
    return table


def _titled(row: dict[str, Any]) -> str:
    """Return a setting's title, and its spec below it."""
    title = escape(row["title"])
    return title if not row["spec"] or row["spec"] == row["title"] else f"{title}\n[dim]{escape(row['spec'])}[/]"


def links(about: dict[str, Any]) -> Table:
    table = _table("Links, both ways at once", "ranks", "each way", "of the line rate", "latency, one way")
    line = about["line_rate"]
    for pair in about["pairs"]:
        share = f"{pair['bandwidth'] / line:.0%}" if line else "line rate unknown"
        share = "inside a node" if pair["inside"] else share
        latency = duration(pair["latency_s"])
        table.add_row(f"{pair['first']} – {pair['second']}", format_rate(8 * pair["bandwidth"]), share, latency)
    return table


def codecs(about: dict[str, Any]) -> Table:
    heads = ("", "encodes", "decodes", "ratio", "pays from", "on links to")
    table = _table("Compressors here, in bytes of fp32 gradient", *heads)
    for row in about["codecs"]:
        needed = row["minimal_ratio"]
        table.add_row(
            escape(row["title"]),
            f"{format_bytes(row['encode'])}/s",
            f"{format_bytes(row['decode'])}/s",
            f"{row['ratio']:.1f}x",
            "never" if needed is None else f"{needed:.2f}x",
            format_rate(8 * row["useful_bandwidth"]),
        )
    return table


def how(about: dict[str, Any]) -> str:
    """Return a few sentences on the measurements."""
    steps = f"{len(about['steps_s'])} steps as they are"
    if about["sharded"]:
        in_all = f"weights and gradients of {sum(b['kind'] == 'reduce_scatter' for b in about['buckets'])} modules"
        steps += f", computing and {len(about['buckets'])} collectives in turns"
        names = " W8G4 is weights in 8 bits and gradients in 4."
    else:
        in_all = f"{len(about['buckets'])} buckets"
        steps += ", and between them as many that wait for each bucket on the spot"
        names = ""
    core = "no core is free for communication" if about["shared"] == 1 else "communication has cores of its own"
    if 0 < about["shared"] < 1:
        core = "communication takes part of the cores that compute"
    return (
        f"{about['ranks']} ranks on {count(about['nodes'], 'node')}, {about['parameters']:,} parameters in "
        f"{in_all}; {count(about['cores_each'], 'core')} and {count(about['threads'], 'thread')} a rank, so "
        f"{core}. {steps}: "
        f"{duration(about['compute_s']['value'])} of computing. Now is measured; all else is predicted from these "
        "steps, the links and the codecs. Ranges hold 90 % of what the measurements allow." + names
    )
