"""Part (a), figure 6: logistic regression by every method on every data set, in two processes.

It shows the objective gap by bits and by gradients, and the largest integer that is sent.
"""

from __future__ import annotations

import functools
import math
import multiprocessing
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from experiments.framework.claims import Row, Rows
from experiments.papers.intsgd import datasets
from experiments.papers.intsgd.datasets import BATCH_SHARE, NUM_WORKERS, Logistic, Optimum, optimum
from experiments.papers.intsgd.world import Array, Method, Trace, run
from thinwire_tools import plots

_K = TypeVar("_K")
_V = TypeVar("_V")

NUM_RECORDS = 50
_PROCESSES = 2

METHODS = (
    Method("gd", "GD"),
    Method("diana", "DIANA", shifts=True),
    Method("lsvrg", "L-SVRG", reference=True),
    Method("intgd", "IntGD", integers=True),
    Method("intdiana", "IntDIANA", shifts=True, integers=True),
    Method("vr-intdiana", "VR-IntDIANA", shifts=True, integers=True, reference=True),
)


RATES = {False: 1.0, True: 0.5}
"""Learning rates, in 1/L: of full gradients, and of L-SVRG. A method and its twin in full precision take the same."""


@dataclass(frozen=True)
class Source:
    """A data set by name, or the LibSVM file ``path``, and how long and how often it is gone over: ``steps`` of full
    gradients, ``reference_steps`` of L-SVRG."""

    name: str
    steps: int = 4000
    reference_steps: int = 8000
    seeds: int = 20
    path: str | None = None

    @property
    def num_entries(self) -> int:
        """About, so that the large ones come first."""
        return datasets.size(self.name) if self.path is None else Path(self.path).stat().st_size // 8


SOURCES = (
    Source("breast_cancer", 600, 1200),
    Source("digits"),
    Source("a5a"),
    Source("mushrooms"),
    Source("w8a", 3000, 6000, seeds=5),
    Source("real-sim", 2000, 4000, seeds=3),
)
SMOKE_SOURCES = tuple(Source(name, 40, 80, seeds=2) for name in ("breast_cancer", "digits"))
_LEAST_BYTES = {"real-sim": 20_000_000, "w8a": 2_000_000}


def file_source(path: Path, known: Sequence[Source]) -> Source:
    """A LibSVM file, gone over like the last of the ``known`` sources that is not larger."""
    num_bytes = path.stat().st_size
    like = next(source for source in reversed(known) if num_bytes >= _LEAST_BYTES.get(source.name, 0))
    return replace(like, name=path.stem, path=str(path))


@dataclass(frozen=True)
class Known:
    """A data set's problem in figures."""

    origin: str
    rows: int
    coordinates: int
    samples: int
    """Of a worker."""
    penalty: float
    smoothness: float
    optimum: Optimum


@dataclass(frozen=True)
class Minimized:
    """One data set, and the trace of every method by name."""

    source: Source
    known: Known
    traces: dict[str, Trace]


@functools.lru_cache(maxsize=1)
def _problem(source: Source) -> Logistic:
    return Logistic(datasets.load(source.name) if source.path is None else datasets.libsvm(Path(source.path)))


def _alone() -> None:
    """A process of the pool: its algebra on one thread, so that two processes have two cores."""
    from threadpoolctl import threadpool_limits

    threadpool_limits(1)


def _know(source: Source) -> Known:
    problem = _problem(source)
    smoothness = problem.smoothness()
    minimum = optimum(problem, smoothness)
    data = problem.data
    rows, coordinates = data.rows.shape
    return Known(data.origin, rows, coordinates, problem.m, problem.penalty, smoothness, minimum)


def _run(source: Source, method: Method, smoothness: float) -> Trace:
    steps = source.reference_steps if method.reference else source.steps
    seeds = range(source.seeds if method.random else 1)
    every = max(1, steps // NUM_RECORDS)
    return run(_problem(source), method, seeds, steps, RATES[method.reference] / smoothness, every=every)


def minimize(sources: Sequence[Source], on_done: Callable[[str], None]) -> list[Minimized]:
    """Every method on every source. ``on_done`` is called with the title of what has just been finished."""
    context = multiprocessing.get_context("forkserver")
    with ProcessPoolExecutor(min(_PROCESSES, os.cpu_count() or 1), context, initializer=_alone) as pool:
        try:
            # The large sets first, so that neither process is left alone with one in the end.
            order = sorted(sources, key=lambda source: source.num_entries, reverse=True)
            about = _gather({pool.submit(_know, source): source for source in order}, lambda s: s.name, on_done)
            pairs = [(source, method) for source in order for method in METHODS]
            jobs = {pool.submit(_run, s, method, about[s].smoothness): (s, method) for s, method in pairs}
            traces = _gather(jobs, lambda key: f"{key[0].name}, {key[1].title}", on_done)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return [Minimized(s, about[s], {method.name: traces[s, method] for method in METHODS}) for s in sources]


def _gather(jobs: dict[Future[_V], _K], title: Callable[[_K], str], on_done: Callable[[str], None]) -> dict[_K, _V]:
    results: dict[_K, _V] = {}
    for job in as_completed(jobs):
        results[jobs[job]] = job.result()
        on_done(title(jobs[job]))
    return results


if TYPE_CHECKING:
    from experiments.papers.intsgd.paper import IntSGDStudy

_FLOOR = 1e-13
"""A gap below this is rounding error of fp64."""
_REACHED = 1e-11
"""A gap that is small enough to tell how fast a method is."""
_TWINS = {"intdiana": "gd", "vr-intdiana": "lsvrg"}
"""Methods and what they are in full precision."""

_COLORS = {
    "gd": "#555555",
    "diana": "#999999",
    "lsvrg": "#3b6fb6",
    "intgd": "#c0392b",
    "intdiana": "#0a7d4f",
    "vr-intdiana": "#8250c4",
}
_DASHED = ("diana", "lsvrg")


def part_a(study: IntSGDStudy) -> list[Row]:
    """Logistic regression on every data set by every method, with a picture of each."""
    minimized_sources = minimize(study.scale.sources, lambda title: study.advance(1, title))
    for minimized in minimized_sources:
        facts = {**asdict(minimized.source), **asdict(minimized.known)}
        study.datasets[minimized.source.name] = {**facts, "workers": NUM_WORKERS, "batch_share": BATCH_SHARE}
        _draw(study, minimized)
    return measured(minimized_sources)


def measured(minimized_sources: list[Minimized]) -> list[Row]:
    """The curves of every method on every data set, and what the worst seed came to."""
    rows = []
    for minimized in minimized_sources:
        for method in METHODS:
            trace, gap = minimized.traces[method.name], gaps(minimized, method.name)
            row = f"gap/{minimized.source.name}/{method.name}"
            rows.append(Row("6", row, float(gap[-1].mean()), "", _curves(trace, gap)))
    bits = {m.source.name: float(mean_bits(m.traces["intdiana"]).max()) for m in minimized_sources}
    bounds = {m.source.name: bound_bits(m) for m in minimized_sources}
    rows.append(Row("6", "bits/intdiana", max(bits.values()), "bits", {"by_dataset": bits}))
    rows.append(Row("6", "bound/intdiana", max(bits.values()), "bits", {"by_dataset": bits, "bound": bounds}))
    for name, twin in _TWINS.items():
        steps = {minimized.source.name: steps_over_twin(minimized, name, twin) for minimized in minimized_sources}
        rows.append(Row("6", f"steps/{name}", max(steps.values()), "x", {"by_dataset": steps}))
    return rows


def _curves(trace: Trace, gap: Array) -> dict[str, Any]:
    return {
        "steps": trace.steps.tolist(),
        "gap_mean": gap.mean(1).tolist(),
        "gap_least": gap.min(1).tolist(),
        "gap_most": gap.max(1).tolist(),
        "gradients": trace.gradients.mean(1).tolist(),
        "bits_per_coordinate": trace.bits.mean(1).tolist(),
        "largest_sent": trace.largest_sent.max(1).tolist(),
        "largest_sum": trace.largest_sum.max(1).tolist(),
        "num_seeds": int(gap.shape[1]),
    }


# --- of traces, seed by seed


def mean_bits(trace: Trace) -> Array:
    """Bits per coordinate and step that a worker sends, without the exact first step: ``[seeds]``."""
    return (trace.bits[-1] - trace.bits[1]) / (trace.steps[-1] - trace.steps[1])


def bound(coordinates: int, workers: int) -> float:
    """``√(d/2n)``: what no ``α·g`` exceeds for ``α = η√d / (√(2n)‖x − x'‖)`` where local gradients are no larger than
    the step, section 4.2."""
    return math.sqrt(coordinates / (2 * workers))


def bound_bits(minimized: Minimized) -> float:
    """Of an integer that is `bound`, maybe rounded up."""
    return 1.0 + math.log2(math.ceil(bound(minimized.known.coordinates, NUM_WORKERS)))


def gaps(minimized: Minimized, name: str) -> Array:
    """``f − f*``, ``[records, seeds]``, where rounding error is not counted."""
    return np.maximum(minimized.traces[name].values - minimized.known.optimum.value, _FLOOR)


def steps_over_twin(minimized: Minimized, name: str, twin: str) -> float:
    """Steps of the slowest seed to the gap that full precision has after half of its steps, over those of full
    precision: so a method that is slower gets there, too."""
    own, full = gaps(minimized, name), gaps(minimized, twin).mean(1)
    target = max(_REACHED, float(full[len(full) // 2]))
    taken = [steps_to(minimized.traces[name].steps, own[:, seed], target) for seed in range(own.shape[1])]
    return max(taken) / steps_to(minimized.traces[twin].steps, full, target)


def steps_to(steps: Array, gap: Array, target: float) -> float:
    """Steps after which ``gap [records]`` is ``target``, between two records by its logarithm; infinity if never."""
    below = np.nonzero(gap <= target)[0]
    if not len(below):
        return math.inf
    at = int(below[0])
    if at == 0 or gap[at] == gap[at - 1]:
        return float(steps[at])
    share = math.log(gap[at - 1] / target) / math.log(gap[at - 1] / gap[at])
    return float(steps[at - 1] + share * (steps[at] - steps[at - 1]))


def linearity(steps: Array, gap: Array) -> float:
    """R² of a straight line through the gap's logarithm over the second half of the way to its end, or to the floor of
    rounding error; 0 where there is too little to tell."""
    kept = np.nonzero(gap > 10 * _FLOOR)[0]
    kept = kept[len(kept) // 2 :]
    if len(kept) < 3 or np.ptp(gap[kept]) == 0:
        return 0.0
    correlation = np.corrcoef(steps[kept], np.log(gap[kept]))[0, 1]
    return float(correlation**2) if correlation < 0 else 0.0


# --- of the rows' curves, means over seeds


def gone_over(rows: Rows) -> list[str]:
    """In the order in which they were gone over."""
    return list(dict.fromkeys(name.split("/")[1] for name in rows if name.startswith("gap/")))


def curve(rows: Rows, dataset: str, method: str, key: str) -> Array:
    return np.array(rows[f"gap/{dataset}/{method}"][key])


def straightness(rows: Rows, dataset: str, name: str) -> float:
    return linearity(curve(rows, dataset, name, "steps"), curve(rows, dataset, name, "gap_mean"))


def gradients_taken(rows: Rows, dataset: str) -> tuple[float, float, float]:
    """Gradient evaluations of VR-IntDIANA and of IntDIANA to the gap that the worse of them ends with; and that gap."""
    curves: dict[str, Mapping[str, Any]] = {name: rows[f"gap/{dataset}/{name}"] for name in ("vr-intdiana", "intdiana")}
    target = max(_REACHED, *(min(curve["gap_mean"]) for curve in curves.values()))
    taken = []
    for curve in curves.values():
        steps = np.array(curve["steps"])
        taken.append(float(np.interp(steps_to(steps, np.array(curve["gap_mean"]), target), steps, curve["gradients"])))
    return taken[0], taken[1], target


def growth(rows: Rows, dataset: str) -> tuple[float, float, float]:
    """The largest integer that IntGD sends at first and at last, and IntDIANA at last."""
    sent = curve(rows, dataset, "intgd", "largest_sent")
    # Up to the first record all may have been exact.
    return float(sent[1] or sent[2]), float(sent[-1]), float(curve(rows, dataset, "intdiana", "largest_sent")[-1])


def _draw(study: IntSGDStudy, minimized: Minimized) -> None:
    name = minimized.source.name
    known = minimized.known
    figure, panels = plots.canvas(
        3,
        titles=[f"{name}: {known.rows} x {known.coordinates}, {known.origin}", "", ""],
        x="",
        y=["f(x) − f*", "f(x) − f*", "largest integer that a worker sends"],
    )
    for method in METHODS:
        trace, gap, color = minimized.traces[method.name], gaps(minimized, method.name), _COLORS[method.name]
        style: dict[str, Any] = {"color": color, "linestyle": "--" if method.name in _DASHED else "-"}
        # One panel has the legend of all three.
        panels[1].plot([], [], label=method.title, **style)
        for axes, across in zip(panels, (trace.bits.mean(1), trace.gradients.mean(1)), strict=False):
            axes.plot(across, gap.mean(1), **style)
            axes.fill_between(across, gap.min(1), gap.max(1), color=color, alpha=0.2, linewidth=0)
        if method.integers:
            panels[2].plot(trace.steps[1:], trace.largest_sent[1:].mean(1), **style)
            low, high = trace.largest_sent[1:].min(1), trace.largest_sent[1:].max(1)
            panels[2].fill_between(trace.steps[1:], low, high, color=color, alpha=0.2, linewidth=0)
    most = bound(known.coordinates, NUM_WORKERS)
    panels[2].axhline(most, color="#333333", linewidth=0.8, linestyle=":", label="√(d/2n), section 4.2")
    panels[0].set(xlabel="bits per coordinate that a worker has sent", xscale="log", yscale="log")
    panels[1].set(xlabel="gradients over a worker's data", yscale="log")
    panels[2].set(xlabel="step", yscale="log")
    plots.save(figure, study.picture(f"6-{name}"))
