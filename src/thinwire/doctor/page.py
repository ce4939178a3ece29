"""What doctor found, as one page: no scripts, nothing fetched from anywhere, readable on a phone."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from rich.table import Table

from thinwire.doctor import pictures, report

_SHOWN = 6
_STYLE = """
:root { color-scheme: light; --ink: #1d2127; --dim: #5d6672; --line: #dde1e6; --accent: #2f6fde; }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 60rem; padding: 1.25rem 1rem 4rem; color: var(--ink); background: #fff;
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.1rem; letter-spacing: .02em; color: var(--dim); font-weight: 600; margin: 0 0 .75rem; }
h2 { font-size: 1.15rem; margin: 2.5rem 0 .5rem; }
.verdict { font-size: 1.3rem; line-height: 1.4; border-left: 4px solid var(--accent); padding-left: 1rem; margin: 0; }
.numbers { display: grid; grid-template-columns: repeat(auto-fit, minmax(8.5rem, 1fr)); gap: .75rem; margin: 1.5rem 0; }
.numbers div { border: 1px solid var(--line); border-radius: .5rem; padding: .6rem .75rem; }
.numbers b { display: block; font-size: 1.25rem; font-variant-numeric: tabular-nums; }
.numbers span, .note { color: var(--dim); font-size: .875rem; }
ol { padding-left: 1.3rem; } li { margin: .5rem 0; }
pre { background: #f4f6f8; border-radius: .4rem; padding: .7rem .8rem; margin: .4rem 0; overflow-x: auto;
  font: .8125rem/1.45 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; overflow-wrap: normal; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .875rem; font-variant-numeric: tabular-nums; }
th, td { padding: .4rem .6rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
th { color: var(--dim); font-weight: 600; } tr.strong td { font-weight: 700; } tr.dim td { color: var(--dim); }
svg { display: block; width: 100%; max-width: 38rem; height: auto; margin: .5rem 0; }
"""


def write(path: Path, record: dict[str, Any]) -> None:
    """Write the page to ``path``.

    Raises:
        ImportError: matplotlib is missing; says how to install it.
    """
    path.write_text(page(record), encoding="utf-8")


def page(record: dict[str, Any]) -> str:
    """The page of a record, as `thinwire.doctor.record.record` makes them."""
    about = record["about"]
    body = [
        "<h1>thinwire doctor</h1>",
        f'<p class="verdict">{escape(about["verdict"])}</p>',
        _numbers(about),
        _section("What to do", _advice(about["advice"][:_SHOWN])),
        _section("A step, by choice", pictures.steps(about), _table(report.predictions(about))),
        _section("A step as it is", pictures.timeline(about), _note(_STOPS if about["sharded"] else _TIMELINE)),
        _section("Links", _table(report.links(about)), _note(_LINKS)),
        _section("Compressors here", _table(report.codecs(about)), pictures.break_even(about), _note(_BREAK_EVEN)),
        _section("How this was measured", f"<p>{escape(report.how(about))}</p>", _note(_machine(record))),
    ]
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>thinwire doctor</title><style>{_STYLE}</style>"
    )
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>\n' + "\n".join(body) + "\n</body></html>\n"


_TIMELINE = (
    "Marks: a bucket's gradients are complete. Bars: until its all-reduce has arrived, at the speeds measured. What "
    "lies beyond the grey area is what training waits for."
)
_STOPS = (
    "FSDP2 without compression computes nothing while its own collectives are under way on a CPU. Of what each takes, "
    "the rank that came last."
)
_LINKS = "Both directions at once, as an all-reduce uses them. Latency: an empty message, one way."
_BREAK_EVEN = (
    "Equation 4 of the FFT paper (its Figure 10) at the speeds measured here: below its line a compressor costs more "
    "time than it saves; where the line ends, no ratio pays. Dots: this link. Nothing is taken to be hidden behind "
    "backward."
)


def _section(title: str, *parts: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{''.join(parts)}</section>"


def _note(text: str) -> str:
    return f'<p class="note">{escape(text)}</p>'


def _numbers(about: dict[str, Any]) -> str:
    best = next((row for row in about["predictions"] if row["title"] == about["advice"][0]["title"]), None)
    shown = [
        (report.duration(about["today_s"]), "a step now"),
        (f"{about['exposed_share']:.0%}", "of it waits for the link"),
        (report.duration(about["compute_s"]["value"]), "with nothing sent"),
    ]
    if best is not None:
        shown.append((report.duration(best["step_s"]), f"with {best['title']}"))
    cells = "".join(f"<div><b>{escape(value)}</b><span>{escape(what)}</span></div>" for value, what in shown)
    return f'<div class="numbers">{cells}</div>'


def _advice(advice: Sequence[dict[str, Any]]) -> str:
    items = []
    for of in advice:
        lines = f"<pre>{escape(chr(10).join(of['lines']))}</pre>" if of["lines"] else ""
        why = re.sub(r"`(.+?)`", r"<code>\1</code>", escape(of["why"]))
        items.append(f"<li><b>{escape(of['title'])}</b>: {why}{lines}</li>")
    return f"<ol>{''.join(items)}</ol>"


def _table(table: Table) -> str:
    """A table of the terminal's, cell by cell."""
    columns = [list(column.cells) for column in table.columns]
    rows = list(zip(*columns, strict=True))
    heads = "".join(f"<th>{_plain(column.header)}</th>" for column in table.columns)
    body = ""
    for row, style in zip(rows, table.rows, strict=True):
        name = {"bold": "strong", "dim": "dim"}.get(str(style.style), "")
        cells = "".join(f"<td>{_plain(cell)}</td>" for cell in row)
        body += f'<tr class="{name}">{cells}</tr>' if name else f"<tr>{cells}</tr>"
    return f'<div class="wide"><table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table></div>'


def _plain(cell: object) -> str:
    # The tables escape rich's markup.
    return escape(str(cell).replace("\\[", "["))


def _machine(record: dict[str, Any]) -> str:
    machine, versions = record["machine"], record["versions"]
    return (
        f"{machine['cores']} cores of {machine['cpu']}, {machine['memory_bytes'] / 2**30:.0f} GiB, "
        f"{machine['system']}; PyTorch {versions['torch']}, Python {versions['python']}, "
        f"thinwire {versions['thinwire']}."
    )
