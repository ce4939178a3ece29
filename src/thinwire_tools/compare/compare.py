"""The command ``thinwire compare``, which decides whether training ends at the same loss.

Runs are paired: for each seed every variant starts from the same weights, sees the same batches and has the same
learning rates, which end at zero. What differs is the compression of gradients; a control shows that damage would be
seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Self

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from thinwire.runtime import ParityError
from thinwire_tools.compare.comparison import Comparison, Run
from thinwire_tools.compare.data import standard_library
from thinwire_tools.compare.paired import Watcher, compare_training
from thinwire_tools.compare.tasks import SIZES, GPTTask
from thinwire_tools.exits import FAILED, ends_command
from thinwire_tools.ranks import RankFailedError
from thinwire_tools.results import OutputFile, Results


def conduct(
    command: str, task: GPTTask, variants: Sequence[str], *, seeds: int, within: str, json: OutputFile, **options: Any
) -> Comparison:
    """Compare as `compare_training` does, with its ``options``; show the progress and the result."""
    console = Console(highlight=False)
    with ends_command(ValueError, ImportError), ends_command(ParityError, code=FAILED):
        margin = parse_share(within)
        with Bar(console, task.steps) as bar:
            comparison = compare_training(task, variants, seeds=range(seeds), margin=margin, watcher=bar, **options)
        show(console, comparison)
    write_figures(console, command, comparison, comparison_facts(comparison), json)
    return comparison


def show(console: Console, comparison: Comparison) -> None:
    """Print a comparison's table, and how to read it."""
    console.print()
    console.print(comparison.table())
    for line in comparison.remarks():
        console.print(line, soft_wrap=True)


def write_figures(
    console: Console, command: str, comparison: Comparison, about: dict[str, Any], path: OutputFile
) -> None:
    if path:
        results = Results(command, about=about)
        comparison.record(results)
        results.write(path)
        console.print(f"Figures: {path}", soft_wrap=True, markup=False)


def make_task(size: str, steps: int | None, learning_rate: float | None) -> GPTTask:
    task = SIZES[size]
    if steps is not None:
        if steps < 2:
            raise ValueError(f"--steps {steps}: at least 2")
        task = replace(task, steps=steps, probe_every=max(1, steps // 20))
    if learning_rate is not None:
        if not 0 < learning_rate < 1:
            raise ValueError(f"--learning-rate {learning_rate}: between 0 and 1")
        task = replace(task, learning_rate=learning_rate)
    return task


def parse_share(text: str) -> float:
    """Return 0.01 for ``"1%"`` or ``"0.01"``."""
    number = text.strip()
    try:
        return float(number.removesuffix("%")) / (100 if number.endswith("%") else 1)
    except ValueError:
        raise ValueError(f"--within {text!r} is not a share: write 1% or 0.01") from None


def comparison_facts(comparison: Comparison) -> dict[str, Any]:
    """Return what a record of the comparison contains other than its figures."""
    text = standard_library()
    return {
        **comparison.about,
        "text": {"digest": text.digest, "num_files": text.num_files},
        "seeds": list(comparison.seeds),
        "margin": comparison.margin,
        "control": comparison.control.name if comparison.control else None,
        "sensitive": comparison.sensitive,
    }


class Bar(Watcher):
    """Progress over all runs, with the time left; a line for each run where there is no terminal."""

    def __init__(self, console: Console, steps: int) -> None:
        self.steps = steps
        self._progress = Progress(
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("steps"),
            TimeElapsedColumn(),
            TimeRemainingColumn(elapsed_when_finished=True),
            TextColumn("{task.description}"),
            console=console,
            disable=not console.is_terminal,
            speed_estimate_period=120,
        )
        self._task = self._progress.add_task("starting", total=0)
        self.title = ""

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def plan(self, num_runs: int) -> None:
        total = self._progress.tasks[0].total or 0
        self._progress.update(self._task, total=total + num_runs * self.steps)

    def begin(self, title: str) -> None:
        self.title = title
        self._progress.update(self._task, description=escape(title))

    def step(self, step: int, loss: float) -> None:
        self._progress.update(self._task, advance=1, description=f"{escape(self.title)}: loss {loss:.2f}")

    def end(self, run: Run) -> None:
        self.say(f"{self.title}: held-out loss {run.val_loss:.4f}")

    def fail(self, failure: RankFailedError) -> None:
        self.say(f"{self.title}: failed: {failure}", style="bold red")
        self.say(failure.log)

    def say(self, text: str, style: str = "dim") -> None:
        """Print a line above the bar."""
        self._progress.console.print(text, style=style, markup=False, soft_wrap=True)
