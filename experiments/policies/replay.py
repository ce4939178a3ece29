"""Every policy on the same recorded gradients: points of bytes and error, and what each saves against uniform."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median

from experiments.policies.candidates import FAMILIES, Family, Point, Table
from experiments.policies.methods import METHODS, Memory, Method, Plan
from experiments.policies.recording import Recording, Training
from thinwire.compressors import Compressor


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
