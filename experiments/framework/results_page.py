"""The papers that thinwire repeats, and the page ``docs/results.md``: how many of their claims hold, by which rules."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from experiments.framework.claims import cell, results_of, table
from experiments.framework.verdicts import RUN_SCATTER, WORDS, outcome


class Entry(NamedTuple):
    """A paper, or a chapter of one, and the command that repeats it."""

    name: str
    """Name in the command ``python -m experiments <name>``."""
    title: str
    minutes: int
    """Minutes, roughly, on two cores of a 2020s server."""
    protocol: str
    """The paper's way of taking times, where it says so, and its scaled form here."""

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
        "the paper gives throughputs and the times of a micro-batch's parts; here medians over rounds in which all "
        "methods take turns",
    ),
    Entry(
        "fullstack",
        "AQ-SGD's full stack: QuantizedAdam, split learning, appendices F and G (the same paper)",
        20,
        "as for AQ-SGD",
        "stack_paper",
        "aqsgd",
    ),
    Entry(
        "cgx",
        "CGX: Adaptive System Support for Communication-Efficient Deep Learning (Markov's thesis, chapter 3)",
        15,
        "means of 300 steps after 10 to warm up (section 3.7.1); here medians over rounds in which methods take turns, "
        "two steps a turn, after steps to warm up",
    ),
    Entry(
        "lgreco",
        "L-GreCo: Layerwise-Adaptive Gradient Compression (Markov's thesis, section 3.6 and chapter 4)",
        15,
        "as for CGX",
    ),
    Entry(
        "qsdp",
        "QSDP: Quantized Distributed Training of Large Models (Markov's thesis, chapter 5)",
        20,
        "means of 50 steps after 10 to warm up (section 5.7); here medians over rounds in which all methods take turns",
    ),
    Entry(
        "fft",
        "FFT-based Gradient Sparsification for the Distributed Training of DNNs (Wang et al., HPDC 2020)",
        15,
        "wall time of whole trainings; here wall time of whole, smaller trainings",
    ),
    Entry(
        "intsgd",
        "IntSGD: Adaptive Floatless Compression of Stochastic Gradients (Mishchenko et al., ICLR 2022)",
        20,
        "the paper breaks the time of a step down into parts; here medians over rounds in which all methods take turns",
    ),
)

LEFT_OUT = (
    (
        "AdaComp (thesis, section 3.7.3)",
        'the thesis adapted it and found that it "did not converge to reasonable accuracy": there is no figure to hold '
        "against",
    ),
    (
        "Bagua and HiPress (thesis, figure 3.6)",
        "other frameworks, on GPUs; HiPress did not run on the thesis's own GPUs either",
    ),
    ("TensorFlow and Horovod (thesis, figure A.1)", "thinwire is a library for PyTorch"),
    (
        "Comparisons of GPUs and servers (thesis, tables 3.1 and 3.2, figures 3.5, B.4 and B.5)",
        "they are facts of machines that are not this one",
    ),
    ("Prices (thesis, table 3.10)", "a cost per token needs the price of an hour, which only who pays it knows"),
    (
        "FFT paper, figures 1 to 4, 7 to 9 and 11",
        "they show schemes, histograms of a training's gradients, number formats and the latency of NCCL's all-gather; "
        "what they argue for is measured in figures 5, 10 and 16",
    ),
    (
        "Data sets and models of the papers",
        "pictures are scikit-learn's digits (CIFAR-10 where a folder of it is given), text is the source of Python's "
        "standard library, models have up to a few million parameters: what two CPU cores train in minutes. Each page "
        "says in what its experiments differ",
    ),
)
"""Experiments that no row stands for, and reasons."""


_WORDS = WORDS | {False: "**does not hold**"}
_NOT_RUN = "not measured yet"
UNNAMED = "recorded before records named their commit"

_RULES = f"""\
Each claim is judged *holds*, *does not hold* or *inconclusive*, by one-sided 95 % t-bounds over seeds.

- **Equality** ("ends at the same loss") is asked of the paired difference. It does not hold if the lower bound is
  beyond the margin. If half of the interval is wider than the margin, the claim is inconclusive, whatever its center.
  Otherwise it holds if the upper bound is within the margin. It is inconclusive, too, if a method is better by more
  than the margin (the baseline is not tuned), or if the control, a setting that must be worse, is not clearly worse.
- **Superiority** ("ends at a lower loss") does not hold if the upper bound is at most half of the paper's effect, or
  zero if the paper gives none. Otherwise it holds if the lower bound is above zero.
- **Speed** under DDP is judged by ratios of times over separate runs of [replayed steps](#how-steps-are-timed).
  Elsewhere it is judged over the rounds of one run, in which all methods take turns; those intervals contain the
  scatter of such ratios between runs, a standard deviation of {100 * RUN_SCATTER:.1f} %. A claim is inconclusive if the
  interval contains its bound, such as 1 for "is faster". Time to a loss is the steps to it, from seeds trained without
  a clock, by the time of a step; its interval contains the scatter of both.
- A single training or measurement has no interval, and is inconclusive.

What was found is the difference or the ratio that is judged, with its bounds: of an equality, a positive difference is
what is lost; otherwise a positive difference, or a ratio above the bound, is what the claim says.

*Interval* in the tables is half the width of the interval of what is judged: smaller differences cannot be seen."""
_ONCE = ("one training", "one measurement")
_WIDE = ("a ratio within", "a difference below", "the interval")
"""Beginnings of recorded reasons: of a single run, and of an interval that was too wide."""


@dataclass(frozen=True)
class RecordedClaim:
    """One row: a paper's statement and the finding."""

    entry: Entry
    figure: str
    claim: str
    text: str
    holds: bool | None
    why: str
    detectable: float | None
    machine: str

    @property
    def shown_detectable(self) -> str:
        """Size of differences that are too small to be seen, for people."""
        return "" if self.detectable is None else f"{100 * self.detectable:.2g} %"


@dataclass(frozen=True)
class Changed:
    """A claim whose verdict is another one than when it was measured."""

    figure: str
    claim: str
    before: bool | None
    now: bool | None


@dataclass(frozen=True)
class RecordedPaper:
    """The record of one paper in a folder of JSON files."""

    entry: Entry
    claims: tuple[RecordedClaim, ...]
    changed: tuple[Changed, ...]
    failures: tuple[str, ...]
    """Parts that ended in an error, and the error."""
    machines: tuple[str, ...]
    """Machines that rows are of; the first is the whole run's."""
    unnamed: tuple[str, ...]
    """Records that name no commit."""

    def counts(self) -> Counter[str]:
        return Counter(_WORDS[claim.holds] for claim in self.claims)


def read(folder: Path, *, judge: bool = False) -> list[RecordedPaper]:
    """Return the record of each paper. ``judge``: claims are judged again, instead of taken from the files.

    ``<folder>/<name>/all.json`` is the whole run's; later runs of some of its parts, in the same folder, take the
    place of its rows of the same names.

    Raises:
        ValueError: a file is not what ``python -m experiments ... --json`` writes.
    """
    return [_recorded(entry, folder, judge) for entry in CATALOG]


def _recorded(entry: Entry, folder: Path, judge: bool) -> RecordedPaper:
    rows: dict[str, tuple[dict[str, Any], str]] = {}
    failures: list[str] = []
    machines: list[str] = []
    unnamed: list[str] = []
    for path in sorted((folder / entry.name).glob("*.json")):
        record = _record(path)
        unnamed += [] if record.get("commit") or "came_with" in record else [f"{entry.name}/{path.name}"]
        machine = _machine(record)
        machines += [] if machine in machines else [machine]
        results = _judged(entry, record) if judge else record["results"]
        rows |= {row["name"]: (row, machine) for row in results}
        failures += [f"{part}: {why}" for part, why in record.get("about", {}).get("failures", {}).items()]
    judged = [(row, machine) for row, machine in rows.values() if row.get("claim")]
    claims = tuple(_claim(entry, row, machine) for row, machine in judged)
    changed = tuple(_changed(row) for row, _ in judged if "judged_before" in row)
    return RecordedPaper(entry, claims, changed, tuple(failures), tuple(machines), tuple(unnamed))


def _judged(entry: Entry, record: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of a record with their paper's present claims."""
    before = {row["name"]: row["judged_before"] for row in record["results"] if "judged_before" in row}
    rows = results_of(entry.paper.judge(record), "", {}).results
    return [row | ({"judged_before": before[row["name"]]} if row["name"] in before else {}) for row in rows]


def _claim(entry: Entry, row: dict[str, Any], machine: str) -> RecordedClaim:
    figure, claim, text = (str(row[key]) for key in ("figure", "claim", "found"))
    return RecordedClaim(entry, figure, claim, text, row["holds"], row.get("why", ""), row.get("detectable"), machine)


def _changed(row: dict[str, Any]) -> Changed:
    before = row["judged_before"]
    return Changed(str(row["figure"]), str(before["claim"]), before["holds"], row["holds"])


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


def page(papers: Sequence[RecordedPaper], *, pages: str | None = "repro-{}.md") -> str:
    """Return the page in Markdown, from its first table on. ``pages`` is where each paper has one of its own."""
    return "\n\n".join(_sections(papers, pages)) + "\n"


def _sections(papers: Sequence[RecordedPaper], pages: str | None) -> Iterator[str]:
    def link(entry: Entry) -> str:
        return f"[{entry.name}]({pages.format(entry.name) if pages else f'#{_anchor(entry)}'})"

    links = {paper.entry.name: link(paper.entry) for paper in papers}
    yield _totals(papers)
    yield table(SUMMARY, [[links[row[0]], *row[1:]] for row in summary(papers)])
    yield "## How a claim is judged"
    yield _RULES
    if pages is None:
        for paper in papers:
            yield from _section(paper)
    yield from _changes(papers)
    if unnamed := [name for paper in papers for name in paper.unnamed]:
        yield "## Records without a commit"
        yield f"{UNNAMED.capitalize()}: {', '.join(unnamed)}."
    yield "## What is left out"
    yield "\n".join(f"- **{what}**: {why}." for what, why in LEFT_OUT)


def _totals(papers: Sequence[RecordedPaper]) -> str:
    """Return the sums of the table, and why claims are inconclusive."""
    total: Counter[str] = Counter()
    for paper in papers:
        total += paper.counts()
    open_ = [claim.why for paper in papers for claim in paper.claims if claim.holds is None]
    once, wide = (sum(why.startswith(begins) for why in open_) for begins in (_ONCE, _WIDE))
    return (
        f"Of {sum(total.values())} claims, {total[_WORDS[True]]} hold here, {total[_WORDS[False]]} do not, and "
        f"{len(open_)} are inconclusive: the interval is too wide for {wide} of them, {once} were trained or timed "
        f"once, and the set-up or its control cannot decide {len(open_) - wide - once}. *Inconclusive* says nothing "
        "about the paper: two CPU cores are too small and too noisy for many of its experiments."
    )


def _changes(papers: Sequence[RecordedPaper]) -> Iterator[str]:
    """Yield the verdicts that are not those of the run."""
    changed = [(paper.entry.name, row) for paper in papers for row in paper.changed if row.before is not row.now]
    turned = [(name, row) for name, row in changed if None not in (row.before, row.now)]
    if not changed:
        return
    yield "## Verdicts that have changed"
    yield (
        f"{len(changed)} claims were judged otherwise when they were measured, by earlier rules or settings. "
        f"{len(turned)} of them turned from one verdict into the other. The others were inconclusive, or have become "
        "so."
    )
    if turned:
        rows = [[name, row.figure, row.claim, _WORDS[row.before], _WORDS[row.now]] for name, row in turned]
        yield table(["", "figure", "the paper", "before", "now"], rows)


def _section(paper: RecordedPaper) -> Iterator[str]:
    entry = paper.entry
    yield f"## {_heading(entry)}"
    yield f"{entry.title}."
    yield f"`{entry.command}`: about {entry.minutes} minutes. Times: {entry.protocol}."
    if not paper.machines:
        yield f"{_NOT_RUN.capitalize()}: `{entry.command}`."
        return
    if paper.failures:
        yield "Parts that ended in an error:\n\n" + "\n".join(f"- {cell(failure)}" for failure in paper.failures)
    rows = []
    for claim in paper.claims:
        mark = "" if claim.machine == paper.machines[0] else f" ({_note(paper, claim)})"
        text = outcome(claim.text, claim.why) + mark
        rows.append([claim.figure, claim.claim, text, _WORDS[claim.holds], claim.shown_detectable])
    yield table(["figure", "the paper", "here", "", "interval"], rows)
    yield f"{paper.machines[0]}."
    for i, machine in enumerate(paper.machines[1:], 2):
        yield f"({i}) on {machine}."


def _note(paper: RecordedPaper, claim: RecordedClaim) -> str:
    return str(paper.machines.index(claim.machine) + 1)


def _heading(entry: Entry) -> str:
    return entry.title.split(":")[0].split(" (")[0]


def _anchor(entry: Entry) -> str:
    kept = "".join(c for c in _heading(entry).lower() if c.isalnum() or c in " -")
    return kept.replace(" ", "-")
