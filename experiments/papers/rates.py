"""The learning rate of a baseline, bracketed: a rate is tuned where half and twice of it are no better."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from experiments.framework.claims import Rows
from experiments.framework.methods import Method
from experiments.framework.study import Study
from experiments.tasks.images import ImageTask
from thinwire_tools.compare.statistics import estimate


def by_rate(
    study: Study[Any], task: ImageTask, method: Method, num_ranks: int
) -> tuple[str, float, str, dict[str, Any]]:
    """Return a row's name, the rate of ``task``, and the held-out accuracy of each seed at it, half and twice of it."""
    found = {}
    for factor in (1.0, 0.5, 2.0):
        at = replace(task, learning_rate=factor * task.learning_rate)
        trained = [study.train_task(at, method, seed, num_ranks=num_ranks) for seed in study.seeds]
        found[f"{at.learning_rate:g}"] = [run.final_accuracy for run in trained]
    return "learning_rate", task.learning_rate, "", {"accuracy": found}


def untuned(rows: Rows) -> str | None:
    """Say why nothing can be compared with the baseline, if it ends better at half or twice its rate."""
    tried = rows.get("learning_rate")
    if tried is None:
        return None
    own = tried["accuracy"][f"{tried['value']:g}"]
    for rate, accuracy in tried["accuracy"].items():
        if estimate([other - mine for other, mine in zip(accuracy, own, strict=True)]).lower > 0:
            return f"the baseline is better at a rate of {rate}: its own is not tuned"
    return None
