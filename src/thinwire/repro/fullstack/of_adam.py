"""QuantizedAdam against Adam, bf16 gradients and PowerSGD, in plain data parallelism over 100 Mbit/s."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean

from thinwire.repro import plots
from thinwire.repro.aqsgd.judged import held_out, lost
from thinwire.repro.aqsgd.of_time import seconds_to
from thinwire.repro.aqsgd.trainings import Trained
from thinwire.repro.cgx.contest import Times
from thinwire.repro.cgx.models import Model
from thinwire.repro.findings import Finding, no_worse, share
from thinwire.repro.fullstack.study import Scale, Study
from thinwire.repro.fullstack.ways import ADAM, BF16, POWERSGD, QUANTIZED, WARMING, Way

TRAINED = (ADAM, BF16, POWERSGD, QUANTIZED)
TIMED = (*TRAINED, WARMING)
RATE = "100mbit"
_STEPS = 3
"""Of a turn."""

Runs = Mapping[str, Sequence[Trained]]


def adam_steps(scale: Scale) -> int:
    """Of all trainings, and of all turns."""
    trained = len(TRAINED) * scale.seeds * scale.replicated.steps
    return trained + len(TIMED) * (1 + scale.rounds) * _STEPS


def adam(study: Study) -> list[Finding]:
    """Steps to a loss are those of trainings without a limit, their times those of turns over the slow link."""
    task = study.scale.replicated
    runs = {way.name: study.train(way, task) for way in TRAINED}
    # What turns train is past its warm-up.
    model = Model("gpt", "GPT", "", replace(task, exact_steps=1), task.batch, "sequences/s", 0)
    rate = RATE if study.emulated else None
    times = study.contest().times(
        model, TIMED, rounds=study.scale.rounds, steps=_STEPS, rate=rate, on_turn=study.advance
    )
    timed = {way.name: [at_steps(run, way, times, task.exact_steps) for run in runs[way.name]] for way in TRAINED}
    targets = [max(of[seed].loss for of in timed.values()) for seed in study.seeds]
    _draw(study, timed)
    quality = lost(runs[QUANTIZED.name], runs[ADAM.name], study.scale.margin)
    rows = [
        Finding(
            "adam",
            "loss",
            quality.estimate.mean,
            "",
            f"QuantizedAdam in 4 bits ends within {study.scale.margin:.0%} of Adam's loss",
            quality.text,
            quality.within,
            {"differences": quality.differences},
        )
    ]
    rows += [_sooner(study, timed, other, targets) for other in TRAINED if other is not QUANTIZED]
    return [*rows, _table(study, timed, times, targets, rate)]


def at_steps(run: Trained, way: Way, times: Times, exact_steps: int) -> Trained:
    """The training as long as its steps take over the slow link; QuantizedAdam's first ones are exact."""
    exact = exact_steps if way is QUANTIZED else 0
    step_s = [times.step_s(WARMING.name)] * exact + [times.step_s(way.name)] * (len(run.losses) - exact)
    return replace(run, step_s=tuple(step_s))


def relative_times(ours: Sequence[Trained], others: Sequence[Trained], targets: Sequence[float]) -> list[float]:
    """By how much longer ours take than the others to be at each seed's target, as a share; infinite if never."""
    found = []
    for mine, other, target in zip(ours, others, targets, strict=True):
        seconds = [seconds_to(run, target) if math.isfinite(target) else None for run in (mine, other)]
        found.append(seconds[0] / seconds[1] - 1 if seconds[0] and seconds[1] else math.inf)
    return found


def _sooner(study: Study, timed: Runs, other: Way, targets: Sequence[float]) -> Finding:
    differences = relative_times(timed[QUANTIZED.name], timed[other.name], targets)
    told, sooner = no_worse(differences, 0.0)
    gained = 1 / (1 + told.mean) if math.isfinite(told.mean) else math.nan
    return Finding(
        "adam",
        f"sooner/{other.name}",
        gained,
        "x",
        f"over 100 Mbit/s QuantizedAdam is at the same loss sooner than {other.title}",
        f"{gained:.2f}x sooner at a loss of {fmean(targets):.3f}, the worst end of all: its time is {share(told)}",
        study.verdict(sooner),
        {"differences": differences},
    )


def _table(study: Study, timed: Runs, times: Times, targets: Sequence[float], rate: str | None) -> Finding:
    ways = {}
    for way in TRAINED:
        runs = timed[way.name]
        seconds = [seconds_to(run, target) for run, target in zip(runs, targets, strict=True)]
        known = [value for value in seconds if value is not None]
        reached = fmean(known) if len(known) == len(seconds) else None
        ways[way.name] = {
            "title": way.title,
            "step_s": times.step_s(way.name),
            "loss": fmean(held_out(run) for run in runs),
            "losses": [run.epoch_losses for run in runs],
            "seconds": reached,
            "steps": None if reached is None else fmean(map(_steps_to, runs, known)),
            "payload_bytes": times.payload_bytes.get(way.name),
        }
    ours = ways[QUANTIZED.name]
    return Finding(
        "adam",
        "seconds",
        ours["seconds"] if ours["seconds"] is not None else math.nan,
        "s",
        "",
        ", ".join(f"{of['title']}: {1e3 * of['step_s']:.0f} ms a step" for of in ways.values())
        + f"; QuantizedAdam's {study.scale.replicated.exact_steps} first steps {1e3 * times.step_s(WARMING.name):.0f}",
        None,
        {"ways": ways, "link": rate, "warming_s": times.step_s(WARMING.name), "rounds": times.rounds},
        aside=f"steps of {study.scale.replicated.replicas} replicas",
    )


def _steps_to(run: Trained, seconds: float) -> float:
    """Steps that fit into so many seconds of a training."""
    done, left = 0.0, seconds
    for step_s in run.step_s:
        if left <= step_s:
            return done + left / step_s
        done, left = done + 1, left - step_s
    return done


def _draw(study: Study, timed: Runs) -> None:
    titles = [f"{study.scale.replicated.replicas} replicas over 100 Mbit/s"]
    figure, (axes,) = plots.canvas(1, titles=titles, x="seconds", y="loss")
    for way in TRAINED:
        runs = timed[way.name]
        losses = [fmean(column) for column in zip(*(run.epoch_losses for run in runs), strict=True)]
        if all(map(math.isfinite, losses)):
            axes.plot(runs[0].seconds, losses, color=way.colour, marker=".", label=way.title)
    plots.save(figure, study.picture("adam"))
