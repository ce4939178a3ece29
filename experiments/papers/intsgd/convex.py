"""Part (a), the runs: logistic regression by every method on every data set, in two processes."""

from __future__ import annotations

import functools
import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from experiments.papers.intsgd import datasets
from experiments.papers.intsgd.datasets import BATCH_SHARE, NUM_WORKERS, Logistic, Optimum, optimum
from experiments.papers.intsgd.world import Method, Trace, run

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
    Method("intdiana blocks", "IntDIANA, 4 blocks", shifts=True, integers=True, blocks=4),
    Method("intdiana coordinates", "IntDIANA, by coordinate", shifts=True, integers=True, blocks="coordinate"),
    Method("vr-intdiana", "VR-IntDIANA", shifts=True, integers=True, reference=True),
)


RATES = {False: 1.0, True: 0.5}
"""Learning rates, in 1/L: of full gradients, and of L-SVRG. A method and its twin in full precision take the same."""


@dataclass(frozen=True)
class Source:
    """A data set by name, or the LibSVM file ``path``, and how long and how often it is gone over: ``steps`` of full
    gradients, ``reference_steps`` of L-SVRG."""

    name: str
    steps: int = 800
    reference_steps: int = 1600
    seeds: int = 20
    path: str | None = None

    @property
    def num_entries(self) -> int:
        """About, so that the large ones come first."""
        return datasets.size(self.name) if self.path is None else Path(self.path).stat().st_size // 8


SOURCES = (
    Source("breast_cancer", 60, 120),
    Source("digits"),
    Source("a5a"),
    Source("mushrooms"),
    Source("w8a", 500, 1000),
    Source("real-sim", 150, 300, seeds=3),
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

    @property
    def num_workers(self) -> int:
        return NUM_WORKERS


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


def num_jobs(sources: Sequence[Source]) -> int:
    return len(sources) * (1 + len(METHODS))


def minimize(sources: Sequence[Source], on_done: Callable[[str], None]) -> list[Minimized]:
    """Every method on every source. ``on_done`` is called with the title of what has just been finished."""
    context = multiprocessing.get_context("forkserver")
    with ProcessPoolExecutor(min(_PROCESSES, os.cpu_count() or 1), context, initializer=_alone) as pool:
        try:
            # The large sets first, so that neither process is left alone with one in the end.
            order = sorted(sources, key=lambda source: source.num_entries, reverse=True)
            about = _gather({pool.submit(_know, source): source for source in order}, lambda s: s.name, on_done)
            jobs: dict[Future[Trace], tuple[Source, Method]] = {}
            for source in order:
                for method in METHODS:
                    job = pool.submit(_run, source, method, about[source].smoothness)
                    jobs[job] = source, method
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


def describe(minimized: Minimized) -> dict[str, object]:
    """What the JSON file keeps of a data set."""
    known, source = minimized.known, minimized.source
    return {
        "origin": known.origin,
        "rows": known.rows,
        "coordinates": known.coordinates,
        "workers": minimized.num_workers,
        "samples_of_a_worker": known.samples,
        "batch_share": BATCH_SHARE,
        "penalty": known.penalty,
        "smoothness": known.smoothness,
        "least_value": known.optimum.value,
        "descent_ended_above_it": known.optimum.descent - known.optimum.value,
        "descent_iterations": known.optimum.iterations,
        "steps": source.steps,
        "steps_of_lsvrg": source.reference_steps,
        "seeds": source.seeds,
    }
