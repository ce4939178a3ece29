"""Findings of a paper's repetition, with the paper's claims: rows of a table and of the JSON file."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rich import box
from rich.markup import escape
from rich.table import Table

from experiments.framework.verdicts import outcome
from thinwire_tools.results import Results


@dataclass(frozen=True)
class Finding:
    """One value of a figure (or table) of the paper's, as measured here. ``holds`` is None where it is inconclusive,
    ``why`` being the reason, or where the paper says nothing about it, ``claim`` being empty. ``aside``: in the table
    even so, under this name. ``more``: the curves behind the value, for the JSON file. ``detectable``: smaller
    differences are not seen (`verdicts.Judgment`)."""

    figure: str
    name: str
    value: float
    unit: str
    claim: str
    text: str
    holds: bool | None
    more: dict[str, Any] = field(default_factory=dict)
    aside: str = ""
    why: str = ""
    detectable: float | None = None


def table(findings: Sequence[Finding], title: str) -> Table:
    """Return a table of every claim with the finding, for people."""
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=title)
    shown.add_column("figure", no_wrap=True)
    shown.add_column("the paper")
    shown.add_column("here")
    shown.add_column("holds", no_wrap=True)
    words = {True: "[green]yes[/]", False: "[red]no[/]", None: "[dim]inconclusive[/]"}
    for finding in findings:
        if finding.aside:
            aside = f"[dim]beside it: {escape(finding.aside)}[/]"
            shown.add_row(finding.figure, aside, escape(finding.text), "[dim]–[/]")
        elif finding.claim:
            text = escape(outcome(finding.text, finding.why))
            shown.add_row(finding.figure, escape(finding.claim), text, words[finding.holds])
    return shown


def record(findings: Sequence[Finding], command: str, about: dict[str, Any], prefix: str = "fig") -> Results:
    """Return all findings as rows of ``command``'s, by ``prefix``, figure and name; infinities and NaN become null."""
    results = Results(command, about=about)
    for finding in findings:
        results.add(
            f"{prefix}{finding.figure}/{finding.name}",
            plain(finding.value),
            finding.unit,
            figure=finding.figure,
            claim=finding.claim or None,
            found=finding.text,
            holds=finding.holds,
            **({"why": finding.why} if finding.why else {}),
            **({"detectable": plain(finding.detectable)} if finding.detectable else {}),
            **plain(finding.more),
        )
    return results


def plain(value: Any) -> Any:
    """Return ``value`` as JSON keeps it: six digits, and null for infinities and NaN."""
    if isinstance(value, dict):
        return {str(key): plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [plain(part) for part in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value
