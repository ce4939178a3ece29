"""Methods of sending gradients timed against each other: rank processes that have a model for each and take turns.

The instrument is replayed steps in several separate runs. In every run new rank processes take turns in an order drawn
for each round. Each method has one time a run, that of its median round, so that an interval over runs contains
whatever differs between them."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any, Literal, Self, TypeVar

from experiments.framework import replicas
from experiments.framework.claims import over
from experiments.framework.methods import FP32, NOTHING, Method
from experiments.framework.rank import Attaching, Rank
from experiments.framework.ranks import Ranks
from experiments.framework.replay import Compute
from experiments.tasks.images import Model
from thinwire.policies import Sync
from thinwire_tools import lab
from thinwire_tools.compare.train import ring_factor
from thinwire_tools.lab.units import format_rate

NUM_RANKS = 4
RANKS_PER_NODE = 2

Place = Literal["links", "nodes", "host"]
"""Places of ranks: each behind a link of its own; two to a node, which has a link; or all on this host."""

_CALIBRATION_ROUNDS = 3
# Communication hides behind half of the computation at best.
_FIRST_GUESS_HIDDEN = 0.5
_SLOWEST_GUESS = 4.0

OnTurn = Callable[[int, str], None]
"""A function that is called after every turn, with the steps it took and the name of the method."""


@dataclass(frozen=True)
class Times:
    """Seconds of a step by method and round: the mean of a turn on the slowest rank.

    A mean, because without communication nothing makes ranks that share a core wait for each other: it hands each of
    them some steps whole and others in pieces.
    """

    rounds: dict[str, tuple[float, ...]]
    payload_bytes: dict[str, float]
    """Bytes that rank 0 hands to the network in a step, of those methods that report them."""
    layers: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    """Name, bucket, spec and bytes of each layer, in the order of sending, of those methods that compress layers."""
    stages: dict[str, dict[str, float]] = field(default_factory=dict)
    """Mean seconds of a step that rank 0 spends in each stage of communication, of those methods that report them."""
    least_stages: dict[str, dict[str, tuple[float, ...]]] = field(default_factory=dict)
    """Seconds of the stages by round, on the rank that spends the least: a rank that is ready waits for the others."""
    cpu_s: dict[str, tuple[float, ...]] = field(default_factory=dict)
    """Seconds of a processor in a step by method and round, in the mean of the ranks; of replayed steps, those of
    communication alone."""

    def step_s(self, name: str) -> float:
        """Return the seconds of a step in the median round."""
        return median(self.rounds[name])

    def over(self, name: str, other: str) -> list[float]:
        """Return the speed of ``name`` over that of ``other``, round by round, so that a machine that slows down slows
        both."""
        return over(self.rounds, name, other)

    def times_faster(self, name: str, other: str) -> float:
        """Return the speed of ``name`` over that of ``other`` in the median round."""
        return median(self.over(name, other))


class Timing(Ranks):
    """Rank processes at a ``place``; a context manager. ``emulated``: the place's links are, else all use loopback."""

    def __init__(
        self,
        place: Place,
        *,
        emulated: bool,
        num_ranks: int = NUM_RANKS,
        links: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        """Prepare the ranks. ``links``: options of their network, ``options``: those of `Attaching.attached`."""
        network = None
        if emulated and place != "host":
            network = lab.Network(num_ranks, ranks_per_node=RANKS_PER_NODE if place == "nodes" else 1, **(links or {}))
        super().__init__(num_ranks, network, name=place)
        self._options = options

    def times(
        self,
        model: Model,
        methods: Sequence[Attaching],
        *,
        rounds: int,
        steps: int,
        rates: Sequence[str | None],
        on_turn: OnTurn,
    ) -> list[Times]:
        """Train with ``methods`` in turns of ``steps`` steps over links of each of ``rates``, after turns that do not
        count, by models that continue to learn.

        Every round goes through all rates, so that what a machine has to do besides is the same at all of them.

        Raises:
            RankFailedError: a rank failed. The timing is useless then.
        """
        entered = self._enter(model, methods)
        found = self._turns(methods, entered, rounds=rounds, steps=steps, rates=rates, on_turn=on_turn)
        self.call(Rank.leave)
        return found

    def syncs(
        self, model: Model, method: Method, *, steps: int, rate: str | None, on_turn: OnTurn
    ) -> tuple[list[Sync], list[dict[str, Any]]]:
        """Return the bytes of every bucket and seconds of communication of each of ``steps`` steps, on the rank that
        decides, and each layer's last values, as in `Times.layers`."""
        self._enter(model, (method,))
        self.shape(rate)
        answer = self.call(replicas.syncs, which=0, steps=steps)[0]
        on_turn(steps, method.title)
        self.call(Rank.leave)
        return [Sync(tuple(sizes), seconds) for sizes, seconds in answer["syncs"]], answer["layers"]

    def errors(self, model: Model, methods: Sequence[Method], *, steps: int, on_turn: OnTurn) -> dict[str, list[float]]:
        """Return the relative error of ``steps`` averaged gradients as received, by method."""
        self._enter(model, methods)
        errors = {}
        for which, method in enumerate(methods):
            answers = self.call(replicas.errors, which=which, steps=steps)
            errors[method.name] = [float(error) for error in answers[0]["errors"]]
            on_turn(steps, method.title)
        self.call(Rank.leave)
        return errors

    def calibrate(self, model: Model, share: float, *, on_turn: OnTurn) -> str:
        """Return the rate at which a step of plain DDP takes ``1 / share`` of the time that it takes with nothing sent.

        Seconds of a step are taken for ``a + b / rate``, which two rates tell; none at which steps take for ever.
        """
        entered = self._enter(model, (FP32, NOTHING))

        def seconds(rate: float | None) -> dict[str, float]:
            rates = (None if rate is None else rate_text(rate),)
            options: dict[str, Any] = {"rounds": _CALIBRATION_ROUNDS, "steps": 1}
            (times,) = self._turns((FP32, NOTHING), entered, **options, rates=rates, on_turn=on_turn)
            return {name: times.step_s(name) for name in times.rounds}

        ceiling = seconds(None)["nothing"]
        bits = 8 * model.gradient_bytes * ring_factor(self.num_ranks)
        high = bits / (ceiling * (min(1 / share, _SLOWEST_GUESS) - _FIRST_GUESS_HIDDEN))
        low = high / 2
        at_high, at_low = seconds(high), seconds(low)
        self.call(Rank.leave)
        rate = solve_rate(
            (high, at_high["fp32"]),
            (low, at_low["fp32"]),
            median([ceiling, at_high["nothing"], at_low["nothing"]]) / share,
        )
        return rate_text(rate)

    def _enter(self, model: Model, methods: Sequence[Attaching]) -> tuple[dict[str, float], dict[str, Any]]:
        """Build and warm up, over links without a limit; return the bytes that each method sends in a step, and its
        layers' compressors."""
        self.shape(None)
        arguments: dict[str, Any] = {"task": model.task, "methods": tuple(methods), **self._entering(model)}
        answer = self.call(Rank.enter, **arguments)[0]
        settled = {method.name: one for method, one in zip(methods, answer["settled"], strict=True)}
        plain = model.gradient_bytes * ring_factor(self.num_ranks)
        sent = {method.name: plain for method in methods if method.kind == "ddp"}
        sent |= {name: one["payload_bytes"] for name, one in settled.items() if one["payload_bytes"] is not None}
        return sent, {name: one["layers"] for name, one in settled.items() if one["layers"]}

    def _entering(self, model: Model) -> dict[str, Any]:
        """Return further arguments with which ranks build models."""
        return self._options

    def _turns(
        self,
        methods: Sequence[Attaching],
        entered: tuple[dict[str, float], dict[str, Any]],
        *,
        rounds: int,
        steps: int,
        rates: Sequence[str | None],
        on_turn: OnTurn,
    ) -> list[Times]:
        """Return the times over links of each rate, of models that were `entered`."""
        by_rate: list[Answers] = [{method.name: [] for method in methods} for _ in rates]
        for round_ in range(1 + rounds):
            for rate, answers in zip(rates, by_rate, strict=True):
                self.shape(rate)
                if len(rates) > 1:
                    # The turn that sends least makes connections adapt to the other rate.
                    self.call(Rank.turn, which=len(methods) - 1, steps=1)
                for which, method in self._order(methods, round_):
                    turn = self.call(Rank.turn, which=which, steps=steps)
                    if round_:
                        answers[method.name].append(turn)
                    on_turn(steps, method.title)
        return [_times(answers, *entered) for answers in by_rate]

    def _order(self, methods: Sequence[Attaching], round_: int) -> list[tuple[int, Attaching]]:
        """Return the methods in alternating order, so that none is always the first or the last."""
        order = list(enumerate(methods))
        return order if round_ % 2 else order[::-1]


Answers = dict[str, list[list[dict[str, Any]]]]
"""Answers of all ranks after each turn, over links of one rate, by method and round."""


def _times(answers: Answers, payload_bytes: dict[str, float], layers: dict[str, Any]) -> Times:
    def by_round(value: Callable[[Any], float]) -> dict[str, tuple[float, ...]]:
        return {name: tuple(map(value, rounds)) for name, rounds in answers.items()}

    def by_stage(value: Callable[[Any, str], Any]) -> dict[str, dict[str, Any]]:
        return {name: {s: value(rounds, s) for s in rounds[0][0]["stages"]} for name, rounds in answers.items()}

    return Times(
        by_round(lambda turn: max(rank["seconds"] for rank in turn)),
        payload_bytes,
        layers,
        by_stage(lambda rounds, stage: fmean(turn[0]["stages"][stage] for turn in rounds)),
        by_stage(lambda rounds, stage: tuple(min(rank["stages"][stage] for rank in turn) for turn in rounds)),
        by_round(lambda turn: fmean(rank["cpu_s"] for rank in turn)),
    )


def solve_rate(fast: tuple[float, float], slow: tuple[float, float], wanted_s: float) -> float:
    """Return the rate at which a step takes ``wanted_s``, from two (rate, seconds): seconds are ``a + b / rate``.

    Within an eighth of the slower and eight times the faster of the two rates, whatever was measured.
    """
    (high, short_s), (low, long_s) = fast, slow
    per_rate = (long_s - short_s) / (1 / low - 1 / high)
    left = wanted_s - (short_s - per_rate / high)
    rate = per_rate / left if per_rate > 0 and left > 0 else high
    return min(max(rate, low / 8), 8 * high)


def rate_text(rate_bps: float) -> str:
    """Return a rate of two digits, as the lab reads it: ``"290mbit"``."""
    return f"{float(f'{rate_bps / 1e6:.2g}'):g}mbit"


def shown_rate(rate: str) -> str:
    """Return a rate for people."""
    return format_rate(lab.parse_rate(rate))


def where(rate: str | None) -> str:
    """Return a link's description, for people."""
    return "over loopback" if rate is None else f"over {shown_rate(rate)}"


FoundT = TypeVar("FoundT")


@dataclass(frozen=True)
class SeparateRuns:
    """Methods timed in ``runs`` runs with new ranks in each, over emulated links with a round-trip time of ``rtt_s``.
    Steps are replayed (`experiments.framework.replay`) or, without ``computes``, computed."""

    place: Place
    emulated: bool
    num_ranks: int = NUM_RANKS
    runs: int = 5
    computes: dict[Model, Compute] | None = field(default_factory=dict)
    """Recorded computation of each model, once for all runs; None if steps are computed."""
    num_cores: int = field(default_factory=lambda: len(os.sched_getaffinity(0)))
    rtt_s: float = 0.0

    def times(self, model: Model, methods: Sequence[Attaching], **turns: Any) -> list[Times]:
        """Return what `Timing.times` does, with the median round of a run in place of a round; ``turns`` are its other
        arguments.

        Raises:
            RankFailedError: a rank did not make it.
        """
        found = self.each(lambda timing: timing.times(model, methods, **turns))
        return [joined(at_rate) for at_rate in zip(*found, strict=True)]

    def each(self, measure: Callable[[Timing], FoundT]) -> list[FoundT]:
        """Return the results of ``measure`` in each run."""
        found = []
        for run in range(self.runs):
            with PinnedTiming(self, run) as timing:
                found.append(measure(timing))
        return found

    def calibrate(self, model: Model, share: float, *, on_turn: OnTurn) -> str:
        """Run `Timing.calibrate` once."""
        with PinnedTiming(self, self.runs) as timing:
            return timing.calibrate(model, share, on_turn=on_turn)


class PinnedTiming(Timing):
    """One run of `SeparateRuns`: a `Timing` of ranks that each keep to a core; a context manager.

    Rates and seconds are those of ranks that have a core each. With more ranks than cores, time runs slower by a
    factor: links have that part of the rate and a longer round-trip time, and seconds are divided by it.
    """

    def __init__(self, runs: SeparateRuns, seed: int) -> None:
        """Prepare the run. ``seed``: seed of the order of turns."""
        self._cores = sorted(os.sched_getaffinity(0))[: runs.num_cores]
        self._slowdown = -(-runs.num_ranks // len(self._cores))
        # Where time runs slower, so does what is under way.
        links = {"rtt": f"{1e3 * runs.rtt_s * self._slowdown:g}ms"} if runs.rtt_s else None
        super().__init__(runs.place, emulated=runs.emulated, num_ranks=runs.num_ranks, links=links)
        self._computes, self._random = runs.computes, random.Random(seed)

    def __enter__(self) -> Self:
        super().__enter__()
        self.call(Rank.pin, cores=self._cores, slowdown=self._slowdown)
        return self

    def _entering(self, model: Model) -> dict[str, Any]:
        if self._computes is None:
            return self._options
        if model not in self._computes:
            self._computes[model] = Compute(**self.call(replicas.record, task=model.task)[0]["compute"])
        return {**self._options, "compute": self._computes[model]}

    def _order(self, methods: Sequence[Attaching], round_: int) -> list[tuple[int, Attaching]]:
        order = list(enumerate(methods))
        self._random.shuffle(order)
        return order

    def shape(self, rate: str | None) -> None:
        super().shape(None if rate is None else f"{lab.parse_rate(rate) // self._slowdown}bit")


def joined(runs: Sequence[Times]) -> Times:
    """Return one `Times` of separate runs: times by run, each the median of its rounds."""
    first = runs[0]

    def by_run(rounds_of: Callable[[Times], Mapping[str, Sequence[float]]]) -> dict[str, tuple[float, ...]]:
        return {name: tuple(median(rounds_of(run)[name]) for run in runs) for name in rounds_of(first)}

    return Times(
        by_run(lambda run: run.rounds),
        first.payload_bytes,
        first.layers,
        {
            name: {stage: fmean(run.stages[name][stage] for run in runs) for stage in stages}
            for name, stages in first.stages.items()
        },
        {name: by_run(lambda run, name=name: run.least_stages[name]) for name in first.least_stages},
        by_run(lambda run: run.cpu_s),
    )
