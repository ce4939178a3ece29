"""Claims as data: a paper's statement, the measurements that speak to it, and the rule by which they are judged.

A part of a paper measures rows; its claims judge them. A claim sees nothing but the rows of its figure, as the JSON
file keeps them, so that a recorded run can be judged again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from experiments.framework.findings import Finding, plain
from experiments.framework.verdicts import Judgment, exceeds, faster, matches
from thinwire_tools.compare.statistics import Estimate, estimate

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
    """A paper's ``statement``, and the ``rule`` by which rows are judged; None for rows that are only shown with
    claims. ``row``: the measured value that it is about; where that follows from other rows, ``value`` makes it of
    them, in ``unit``. ``text``: the rows in words, where the interval that the rule looked at does not say it.
    ``over_link``: it rests on times over a slow link. ``unjudged``: why a statement has no rule, such as that the
    set-up implies it."""

    figure: str
    row: str
    statement: str
    rule: Rule | None = None
    over_link: bool = False
    value: Callable[[Rows], float] | None = None
    unit: str = ""
    text: Callable[[Rows], str] | None = None
    unjudged: str = ""


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
    judged = claim.rule is not None
    if claim.over_link and not emulated:
        text, judgment = NO_LINK, Judgment(None)
    else:
        judgment = claim.rule(rows) if claim.rule else Judgment(None, claim.unjudged)
        text = claim.text(rows) if claim.text else judgment.found
    if not judged:
        return Finding(*fields, "", text, None, dict(row.data), aside=claim.statement, why=claim.unjudged)
    verdict = judgment.holds, dict(row.data), "", judgment.why, judgment.detectable
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


def ratios(rows: Rows, fast: str, slow: str, key: str = "step_s") -> list[float]:
    """Return how many times faster ``fast`` is than ``slow``, round by round, as a machine may slow down."""
    return [theirs / mine for mine, theirs in zip(rows[fast][key], rows[slow][key], strict=True)]


def times_faster(rows: Rows, fast: str, slow: str, key: str = "step_s") -> float:
    """Return the speed of ``fast`` over that of ``slow`` in the median round."""
    return median(ratios(rows, fast, slow, key))


def differences(row: Mapping[str, Any], key: str) -> list[float]:
    """Return one difference a seed; infinity where a training diverged, which JSON keeps as null."""
    return [math.inf if value is None else value for value in row[key]]


def estimated(row: Mapping[str, Any], key: str) -> Estimate:
    """Return mean and bounds of `differences`."""
    return estimate(differences(row, key))
