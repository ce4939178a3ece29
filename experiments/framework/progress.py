"""Progress of a comparison in a terminal: a bar for each phase and one for all; plain lines where there is none."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.progress_bar import ProgressBar
from rich.text import Text


class _Bar(BarColumn):
    """A bar that stays still until its phase begins; rich's own moves, as if the phase ran."""

    def render(self, task: Task) -> ProgressBar:
        return ProgressBar(total=task.total, completed=task.completed, width=self.bar_width)


class _Remaining(ProgressColumn):
    """Time left of a phase that runs, by its own speed; before that, and for the whole, as predicted."""

    def render(self, task: Task) -> Text:
        if task.finished:
            return Text("")
        left = task.fields["left_s"]
        if task.started and task.time_remaining is not None and not task.fields["whole"]:
            left = task.time_remaining
        return Text(f"~{int(left) // 60}:{int(left) % 60:02d}", style="cyan" if task.started else "dim")


class Screen:
    """Bars for ``phases {name: (title, steps, predicted seconds)}``; a context manager."""

    def __init__(self, console: Console, phases: dict[str, tuple[str, int, float]]) -> None:
        self.console = console
        self._phases = phases
        self._progress = Progress(
            TextColumn("{task.description}"),
            _Bar(bar_width=14),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            _Remaining(),
            TextColumn("{task.fields[note]}"),
            console=console,
            disable=not console.is_terminal,
        )
        self._tasks: dict[str, TaskID] = {}
        self._done_s = 0.0

    def __enter__(self) -> Self:
        for name, (title, steps, seconds) in self._phases.items():
            self._tasks[name] = self._progress.add_task(
                title, total=steps, start=False, note="", left_s=seconds, whole=False
            )
        total_s = sum(seconds for _, _, seconds in self._phases.values())
        self._whole = self._progress.add_task(
            "[bold]all", total=round(total_s), note="seconds (predicted)", left_s=total_s, whole=True
        )
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._progress.stop()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Run the clock of ``name`` while the body runs."""
        self._progress.start_task(self._tasks[name])
        self._progress.update(self._tasks[name], note="starting")
        try:
            yield
        finally:
            self._progress.stop_task(self._tasks[name])
            self._done_s += self._phases[name][2]
            self._show_whole(0.0)

    def advance(self, name: str, step: int, now: float | str) -> None:
        """Add ``step`` done steps to ``name``; ``now`` is the last one's loss, or the present activity."""
        _, steps, seconds = self._phases[name]
        note = escape(now) if isinstance(now, str) else f"loss {now:.2f}"
        self._progress.update(self._tasks[name], completed=step, note=note)
        self._show_whole(seconds * step / steps)

    def note(self, name: str, text: str) -> None:
        """Show the result of a finished phase."""
        self._tell(name, text, "green")

    def fail(self, name: str, why: str) -> None:
        """Show that ``name`` failed."""
        self._tell(name, f"failed: {why}", "bold red")

    def _show_whole(self, running_s: float) -> None:
        done_s = self._done_s + running_s
        total_s = self._progress.tasks[self._whole].total or 0.0
        self._progress.update(self._whole, completed=round(done_s), left_s=max(0.0, total_s - done_s))

    def _tell(self, name: str, text: str, style: str) -> None:
        self._progress.update(self._tasks[name], note=f"[{style}]{text}[/]")
        if not self.console.is_terminal:
            self.console.print(f"{self._phases[name][0]}: {text}", style=style, markup=False)
