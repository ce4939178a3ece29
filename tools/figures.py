"""What pages made of figures have in common: the JSON files of `make bench`, tables, claims, pictures."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from experiments.framework.verdicts import WORDS, outcome

ROOT = Path(__file__).resolve().parent.parent
BENCHMARKS = ROOT / "benchmarks"
HOLDS = WORDS | {True: "yes", False: "no"}


class Figures:
    """The results of one command, by name."""

    def __init__(self, path: Path) -> None:
        self.record: dict[str, Any] = json.loads(path.read_text())
        self.rows = {row["name"]: row for row in self.record["results"]}

    def get(self, name: str) -> float | None:
        return self.rows[name]["value"] if name in self.rows else None

    def bounded(self, name: str) -> str:
        """A relative difference in per cent, and its bounds where it has some; empty if there is no such row."""
        row = self.rows.get(name)
        if row is None:
            return ""
        bounds = f" ({100 * row['lower']:+.2f} to {100 * row['upper']:+.2f})" if "lower" in row else ""
        return f"{100 * row['value']:+.2f} %{bounds}"

    @property
    def machine(self) -> str:
        return machines([self])


def machines(runs: list[Figures]) -> str:
    """Where ``runs`` were measured; where they differ, each of the values."""

    def values(of: Callable[[dict[str, Any], dict[str, Any]], str]) -> str:
        return " or ".join(dict.fromkeys(of(run.record["machine"], run.record["versions"]) for run in runs))

    return (
        f"{values(lambda machine, _: str(machine['cores']))} shared cores of "
        f"{values(lambda machine, _: 'an ' + machine['cpu'])}, "
        f"{values(lambda machine, _: format(machine['memory_bytes'] / 2**30, '.0f'))} GiB, "
        f"{values(lambda machine, _: machine['system'])}, "
        f"PyTorch {values(lambda _, versions: versions['torch'])}, "
        f"Python {values(lambda _, versions: versions['python'])}"
    )


def table(head: list[str], rows: list[list[str]], *, numbers: bool = True) -> str:
    rule = ["---"] + ["---:" if numbers else "---"] * (len(head) - 1)
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, rule, *rows])


def claims(results: list[dict[str, Any]], whose: str, figures: Mapping[str, str]) -> str:
    """What a paper claims and what was found, row by row; ``figures`` renames some that were recorded."""
    shown = [
        [
            figures.get(row["figure"], row["figure"]),
            row["claim"],
            outcome(row["found"], row.get("why")),
            HOLDS[row["holds"]],
            f"{100 * row['detectable']:.2g} %" if row.get("detectable") else "",
        ]
        for row in results
        if row.get("claim")
    ]
    # A bar in a cell would end it.
    rows = [[cell.replace("|", "\\|") for cell in row] for row in shown]
    return table(["figure or table", whose, "here", "holds", "interval (±)"], rows, numbers=False)


def bullets(texts: Iterable[str]) -> str:
    return "".join(f"- {text}\n" for text in texts)


def pictures(folder: Path) -> list[Path]:
    """The SVGs of a folder, by the numbers in their names."""

    def numbers(path: Path) -> list[int]:
        return [int(number) for number in re.findall(r"\d+", path.stem)]

    return sorted(folder.glob("*.svg"), key=lambda path: (numbers(path), path.stem))


def picture(path: Path, caption: str) -> str:
    """A picture below benchmarks/ and its caption, for a page in docs/."""
    return f"![{caption}](../benchmarks/{path.parent.name}/{path.name})\n\n*{caption}.*"
