"""Claims as data: a paper's statement, the measurements that speak to it, and the rule by which they are judged.

A part of a paper measures rows; its claims judge them. A claim sees nothing but the rows of its figure, as the JSON
file keeps them, so that a recorded run can be judged again. A finding is a row with its claim and the verdict."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from rich.markdown import Markdown

from experiments.framework.verdicts import WORDS, Judgment, exceeds, faster, matches, outcome
from thinwire_tools.compare.statistics import Estimate, estimate
from thinwire_tools.results import Results


@dataclass(frozen=True)
class Finding:
    """One value of a figure (or table) of the paper's, as measured here. ``holds`` is None where it is inconclusive,
    ``why`` being the reason, or where the paper says nothing about it, ``claim`` being empty.
    ``more``: the curves behind the value, for the JSON file. ``detectable``: smaller differences are not seen
    (`verdicts.Judgment`)."""

    figure: str
    name: str
    value: float
    unit: str
    claim: str
    text: str
    holds: bool | None
    more: dict[str, Any] = field(default_factory=dict)
    why: str = ""
    detectable: float | None = None


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell(text) for text in line) + " |" for line in lines)


def cell(text: str) -> str:
    """Return ``text`` in one line, as a cell of a table has it."""
    return " ".join(text.split()).replace("|", "\\|")


def table_of_claims(findings: Sequence[Finding], title: str) -> Markdown:
    """Return every claim with the finding, for people."""
    rows = [[f.figure, f.claim, outcome(f.text, f.why), WORDS[f.holds]] for f in findings if f.claim]
    return Markdown(f"## {title}\n\n{table(('figure', 'the paper', 'here', ''), rows)}")


def results_of(findings: Sequence[Finding], command: str, about: dict[str, Any]) -> Results:
    """Return all findings as rows of ``command``'s, by figure and name; infinities and NaN become null."""
    results = Results(command, about=about)
    for finding in findings:
        results.add(
            f"{finding.figure}/{finding.name}",
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


Rows = Mapping[str, Mapping[str, Any]]
"""Rows of one figure by name: ``value``, ``unit``, and further measurements."""
Rule = Callable[[Rows], Judgment]

NO_LINK = "no slow link can be emulated here"


@dataclass(frozen=True)
class Row:
    """One measured value of a figure (or table), with the ``data`` of the curves behind it, for the JSON file."""

    figure: str
    name: str
    value: float
    unit: str
    data: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Claim:
    """A paper's ``statement``, and the ``rule`` by which rows are judged. ``row``: the measured value that it is about;
    where that follows from other rows, ``value`` makes it of them, in ``unit``. ``text``: the rows in words, where the
    interval that the rule looked at does not say it. ``over_link``: it rests on times over a slow link."""

    figure: str
    row: str
    statement: str
    rule: Rule
    over_link: bool = False
    value: Callable[[Rows], float] | None = None
    unit: str = ""
    text: Callable[[Rows], str] | None = None


def judge(claims: Iterable[Claim], rows: Iterable[Row], *, emulated: bool) -> list[Finding]:
    """Return every row with the claim that is about it, if any, and those that claims make; ``emulated``: there was a
    slow link.

    A claim about a row that was not measured is left out: parts that share a figure may be run one by one.

    Raises:
        ValueError: two claims are about the same row.
    """
    rows = list(rows)
    by_figure: dict[str, dict[str, Mapping[str, Any]]] = {}
    for row in rows:
        value = plain({"value": row.value, "unit": row.unit, **row.data})
        by_figure.setdefault(row.figure, {})[row.name] = value
    of_row: dict[tuple[str, str], Claim] = {}
    made: list[Row] = []
    for claim in claims:
        key = claim.figure, claim.row
        if key in of_row:
            raise ValueError(f"two claims are about {claim.figure}/{claim.row}")
        of_row[key] = claim
        if claim.figure not in by_figure or claim.row in by_figure[claim.figure]:
            continue
        # The rows that its value is made of may not have been measured either.
        with suppress(KeyError):
            if claim.value is not None:
                made.append(Row(*key, claim.value(by_figure[claim.figure]), claim.unit))
    rows = made + rows
    for row in made:
        by_figure[row.figure][row.name] = plain({"value": row.value, "unit": row.unit})
    return [_finding(row, of_row.get((row.figure, row.name)), by_figure[row.figure], emulated) for row in rows]


def _finding(row: Row, claim: Claim | None, rows: Rows, emulated: bool) -> Finding:
    fields = row.figure, row.name, row.value, row.unit
    if claim is None:
        return Finding(*fields, "", "", None, dict(row.data))
    if claim.over_link and not emulated:
        text, judgment = NO_LINK, Judgment(None)
    else:
        judgment = claim.rule(rows)
        text = claim.text(rows) if claim.text else judgment.found
    verdict = judgment.holds, dict(row.data), judgment.why, judgment.detectable
    return Finding(*fields, claim.statement, text, *verdict)


def recorded(record: Mapping[str, Any]) -> list[Row]:
    """Return the rows of a JSON file that `thinwire_tools.results.Results` wrote."""
    return [
        Row(
            row["figure"],
            row["name"].removeprefix(f"{row['figure']}/"),
            math.nan if row["value"] is None else row["value"],
            row["unit"],
            {key: value for key, value in row.items() if key not in _OF_EVERY_ROW},
        )
        for row in record["results"]
    ]


_OF_EVERY_ROW = ("name", "value", "unit", "figure", "claim", "found", "holds", "why", "detectable", "judged_before")

# --- rules that papers share


def within(row: str, key: str, margin: float, unit: str = "%") -> Rule:
    """Return the rule that the mean over seeds of the differences under ``key`` is at most ``margin``."""
    return lambda rows: matches(estimated(rows[row], key), margin, unit)


def beyond(row: str, key: str, effect: float | None = None, unit: str = "%") -> Rule:
    """Return the rule that the mean of the differences is above zero; it is ``effect`` in the paper."""
    return lambda rows: exceeds(estimated(rows[row], key), effect, unit)


def faster_than_all(row: str, others: Sequence[str]) -> Rule:
    """Return the rule that the seconds of ``row`` (one a seed) are below the least of all ``others``'s."""

    def rule(rows: Rows) -> Judgment:
        seconds = zip(rows[row]["step_s"], *(rows[other]["step_s"] for other in others), strict=True)
        return faster([min(theirs) / mine for mine, *theirs in seconds])

    return rule


def over(rounds: Mapping[str, Sequence[float]], fast: str, slow: str) -> list[float]:
    """Return how many times faster ``fast`` is than ``slow``, round by round, as a machine may slow down."""
    return [theirs / mine for mine, theirs in zip(rounds[fast], rounds[slow], strict=True)]


def ratios(rows: Rows, fast: str, slow: str, key: str = "step_s") -> list[float]:
    """Return `over` of what two rows have under ``key``."""
    return over({name: rows[name][key] for name in (fast, slow)}, fast, slow)


def times_faster(rows: Rows, fast: str, slow: str, key: str = "step_s") -> float:
    """Return the speed of ``fast`` over that of ``slow`` in the median round."""
    return median(ratios(rows, fast, slow, key))


def known(values: Sequence[float | None]) -> list[float]:
    """Return one value a seed; infinity where a training diverged, which JSON keeps as null."""
    return [math.inf if value is None else value for value in values]


def estimated(row: Mapping[str, Any], key: str) -> Estimate:
    """Return mean and bounds of the differences under ``key``."""
    return estimate(known(row[key]))


def bounded(row: Mapping[str, Any], mean: float | None) -> Estimate:
    """Return a recorded mean and the row's bounds; JSON keeps as null those of one seed, and what diverged."""
    mean, unknown = (math.inf, math.inf) if mean is None else (mean, -math.inf)
    lower, upper = row["lower"], row["upper"]
    return Estimate(mean, math.nan, unknown if lower is None else lower, math.inf if upper is None else upper, 0)
