"""A repetition of a paper in parts: their progress, and what the failure of one costs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from rich.console import Console

from thinwire import lab
from thinwire.repro.crew import RankFailed
from thinwire.repro.findings import Finding, record, table
from thinwire.repro.progress import Screen
from thinwire.wire import ParityError


class Parted(ABC):
    """What all parts of one run are made from; a context manager. Their progress is on ``screen``."""

    screen: Screen
    _part = ""
    _done = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @abstractmethod
    def close(self) -> None:
        """End all ranks; a later part starts new ones."""

    @contextmanager
    def part(self, part: str) -> Iterator[None]:
        """While the body runs, progress is that part's."""
        self._part, self._done = part, 0
        with self.screen.phase(part):
            yield

    def advance(self, steps: int, now: str) -> None:
        """So many more steps of this part are done."""
        self._done += steps
        self.screen.advance(self._part, self._done, now)


def chosen_parts(asked: Sequence[str], known: Mapping[str, object]) -> list[str]:
    """The names in ``--parts``, which may hold several each, with commas or spaces.

    Raises:
        ValueError: one of them is not ``known``, or there is none.
    """
    chosen = list(dict.fromkeys(name for part in asked for name in part.replace(",", " ").split()))
    if not chosen or set(chosen) - set(known):
        raise ValueError(f"--parts {' '.join(asked)!r}: choose among {' '.join(known)}")
    return chosen


def check_counts(seeds: int, rounds: int | None) -> None:
    """Raise ``ValueError`` unless there is at least one seed, and one round where a number of them was asked for."""
    if seeds < 1:
        raise ValueError(f"--seeds {seeds}: at least 1")
    if rounds is not None and rounds < 1:
        raise ValueError(f"--rounds {rounds}: at least 1")


def announce(console: Console, seconds: float) -> bool:
    """Say what cannot be judged here, and about how long it takes; whether slow links can be made."""
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
    """Show what was found, write it to ``path``, and say where the pictures are; the command's exit code."""
    console.print(table(findings, title))
    record(findings, command, about | ({"failures": dict(failures)} if failures else {}), prefix="").write(path)
    console.print(f"Pictures: {out}  Figures: {path}", soft_wrap=True, markup=False)
    return 1 if failures else 0


StudyT = TypeVar("StudyT", bound=Parted)


def make_parts(
    console: Console, study: StudyT, parts: Mapping[str, Callable[[StudyT], list[Finding]]]
) -> tuple[list[Finding], dict[str, str]]:
    """What was found, and which parts failed and why. A failure costs its part, not the others."""
    found: list[Finding] = []
    failures: dict[str, str] = {}
    with study.screen as screen, study:
        for part, make in parts.items():
            try:
                with study.part(part):
                    rows = make(study)
            except (RankFailed, ParityError) as failure:
                # After a rank's failure the others are of no more use: what is left starts with new ones.
                study.close()
                failures[part] = str(failure)
                screen.fail(part, str(failure))
                if isinstance(failure, RankFailed):
                    console.print(failure.log, style="dim", markup=False)
                continue
            found += rows
            judged = [row.holds for row in rows if row.claim and row.holds is not None]
            screen.note(part, f"{sum(judged)} of {len(judged)} claims hold" if judged else "none judged")
    return found, failures
