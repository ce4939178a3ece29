"""The policy ``auto``: compression that makes steps shortest on the present links, within an error, or none."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

import numpy as np

from thinwire.arguments import check_number
from thinwire.collectives import Algorithm, Hierarchical, ScatterReduceAllGather, parse_algorithm
from thinwire.compressors import Coded, Compressor, Raw, parse
from thinwire.plan import Plan
from thinwire.plan.forecast import (
    FEW_BITS,
    Bucket,
    Links,
    Pace,
    coded_transfer,
    hiding_interval,
    local_step,
    native_step,
    planned_step,
)
from thinwire.policies.budget import cheapest_plans
from thinwire.policies.candidates import LayerCandidates, usable_gradients, with_error_feedback
from thinwire.policies.families import check_contracting
from thinwire.policies.policy import Evidence, Policy, Proposal, StepTime

_ALIKE = 0.25
"""Relative change of a link up to which earlier measurements on it remain valid."""
_BOUND = 0.25
"""Share of computing that communication may add to the shortest step before other ways of training are named."""
_AHEAD = 0.97
"""Ratio of an algorithm's step to that of the present one, and of the one named before, below which it is chosen."""


@dataclass(frozen=True, kw_only=True)
class Auto(Policy):
    """Chooses the compression that makes steps shortest, from measurements while a model trains.

        wire = thinwire.compress(model, "auto")
        wire = thinwire.compress(model, thinwire.policies.Auto(error=0.1, every=200))

    The first ``warmup`` steps are exact, as without thinwire, and are watched: when buckets become ready, how long
    steps take. Then, and before each later decision, all ranks measure their links and codecs; of all plans whose error
    is at most ``error`` the one with the shortest predicted step is taken, if that is shorter than an uncompressed
    one by ``gain``. If not, or if steps turn out no faster, gradients are sent uncompressed until the next decision.

    It also chooses what is sent over which link: exact or in 8 bits inside a node and in fewer bits between nodes, less
    by slow links than by fast ones.
    """

    every: int = 500
    """Number of steps between two decisions."""
    warmup: int = 20
    window: int | None = 10
    lag: int | None = 5
    error: float = 0.15
    """Bound on the relative L2 error of all gradients together. Min-max in 4 bits loses 0.14 of those of a GPT."""
    gain: float = 0.05
    """Share of an uncompressed step by which a compressed one must be faster."""
    candidates: tuple[str, ...] = (*(f"minmax(bits={bits}, bucket=128)" for bits in (2, 3, 4, 5, 6, 8)), "cast(bf16)")
    """Compressors that a layer may get other than raw. If one of them wants error feedback, all get it."""
    algorithms: tuple[str, ...] = (
        "sra",
        "sra(rates=measured)",
        "hierarchical(inside=dense)",
        "hierarchical(inside=minmax(bits=8, bucket=128))",
        "hierarchical(inside=same)",
    )
    """Collective algorithms to choose from, where `thinwire.compress` was given none; of two that take about as long,
    the first. Hierarchies count where several ranks share a node, measured rates where links differ by a quarter."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("error", self.error, above=0, below=1)
        check_number("gain", self.gain, low=0, below=1)
        if not isinstance(self.candidates, tuple) or not self.candidates:
            raise ValueError(f"candidates must be a tuple of specs, not {self.candidates!r}")
        if self.warmup <= self.lag_steps:
            raise ValueError(
                f"warmup={self.warmup} must be more than lag={self.lag_steps}: the first decision is made within it"
            )
        check_contracting(f"candidates={self.candidates}", self._compressors())
        if not isinstance(self.algorithms, tuple) or not self.algorithms:
            raise ValueError(f"algorithms must be a tuple of specs, not {self.algorithms!r}")
        for algorithm in self.considers:
            star = isinstance(algorithm, ScatterReduceAllGather) and algorithm.rates in ("", "measured")
            if not star and not (isinstance(algorithm, Hierarchical) and algorithm.across == "slices"):
                raise ValueError(
                    f"{algorithm} among algorithms: steps are predicted for sra, sra(rates=measured) and "
                    "hierarchical(inside=...); give another one as thinwire.Network(algorithm=...)"
                )

    @property
    def considers(self) -> tuple[Algorithm, ...]:
        return tuple(map(parse_algorithm, self.algorithms))

    @property
    def memory_size(self) -> int:
        return 4

    def to_measure(self, reference: Mapping[str, Compressor]) -> frozenset[Compressor]:
        compressors = self._compressors()
        coded = [c for c in compressors if isinstance(c, Coded)]
        inner = [t.inner(c) for t in self.considers if isinstance(t, Hierarchical) for c in coded]
        return frozenset({*compressors, *inner, parse(FEW_BITS), Raw()})

    def _compressors(self) -> tuple[Compressor, ...]:
        return with_error_feedback([parse(spec) for spec in self.candidates])

    def _algorithms(self, evidence: Evidence, links: Links) -> list[Algorithm]:
        """Return the collective algorithms that suit this world and these links."""
        if evidence.asked != ScatterReduceAllGather():
            return [evidence.algorithm]
        plain = all(c.traits.plain_sum for c in self._compressors() if isinstance(c, Coded))
        algorithms: list[Algorithm] = []
        for algorithm in self.considers:
            placed = links.adapted(algorithm)
            if placed is not None and (placed.is_star or plain):
                algorithms.append(_settled(placed, evidence.algorithm))
        return algorithms or [evidence.algorithm]

    def propose(self, evidence: Evidence) -> Proposal:
        started = time.perf_counter()
        off: dict[str, Compressor] = dict.fromkeys(evidence.reference, Raw())
        if evidence.links is None or evidence.num_ranks < 2:
            return Proposal(off, note="off: there are no links to measure")
        if not evidence.steps:
            return Proposal(dict(evidence.present), note="no step was timed: the plan stays", memory=evidence.memory)
        # The cost of traffic is the same on both sides of the comparison; only codecs add to it.
        links = replace(evidence.links, native_cpu=0.0, exchange_cpu=0.0)
        now = _StepModel(middle_pace(evidence.steps), links, evidence.codec_s, evidence.algorithm)
        table = self._table(evidence)
        errors_s = time.perf_counter() - started
        models = [replace(now, algorithm=algorithm) for algorithm in self._algorithms(evidence, links)]
        best_plans = [
            (model, self._best(model, off, table))
            for model in sorted(models, key=lambda model: model.algorithm != now.algorithm)
        ]
        steps = [model.step_s(plan) for model, plan in best_plans]
        (model, best), step = next(
            pair for pair in zip(best_plans, steps, strict=True) if _AHEAD * pair[1] <= min(steps)
        )
        note, on, memory = self._decide(evidence, now, step)
        chosen = best if on else off
        if on and model.algorithm != ScatterReduceAllGather():
            note += f", by {model.algorithm}"
        rows = [row for row, _ in table]
        errors = {c.name: float(c.errors[c.candidates.index(chosen[c.name])]) for c in rows}
        note += f"; {Plan(chosen).summary()}, error {_relative(errors, rows):.3f} of {self.error:g}" if on else ""
        note += model.alternatives(step, evidence.reference)
        solve_s = time.perf_counter() - started - errors_s
        everything = dict.fromkeys(evidence.reference, memory)
        return Proposal(chosen, errors, {}, note, everything, errors_s, solve_s, model.algorithm if on else None)

    def _best(
        self, model: _StepModel, off: Mapping[str, Compressor], table: Sequence[tuple[LayerCandidates, tuple[int, ...]]]
    ) -> dict[str, Compressor]:
        priced = [
            replace(row, costs=np.array([model.layer_s(c, shape) for c in row.candidates], dtype=np.float64))
            for row, shape in table
        ]
        return min((dict(off) | plan for plan in self._plans(priced)), key=model.step_s)

    def _table(self, evidence: Evidence) -> list[tuple[LayerCandidates, tuple[int, ...]]]:
        """Return each layer's candidates with their errors, not yet priced, and its shape."""
        gradients = usable_gradients(evidence.reference, evidence.gradients)
        candidates = self._compressors()
        return [
            (
                LayerCandidates.evaluate(name, gradient, candidates, Raw(), lambda name, c, shape: 0.0),
                tuple(gradient.shape),
            )
            for name, gradient in gradients.items()
        ]

    def _plans(self, table: Sequence[LayerCandidates]) -> list[dict[str, Compressor]]:
        """Return plans within the error: the cheapest of all candidates, and of each kind alone."""
        errors, costs = [layer.errors for layer in table], [layer.costs for layer in table]
        budget = self.error**2 * sum(layer.norm**2 for layer in table)
        return [
            {layer.name: layer.candidates[k] for layer, k in zip(table, picked, strict=True)}
            for picked in cheapest_plans(table, errors, costs, budget)
        ]

    def _decide(self, evidence: Evidence, model: _StepModel, predicted: float) -> tuple[str, bool, tuple[float, ...]]:
        """Return the note, whether to compress, and what to remember: steps measured raw and compressed, each with
        the seconds a byte of an all-reduce took then. ``of``: with the collective algorithm in use."""
        raw_s, raw_link, compressed_s, compressed_link = next(iter(evidence.memory.values()), (0.0,) * 4)
        link = model.links.native.per_byte
        now = median(step.seconds for step in evidence.steps)
        if all(isinstance(c, Raw) for c in evidence.present.values()) or not evidence.steps[-1].compressed:
            raw_s, raw_link = now, link
            if _alike(link, compressed_link):
                # Measurements of an earlier trial on such a link are better than predictions.
                predicted = max(predicted, compressed_s)
        else:
            compressed_s, compressed_link = now, link
            # The model's error in the present plan is also its error in others.
            predicted *= now / model.step_s(evidence.present)
        uncompressed = raw_s if _alike(link, raw_link) else native_step(model.pace, model.links)
        on = predicted < (1 - self.gain) * uncompressed
        note = (
            f"{'on' if on else 'off'}: a step takes {1e3 * uncompressed:.0f} ms uncompressed and would take "
            f"{1e3 * predicted:.0f} ms compressed, links carry {8e-6 / max(link, 1e-12):.0f} Mbit/s"
        )
        return note, on, (raw_s, raw_link, compressed_s, compressed_link)


@dataclass(frozen=True)
class _StepModel:
    """Steps at one pace, over links as they were measured last."""

    pace: Pace
    links: Links
    codec_s: Mapping[Compressor, float]
    algorithm: Algorithm

    def step_s(self, plan: Mapping[str, Compressor]) -> float:
        """Return the seconds of a step with a plan of the layers that may be compressed."""
        if all(isinstance(c, Raw) for c in plan.values()):
            return native_step(self.pace, self.links)
        return planned_step(self.pace, self.links, self._layers(plan), self.codec_s, self.algorithm)

    def _layers(self, plan: Mapping[str, Compressor]) -> dict[str, Compressor]:
        return {name: plan.get(name, Raw()) for bucket in self.pace.buckets for name, _ in bucket.layers}

    def alternatives(self, step_s: float, compressible: Iterable[str]) -> str:
        """Return a note on other ways of training, if the best step of ``step_s`` leaves them much to gain; else ""."""
        compute_s = self.pace.compute_s
        if step_s <= (1 + _BOUND) * compute_s:
            return ""
        plan = dict.fromkeys(compressible, parse(FEW_BITS))
        layers = self._layers(plan)
        every = hiding_interval(self.pace, self.links, layers, self.codec_s)
        rare_s = local_step(self.pace, self.links, layers, self.codec_s, every)
        return (
            f"; {1 - compute_s / step_s:.0%} of the shortest step is communication still: with "
            f"thinwire.optim.CompressedAdamW in 2 bits a step would take {1e3 * self.step_s(plan):.0f} ms, with "
            f"thinwire.local.DiLoCo in 2 bits, every={every}, {1e3 * rare_s:.0f} ms"
        )

    def layer_s(self, compressor: Compressor, shape: Sequence[int]) -> float:
        """Return the seconds that a layer adds to its bucket. Latencies are counted for the bucket."""
        alone = Bucket(0.0, (("", tuple(shape)),))
        transfer = coded_transfer(alone, {"": compressor}, self.links, self.codec_s, self.algorithm)
        if self.pace.shared:
            return transfer.after_s + self.pace.shared * transfer.codec_s
        return transfer.after_s


def middle_pace(steps: Sequence[StepTime]) -> Pace:
    """Return the median of steps whose buckets are those of the last one."""
    last = steps[-1].pace
    alike = [s.pace for s in steps if [b.layers for b in s.pace.buckets] == [b.layers for b in last.buckets]]
    buckets = tuple(
        replace(bucket, ready_s=median(pace.buckets[i].ready_s for pace in alike))
        for i, bucket in enumerate(last.buckets)
    )
    return replace(last, buckets=buckets, compute_s=median(pace.compute_s for pace in alike))


def _settled(algorithm: Algorithm, present: Algorithm) -> Algorithm:
    """Return the collective algorithm; the present one, if that has about the same rates."""
    if not isinstance(algorithm, ScatterReduceAllGather) or not isinstance(present, ScatterReduceAllGather):
        return algorithm
    now, then = algorithm.rates, present.rates
    if isinstance(now, str) or isinstance(then, str):
        return algorithm
    return present if all(_alike(*pair) for pair in zip(now, then, strict=True)) else algorithm


def _alike(link: float, then: float) -> bool:
    return then > 0 and abs(link / then - 1) <= _ALIKE


def _relative(errors: Mapping[str, float], table: Sequence[LayerCandidates]) -> float:
    norm = sum(layer.norm**2 for layer in table)
    return float(np.sqrt(sum(errors.values()) / norm)) if norm else 0.0
