"""Every policy on the same recorded gradients, and how far apart two of them are."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from experiments.papers.lgreco.gradients import Training
from experiments.policies.candidates import Family, Point, Table
from experiments.policies.methods import Memory, Method, Plan


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


@dataclass
class Bench:
    """Trainings of a task and a family: uniform compression, which is the reference line, and what policies decided.

    ``uniform[training][snapshot]`` has a point for each member of the family. ``kept`` are the points of L-GreCo's
    first plan of each training on its later snapshots, by level. ``uniform_buckets[level]`` are the bytes of DDP's
    buckets under uniform compression.
    """

    family: Family
    steps: tuple[tuple[int, ...], ...]
    uniform: list[list[list[Point]]]
    decisions: dict[str, list[Decision]]
    kept: list[list[list[Point]]]
    uniform_buckets: list[list[float]]


def replay(
    trainings: Sequence[Training],
    methods: Sequence[Method],
    family: Family,
    on_step: Callable[[str], None] = lambda now: None,
) -> Bench:
    """Replay policies that choose from a family on every snapshot of trainings of one task."""
    bench = Bench(family, tuple(one.steps for one in trainings), [], {method.name: [] for method in methods}, [], [])
    for index, training in enumerate(trainings):
        on_step(f"{training.title}, {family.title}, training {index + 1} of {len(trainings)}")
        tables = [Table(family, snapshot, training) for snapshot in training.snapshots]
        bench.uniform.append([[table.point(table.uniform(member)) for member in family.members] for table in tables])
        bench.uniform_buckets = [tables[0].by_bucket(tables[0].uniform(level)) for level in family.levels]
        for method in methods:
            bench.decisions[method.name] += _decisions(index, training, tables, family, method)
            if method.name == "lgreco":
                bench.kept.append(_kept(tables, family, method))
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
            plan, memory = method.choose(table, reference, memory)
            later = tables[at + 1].point(plan) if at + 1 < len(tables) else None
            yield Decision(index, training.steps[at], level, table.point(plan), later, tuple(table.by_bucket(plan)))


def _kept(tables: Sequence[Table], family: Family, lgreco: Method) -> list[list[Point]]:
    """L-GreCo's first plan on each later snapshot, by level."""
    rows = []
    for reference in family.levels:
        first: Plan = lgreco.choose(tables[0], reference, {})[0]
        rows.append([table.point(first) for table in tables[1:]])
    return rows


Ratios = tuple[float, ...]
"""For each training, a geometric mean over levels and snapshots; NaN if no point lies within the line."""

DecisionPlace = tuple[int, int, int]
"""Training, step and level of a decision."""


def places(bench: Bench, method: str) -> frozenset[DecisionPlace]:
    """Where a policy decided: `Method.sparse` ones at fewer places than others."""
    return frozenset((one.training, one.step, one.level) for one in bench.decisions[method])


def fewer_bytes(
    bench: Bench, method: str, *, later: bool = False, at: frozenset[DecisionPlace] | None = None
) -> Ratios:
    """How many times fewer bytes than uniform compression of the same error a policy sends. ``later``: on the snapshot
    after the one that a plan was made on; ``at``: of these decisions only."""
    return _by_training(bench, method, Line.fewer_bytes, later=later, at=at)


def less_error(bench: Bench, method: str, *, at: frozenset[DecisionPlace] | None = None) -> Ratios:
    """How many times less error than uniform compression of the same bytes a policy has."""
    return _by_training(bench, method, Line.less_error, at=at)


def against(bench: Bench, method: str, other: str, *, later: bool = False) -> Ratios:
    """How many times fewer bytes than another policy's frontier, at the same error on the same snapshot; ``later``: on
    the snapshot after the one that the plans of both were made on."""
    frontiers: dict[tuple[int, int], list[Point]] = {}
    for place, point in _points(bench, other, later):
        frontiers.setdefault(place, []).append(point)
    lines = {place: Line(points) for place, points in frontiers.items()}
    return _by_training(bench, method, Line.fewer_bytes, later=later, lines=lines)


def geometric_mean(ratios: Iterable[float]) -> float:
    """The mean of those that are known; NaN if none is."""
    known = [math.log(ratio) for ratio in ratios if ratio > 0 and math.isfinite(ratio)]
    return math.exp(fmean(known)) if known else math.nan


@dataclass(frozen=True)
class Line:
    """Plans on one snapshot, interpolated linearly in logarithms; ratios to it are NaN outside of what was measured."""

    points: Sequence[Point]

    def fewer_bytes(self, point: Point) -> float:
        """How many times fewer bytes than the line's at the same error the point sends."""
        here = _between(point.error, [p.error for p in self.points], [p.sent_bytes for p in self.points])
        return here / point.sent_bytes

    def less_error(self, point: Point) -> float:
        """How many times less error than the line's at the same bytes the point has."""
        here = _between(point.sent_bytes, [p.sent_bytes for p in self.points], [p.error for p in self.points])
        return here / point.error if point.error else math.nan


def _between(x: float, xs: Sequence[float], ys: Sequence[float]) -> float:
    pairs = sorted((math.log(a), math.log(b)) for a, b in zip(xs, ys, strict=True) if a > 0 and b > 0)
    at = math.log(x) if x > 0 else math.nan
    if len(pairs) < 2 or not pairs[0][0] - 1e-9 <= at <= pairs[-1][0] + 1e-9:
        return math.nan
    known, values = zip(*pairs, strict=True)
    return math.exp(float(np.interp(at, known, values)))


def _by_training(
    bench: Bench,
    method: str,
    ratio: Callable[[Line, Point], float],
    *,
    later: bool = False,
    at: frozenset[DecisionPlace] | None = None,
    lines: Mapping[tuple[int, int], Line] | None = None,
) -> Ratios:
    """Means of ratios to uniform compression, or to other ``lines``, by training and snapshot."""
    ratios: list[list[float]] = [[] for _ in bench.uniform]
    for (training, snapshot), point in _points(bench, method, later, at):
        line = lines[training, snapshot] if lines else Line(bench.uniform[training][snapshot])
        ratios[training].append(ratio(line, point))
    return tuple(map(geometric_mean, ratios))


def _points(
    bench: Bench, method: str, later: bool, at: frozenset[DecisionPlace] | None = None
) -> Iterator[tuple[tuple[int, int], Point]]:
    """Training and index of the snapshot that a point is on, and the point."""
    for one in bench.decisions[method]:
        if at is not None and (one.training, one.step, one.level) not in at:
            continue
        snapshot = bench.steps[one.training].index(one.step)
        if not later:
            yield (one.training, snapshot), one.point
        elif one.later is not None:
            yield (one.training, snapshot + 1), one.later
