"""What every part of the IntSGD paper's experiments is made from: how much of them, the folder, the progress."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from thinwire.repro.intsgd.convex import Source
from thinwire.repro.progress import Screen


@dataclass
class Study:
    """One run of the command."""

    out: Path
    screen: Screen
    sources: Sequence[Source]
    smoke: bool
    _part: str = ""
    _done: int = field(default=0)

    def picture(self, figure: str) -> Path:
        return self.out / f"fig{figure}.svg"

    @contextmanager
    def part(self, part: str) -> Iterator[None]:
        """While the body runs, progress is that part's."""
        self._part, self._done = part, 0
        with self.screen.phase(part):
            yield

    def job_done(self, title: str) -> None:
        """One more of part (a)'s runs is over."""
        self._done += 1
        self.screen.advance(self._part, self._done, title)
