"""The command ``python -m experiments all``: every repetition in turn, and one page of all claims."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from rich.markdown import Markdown

from experiments.framework.claims import table
from experiments.framework.results_page import CATALOG, SUMMARY, UNNAMED, Entry, RecordedPaper, page, read, summary
from thinwire_tools.exits import ends_command
from thinwire_tools.results import OutputFile, Results

_SMOKE_MINUTES = 0.5
_TIMES_LONGER = 6.0
"""Ratio of a repetition's time to the predicted one, plus ten minutes, at which it is ended."""


def repro_all(
    *,
    only: tuple[str, ...] = (),
    smoke: bool = False,
    from_: Annotated[Path | None, tyro.conf.arg(name="from", metavar="DIR")] = None,
    out: Path = Path("repro"),
    json: OutputFile = None,
) -> int:
    """Repeat every table and figure of the papers at a scale of two cores, and write one page of all claims.

    Runs `python -m experiments aqsgd`, `fullstack`, `cgx`, `lgreco`, `qsdp`, `fft` and `intsgd` one after the other,
    each with its pictures and figures in a folder of OUT, and then writes OUT/results.md: a row for each claim of a
    paper, with what the paper says, what was found, and whether that holds. A paper that fails costs its own rows only.
    Takes about two and a half hours on two cores, with --smoke a few minutes.

    Examples:
      python -m experiments all
      python -m experiments all --only fft cgx --out found
      python -m experiments all --from benchmarks --out found     # judge figures that are there
      python -m experiments all --smoke

    Args:
        only: which of them; all, if none is named.
        smoke: the small version of each: the same path, no figures worth keeping.
        from_: run nothing: judge the records in this folder's folders, one a paper, and write the page.
        out: folder for the page, the pictures and the figures.
        json: write how many claims of each paper hold, do not or are inconclusive to this file.
    """
    console = Console(highlight=False)
    wanted = [name for part in only for name in part.replace(",", " ").split()]
    unknown = sorted(set(wanted) - {entry.name for entry in CATALOG})
    with ends_command():
        if unknown:
            raise ValueError(f"--only {' '.join(unknown)}: there are {', '.join(entry.name for entry in CATALOG)}")
        if from_ is not None and not from_.is_dir():
            raise ValueError(f"--from {from_}: no such folder")
    out.mkdir(parents=True, exist_ok=True)
    chosen = [entry for entry in CATALOG if not wanted or entry.name in wanted]
    codes = {} if from_ is not None else _run_all(console, chosen, out, smoke=smoke)
    with ends_command():
        papers = read(from_ or out, judge=from_ is not None)
    path = out / "results.md"
    path.write_text(f"# Results of the reproductions\n\n{page(papers)}")
    console.print(Markdown(table(SUMMARY, summary(papers))))
    if unnamed := [name for paper in papers for name in paper.unnamed]:
        console.print(f"{UNNAMED.capitalize()}: {', '.join(unnamed)}.", markup=False)
    console.print(f"Page: {path}", soft_wrap=True, markup=False)
    if json is not None:
        _record(papers, codes, smoke=smoke).write(json)
    failed = [name for name, code in codes.items() if code]
    if failed:
        console.print(f"Failed: {', '.join(failed)}.", style="bold red", markup=False)
    return 1 if failed else 0


def _run_all(console: Console, chosen: list[Entry], out: Path, *, smoke: bool) -> dict[str, int]:
    """Return the exit code of each repetition, by name."""
    left = sum(_SMOKE_MINUTES if smoke else entry.minutes for entry in chosen)
    console.print(f"{len(chosen)} repetitions, about {left:.0f} minutes on two quiet cores.")
    codes = {}
    for i, entry in enumerate(chosen, 1):
        console.rule(f"{i} of {len(chosen)}: {entry.command}")
        started, minutes = time.monotonic(), _SMOKE_MINUTES if smoke else entry.minutes
        codes[entry.name] = _run(entry, out, smoke=smoke, minutes=minutes)
        took, left = (time.monotonic() - started) / 60, left - minutes
        word = "done" if codes[entry.name] == 0 else f"failed, with exit code {codes[entry.name]},"
        console.print(f"{entry.command}: {word} in {took:.1f} minutes; about {left:.0f} minutes to go.", markup=False)
    return codes


def _run(entry: Entry, out: Path, *, smoke: bool, minutes: float) -> int:
    # Each repetition is a process of its own: the end of one does not end the others.
    path = out / entry.name / "all.json"
    path.unlink(missing_ok=True)
    argv = [sys.executable, "-m", "experiments", entry.name, "--out", str(path.parent), *(["--smoke"] if smoke else [])]
    process = subprocess.Popen(argv)
    try:
        return process.wait(timeout=60 * (_TIMES_LONGER * minutes + 10))
    except subprocess.TimeoutExpired:
        return 124
    finally:
        # Ctrl-C reaches it, too, and it puts networks away first.
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()


def _record(papers: list[RecordedPaper], codes: dict[str, int], *, smoke: bool) -> Results:
    results = Results("python -m experiments all", about={"smoke": smoke, "exit_codes": codes})
    for paper in papers:
        counts = paper.counts()
        for word, count in counts.items():
            results.add(f"claims/{paper.entry.name}/{word.strip('*')}", count, "")
    return results
