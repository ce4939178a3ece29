"""The instrument by which methods of sending gradients are timed: replayed steps, in several separate runs.

In every run new rank processes take turns in an order drawn for each round. Each method has one time a run, that
of its median round, so that an interval over runs contains whatever differs between them.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any, Self, TypeVar

from experiments.framework import replicas
from experiments.framework.rank import Rank
from experiments.framework.replay import Compute
from experiments.framework.timing import NUM_RANKS, OnTurn, Place, TimedMethod, Times, Timing
from experiments.tasks.models import Model
from thinwire_tools import lab

FoundT = TypeVar("FoundT")


@dataclass(frozen=True)
class SeparateRuns:
    """Methods timed in ``runs`` runs with new ranks in each. Steps are replayed (`experiments.framework.replay`) or,
    without ``computes``, computed."""

    place: Place
    emulated: bool
    num_ranks: int = NUM_RANKS
    runs: int = 5
    computes: dict[Model, Compute] | None = field(default_factory=dict)
    """Recorded computation of each model, once for all runs; None if steps are computed."""
    num_cores: int = field(default_factory=lambda: len(os.sched_getaffinity(0)))

    def times(
        self,
        model: Model,
        methods: Sequence[TimedMethod],
        *,
        rounds: int,
        steps: int,
        rates: Sequence[str | None],
        on_turn: OnTurn,
    ) -> list[Times]:
        """Return `Times` over links of each of ``rates`` with a run where `Timing.times` has a round: its median round.

        Raises:
            RankFailed: a rank did not make it.
        """
        turns: dict[str, Any] = {"rounds": rounds, "steps": steps, "rates": rates, "on_turn": on_turn}
        found = self.each(lambda timing: timing.times_by_rate(model, methods, **turns))
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
    factor: links have that part of the rate, and seconds are divided by it.
    """

    def __init__(self, runs: SeparateRuns, seed: int) -> None:
        """Prepare the run. ``seed``: seed of the order of turns."""
        super().__init__(runs.place, emulated=runs.emulated, num_ranks=runs.num_ranks)
        self._computes, self._random = runs.computes, random.Random(seed)
        self._cores = sorted(os.sched_getaffinity(0))[: runs.num_cores]
        self._slowdown = -(-runs.num_ranks // len(self._cores))

    def __enter__(self) -> Self:
        super().__enter__()
        self.call(Rank.pin, cores=self._cores, slowdown=self._slowdown)
        return self

    def _entering(self, model: Model) -> dict[str, Any]:
        if self._computes is None:
            return {}
        if model not in self._computes:
            self._computes[model] = Compute.from_json(self.call(replicas.record, task=model.task)[0]["compute"])
        return {"compute": self._computes[model]}

    def _order(self, methods: Sequence[TimedMethod], round_: int) -> list[tuple[int, TimedMethod]]:
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
