"""The smallest difference that each task of the experiments shows, from recorded runs."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from statistics import median
from typing import Any

from experiments.framework import claims
from experiments.framework.claims import Rows
from experiments.framework.verdicts import shown_difference
from thinwire_tools.compare.statistics import CONFIDENCE, POWER, Estimate, estimate, need_scipy, relative_differences

_VALUES = ("by_seed", "perplexities", "losses", "own")
_BASELINES = ("fp32", "fp32_losses", "baseline_perplexities")
_SEEDS = (3, 5)


@dataclass(frozen=True)
class Task:
    """A training whose methods are told apart by ``metric``.

    Args:
        title: the task, for people.
        metric: the value that is compared with the baseline's, seed by seed.
        file: the record of the runs, in benchmarks/.
        rows: what the names of the methods' rows begin with.
        control: pattern of the rest of the name of the row that must be worse; none was recorded where it is empty.
        baseline: the row of the baseline, where the methods' rows do not have its values: its name, or the rest of it.
    """

    title: str
    metric: str
    file: str
    rows: str
    control: str = ""
    baseline: str = ""


@dataclass(frozen=True)
class Power:
    """The power of a task. Differences are shares of the baseline's value; of accuracies, points; positive is worse."""

    task: Task
    num_methods: int
    num_seeds: int
    deviation: float
    """Median over methods of the standard deviation of a paired difference."""
    least: float
    """Smallest difference of a method that is told from none; infinity if none is."""
    control: Estimate | None

    def visible(self, num_seeds: int) -> float:
        """Return the true difference that a one-sided paired t-test sees with a chance of `POWER`."""
        quantile = need_scipy().t.ppf
        both = float(quantile(CONFIDENCE, num_seeds - 1) + quantile(POWER, num_seeds - 1))
        return both * self.deviation / math.sqrt(num_seeds)


TASKS = (
    Task("GPT, fine-tuned in 2 stages", "loss", "aqsgd/curves", "figure 3/", "direct/small/2 stages/fw2 bw4"),
    Task("GPT, from scratch in 2 stages", "loss", "aqsgd/curves", "figure 7/", "direct/*"),
    Task("GPT, 8 stages", "loss", "aqsgd/more", "figure 9 (8 stages)/", "direct/*"),
    Task("labels of text, 2 stages", "loss", "aqsgd/tokens", "figure 3 (a, b)/", "direct/*fw2 bw4"),
    Task("GPT, tensor parallel", "loss", "fullstack/appendices", "appendix F/table/loss/", "direct3", "fp32"),
    Task("split learning on digits", "loss", "fullstack/split", "figure 10/table/loss/", "control", "fp32"),
    Task("GPT under DDP", "held-out loss", "cgx/quality", "3.5/lost/gpt/"),
    Task("CNN under DDP", "accuracy", "cgx/quality", "3.5/lost/cnn/"),
    Task("GPT, layerwise", "held-out loss", "lgreco/quality", "table 4.3/lost/gpt/"),
    Task("CNN, layerwise", "held-out loss", "lgreco/cnn", "table 4.2/lost/cnn/"),
    Task(
        "GPT under FSDP2", "perplexity", "qsdp/again/0", "table 5.2/perplexity/", "W4G4", "table 5.1/lost/small/2 ranks"
    ),
    Task("ConvNet on digits, FFT", "accuracy", "fft/quality", "13/accuracy/", "control"),
    Task("ResNet on digits, IntSGD", "accuracy", "intsgd/resnet", "2/quality/", "heuristic"),
    Task("LSTM, IntSGD", "perplexity", "intsgd/lstm", "3/quality/", "heuristic"),
    Task(
        "GPT under AdamW, 150 steps, every compressor",
        "held-out loss",
        "compressors/compare-every",
        "held_out_loss/",
        "control/*",
        "fp32",
    ),
    Task("GPT, 1000 steps, every way to train", "held-out loss", "optimizer/training", "loss/", "alone", "AdamW, fp32"),
)


def powers(folder: Path) -> list[Power]:
    """Return the power of every task, by the records in ``folder``."""
    records = (json.loads((folder / f"{task.file}.json").read_text()) for task in TASKS)
    return [measured(task, by_name(record["results"])) for task, record in zip(TASKS, records, strict=True)]


def by_name(results: Sequence[Mapping[str, Any]]) -> Rows:
    """Return rows by name. Values of several methods in one, ``{method: [value of each seed]}``, are rows as well:
    ``ROW/KEY/METHOD``."""
    rows = {row["name"]: row for row in results}
    for row in results:
        for key, methods in row.items():
            if isinstance(methods, Mapping):
                own = {m: {"by_seed": values} for m, values in methods.items() if isinstance(values, list)}
                rows |= {f"{row['name']}/{key}/{method}": values for method, values in own.items()}
    return rows


def measured(task: Task, rows: Rows) -> Power:
    """Return the power of a task by the recorded rows of methods that have at least two seeds."""
    controls, methods = [], []
    for name, row in rows.items():
        if not name.startswith(task.rows):
            continue
        relative = differences(task, row, rows)
        # Nothing but zeros is the baseline itself, or a method that sends the same bits.
        if len(relative) >= 2 and any(relative) and all(map(math.isfinite, relative)):
            (controls if fnmatchcase(name.removeprefix(task.rows), task.control) else methods).append(
                estimate(relative)
            )
    every = [*methods, *controls]
    return Power(
        task,
        len(every),
        min(one.num_pairs for one in every),
        median(one.deviation for one in methods or every),
        min((one.mean for one in every if one.lower > 0), default=math.inf),
        controls[0] if controls else None,
    )


def differences(task: Task, row: Mapping[str, Any], rows: Rows) -> list[float]:
    """Return the loss of a method against the baseline, seed by seed; empty where its row has no values of seeds."""
    if isinstance(row.get("lost"), list):
        return claims.known(row["lost"])
    key = next((key for key in _VALUES if isinstance(row.get(key), list)), None)
    if key is None:
        return []
    values, baseline = row[key], _baseline(task, row, rows, key)
    if baseline is None or None in values:
        return []
    if task.metric == "accuracy":
        return [theirs - mine for mine, theirs in zip(values, baseline, strict=True)]
    return relative_differences(values, baseline)


def _baseline(task: Task, row: Mapping[str, Any], rows: Rows, key: str) -> Sequence[float] | None:
    if task.baseline:
        own = task.rows + task.baseline
        other = rows[own if own in rows else task.baseline]
        return next((other[name] for name in (*_BASELINES, key) if isinstance(other.get(name), list)), None)
    if isinstance(row.get("baseline"), dict):
        return row["baseline"].get(key)
    return next((row[name] for name in _BASELINES if isinstance(row.get(name), list)), None)


def cells(one: Power) -> list[str]:
    """Return a row of the table, for people."""
    if one.control is None:
        control = "none recorded"
    else:
        control = shown_difference(one.control) + ("" if one.control.lower > 0 else ": not clearly worse")
    least = "none" if math.isinf(one.least) else _percent(one.least)
    seen = [_percent(one.visible(number)) for number in _SEEDS]
    return [one.task.title, one.task.metric, f"{one.num_methods}, {one.num_seeds}", *seen, least, control]


def _percent(share: float) -> str:
    """Format in two digits, or in whole percents."""
    return f"{100 * share:.0f} %" if share >= 0.1 else f"{100 * share:.2g} %"
