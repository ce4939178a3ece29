"""``python -m experiments bench instrument``: what the instrument that times replayed steps can be trusted with."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from typing import Any

from rich.console import Console

from experiments.framework.methods import FP32, NOTHING, THINWIRE
from experiments.framework.pages import show
from experiments.framework.timing import SeparateRuns, Times
from experiments.papers.cgx.measurements import powersgd
from experiments.tasks.images import TIMED, TIMED_SMOKE
from thinwire_tools import lab
from thinwire_tools.compare.statistics import estimate
from thinwire_tools.exits import ends_command
from thinwire_tools.results import OutputFile, Results

_AGAIN = replace(THINWIRE, name="again", title="thinwire, entered again")
_FOUR_RANKS = 4


def instrument(
    *,
    rates: str = "300mbit",
    runs: int = 5,
    rounds: int = 3,
    steps: int = 2,
    smoke: bool = False,
    json: OutputFile = None,
) -> int:
    """Time the same steps computed and replayed, with a core for each rank and with fewer, and one method twice.

    *Replayed*: seconds of replayed steps over those of computed ones, with as many ranks as cores. *Slowed*: replayed
    on half of the cores, where time runs half as fast, over replayed on all. *Itself*: a method over the same method
    under another name. The last two should be 1; the first is less where ranks that compute at once slow each other
    down. Intervals are over separate runs (two-sided, 90 %).

    Examples:
      python -m experiments bench instrument
      python -m experiments bench instrument --rates 100mbit,1gbit --runs 8

    Args:
        rates: of each rank's link, separated by commas.
        runs: separate runs of each.
        rounds: turns of each method in a run.
        steps: of a turn.
        smoke: small models, one round: the same path, no figures worth keeping.
        json: write the figures to this file.
    """
    num_cores = len(os.sched_getaffinity(0))
    with ends_command():
        links = rates.split(",")
        if min(runs - 1, rounds, steps) < 1:
            raise ValueError(f"--runs {runs} --rounds {rounds} --steps {steps}: at least 2, 1 and 1")
        if num_cores < 2:
            raise ValueError("this needs two cores: ranks that compute must not share one")
        for rate in links:
            lab.Network(2, rate=rate).close()
    about: dict[str, Any] = {"runs": runs, "rounds": rounds, "steps": steps, "cores": num_cores, "smoke": smoke}
    results = Results("python -m experiments bench instrument", about=about)
    with Console().status("timing ...") as status:

        def on_turn(_: int, title: str) -> None:
            status.update(f"{model.title}: {title}")

        for model in TIMED_SMOKE[:1] if smoke else TIMED:
            methods = (FP32, THINWIRE, _AGAIN, powersgd(model), NOTHING)
            turns: dict[str, Any] = {"rounds": rounds, "steps": steps, "rates": links, "on_turn": on_turn}
            replayed = SeparateRuns("links", True, num_cores, runs)
            computed = replace(replayed, computes=None)
            slowed = replace(replayed, num_cores=num_cores // 2)
            more = replace(replayed, num_ranks=max(_FOUR_RANKS, num_cores))
            found = [each.times(model, methods, **turns) for each in (replayed, computed, slowed, more)]
            for rate, own, real, half, many in zip(links, *found, strict=True):
                pairs = {("replayed", m.title): _ratios(own, real, m.name, m.name) for m in methods if m != _AGAIN}
                pairs |= {("slowed", m.title): _ratios(half, own, m.name, m.name) for m in methods if m != _AGAIN}
                itself = {f"itself, {num_cores} ranks": own, f"itself, {more.num_ranks} ranks": many}
                for kind, times in itself.items():
                    pairs[kind, THINWIRE.title] = _ratios(times, times, _AGAIN.name, THINWIRE.name)
                for (kind, title), ratios in pairs.items():
                    seen = estimate([math.log(ratio) for ratio in ratios])
                    low, ratio, high = (math.exp(value) for value in (seen.lower, seen.mean, seen.upper))
                    interval = {"lower": low, "upper": high, "by_run": ratios}
                    results.add(f"{kind}/{model.name}/{rate}/{title}", ratio, "x", **interval)
            assert replayed.computes is not None
            results.add(f"computed_s/{model.name}", replayed.computes[model].step_s, "s")
    show("instrument", results, json)
    return 0


def _ratios(above: Times, below: Times, name: str, other: str) -> list[float]:
    """Run by run, seconds of ``name`` over those of ``other``."""
    return [a / b for a, b in zip(above.rounds[name], below.rounds[other], strict=True)]
