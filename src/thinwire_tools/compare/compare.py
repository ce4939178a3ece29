"""``thinwire compare``: does training end at the same loss? The one place that decides it.

Runs are paired: for each seed every variant starts from the same weights, sees the same batches and has the same
learning rates, which end at zero. What differs is the compression of gradients; a control shows that damage would be
seen.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, Self

import tyro
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from thinwire.runtime import ParityError
from thinwire_tools.compare.comparison import Comparison
from thinwire_tools.compare.data import standard_library
from thinwire_tools.compare.paired import CONTROL, Tune, compare_training
from thinwire_tools.compare.report import Run
from thinwire_tools.compare.tasks import SIZES, GPTTask
from thinwire_tools.exits import FAILED, ends_command
from thinwire_tools.results import OutputFile, Results


def compare(
    variants: tyro.conf.Positional[tuple[str, ...]] = ("minmax(bits=4, bucket=128)",),
    *,
    seeds: int = 3,
    within: str = "1%",
    control: str | None = CONTROL,
    size: Literal["small", "demo"] = "small",
    steps: int | None = None,
    ranks: int = 2,
    rate: str | None = None,
    learning_rate: float | None = None,
    tune: bool = False,
    tune_each: bool = False,
    measure: int = 0,
    smoke: bool = False,
    strict: bool = False,
    json: OutputFile = None,
) -> int:
    """Compare the loss that training ends at with compressed gradients to that with uncompressed (fp32) ones.

    Paired runs of a byte-level GPT over several seeds, a confidence interval of the difference, and a control that must
    fail, so that "within 1 %" means something: exits with 1 if the control does not.

    Examples:
      thinwire compare "minmax(bits=4, bucket=128)" "ef(minmax(bits=2))"
      thinwire compare "minmax(bits=4)" --seeds 5 --within 0.5% --rate 100mbit --json out.json
      thinwire compare "onebit(bucket=512)" --tune-each
      thinwire compare "topk(density=0.01)" "topk(density=0.01) with lgreco(every=25)"
      thinwire compare --smoke

    Args:
        variants: specs of compressors; "SPEC with POLICY" has a policy (lgreco, kmeans, accordion ...) choose each
            layer's own while training goes on; "alone" has ranks send nothing.
        seeds: number of seeds, each one paired run of every variant; a verdict takes at least 2.
        within: how much higher a loss may be and still be the same: 1% or 0.01.
        control: a spec that must fail; None for none, which leaves open whether this training shows damage at all.
        size: of the GPT: small (0.8 M parameters) or demo (4.8 M, that of `thinwire demo`).
        steps: training steps of each run.
        ranks: number of ranks.
        rate: of each rank's link (100mbit, 1gbit ...), emulated; without it loopback, where time means nothing.
        learning_rate: the highest one, for all variants, instead of the size's own.
        tune: sweep the learning rate of uncompressed training first, on a seed of its own; its best holds for all.
        tune_each: as --tune, and a second table with the learning rate of every variant tuned.
        measure: every so many steps, also measure how far the mean that arrives is from the exact one (alpha).
        smoke: a tiny model and few steps, under a minute: the same path, no figures worth keeping.
        strict: exit with 1 unless every variant is within the margin.
        json: write the figures to this file.
    """
    console = Console(highlight=False)
    tuning: Tune = "each" if tune_each else "baseline" if tune else "no"
    with ends_command(ValueError, ImportError), ends_command(ParityError, code=FAILED):
        if script := next((text for text in variants if text.endswith(".py")), None):
            before = "".join(f'"{text}" ' for text in variants[: variants.index(script)])
            raise ValueError(f"a script comes after two dashes: thinwire compare {before}-- {script}")
        task = _task("smoke" if smoke else size, steps, learning_rate)
        with Bar(console, task.steps) as bar:
            comparison = compare_training(
                task,
                variants,
                seeds=range(seeds),
                margin=share_of(within),
                control=control,
                num_ranks=ranks,
                rate=rate,
                tune=tuning,
                measure=measure,
                watcher=bar,
            )
        _show(console, comparison)
    write_figures(console, "thinwire compare", comparison, facts_of(comparison), json)
    return 0 if comparison.sensitive and (comparison.all_within or not strict) else 1


def _task(size: str, steps: int | None, learning_rate: float | None) -> GPTTask:
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


def write_figures(
    console: Console, command: str, comparison: Comparison, about: dict[str, object], path: OutputFile
) -> None:
    """Write a comparison's figures to ``path``, if there is one."""
    if path:
        results = Results(command, about=about)
        comparison.record(results)
        results.write(path)
        console.print(f"Figures: {path}", soft_wrap=True, markup=False)


def share_of(text: str) -> float:
    """0.01 of ``"1%"`` or ``"0.01"``."""
    number = text.strip()
    try:
        return float(number.removesuffix("%")) / (100 if number.endswith("%") else 1)
    except ValueError:
        raise ValueError(f"--within {text!r} is not a share: write 1% or 0.01") from None


def _show(console: Console, comparison: Comparison) -> None:
    tables = [(comparison, "Learning rate of fp32 for all")]
    if comparison.each_tuned:
        tables.append((comparison.each_tuned, "Learning rate of each variant tuned"))
    for comparison, title in tables:
        rates = {f"{side.learning_rate:g}" for side in comparison.sides()}
        console.print()
        console.print(comparison.table(f"{title}: {', '.join(sorted(rates, key=float))}"))
        for line in comparison.remarks():
            console.print(line, soft_wrap=True)


def facts_of(comparison: Comparison) -> dict[str, object]:
    """What a record of the comparison holds besides its figures."""
    text = standard_library()
    return {
        **comparison.about,
        "text": {"digest": text.digest, "num_files": text.num_files},
        "seeds": list(comparison.seeds),
        "margin": comparison.margin,
        "control": comparison.control.name if comparison.control else None,
        "sensitive": comparison.sensitive,
    }


class Bar:
    """Progress over all runs, with the time left; a line for each run where there is no terminal."""

    def __init__(self, console: Console, steps: int) -> None:
        self._console, self._steps = console, steps
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
        self._title, self._before = "", 0

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def plan(self, num_runs: int) -> None:
        total = self._progress.tasks[0].total or 0
        self._progress.update(self._task, total=total + num_runs * self._steps)

    def begin(self, title: str) -> None:
        self._title = title
        self._progress.update(self._task, description=escape(title))

    def step(self, step: int, loss: float) -> None:
        description = f"{escape(self._title)}: loss {loss:.2f}"
        self._progress.update(self._task, completed=self._before + step, description=description)

    def end(self, run: Run) -> None:
        self._before += self._steps
        self._progress.console.print(f"{self._title}: held-out loss {run.val_loss:.4f}", style="dim", markup=False)
