"""The demo while it runs: a table of all variants, updated every turn; plain lines where there is no terminal."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text


@dataclass
class _Row:
    title: str
    step: int = 0
    step_s: float | None = None
    loss: float | None = None
    note: str = ""


class Scoreboard:
    """Progress of ``titles {variant: title}`` over ``num_steps`` steps each; a context manager."""

    def __init__(self, console: Console, titles: Mapping[str, str], num_steps: int, predicted_s: float) -> None:
        self.console, self._num_steps, self._predicted_s = console, num_steps, predicted_s
        self._rows = {name: _Row(title) for name, title in titles.items()}
        self._running: str | None = None
        self._live = Live(self, console=console, refresh_per_second=4, transient=True)

    def __enter__(self) -> Self:
        self._started = time.monotonic()
        if self.console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def begin(self, name: str) -> None:
        """``name``'s turn begins."""
        self._running = name

    def advance(self, name: str, step: int) -> None:
        """``name`` has trained ``step`` steps."""
        self._rows[name].step = step

    def record(self, name: str, step_s: float, loss: float) -> None:
        """``name``'s turn is over: seconds of its median step, and its held-out loss."""
        row = self._rows[name]
        first = row.step_s is None
        row.step_s, row.loss = step_s, loss
        if not self.console.is_terminal and (first or row.step == self._num_steps):
            text = f"{row.title}: {row.step} steps, {1e3 * step_s:.0f} ms a step, held-out loss {loss:.3f}"
            self.console.print(text, markup=False)

    def fail(self, name: str, why: str) -> None:
        """``name`` did not finish."""
        self._rows[name].note = f"failed: {why}"
        if not self.console.is_terminal:
            self.console.print(f"{self._rows[name].title}: failed: {why}", style="bold red", markup=False)

    @property
    def done_share(self) -> float:
        """Steps made, as a share of all."""
        steps = [self._num_steps if row.note else row.step for row in self._rows.values()]
        return sum(steps) / (self._num_steps * len(steps))

    def __rich__(self) -> Group:
        table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 2, 0, 0))
        for heading in ("gradients", "steps", "ms a step", "held-out loss", ""):
            table.add_column(heading, justify="left" if heading in ("gradients", "") else "right", no_wrap=True)
        for name, row in self._rows.items():
            style = "red" if row.note else "bold" if name == self._running else ""
            speed = "" if row.step_s is None else f"{1e3 * row.step_s:.0f}"
            loss = "" if row.loss is None else f"{row.loss:.3f}"
            table.add_row(row.title, f"{row.step}/{self._num_steps}", speed, loss, row.note, style=style)
        return Group(table, Text(self._time_left(), style="cyan"))

    def _time_left(self) -> str:
        elapsed_s, share = time.monotonic() - self._started, self.done_share
        left_s = elapsed_s * (1 / share - 1) if share > 0.05 else max(0.0, self._predicted_s - elapsed_s)
        return f"about {int(left_s) // 60}:{int(left_s) % 60:02d} left"
