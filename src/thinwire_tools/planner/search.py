"""The fastest plan of a pipeline: where to cut it, on which machines, in which schedule, with how many bits."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import pairwise, permutations
from typing import NamedTuple

import torch

from thinwire.compressors import Coded, Compressor, Raw, coder_of, parse
from thinwire.plan.contraction import gaussian_lost_share
from thinwire.policies.by_link import ByLink
from thinwire_tools.planner.schedules import SCHEDULES, Schedule, ScheduleName
from thinwire_tools.planner.simulate import Boundary, LinkCost, Simulated, StageTimes, simulate

REFERENCE = ("delta(maxabs(bits=3))", "maxabs(bits=6)")
"""Forward and backward: the AQ-SGD paper's fw3 bw6."""
_HEADER_BYTES = 64
_ALL_ORDERS = 5
_STARTS = 3
"""Orders of machines from which single changes are tried, for each schedule."""
_SAMPLE = (256, 1024)


@dataclass(frozen=True)
class Layer:
    """A layer that no cut divides, as it was measured for one micro-batch on a machine of speed 1."""

    name: str
    forward_s: float
    backward_s: float
    activation_bytes: float
    """Of its output, uncompressed in fp32."""
    weights_s: float | None = None
    """The part of ``backward_s`` that only the weights need; None for half of it."""


@dataclass(frozen=True)
class Machine:
    """A machine that computes."""

    name: str
    speed: float = 1.0
    line: float = math.inf
    """Bytes per second that all its links carry together, each way."""


class Link(NamedTuple):
    """One direction between two machines."""

    rate: float
    """Bytes per second."""
    latency_s: float = 0.0


@dataclass(frozen=True)
class PipelineProblem:
    """What is to be planned."""

    layers: tuple[Layer, ...]
    machines: tuple[Machine, ...]
    links: Mapping[tuple[str, str], Link]
    """By the names of the machine that sends and the one that receives."""
    num_chunks: int
    """Micro-batches of a step."""
    choices: ByLink = field(default_factory=ByLink)
    """Compressors to choose from; uncompressed is always a choice."""
    reference: tuple[str, str] = REFERENCE
    """The error budget: forward and backward, the plan may lose as much as these would at the boundaries of one stage
    for each machine."""
    schedules: tuple[ScheduleName, ...] = SCHEDULES
    per_rank: int = 2
    """The most stages that a machine may have."""

    def __post_init__(self) -> None:
        names = [machine.name for machine in self.machines]
        if len(set(names)) != len(names) or len(names) < 2:
            raise ValueError(f"a pipeline takes two machines or more, of different names, not {names}")
        if len(self.layers) < len(self.machines):
            raise ValueError(f"{len(self.layers)} layers cannot be cut into {len(self.machines)} stages")
        missing = [(a, b) for a in names for b in names if a != b and (a, b) not in self.links]
        if missing:
            raise ValueError(f"the link from {missing[0][0]} to {missing[0][1]} is not given")
        if not self.schedules:
            raise ValueError("no schedule to choose from")

    @cached_property
    def forward(self) -> tuple[Choice, ...]:
        """What may be chosen for activations, the most bytes first."""
        return _choices(self.choices.forward)

    @cached_property
    def backward(self) -> tuple[Choice, ...]:
        """What may be chosen for gradients, the most bytes first."""
        return _choices(self.choices.backward)

    @cached_property
    def budgets(self) -> tuple[float, float]:
        """Sums of squared lost shares that are allowed forward and backward."""
        allowed = (Choice.from_compressor(parse(spec)).error * (len(self.machines) - 1) for spec in self.reference)
        forward, backward = (value * (1 + 1e-9) for value in allowed)
        return forward, backward

    def only(self, name: ScheduleName) -> PipelineProblem:
        """The same problem with one schedule."""
        return replace(self, schedules=(name,))

    def shapes(self) -> Iterator[Schedule]:
        """The schedules that there may be."""
        for name in self.schedules:
            for per_rank in range(1, self.per_rank + 1):
                fits = per_rank == 1 if name in ("gpipe", "1f1b") else per_rank > 1 or name == "zero-bubble"
                rounds = max(1, self.num_chunks // len(self.machines))
                even = name in ("gpipe", "1f1b") or self.num_chunks % rounds == 0
                if fits and even and per_rank * len(self.machines) <= len(self.layers):
                    yield Schedule.build(name, len(self.machines), self.num_chunks, per_rank)


class Choice(NamedTuple):
    """A compressor of a boundary."""

    spec: str
    share: float
    """Bytes that it sends for each uncompressed one."""
    error: float
    """Square of the share of the norm that it loses of normally distributed values."""

    @staticmethod
    def from_compressor(compressor: Compressor) -> Choice:
        """A compressor of activations, of their changes, or of gradients.

        Raises:
            ValueError: it cannot code them.
        """
        coder = _coder(compressor)
        share = coder.wire_bytes(_SAMPLE, torch.float32) / (4 * math.prod(_SAMPLE))
        return Choice(str(compressor), share, gaussian_lost_share(coder) ** 2)


def _choices(compressors: Sequence[str | Compressor]) -> tuple[Choice, ...]:
    choices = [Choice.from_compressor(compressor) for compressor in dict.fromkeys([Raw(), *map(parse, compressors)])]
    return tuple(sorted(choices, key=lambda choice: -choice.share))


def _coder(compressor: Compressor) -> Coded:
    coder = coder_of(compressor)
    if not isinstance(coder, Coded):
        raise ValueError(f"{compressor} cannot code what crosses a stage boundary")
    return coder


@dataclass(frozen=True)
class PipelinePlan:
    """A plan of a pipeline, and the step that it comes to."""

    problem: PipelineProblem
    schedule: Schedule
    order: tuple[int, ...]
    """The machine of each rank."""
    cuts: tuple[int, ...]
    """The first layer of each stage, and at the end the number of layers."""
    forward: tuple[int, ...]
    """By boundary, an index into the choices for activations."""
    backward: tuple[int, ...]

    @cached_property
    def simulated(self) -> Simulated:
        """Its step."""
        stages = [
            _stage(self.problem, self._machine(s), self.cuts[s], self.cuts[s + 1]) for s in range(len(self.cuts) - 1)
        ]
        lines = [self.problem.machines[machine].line for machine in self.order]
        shared = any(map(math.isfinite, lines))
        return simulate(self.schedule, stages, self._boundaries(), lines=lines if shared else None)

    @property
    def step_s(self) -> float:
        return self.simulated.step_s

    @property
    def forward_specs(self) -> tuple[str, ...]:
        """By boundary, as `thinwire.compress_stage` takes them."""
        return tuple(self.problem.forward[i].spec for i in self.forward)

    @property
    def backward_specs(self) -> tuple[str, ...]:
        """By boundary, as `thinwire.compress_stage` takes them."""
        return tuple(self.problem.backward[i].spec for i in self.backward)

    @property
    def errors(self) -> tuple[float, float]:
        """Sums of squared lost shares forward and backward, to compare with the budgets."""
        forward = math.fsum(self.problem.forward[i].error for i in self.forward)
        return forward, math.fsum(self.problem.backward[i].error for i in self.backward)

    @property
    def fits(self) -> bool:
        """Whether it is within the error budget."""
        return all(error <= budget for error, budget in zip(self.errors, self.problem.budgets, strict=True))

    def machine(self, stage: int) -> str:
        """The name of the machine that has a stage."""
        return self._machine(stage).name

    def _machine(self, stage: int) -> Machine:
        return self.problem.machines[self.order[stage % len(self.order)]]

    def _boundaries(self) -> list[Boundary]:
        return [
            Boundary(
                self.link_cost(b, self.problem.forward[f], forward=True),
                self.link_cost(b, self.problem.backward[g], forward=False),
            )
            for b, (f, g) in enumerate(zip(self.forward, self.backward, strict=True))
        ]

    def link_cost(self, boundary: int, choice: Choice, *, forward: bool) -> LinkCost:
        """A message across a boundary with another compressor."""
        return _link_cost(
            self.problem, self.cuts[boundary + 1], self._machine(boundary), self._machine(boundary + 1), choice, forward
        )


def _stage(problem: PipelineProblem, machine: Machine, begin: int, end: int) -> StageTimes:
    layers = problem.layers[begin:end]
    weights = math.fsum(layer.backward_s / 2 if layer.weights_s is None else layer.weights_s for layer in layers)
    times = (math.fsum(layer.forward_s for layer in layers), math.fsum(layer.backward_s for layer in layers), weights)
    return StageTimes(*(seconds / machine.speed for seconds in times))


def _link_cost(
    problem: PipelineProblem, cut: int, before: Machine, after: Machine, choice: Choice, forward: bool
) -> LinkCost:
    names = (before.name, after.name) if forward else (after.name, before.name)
    link = problem.links[names]
    num_bytes = _HEADER_BYTES + choice.share * problem.layers[cut - 1].activation_bytes
    return LinkCost(num_bytes / link.rate, link.latency_s, rate=link.rate)


def plan_pipeline(problem: PipelineProblem) -> PipelinePlan:
    """The fastest plan that is found.

    For each schedule and order of machines (all of up to five machines, else chains along fast links) the layers are
    cut so that the slowest stage or link is as fast as can be: exactly, by dynamic programming. Each boundary then gets
    the most accurate compressor that takes no longer than the slowest one must: exactly again. From the best of these,
    single changes are tried in a simulated step as long as one makes it shorter: a cut moved by a layer, two machines
    exchanged, another compressor, or one boundary's accuracy traded for another's. No single change betters the plan
    that is returned. That it is the best of all is not proven; tests compare it with exhaustive search.

    Raises:
        ValueError: no schedule takes so many micro-batches on so many machines.
    """
    plans = []
    for schedule in problem.shapes():
        starts = [_started(problem, schedule, order) for order in _orders(problem)]
        # Machines that are alike make orders that are.
        distinct = {round(plan.step_s, 9): plan for plan in reversed(starts)}
        plans += [_descend(distinct[step]) for step in sorted(distinct)[:_STARTS]]
    if not plans:
        raise ValueError(f"none of {', '.join(problem.schedules)} takes {problem.num_chunks} micro-batches here")
    return min(plans, key=lambda plan: plan.step_s)


def even_plan(
    problem: PipelineProblem, name: ScheduleName = "1f1b", spec: tuple[str, str] = ("raw", "raw")
) -> PipelinePlan:
    """The plan to compare with: as many layers in each stage, machines in the order given, one compressor for all."""
    per_rank = 2 if name == "interleaved" else 1
    schedule = Schedule.build(name, len(problem.machines), problem.num_chunks, per_rank)
    cuts = tuple(len(problem.layers) * s // schedule.num_stages for s in range(schedule.num_stages + 1))
    picked = []
    for options, wanted in zip((problem.forward, problem.backward), spec, strict=True):
        index = next((i for i, choice in enumerate(options) if choice.spec == str(parse(wanted))), None)
        if index is None:
            raise ValueError(f"{wanted} is none of the choices: {', '.join(choice.spec for choice in options)}")
        picked.append((index,) * (schedule.num_stages - 1))
    return PipelinePlan(problem, schedule, tuple(range(len(problem.machines))), cuts, picked[0], picked[1])


def _orders(problem: PipelineProblem) -> list[tuple[int, ...]]:
    """All orders of a few machines; of more, that given, and from each on always the one behind the fastest link."""
    machines, size = range(len(problem.machines)), max(layer.activation_bytes for layer in problem.layers)
    if len(machines) <= _ALL_ORDERS:
        return list(permutations(machines))

    def seconds(a: int, b: int) -> float:
        there, back = (problem.links[problem.machines[x].name, problem.machines[y].name] for x, y in ((a, b), (b, a)))
        return size / there.rate + size / back.rate + there.latency_s + back.latency_s

    orders = [tuple(machines)]
    for first in machines:
        chain = [first]
        while len(chain) < len(machines):
            left = [machine for machine in machines if machine not in chain]
            chain.append(min(left, key=partial(seconds, chain[-1])))
        orders.append(tuple(chain))
    return list(dict.fromkeys(orders))


def _started(problem: PipelineProblem, schedule: Schedule, order: tuple[int, ...]) -> PipelinePlan:
    """The cuts and the bits with which the slowest stage or link is as fast as can be."""
    cuts = _cut(problem, order, schedule.num_stages)
    none = (0,) * (schedule.num_stages - 1)
    return _with_bits(PipelinePlan(problem, schedule, order, cuts, none, none))


def _cut(problem: PipelineProblem, order: Sequence[int], num_stages: int) -> tuple[int, ...]:
    """The cuts whose slowest stage, or link with the fewest bits, is fastest; of these those with even stages."""
    machines = [problem.machines[order[s % len(order)]] for s in range(num_stages)]
    fewest = (problem.forward[-1], problem.backward[-1])
    total = len(problem.layers)
    best: list[dict[int, tuple[float, float, tuple[int, ...]]]] = [{0: (0.0, 0.0, (0,))}]
    for s, machine in enumerate(machines):
        row: dict[int, tuple[float, float, tuple[int, ...]]] = {}
        for end in range(s + 1, total - (num_stages - 1 - s) + 1) if s < num_stages - 1 else (total,):
            for begin, (slowest, squares, cuts) in best[-1].items():
                if begin >= end:
                    continue
                times = _stage(problem, machine, begin, end)
                seconds = times.forward_s + times.backward_s
                costs = [0.0]
                if s:
                    pair = (machines[s - 1], machine)
                    costs = [
                        _link_cost(problem, begin, *pair, choice, f).link_s
                        for choice, f in zip(fewest, (True, False), strict=True)
                    ]
                candidate = (max(slowest, seconds, *costs), squares + seconds**2, (*cuts, end))
                row[end] = min(row.get(end, candidate), candidate)
        best.append(row)
    return best[-1][total][2]


def _with_bits(plan: PipelinePlan) -> PipelinePlan:
    """The plan with, at each boundary, the most accurate choice that takes no longer than the slowest one must."""
    problem, chosen = plan.problem, []
    for options, budget, forward in zip(
        (problem.forward, problem.backward), problem.budgets, (True, False), strict=True
    ):
        costs = [
            [plan.link_cost(b, choice, forward=forward).link_s for choice in options] for b in range(len(plan.cuts) - 2)
        ]
        for allowed in sorted({seconds for row in costs for seconds in row}):
            picked = [next((i for i, s in enumerate(row) if s <= allowed), len(row)) for row in costs]
            if all(i < len(options) for i in picked) and math.fsum(options[i].error for i in picked) <= budget:
                break
        else:
            picked = [0] * len(costs)
        chosen.append(tuple(picked))
    return replace(plan, forward=chosen[0], backward=chosen[1])


def _descend(plan: PipelinePlan) -> PipelinePlan:
    """The plan after all single changes that make its step shorter."""
    while True:
        best = min((other for other in _changed(plan) if other.fits), key=lambda other: other.step_s, default=plan)
        if best.step_s >= plan.step_s * (1 - 1e-9):
            return plan
        plan = best


def _changed(plan: PipelinePlan) -> Iterator[PipelinePlan]:
    """The plans that differ from this one by a single change."""
    inner = range(1, len(plan.cuts) - 1)
    for i in inner:
        for by in (-1, 1):
            cuts = (*plan.cuts[:i], plan.cuts[i] + by, *plan.cuts[i + 1 :])
            if all(a < b for a, b in pairwise(cuts)):
                moved = replace(plan, cuts=cuts)
                yield moved
                yield _with_bits(moved)
    for a in range(len(plan.order)):
        for b in range(a):
            order = list(plan.order)
            order[a], order[b] = order[b], order[a]
            yield _started(plan.problem, plan.schedule, tuple(order))
    for forward, options in ((True, plan.problem.forward), (False, plan.problem.backward)):
        for picked in _repicked(plan.forward if forward else plan.backward, len(options)):
            yield replace(plan, forward=picked) if forward else replace(plan, backward=picked)


def _repicked(picked: tuple[int, ...], num_options: int) -> Iterator[tuple[int, ...]]:
    """One boundary with any other choice; or with one step fewer bits, and another with one step more."""
    for b, now in enumerate(picked):
        yield from ((*picked[:b], i, *picked[b + 1 :]) for i in range(num_options) if i != now)
        for other in range(len(picked)):
            if other != b and now + 1 < num_options and picked[other] > 0:
                traded = list(picked)
                traded[b] += 1
                traded[other] -= 1
                yield tuple(traded)
