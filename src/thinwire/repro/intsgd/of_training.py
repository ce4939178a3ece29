"""Part (b): tables 2 and 3 and figures 1 to 4, quality and times of every way of sending gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import Any

import numpy as np

from thinwire.repro import plots
from thinwire.repro.cgx.judging import above
from thinwire.repro.fft.of_theorems import curves
from thinwire.repro.fft.runs import Trained
from thinwire.repro.findings import Finding, no_worse, worse
from thinwire.repro.intsgd.study import TASKS, Study
from thinwire.repro.intsgd.timing import Times, over
from thinwire.repro.intsgd.ways import (
    DETERM,
    HEURISTIC,
    HEURISTIC_32,
    NATSGD,
    POWERSGD,
    QSGD,
    RANDOM,
    RANDOM_32,
    SGD,
    SGD_GATHERED,
    TABLE,
    TRAINED,
    WAYS,
    Task,
    Way,
)
from thinwire.repro.statistics import Estimate

TABLES: dict[Task, str] = {"pictures": "2", "words": "3"}
CURVES: dict[Task, str] = {"pictures": "3", "words": "4"}
_NETWORKS: dict[Task, str] = {"pictures": "ResNet", "words": "LSTM"}
_LEAST_MARGIN: dict[Task, float] = {"pictures": 0.005, "words": 0.01}
"""In shares of the images, and in nats."""
_INT8_SHARE = 0.27

Runs = dict[Task, dict[str, list[Trained]]]
AllTimes = dict[Task, dict[str, Times]]


@dataclass(frozen=True)
class _Claim:
    """What the paper says of a way's quality; ``matches`` SGD's or not; ``paper`` are its figures."""

    way: Way
    matches: bool
    paper: str


_QUALITY: dict[Task, tuple[_Claim, ...]] = {
    "pictures": (
        _Claim(RANDOM, True, "94.55 against 94.67 %, table 2"),
        _Claim(RANDOM_32, True, "figure 1"),
        _Claim(DETERM, True, "94.43 against 94.67 %, table 2"),
        _Claim(HEURISTIC, False, "figure 1, section 5.2"),
        _Claim(HEURISTIC_32, False, "figure 1, section 5.2"),
        _Claim(QSGD, False, "93.69 against 94.67 %, table 2"),
        _Claim(NATSGD, True, "94.57 against 94.67 %, table 2"),
        _Claim(POWERSGD, False, "94.33 against 94.67 %, table 2"),
    ),
    "words": (
        _Claim(RANDOM, True, "4.54 against 4.54, table 3"),
        _Claim(RANDOM_32, True, "figure 1"),
        _Claim(DETERM, False, "4.70 against 4.54, table 3"),
        _Claim(HEURISTIC, False, "figure 1, section 5.2"),
        _Claim(HEURISTIC_32, False, "figure 1, section 5.2"),
        _Claim(QSGD, False, "4.63 against 4.54, table 3"),
        _Claim(NATSGD, True, "4.52 against 4.54, table 3"),
        _Claim(POWERSGD, True, "4.52 against 4.54, table 3"),
    ),
}


def part_b(study: Study) -> list[Finding]:
    """Train with every way from the same seeds, time all of them in turns, and draw."""
    found: Runs = {task: {way.name: [] for way in TRAINED} for task in TASKS}
    for task in TASKS:
        for seed in study.seeds:
            # Seed by seed, so that what slows the machine for a while slows all of them.
            for way in TRAINED:
                run = study.train(task, way.spec_for(task), seed, way.title, way.topology)
                found[task][way.name].append(run)
    times: AllTimes = study.times()
    _draw(study, found, times)
    rows = []
    for task in TASKS:
        rows += quality(task, found[task])
        rows += speed(task, times[task], timed=study.rate is not None)
    return rows


# --- quality


def measure(task: Task, run: Trained) -> float:
    """What is compared: accuracy of images, mean loss of words."""
    return run.final_accuracy if task == "pictures" else run.final_loss


def lost(task: Task, baseline: Sequence[Trained], runs: Sequence[Trained]) -> list[float]:
    """By how much each seed's run is worse than its pair: in accuracy, or in nats."""
    sign = 1.0 if task == "pictures" else -1.0
    return [sign * (measure(task, b) - measure(task, r)) for b, r in zip(baseline, runs, strict=True)]


def spread(task: Task, runs: Sequence[Trained]) -> float:
    """Between the best and the worst seed, or the least that is asked about."""
    values = [measure(task, run) for run in runs]
    return max(_LEAST_MARGIN[task], max(values) - min(values))


def quality(task: Task, runs: Mapping[str, Sequence[Trained]]) -> list[Finding]:
    """A row for every claim about a way's quality, and SGD's own."""
    base = runs[SGD.name]
    margin, network = spread(task, base), _NETWORKS[task]
    rows = []
    for claim in _QUALITY[task]:
        own = runs[claim.way.name]
        differences = lost(task, base, own)
        # To match is not to be worse by more than seeds differ; to fall short is to be worse, pair by pair.
        estimate, holds = no_worse(differences, margin) if claim.matches else worse(differences, 0.0)
        verb = "ends at" if claim.matches else "falls short of"
        rows.append(
            Finding(
                TABLES[task],
                f"quality/{claim.way.name}",
                fmean(measure(task, run) for run in own),
                "" if task == "pictures" else "nats",
                f"{network}: {claim.way.title} {verb} SGD's quality ({claim.paper})",
                f"{_shown(task, own)}, lost: {_lost_text(task, estimate)}, SGD's seeds spread {_amount(task, margin)}",
                holds,
                {"spec": claim.way.spec_for(task), "margin": margin, "lost": differences, **curves(own)},
            )
        )
    rows.append(
        Finding(
            TABLES[task],
            f"quality/{SGD.name}",
            fmean(measure(task, run) for run in base),
            "" if task == "pictures" else "nats",
            "",
            _shown(task, base),
            None,
            {"margin": margin, **curves(base)},
            aside=f"{network}: SGD's quality",
        )
    )
    return rows


def _shown(task: Task, runs: Sequence[Trained]) -> str:
    mean = fmean(measure(task, run) for run in runs)
    return f"{mean:.2%}" if task == "pictures" else f"loss {mean:.4f} (perplexity {np.exp(mean):.2f})"


def _amount(task: Task, value: float) -> str:
    return f"{100 * value:.2f} points" if task == "pictures" else f"{value:.4f}"


def _lost_text(task: Task, found: Estimate) -> str:
    factor, unit = (100.0, " points") if task == "pictures" else (1.0, "")
    digits = 2 if task == "pictures" else 4
    text = f"{factor * found.mean:+.{digits}f}{unit}"
    if not np.isfinite(found.lower):
        return text
    return f"{text} ({factor * found.lower:+.{digits}f} to {factor * found.upper:+.{digits}f})"


# --- times


def speed(task: Task, times: Mapping[str, Times], *, timed: bool) -> list[Finding]:
    """A row for every way's times, and the claims about them, which are judged where links are slow."""
    return [*(_judge(task, claim, times, timed) for claim in _TIMES), *(_row(task, way, times) for way in WAYS)]


def _row(task: Task, way: Way, times: Mapping[str, Times]) -> Finding:
    found = times[way.name].medians()
    text = ", ".join(f"{name} {1e3 * found[name]:.1f} ms" for name in ("overhead", "communication", "total"))
    return Finding(
        TABLES[task],
        f"step_s/{way.name}",
        found["total"],
        "s",
        "",
        text,
        None,
        {"communication_s": found["communication"], "overhead_s": found["overhead"], "rounds": vars(times[way.name])},
        aside=f"{_NETWORKS[task]}: a step of {way.title}" if way in TABLE else "",
    )


@dataclass(frozen=True)
class _Faster:
    """A claim that ``way`` takes at most (``slower``: more than) ``bound`` times ``other``'s ``part`` of a step."""

    way: Way
    other: Way
    text: str
    part: str = "total"
    bound: float = 1.0
    slower: bool = False


_TIMES = (
    _Faster(RANDOM, SGD, f"int8 communicates in {_INT8_SHARE} of fp32's time at most", "communication", _INT8_SHARE),
    _Faster(RANDOM, SGD, "IntSGD (random) is faster than SGD by all-reduce (5.3)"),
    _Faster(DETERM, SGD, "IntSGD (determ.) is faster than SGD by all-reduce (5.3)"),
    _Faster(POWERSGD, SGD, "PowerSGD is faster than SGD by all-reduce (5.3)"),
    _Faster(QSGD, SGD_GATHERED, "QSGD is faster than SGD by all-gather (5.3)"),
    _Faster(NATSGD, SGD_GATHERED, "NatSGD is faster than SGD by all-gather (5.3)"),
    _Faster(QSGD, SGD, "QSGD is slower than SGD by all-reduce (5.3)", slower=True),
    _Faster(NATSGD, SGD, "NatSGD is slower than SGD by all-reduce (5.3)", slower=True),
    _Faster(RANDOM, DETERM, "random rounding takes more computation than determ. (5.3)", "overhead", slower=True),
)


def _judge(task: Task, claim: _Faster, times: Mapping[str, Times], timed: bool) -> Finding:
    ratios = over(getattr(times[claim.way.name], claim.part), getattr(times[claim.other.name], claim.part))
    longer = above(ratios, claim.bound)
    holds = longer if claim.slower or longer is None else not longer
    ratio = float(np.median(ratios))
    return Finding(
        TABLES[task],
        f"{claim.part}/{claim.way.name} over {claim.other.name}",
        ratio,
        "x",
        f"{_NETWORKS[task]}: {claim.text}",
        f"{ratio:.3f}x" if timed else f"{ratio:.3f}x; no slow link can be emulated here",
        holds if timed else None,
        {"ratios": ratios, "bound": claim.bound},
    )


# --- pictures


def _draw(study: Study, found: Runs, times: AllTimes) -> None:
    _draw_curves(study, found, "1", (SGD, RANDOM, RANDOM_32, HEURISTIC, HEURISTIC_32))
    _draw_times(study, times)
    for task in TASKS:
        _draw_training(study, task, found[task])


def _draw_curves(study: Study, found: Runs, figure: str, ways: Sequence[Way]) -> None:
    titles = [f"{_NETWORKS[task]}, {'held-out accuracy' if task == 'pictures' else 'held-out loss'}" for task in TASKS]
    drawn, panels = plots.canvas(2, titles=titles, x="step", y=["", "nats"])
    for task, axes in zip(TASKS, panels, strict=True):
        for way in ways:
            runs = found[task][way.name]
            _plot(axes, way, runs, "accuracy" if task == "pictures" else "held_out_loss")
    plots.save(drawn, study.picture(figure))


def _draw_training(study: Study, task: Task, runs: Mapping[str, Sequence[Trained]]) -> None:
    held_out = "accuracy" if task == "pictures" else "held_out_loss"
    titles = [f"{_NETWORKS[task]}: training loss", f"held-out {held_out.replace('held_out_', '')}"]
    drawn, panels = plots.canvas(2, titles=titles, x="step", y=["nats", "" if task == "pictures" else "nats"])
    for way in TRAINED:
        _plot_training(panels[0], way, runs[way.name])
        _plot(panels[1], way, runs[way.name], held_out)
    if task == "pictures":
        panels[0].set_yscale("log")
    plots.save(drawn, study.picture(CURVES[task]))


def _plot(axes: Any, way: Way, runs: Sequence[Trained], what: str) -> None:
    values = np.array([getattr(run, what) for run in runs])
    # What has been learnt at all is learnt before the first look.
    steps, values = runs[0].probe_steps, values[:, 1:]
    axes.plot(steps, values.mean(0), color=way.colour, label=way.title)
    axes.fill_between(steps, values.min(0), values.max(0), color=way.colour, alpha=0.15, linewidth=0)


def _plot_training(axes: Any, way: Way, runs: Sequence[Trained]) -> None:
    edges = [0, *runs[0].probe_steps]
    pieces = list(pairwise(edges))
    values = [[fmean(run.train_loss[low:high]) for low, high in pieces] for run in runs]
    axes.plot(edges[1:], np.mean(values, axis=0), color=way.colour, label=way.title)


def _draw_times(study: Study, times: AllTimes) -> None:
    """What a step is made of, one bar a way."""
    over_link = f"over {study.rate}" if study.rate else "over loopback"
    titles = [f"{_NETWORKS[task]}, a step {over_link}" for task in TASKS]
    drawn, panels = plots.canvas(2, titles=titles, x="ms", y="")
    for task, axes in zip(TASKS, panels, strict=True):
        found = [times[task][way.name].medians() for way in WAYS]
        left = np.zeros(len(WAYS))
        computing = [m["total"] - m["communication"] - m["overhead"] for m in found]
        parts = {
            "communication": ("#c0392b", [m["communication"] for m in found]),
            "encoding and decoding": ("#d98a00", [m["overhead"] for m in found]),
            "computation, waiting": ("#bbbbbb", computing),
        }
        for label, (colour, seconds) in parts.items():
            widths = 1e3 * np.maximum(0.0, np.array(seconds))
            axes.barh(range(len(WAYS)), widths, left=left, color=colour, label=label)
            left += widths
        axes.set_yticks(range(len(WAYS)), [way.title for way in WAYS])
        axes.invert_yaxis()
        axes.grid(visible=False, axis="y")
    plots.save(drawn, study.picture("2"))
