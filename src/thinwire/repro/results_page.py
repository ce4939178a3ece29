"""``docs/results.md``: every claim of the papers beside what was found here, from the JSON files of the repetitions."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thinwire.repro.seeds import LEFT_OUT, SEEDS, Seed

_WORDS = {True: "holds", False: "**does not hold**", None: "open"}
_NOT_RUN = "not measured yet"


@dataclass(frozen=True)
class Claim:
    """One row: what a paper says and what was found."""

    seed: Seed
    figure: str
    claim: str
    found: str
    holds: bool | None
    machine: str


@dataclass(frozen=True)
class Found:
    """What a folder of JSON files says of one paper."""

    seed: Seed
    claims: tuple[Claim, ...]
    failures: tuple[str, ...]
    """Parts that ended in an error, and the error."""
    machines: tuple[str, ...]
    """Each one that rows are of; the first is the whole run's."""

    def counts(self) -> Counter[str]:
        return Counter(_WORDS[claim.holds] for claim in self.claims)


def read(folder: Path) -> list[Found]:
    """What is known of each paper.

    ``<folder>/repro-<name>.json`` is of the whole run; later runs of some of its parts, ``repro-<name>-*.json``, take
    the place of what it found of the same figures.

    Raises:
        ValueError: a file is not what ``thinwire repro ... --json`` writes.
    """
    return [_found(seed, folder) for seed in SEEDS]


def _found(seed: Seed, folder: Path) -> Found:
    claims: list[Claim] = []
    failures: list[str] = []
    machines: list[str] = []
    for path in (folder / f"repro-{seed.name}.json", *sorted(folder.glob(f"repro-{seed.name}-*.json"))):
        if not path.exists():
            continue
        record = _record(path)
        machine = _machine(record)
        machines += [] if machine in machines else [machine]
        fresh = [
            Claim(seed, str(row["figure"]), str(row["claim"]), str(row["found"]), row["holds"], machine)
            for row in record["results"]
            if row.get("claim")
        ]
        again = {str(row["figure"]) for row in record["results"]}
        claims = [claim for claim in claims if claim.figure not in again] + fresh
        failures += [f"{part}: {why}" for part, why in record.get("about", {}).get("failures", {}).items()]
    return Found(seed, tuple(claims), tuple(failures), tuple(machines))


def _record(path: Path) -> dict[str, Any]:
    try:
        record = json.loads(path.read_text())
        for row in record["results"]:
            if row["figure"] is None or (row["claim"] and (row["found"] is None or row["holds"] not in _WORDS)):
                raise ValueError(f"{row['name']} has no verdict")
        _machine(record)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} is not what thinwire repro ... --json writes: {error!r}") from None
    return record


def _machine(record: dict[str, Any]) -> str:
    machine, versions = record["machine"], record["versions"]
    return (
        f"{machine['cores']} shared cores of an {machine['cpu']}, {machine['memory_bytes'] / 2**30:.0f} GiB, "
        f"{machine['system']}, PyTorch {versions['torch']}, Python {versions['python']}"
    )


def summary(found: Sequence[Found]) -> list[list[str]]:
    """A row for each paper: its command, and how many of its claims hold, do not, are open."""
    rows = []
    for paper in found:
        counts = paper.counts()
        numbers = [str(counts[word]) for word in _WORDS.values()] if paper.machines else [_NOT_RUN, "", ""]
        rows.append([paper.seed.name, paper.seed.title, *numbers])
    return rows


def page(found: Sequence[Found], *, pages: str | None = "repro-{}.md") -> str:
    """The page in Markdown, from its first table on. ``pages`` is where each paper has one of its own."""
    return "\n\n".join(_sections(found, pages)) + "\n"


def _sections(found: Sequence[Found], pages: str | None) -> Iterator[str]:
    names = {paper.seed.name: f"[{paper.seed.name}](#{_anchor(paper.seed)})" for paper in found}
    head = ["", "paper", "claims that hold", "that do not", "open"]
    yield _table(head, [[names[row[0]], *row[1:]] for row in summary(found)])
    total: Counter[str] = Counter()
    for paper in found:
        total += paper.counts()
    number = sum(total.values())
    yield (
        f"Of {number} claims {total[_WORDS[True]]} hold here, {total[_WORDS[False]]} do not, and {total[_WORDS[None]]} "
        "are open: too few seeds, too much noise, or a link that this machine cannot be given. A claim is judged by a "
        "rule that was fixed before the run; each paper's page states it."
    )
    for paper in found:
        yield from _section(paper, pages)
    yield "## What is left out, and why"
    yield "\n".join(f"- **{what}**: {why}." for what, why in LEFT_OUT)


def _section(paper: Found, pages: str | None) -> Iterator[str]:
    seed = paper.seed
    yield f"## {_heading(seed)}"
    yield f"{seed.title}."
    more = f" [Its page]({pages.format(seed.name)}) has tables, pictures and what differs." if pages else ""
    yield f"`{seed.command}`: about {seed.minutes} minutes.{more} Times: {seed.protocol}."
    if not paper.machines:
        yield f"{_NOT_RUN.capitalize()}: `{seed.command}`."
        return
    if paper.failures:
        yield "Parts that ended in an error:\n\n" + "\n".join(f"- {_cell(failure)}" for failure in paper.failures)
    rows = []
    for claim in paper.claims:
        mark = "" if claim.machine == paper.machines[0] else f" ({_note(paper, claim)})"
        rows.append([claim.figure, claim.claim, claim.found + mark, _WORDS[claim.holds]])
    yield _table(["figure", "the paper", "here", ""], rows)
    yield f"{paper.machines[0]}."
    for i, machine in enumerate(paper.machines[1:], 2):
        yield f"({i}) on {machine}."


def _note(paper: Found, claim: Claim) -> str:
    return str(paper.machines.index(claim.machine) + 1)


def _heading(seed: Seed) -> str:
    return seed.title.split(":")[0].split(" (")[0]


def _anchor(seed: Seed) -> str:
    kept = "".join(c for c in _heading(seed).lower() if c.isalnum() or c in " -")
    return kept.replace(" ", "-")


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(_cell(cell) for cell in line) + " |" for line in lines)
