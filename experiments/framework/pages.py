"""Figures of README.md and docs/. ``python -m experiments.framework.pages`` writes them; ``--check`` only compares.

What stands between the marks ``<!-- figures: name -->`` and ``<!-- end -->`` of a page is the Jinja template
``name.j2`` of a folder of ``benchmarks/``, filled with the JSON file of that name, or with those that it reads.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

import jinja2
from rich.console import Console
from rich.markdown import Markdown

from experiments.framework import power, results_page
from experiments.framework.claims import estimated
from experiments.framework.results_page import CATALOG
from experiments.framework.verdicts import RUN_SCATTER, WORDS, outcome, shown_difference
from thinwire_tools.compare.statistics import estimate, relative_differences
from thinwire_tools.lab.units import format_rate, parse_rate
from thinwire_tools.results import Results

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
HOLDS = WORDS | {True: "yes", False: "no"}
_MARKED = re.compile(r"(<!-- figures: (\S+) -->\n).*?(?=\n<!-- end -->)", re.DOTALL)

Row = Mapping[str, Any]


class Record:
    """The rows of the JSON files of one command, by name: a later file's take the place of those of the same names."""

    def __init__(self, *records: Mapping[str, Any]) -> None:
        self.about, self.command = records[0].get("about", {}), records[0]["command"]
        self.rows: dict[str, Row] = {row["name"]: row for record in records for row in record["results"]}
        self.of = {row["name"]: record for record in records for row in record["results"]}

    def __getitem__(self, name: str) -> float | None:
        """The value of a row; None if there is no such row."""
        return self.rows[name]["value"] if name in self.rows else None

    def under(self, prefix: str) -> list[Row]:
        """The rows whose names begin so."""
        return [row for name, row in self.rows.items() if name.startswith(prefix)]

    def names(self, prefix: str) -> list[str]:
        """The rest of these names."""
        return [row["name"].removeprefix(prefix) for row in self.under(prefix)]

    def ranked(self, prefix: str, names: Iterable[str], *, reverse: bool = False) -> list[str]:
        """``names`` by the values of the rows under ``prefix``; a name without such a row counts as zero."""
        return sorted(names, key=lambda name: self[prefix + name] or 0.0, reverse=reverse)

    @property
    def machine(self) -> str:
        return self.machine_of(self.rows)

    def machine_of(self, names: Iterable[str]) -> str:
        """The machine and the commit by which these rows were measured; where they differ, each of the values."""
        records = [self.of[name] for name in names]
        commits = dict.fromkeys(map(_commit, records))

        def values(form: Callable[[Any, Any], str]) -> str:
            return " or ".join(dict.fromkeys(form(record["machine"], record["versions"]) for record in records))

        return (
            f"{values(lambda machine, _: str(machine['cores']))} shared cores of "
            f"{values(lambda machine, _: 'an ' + machine['cpu'])}, "
            f"{values(lambda machine, _: format(machine['memory_bytes'] / 2**30, '.0f'))} GiB, "
            f"{values(lambda machine, _: machine['system'])}, PyTorch {values(lambda _, versions: versions['torch'])}, "
            f"Python {values(lambda _, versions: versions['python'])}, {' or '.join(commits)}"
        )


def _commit(record: Mapping[str, Any]) -> str:
    """The commit that measured a record; of one that came before records named it, that by which it came, if known."""
    if record.get("commit"):
        return f"commit {record['commit'][:12]}{record['commit'][40:]}"
    return f"by code of commit {record['came_with'][:12]}" if "came_with" in record else results_page.UNNAMED


def read(pattern: str) -> Record:
    """The files in benchmarks/ that match, without their suffix."""
    return Record(*(json.loads(path.read_text()) for path in sorted(BENCHMARKS.glob(f"{pattern}.json"))))


def section(name: str, run: Record | None = None) -> str:
    """Render a section, with links from the root of the repository. By default ``run`` is the recorded one."""
    template = _TEMPLATES.get_template(f"{name}.j2")
    recorded = Path(str(template.filename)).with_suffix(".json")
    if run is None and recorded.exists():
        run = Record(json.loads(recorded.read_text()))
    return template.render(name=name, run=run).strip("\n")


def show(name: str, results: Results, json: Path | None) -> None:
    """Write ``results`` to ``json``, and print what a page would say of them."""
    if json is not None:
        results.write(json)
    Console().print(Markdown(section(name, Record(results.to_dict()))))


def filled(page: Path) -> str:
    """The text of a page with every marked section rendered again."""

    def fill(marked: re.Match[str]) -> str:
        text = section(marked[2])
        if page.parent != ROOT:
            text = text.replace("](docs/", "](").replace("](benchmarks/", "](../benchmarks/")
        return marked[1] + text

    return _MARKED.sub(fill, page.read_text())


def sections() -> list[tuple[str, str]]:
    """Pages and names of all that is marked."""
    marked = [(page.relative_to(ROOT).as_posix(), _MARKED.findall(page.read_text())) for page in PAGES]
    return [(page, name) for page, found in marked for _, name in found]


# --- what templates call


def _number(value: float | None, form: str, scale: float = 1) -> str:
    return "" if value is None else format(value * scale, form)


def _mean(values: list[float | None]) -> float | None:
    """Average seeds, of which None is one that diverged."""
    return None if None in values else fmean(value for value in values if value is not None)


def _bounded(row: Row | None, form: str = "+.2f") -> str:
    """A relative difference in per cent, and its bounds where it has some."""
    if row is None:
        return ""
    value, *bounds = (format(100 * row[key], form) for key in ("value", "lower", "upper") if key in row)
    return f"{value} % ({' to '.join(bounds)})" if bounds else f"{value} %"


def _against(row: Row, control: Row, key: str) -> str:
    """The relative difference of what two rows have under ``key``, seed by seed, and its interval."""
    found = estimate(relative_differences(row[key], control[key]))
    return _bounded({"value": found.mean, "lower": found.lower, "upper": found.upper})


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _head(*titles: str, numbers: bool = True) -> str:
    """The first two lines of a table."""
    return f"{_line(titles)}\n{_line(['---'] + ['---:' if numbers else '---'] * (len(titles) - 1))}"


def _claim(row: Row, figures: Mapping[str, str]) -> str:
    """Render a claim of a paper and its outcome; ``figures`` renames some that were recorded."""
    cells = [figures.get(row["figure"], row["figure"]), row["claim"], outcome(row["found"], row.get("why"))]
    cells += [HOLDS[row["holds"]], f"{100 * row['detectable']:.2g} %" if row.get("detectable") else ""]
    return _line(cell.replace("|", "\\|") for cell in cells)  # a bar would end the cell


def _picture(path: str, caption: str) -> str:
    """A picture below benchmarks/ and its caption, which end a paragraph."""
    return f"![{caption}](benchmarks/{path}.svg)\n\n*{caption}.*\n"


_TEMPLATES = jinja2.Environment(
    loader=jinja2.FileSystemLoader(sorted(path for path in BENCHMARKS.iterdir() if path.is_dir())),
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_TEMPLATES.filters |= {"f": _number, "mean": _mean, "bounded": _bounded, "line": _line}
_TEMPLATES.filters["rate"] = lambda text: format_rate(parse_rate(text))
_TEMPLATES.globals |= {"read": read, "against": _against, "head": _head, "claim": _claim, "picture": _picture}
_TEMPLATES.globals |= {
    "beyond": lambda row, key: shown_difference(estimated(row, key)),
    "paper": lambda name: next(entry.paper for entry in CATALOG if entry.name == name),
    "recorded": lambda: results_page.read(BENCHMARKS),
    "overview": results_page.overview,
    "changes": results_page.changes,
    "scatter": RUN_SCATTER,
    "power": lambda: [power.cells(one) for one in power.powers(BENCHMARKS)],
}


def main() -> int:
    texts = {page: filled(page) for page in PAGES}
    if "--check" in sys.argv[1:]:
        return any(text != page.read_text() for page, text in texts.items())
    for page, text in texts.items():
        page.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
