"""The papers that thinwire repeats, and the tables of ``docs/results.md``: how many of their claims hold."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from experiments.framework.claims import cell, results_of, table
from experiments.framework.verdicts import WORDS, outcome


class Entry(NamedTuple):
    """A paper, or a chapter of one, and the command that repeats it."""

    name: str
    """Name in the command ``python -m experiments <name>``."""
    title: str
    minutes: int
    """Minutes, roughly, on two cores of a 2020s server."""
    module: str = "paper"
    """Module of its package that holds its claims, where that is not `paper`."""
    package: str = ""
    """Package of `experiments.papers` that repeats it, where that is not of its name."""

    @property
    def paper(self) -> Any:
        """The claims and parts (`experiments.framework.paper.Paper`)."""
        return import_module(f"experiments.papers.{self.package or self.name}.{self.module}").PAPER

    @property
    def command(self) -> str:
        return f"python -m experiments {self.name}"


CATALOG = (
    Entry(
        "aqsgd",
        "AQ-SGD: Fine-tuning Language Models over Slow Networks (Wang et al., NeurIPS 2022), and its blog post",
        75,
    ),
    Entry(
        "fullstack",
        "AQ-SGD's full stack: QuantizedAdam, split learning, appendices F and G (the same paper)",
        20,
        "stack_paper",
        "aqsgd",
    ),
    Entry(
        "cgx", "CGX: Adaptive System Support for Communication-Efficient Deep Learning (Markov's thesis, chapter 3)", 15
    ),
    Entry(
        "lgreco", "L-GreCo: Layerwise-Adaptive Gradient Compression (Markov's thesis, section 3.6 and chapter 4)", 15
    ),
    Entry("qsdp", "QSDP: Quantized Distributed Training of Large Models (Markov's thesis, chapter 5)", 20),
    Entry("fft", "FFT-based Gradient Sparsification for the Distributed Training of DNNs (Wang et al., HPDC 2020)", 15),
    Entry(
        "intsgd", "IntSGD: Adaptive Floatless Compression of Stochastic Gradients (Mishchenko et al., ICLR 2022)", 20
    ),
)

_WORDS = WORDS | {False: "**does not hold**"}
_NOT_RUN = "not measured yet"
UNNAMED = "recorded before records named their commit"

_WIDE = ("half of the interval", "the interval")
"""Beginnings of recorded reasons: of an interval that was too wide."""


@dataclass(frozen=True)
class RecordedPaper:
    """The record of one paper in a folder of JSON files."""

    entry: Entry
    claims: tuple[Mapping[str, Any], ...]
    """Rows that have a claim, each with its ``machine``, in the order of the paper's claims."""
    failures: tuple[str, ...]
    """Parts that ended in an error, and the error."""
    machines: tuple[str, ...]
    """Machines that rows are of; the first is the whole run's."""
    unnamed: tuple[str, ...]
    """Records that name no commit."""

    def counts(self) -> Counter[str]:
        return Counter(_WORDS[row["holds"]] for row in self.claims)


def read(folder: Path, *, judge: bool = False) -> list[RecordedPaper]:
    """Return the record of each paper. ``judge``: claims are judged again, instead of taken from the files.

    ``<folder>/<name>/all.json`` is the whole run's; later runs of some of its parts, in the same folder, take the
    place of its rows of the same names.

    Raises:
        ValueError: a file is not what ``python -m experiments ... --json`` writes.
    """
    return [_recorded(entry, folder, judge) for entry in CATALOG]


def _recorded(entry: Entry, folder: Path, judge: bool) -> RecordedPaper:
    rows: dict[str, dict[str, Any]] = {}
    failures: list[str] = []
    machines: list[str] = []
    unnamed: list[str] = []
    for path in sorted((folder / entry.name).glob("*.json")):
        record = _record(path)
        unnamed += [] if record.get("commit") or "came_with" in record else [f"{entry.name}/{path.name}"]
        machine = _machine(record)
        machines += [] if machine in machines else [machine]
        results = _judged(entry, record) if judge else record["results"]
        rows |= {row["name"]: {**row, "machine": machine} for row in results}
        failures += [f"{part}: {why}" for part, why in record.get("about", {}).get("failures", {}).items()]
    order = {f"{claim.figure}/{claim.row}": at for at, claim in enumerate(entry.paper.claims)}
    claims = sorted((row for row in rows.values() if row.get("claim")), key=lambda row: order.get(row["name"], -1))
    return RecordedPaper(entry, tuple(claims), tuple(failures), tuple(machines), tuple(unnamed))


def _judged(entry: Entry, record: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of a record with their paper's present claims."""
    before = {row["name"]: row["judged_before"] for row in record["results"] if "judged_before" in row}
    rows = results_of(entry.paper.judge(record), "", {}).results
    return [row | ({"judged_before": before[row["name"]]} if row["name"] in before else {}) for row in rows]


def _record(path: Path) -> dict[str, Any]:
    try:
        record = json.loads(path.read_text())
        for row in record["results"]:
            if row["figure"] is None or (row["claim"] and (row["found"] is None or row["holds"] not in _WORDS)):
                raise ValueError(f"{row['name']} has no verdict")
        _machine(record)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} is not what python -m experiments ... --json writes: {error!r}") from None
    return record


def _machine(record: dict[str, Any]) -> str:
    machine, versions = record["machine"], record["versions"]
    return (
        f"{machine['cores']} shared cores of an {machine['cpu']}, {machine['memory_bytes'] / 2**30:.0f} GiB, "
        f"{machine['system']}, PyTorch {versions['torch']}, Python {versions['python']}"
    )


SUMMARY = ("", "paper", "claims that hold", "that do not", "inconclusive")


def summary(papers: Sequence[RecordedPaper]) -> list[list[str]]:
    """Return a row of `SUMMARY` for each paper."""
    rows = []
    for paper in papers:
        counts = paper.counts()
        numbers = [str(counts[word]) for word in _WORDS.values()] if paper.machines else [_NOT_RUN, "", ""]
        rows.append([paper.entry.name, paper.entry.title, *numbers])
    return rows


def page(papers: Sequence[RecordedPaper]) -> str:
    """Return the page of a run in Markdown: all claims of all papers."""
    parts = [overview(papers), *(part for paper in papers for part in _section(paper)), changes(papers)]
    return "\n\n".join(part for part in parts if part) + "\n"


def overview(papers: Sequence[RecordedPaper], pages: str | None = None) -> str:
    """Return the totals and a row for each paper; ``pages`` is where each has a page of its own."""
    rows = summary(papers)
    for paper, row in zip(papers, rows, strict=True):
        row[0] = f"[{row[0]}]({pages.format(row[0]) if pages else f'#{_anchor(paper.entry)}'})"
    return f"{_totals(papers)}\n\n{table(SUMMARY, rows)}"


def _totals(papers: Sequence[RecordedPaper]) -> str:
    """Return the sums of the table, and why claims are inconclusive."""
    total: Counter[str] = Counter()
    for paper in papers:
        total += paper.counts()
    open_ = [row.get("why", "") for paper in papers for row in paper.claims if row["holds"] is None]
    wide = sum(why.startswith(_WIDE) for why in open_)
    return (
        f"Of {sum(total.values())} claims, {total[_WORDS[True]]} hold here, {total[_WORDS[False]]} do not, and "
        f"{len(open_)} are inconclusive: the interval is too wide for {wide} of them, and the set-up or its "
        f"control cannot decide {len(open_) - wide}. *Inconclusive* says nothing about the paper: two CPU cores are "
        "too small and too noisy for many of its experiments."
    )


def changes(papers: Sequence[RecordedPaper]) -> str:
    """Return the verdicts that are not those of the run, and the records that name no commit."""
    parts = []
    rows = [(paper.entry.name, row, row.get("judged_before", row)) for paper in papers for row in paper.claims]
    changed = [(name, row, before) for name, row, before in rows if before["holds"] is not row["holds"]]
    if changed:
        turned = [
            [name, row["figure"], str(before["claim"]), _WORDS[before["holds"]], _WORDS[row["holds"]]]
            for name, row, before in changed
            if None not in (before["holds"], row["holds"])
        ]
        parts += [
            "## Verdicts that have changed",
            f"{len(changed)} claims were judged otherwise when they were measured, by earlier rules or settings. "
            f"{len(turned)} of them turned from one verdict into the other. The others were inconclusive, or have "
            "become so.",
            *([table(["", "figure", "the paper", "before", "now"], turned)] if turned else []),
        ]
    if unnamed := [name for paper in papers for name in paper.unnamed]:
        parts += ["## Records without a commit", f"{UNNAMED.capitalize()}: {', '.join(unnamed)}."]
    return "\n\n".join(parts)


def _section(paper: RecordedPaper) -> Iterator[str]:
    entry = paper.entry
    yield f"## {_heading(entry)}"
    yield f"{entry.title}."
    yield f"`{entry.command}`: about {entry.minutes} minutes."
    if not paper.machines:
        yield f"{_NOT_RUN.capitalize()}: `{entry.command}`."
        return
    if paper.failures:
        yield "Parts that ended in an error:\n\n" + "\n".join(f"- {cell(failure)}" for failure in paper.failures)
    rows = []
    for row in paper.claims:
        at = paper.machines.index(row["machine"])
        text = outcome(row["found"], row.get("why")) + (f" ({at + 1})" if at else "")
        interval = "" if row.get("detectable") is None else f"{100 * row['detectable']:.2g} %"
        rows.append([row["figure"], row["claim"], text, _WORDS[row["holds"]], interval])
    yield table(["figure", "the paper", "here", "", "interval"], rows)
    yield f"{paper.machines[0]}."
    for i, machine in enumerate(paper.machines[1:], 2):
        yield f"({i}) on {machine}."


def _heading(entry: Entry) -> str:
    return entry.title.split(":")[0].split(" (")[0]


def _anchor(entry: Entry) -> str:
    kept = "".join(c for c in _heading(entry).lower() if c.isalnum() or c in " -")
    return kept.replace(" ", "-")
