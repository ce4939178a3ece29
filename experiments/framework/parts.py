"""Parts of a paper: their choice, the cost of a failure, and the results at the end."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from experiments.framework.findings import Finding, record, table
from experiments.framework.study import Study
from thinwire.runtime import ParityError
from thinwire_tools import lab
from thinwire_tools.ranks import RankFailed


def chosen_parts(asked: Sequence[str], known: Mapping[str, object]) -> list[str]:
    """Return the names in ``--parts``, which may have several each, with commas or spaces.

    Raises:
        ValueError: one of them is not ``known``, or there is none.
    """
    chosen = list(dict.fromkeys(name for part in asked for name in part.replace(",", " ").split()))
    if not chosen or set(chosen) - set(known):
        raise ValueError(f"--parts {' '.join(asked)!r}: choose among {' '.join(known)}")
    return chosen


def announce(console: Console, seconds: float) -> bool:
    """Print what cannot be judged here, and about how long it takes; return whether slow links can be made."""
    missing = lab.unavailable()
    if missing:
        console.print(f"No slow network can be made here, so times over links are not judged: {missing}", markup=False)
    minutes = seconds / 60
    console.print(f"This takes about {minutes:.0f} minutes." if minutes >= 1.5 else "This takes about a minute.")
    return missing is None


def finish(
    console: Console,
    findings: Sequence[Finding],
    failures: Mapping[str, str],
    about: dict[str, Any],
    *,
    command: str,
    title: str,
    out: Path,
    path: Path,
) -> int:
    """Show the findings, write them to ``path``, and print where the pictures are; return the command's exit code."""
    console.print(table(findings, title))
    record(findings, command, about | ({"failures": dict(failures)} if failures else {}), prefix="").write(path)
    console.print(f"Pictures: {out}  Figures: {path}", soft_wrap=True, markup=False)
    return 1 if failures else 0


def write_again(
    console: Console, findings: Sequence[Finding], before: Mapping[str, Any], judged: str, path: Path, title: str
) -> None:
    """Write the present judgment of a recorded run; its machine, versions and measured rows stay.

    A row whose verdict is another one than when it was measured keeps the first one under ``judged_before``.
    """
    console.print(table(findings, title))
    rows = record(findings, "", {}, prefix="").results
    old = {row["name"]: row for row in before["results"]}
    for row in rows:
        # A new claim makes its value of rows that were measured.
        then = old.get(row["name"], {})
        first = then.get("judged_before") or {key: then.get(key) for key in ("claim", "holds")}
        if first["claim"] and (not row["claim"] or row["holds"] is not first["holds"]):
            row["judged_before"] = first
    again = {**before, "about": {**before["about"], "judged": judged}, "results": rows}
    path.write_text(json.dumps(again, indent=1) + "\n")
    console.print(f"Figures: {path}", soft_wrap=True, markup=False)


def make_parts(
    console: Console, study: Study[Any], parts: Mapping[str, Callable[[Study[Any]], list[Finding]]]
) -> tuple[list[Finding], dict[str, str]]:
    """Return the findings, and reasons of failed parts. A failure costs its part, not the others."""
    findings: list[Finding] = []
    failures: dict[str, str] = {}
    with study.screen as screen, study:
        for part, make in parts.items():
            try:
                with study.part(part):
                    rows = make(study)
            except (RankFailed, ParityError) as failure:
                # After a rank's failure the others are useless: later parts start new ones.
                study.close()
                failures[part] = str(failure)
                screen.fail(part, str(failure))
                if isinstance(failure, RankFailed):
                    console.print(failure.log, style="dim", markup=False)
                continue
            findings += rows
            judged = [row.holds for row in rows if row.claim and row.holds is not None]
            screen.note(part, f"{sum(judged)} of {len(judged)} claims hold" if judged else "none judged")
    return findings, failures
