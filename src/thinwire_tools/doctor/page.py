"""The report as one HTML page: no scripts, nothing fetched from anywhere, readable on a phone."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from rich.table import Table

from thinwire_tools.doctor import pictures, report
from thinwire_tools.lab.units import duration

_SHOWN = 6
_SPEC = re.compile(r"^(.*)\n\[dim\](.*)\[/\]$", re.DOTALL)


def need_jinja2() -> Any:
    """Return the module ``jinja2``. Raises ``ImportError`` that says how to install it."""
    try:
        import jinja2
    except ImportError as error:
        raise ImportError("an HTML report requires Jinja2 and matplotlib: pip install jinja2 matplotlib") from error
    return jinja2


def write(path: Path, record: dict[str, Any]) -> None:
    """Write the page to ``path``.

    Raises:
        ImportError: Jinja2 or matplotlib is missing; says how to install them.
    """
    path.write_text(page(record), encoding="utf-8")


def page(record: dict[str, Any]) -> str:
    """Return the page of a record, as `thinwire_tools.doctor.record.record` makes them."""
    jinja2 = need_jinja2()
    about = record["about"]
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, undefined=jinja2.StrictUndefined)
    environment.filters["code"] = lambda text: jinja2.utils.markupsafe.Markup(
        re.sub(r"`(.+?)`", r"<code>\1</code>", str(jinja2.utils.markupsafe.escape(text)))
    )
    template = environment.from_string(Path(__file__).with_name("report.html.j2").read_text(encoding="utf-8"))
    return template.render(
        about=about,
        advice=about["advice"][:_SHOWN],
        numbers=_numbers(about),
        predictions=_cells(report.predictions(about)),
        elsewhere=_cells(report.elsewhere(about)) if about["elsewhere"] else None,
        links=_cells(report.links(about)),
        codecs=_cells(report.codecs(about)),
        pictures={
            "steps": pictures.steps(about),
            "timeline": pictures.timeline(about),
            "break_even": pictures.break_even(about),
        },
        how=report.how(about),
        machine=_machine(record),
    )


def _numbers(about: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the figures at the top, with their names."""
    best = next((row for row in about["predictions"] if row["title"] == about["advice"][0]["title"]), None)
    numbers = [
        (duration(about["today_s"]), "a step now"),
        (f"{about['exposed_share']:.0%}", "of it waits for the link"),
        (duration(about["compute_s"]["value"]), "with nothing sent"),
    ]
    if best is not None:
        numbers.append((duration(best["step_s"]), f"with {best['title']}"))
    return numbers


def _cells(table: Table) -> dict[str, Any]:
    """Return a table of the terminal's report, cell by cell."""
    columns = [list(column.cells) for column in table.columns]
    styles = [{"bold": "strong", "dim": "dim"}.get(str(row.style), "") for row in table.rows]
    rows = [
        {"style": style, "cells": [_cell(str(cell)) for cell in row]}
        for row, style in zip(zip(*columns, strict=True), styles, strict=True)
    ]
    return {"heads": [str(column.header).replace("\n", " ") for column in table.columns], "rows": rows}


def _cell(text: str) -> dict[str, str]:
    """Return the text of a cell without rich's markup, and the spec below it."""
    match = _SPEC.match(text)
    title, spec = match.groups() if match else (text, "")
    return {"text": title.replace("\\[", "["), "spec": spec.replace("\\[", "[")}


def _machine(record: dict[str, Any]) -> str:
    machine, versions = record["machine"], record["versions"]
    return (
        f"{report.count(machine['cores'], 'core')} of {machine['cpu']}, {machine['memory_bytes'] / 2**30:.0f} GiB, "
        f"{machine['system']}; PyTorch {versions['torch']}, Python {versions['python']}, "
        f"thinwire {versions['thinwire']}."
    )
