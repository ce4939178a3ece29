"""Frontiers of bytes and error, and how far apart two of them are."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

import numpy as np

from experiments.policies.candidates import Point
from experiments.policies.replay import Bench, Decision, Replayed
from thinwire_tools.compare.statistics import estimate

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
        return line.error_at(point, "error") / point.error if point.error else math.nan

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

    def error_at(self, point: Point, measure: Measure) -> float:
        return _between(
            point.sent_bytes, [p.sent_bytes for p in self.points], [getattr(p, measure) for p in self.points]
        )


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
