"""Every policy on the same recorded gradients: frontiers of bytes and error, and how far apart two of them are."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Literal

import numpy as np

from experiments.policies.candidates import FAMILIES, Family, Point, Table
from experiments.policies.methods import METHODS, Memory, Method, Plan
from experiments.policies.recording import Recording, Training
from thinwire.compressors import Compressor
from thinwire_tools.compare.statistics import estimate


@dataclass(frozen=True)
class Decision:
    """One plan of a policy. ``point``: on the snapshot that it was made on; ``later``: the same plan on the next
    snapshot of the training, which it has not seen; ``by_bucket``: bytes of DDP's buckets as they leave."""

    training: int
    step: int
    level: int
    point: Point
    later: Point | None
    by_bucket: tuple[float, ...]
    seconds: float


@dataclass
class Replayed:
    """All decisions of a policy on one task and family."""

    task: str
    family: Family
    method: Method
    decisions: list[Decision] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """Of a decision, once errors are known: the median."""
        return median(decision.seconds for decision in self.decisions)


@dataclass
class Bench:
    """One task and family: uniform compression, which is the reference line, and all policies.

    ``uniform[training][snapshot]`` has a point for each member of the family. ``kept`` are the points of L-GreCo's
    first plan of each training on its later snapshots, by level. ``uniform_buckets[level]`` are the bytes of DDP's
    buckets under uniform compression. ``evaluate_s``: the median seconds to find all candidates' errors on a snapshot.
    """

    task: str
    family: Family
    steps: tuple[tuple[int, ...], ...]
    uniform: list[list[list[Point]]]
    replayed: dict[str, Replayed]
    kept: list[list[list[Point]]]
    uniform_buckets: list[list[float]]
    evaluate_s: float


def replay(
    recording: Recording,
    *,
    tasks: Sequence[str] = (),
    methods: Sequence[Method] = METHODS,
    families: Sequence[Family] = FAMILIES,
    on_step: Callable[[str], None] = lambda now: None,
) -> list[Bench]:
    """Replay every policy on every training of a recording, or of those of its ``tasks`` that are named.

    Raises:
        BadRecording: a snapshot is not finite.
    """
    benches = []
    for task in tasks or recording.tasks:
        for family in families:
            mine = [method for method in methods if not method.families or family.name in method.families]
            benches.append(_bench(recording, task, family, mine, on_step))
    return benches


def _bench(
    recording: Recording, task: str, family: Family, methods: Sequence[Method], on_step: Callable[[str], None]
) -> Bench:
    trainings = recording.of(task)
    bench = Bench(
        task,
        family,
        tuple(training.steps for training in trainings),
        [],
        {method.name: Replayed(task, family, method) for method in methods},
        [],
        [],
        0.0,
    )
    seconds = []
    for index, training in enumerate(trainings):
        on_step(f"{training.title}, {family.title}, training {index + 1} of {len(trainings)}")
        tables = [Table(family, snapshot, training) for snapshot in recording.snapshots(training)]
        seconds += [table.evaluate_s for table in tables]
        bench.uniform.append([[table.point(table.uniform(member)) for member in family.members] for table in tables])
        bench.uniform_buckets = [tables[0].by_bucket(tables[0].uniform(level)) for level in family.levels]
        for method in methods:
            bench.replayed[method.name].decisions += _decisions(index, training, tables, family, method)
        if "lgreco" in bench.replayed:
            bench.kept.append(_kept(tables, family, bench.replayed["lgreco"].method))
    bench.evaluate_s = median(seconds)
    return bench


def _decisions(
    index: int, training: Training, tables: Sequence[Table], family: Family, method: Method
) -> Iterator[Decision]:
    middle = len(tables) // 2
    for level, reference in enumerate(family.levels):
        memory: Memory = {}
        for at, table in enumerate(tables):
            if method.sparse and at != middle:
                continue
            started = time.perf_counter()
            plan, memory = method.choose(table, reference, memory)
            seconds = time.perf_counter() - started
            later = tables[at + 1].point(plan) if at + 1 < len(tables) else None
            yield Decision(
                index, training.steps[at], level, table.point(plan), later, tuple(table.by_bucket(plan)), seconds
            )


def _kept(tables: Sequence[Table], family: Family, lgreco: Method) -> list[list[Point]]:
    """L-GreCo's first plan on each later snapshot, by level."""
    rows = []
    for reference in family.levels:
        first: Plan = lgreco.choose(tables[0], reference, {})[0]
        rows.append([table.point(first) for table in tables[1:]])
    return rows


def level_name(family: Family, level: Compressor) -> str:
    """Of a level, for people and JSON: ``"bits=4"``."""
    return f"{family.parameter}={getattr(level, family.parameter):g}"


Measure = Literal["error", "whole"]


@dataclass(frozen=True)
class Ratio:
    """A mean ratio and its bounds, each with 95 % by itself, over trainings."""

    mean: float
    lower: float
    upper: float
    by_training: tuple[float, ...]

    @classmethod
    def of(cls, logarithms: Sequence[float]) -> Ratio:
        """Of one mean logarithm a training."""
        found = estimate(logarithms)
        return cls(math.exp(found.mean), _exp(found.lower), _exp(found.upper), tuple(map(math.exp, logarithms)))


def _exp(value: float) -> float:
    return math.exp(value) if value < 700 else math.inf


DecisionPlace = tuple[int, int, int]
"""Training, step and level of a decision."""


def places(bench: Bench, method: str) -> frozenset[DecisionPlace]:
    """Where a policy decided: `Method.sparse` ones at fewer places than others."""
    return frozenset((one.training, one.step, one.level) for one in bench.replayed[method].decisions)


def fewer_bytes(
    bench: Bench,
    method: str,
    *,
    later: bool = False,
    measure: Measure = "error",
    at: frozenset[DecisionPlace] | None = None,
) -> Ratio | None:
    """How many times fewer bytes than uniform compression of the same error a policy sends: the geometric mean over
    levels and snapshots of each training. ``later``: on the snapshot after the one that a plan was made on; ``at``:
    of these decisions only. None where a training has no point that lies between those of uniform compression."""

    def ratio(point: Point, line: Line) -> float:
        return line.bytes_at(point, measure) / point.sent_bytes

    return _over_trainings(bench, method, later, at, ratio)


def less_error(bench: Bench, method: str, *, at: frozenset[DecisionPlace] | None = None) -> Ratio | None:
    """How many times less error than uniform compression of the same bytes a policy has."""

    def ratio(point: Point, line: Line) -> float:
        return line.error_at(point) / point.error if point.error else math.nan

    return _over_trainings(bench, method, False, at, ratio)


def against(bench: Bench, method: str, other: str, *, later: bool = False) -> Ratio | None:
    """How many times fewer bytes than another policy's frontier, at the same error on the same snapshot; ``later``: on
    the snapshot after the one that the plans of both were made on."""
    means = []
    for training in range(len(bench.uniform)):
        lines: dict[int, list[Point]] = {}
        for snapshot, point in _points(bench, bench.replayed[other].decisions, training, later):
            lines.setdefault(snapshot, []).append(point)
        ratios = [
            Line(lines[snapshot]).bytes_at(point, "error") / point.sent_bytes
            for snapshot, point in _points(bench, bench.replayed[method].decisions, training, later)
        ]
        known = [math.log(ratio) for ratio in ratios if math.isfinite(ratio)]
        if not known:
            return None
        means.append(fmean(known))
    return Ratio.of(means) if means else None


@dataclass(frozen=True)
class Line:
    """Uniform compression on one snapshot, interpolated linearly in logarithms; NaN outside of what was measured."""

    points: Sequence[Point]

    def bytes_at(self, point: Point, measure: Measure) -> float:
        return _between(
            getattr(point, measure), [getattr(p, measure) for p in self.points], [p.sent_bytes for p in self.points]
        )

    def error_at(self, point: Point) -> float:
        return _between(point.sent_bytes, [p.sent_bytes for p in self.points], [p.error for p in self.points])


def _between(x: float, xs: Sequence[float], ys: Sequence[float]) -> float:
    pairs = sorted((math.log(a), math.log(b)) for a, b in zip(xs, ys, strict=True) if a > 0 and b > 0)
    at = math.log(x) if x > 0 else math.nan
    if len(pairs) < 2 or not pairs[0][0] - 1e-9 <= at <= pairs[-1][0] + 1e-9:
        return math.nan
    known, values = zip(*pairs, strict=True)
    return math.exp(float(np.interp(at, known, values)))


def _over_trainings(
    bench: Bench, method: str, later: bool, at: frozenset[DecisionPlace] | None, ratio: Callable[[Point, Line], float]
) -> Ratio | None:
    means, decisions = [], bench.replayed[method].decisions
    if at is not None:
        decisions = [one for one in decisions if (one.training, one.step, one.level) in at]
    for training in range(len(bench.uniform)):
        values = [
            ratio(point, Line(bench.uniform[training][snapshot]))
            for snapshot, point in _points(bench, decisions, training, later)
        ]
        known = [math.log(value) for value in values if math.isfinite(value) and value > 0]
        if not known:
            return None
        means.append(fmean(known))
    return Ratio.of(means) if means else None


def _points(bench: Bench, decisions: Iterable[Decision], training: int, later: bool) -> Iterable[tuple[int, Point]]:
    """Index of the snapshot that a point is on, and the point."""
    steps = bench.steps[training]
    for decision in decisions:
        if decision.training == training:
            at = steps.index(decision.step)
            if not later:
                yield at, decision.point
            elif decision.later is not None:
                yield at + 1, decision.later


@dataclass(frozen=True)
class Curve:
    """A frontier: geometric means over all snapshots of a level, by level."""

    levels: tuple[int, ...]
    sent_bytes: tuple[float, ...]
    error: tuple[float, ...]
    whole: tuple[float, ...]


def curve(replayed: Replayed) -> Curve:
    """A policy's frontier."""
    levels = sorted({decision.level for decision in replayed.decisions})
    return _curve(levels, [[d.point for d in replayed.decisions if d.level == level] for level in levels])


def uniform_curve(bench: Bench) -> Curve:
    """The reference line."""
    members = range(len(bench.family.members))
    snapshots = [points for training in bench.uniform for points in training]
    return _curve(members, [[points[member] for points in snapshots] for member in members])


def _curve(levels: Iterable[int], points: Sequence[Sequence[Point]]) -> Curve:
    return Curve(
        tuple(levels),
        tuple(_mean(p.sent_bytes for p in some) for some in points),
        tuple(_mean(p.error for p in some) for some in points),
        tuple(_mean(p.whole for p in some) for some in points),
    )


def _mean(values: Iterable[float]) -> float:
    return math.exp(fmean(math.log(max(value, 1e-12)) for value in values))
