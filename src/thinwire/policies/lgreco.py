"""L-GreCo: the cheapest plan whose error stays within that of a plan known to train well (thesis, chapter 4)."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Literal, get_args

import numpy as np

from thinwire.arguments import check_choice, check_int, check_type
from thinwire.compressors import Compressor, parse
from thinwire.plan.cost import Speeds
from thinwire.policies.budget import STEPS, BudgetedPolicy, InfeasibleError, cheapest_plans, is_raw, kind_of, total
from thinwire.policies.candidates import Array, LayerCandidates, Price, with_error_feedback
from thinwire.policies.families import check_contracting, contracts, family, parameter_value
from thinwire.policies.policy import Evidence, Policy, Proposal, Sync

_PLANS_PER_BUCKET = 2
_MOST_PLANS_PER_BUCKET = 4
"""Largest number of plans to try for each bucket: some turn out like others, and more would not help."""
_LEAST_STEPS = 3
_SKIPPED_STEPS = 2
"""Number of steps of a new plan that do not count, because they allocate messages."""


def seconds_per_byte(syncs: Sequence[Sync]) -> list[float] | None:
    """Return the seconds that a byte of each bucket adds from the first bucket's start to the last one's end.

    A non-negative linear regression with a constant, of the median time of every plan that was seen for long enough.
    None as long as too few different plans were: two for each bucket.
    """
    seen: dict[tuple[int, ...], list[float]] = {}
    for sync in syncs:
        seen.setdefault(sync.bucket_bytes, []).append(sync.seconds)
    # DDP forms other buckets after the first steps: only those count that it has now.
    num_buckets = len(syncs[-1].bucket_bytes) if syncs else 0
    plans = {
        sizes: median(seconds[_SKIPPED_STEPS:])
        for sizes, seconds in seen.items()
        if len(sizes) == num_buckets and len(seconds) >= _SKIPPED_STEPS + _LEAST_STEPS
    }
    if not num_buckets or len(plans) < _PLANS_PER_BUCKET * num_buckets:
        return None
    from scipy.optimize import nnls

    sizes = np.array(list(plans), dtype=np.float64)
    columns = np.concatenate([sizes / sizes.max(), np.ones((len(plans), 1))], axis=1)
    coefficients, _ = nnls(columns, np.array(list(plans.values())))
    return [float(value) / float(sizes.max()) for value in coefficients[:-1]]


Objective = Literal["bytes", "error", "time", "link"]


@dataclass(frozen=True, kw_only=True)
class LGreco(BudgetedPolicy):
    """A policy that minimizes the bytes sent, subject to the error of the reference (thesis, Algorithm 4.1).

        wire = thinwire.compress(model, "topk(density=0.01)", adapt=thinwire.policies.LGreco(every=500))

    The reference is what the rules name for each layer, or another policy's choice. Every candidate of every layer is
    tried on the sum of some steps' gradients, without error feedback; of all plans within the budget of error the
    cheapest is taken. Layers that had no gradient keep their reference.
    """

    families: tuple[str, ...] = ()
    """Specs whose families are the candidates; if empty, the family of each layer's reference. Of several, each layer
    gets the best one (the thesis's future work), with error feedback around all if one wants it."""
    steps: int = STEPS
    """Number of steps of the dynamic program: the thesis's D."""
    objective: Objective = "bytes"
    """``bytes``; ``error`` minimizes the error instead, subject to ``alpha`` times the bytes of the reference;
    ``time`` weighs the bytes of each bucket by the time that they were measured to take, after up to four plans for
    each bucket, tried for 50 steps each (4.5); ``link`` minimizes the predicted time of encoding, sending at the
    measured rate, and decoding, with raw layers among the candidates."""
    reference: Policy | None = None
    """Policy whose choice sets the error to be kept, such as `Accordion` (4.6.3)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("objective", self.objective, get_args(Objective))
        check_int("steps", self.steps, 1)
        check_type("families", self.families, tuple, "a tuple of specs")
        check_type("reference", self.reference, Policy | None, "a policy, such as accordion()")
        for spec in self.families:
            family(parse(spec), self.bounds, self.step)

    @property
    def memory_size(self) -> int:
        return 0 if self.reference is None else self.reference.memory_size

    @property
    def needs_syncs(self) -> bool:
        return self.objective == "time"

    def to_time(self, reference: Mapping[str, Compressor]) -> frozenset[Compressor]:
        if self.objective != "link":
            return frozenset()
        timed: set[Compressor] = set()
        for compressor in set(reference.values()):
            candidates = [c for c in self.family(compressor) if not is_raw(c)]
            # Speeds hardly depend on the parameter: three of each kind stand for all.
            for kind in {kind_of(c) for c in candidates}:
                alike = sorted((c for c in candidates if kind_of(c) == kind), key=_value)
                timed |= {alike[0], alike[len(alike) // 2], alike[-1]}
        return frozenset(timed)

    def check(self, reference: Mapping[str, Compressor], shapes: Mapping[str, Sequence[int]]) -> None:
        super().check(reference, shapes)
        asked = [parse(spec) for spec in self.families]
        if self.bounds is not None:
            asked = [member for compressor in asked for member in family(compressor, self.bounds, self.step)]
        for compressor in set(reference.values()):
            where = f"families={self.families}, bounds={self.bounds}"
            check_contracting(where, with_error_feedback([*asked, compressor])[:-1])
        if self.reference is not None:
            self.reference.check(reference, shapes)

    def family(self, reference: Compressor) -> tuple[Compressor, ...]:
        if not self.families:
            return super().family(reference)
        members = [member for spec in self.families for member in family(parse(spec), self.bounds, self.step)]
        *wrapped, reference = with_error_feedback([*members, reference])
        return (*filter(contracts, wrapped), reference)

    def base(self, evidence: Evidence) -> tuple[Mapping[str, Compressor], Mapping[str, tuple[float, ...]]]:
        if self.reference is None:
            return super().base(evidence)
        chosen = self.reference.propose(evidence)
        return chosen.layers, chosen.memory

    def propose(self, evidence: Evidence) -> Proposal:
        proposal = super().propose(evidence)
        if self.objective != "time" or _num_buckets(evidence) < 2 or _times(evidence) is not None:
            return proposal
        if _tries(evidence):
            return replace(proposal, trial=True, note=f"plan {evidence.trials + 1} of those tried to time buckets")
        note = "the plans that were tried do not tell what a byte of each bucket takes: all bytes count alike"
        return replace(proposal, note=f"{proposal.note}; {note}" if proposal.note else note)

    def candidates(
        self, evidence: Evidence, base: Mapping[str, Compressor], name: str, shape: Sequence[int]
    ) -> tuple[Compressor, tuple[Compressor, ...]]:
        if name not in base and self.families:
            raw = self.raw(evidence, name)
            return raw, (*self.family(evidence.unsuited[name]), raw)
        reference, candidates = super().candidates(evidence, base, name, shape)
        if self.families:
            # The reference has error feedback where the candidates do, so that residuals survive a change.
            reference = with_error_feedback([*candidates, reference])[-1]
        if self.objective == "link":
            candidates = (*candidates, self.raw(evidence, name))
        return reference, candidates

    def price(self, evidence: Evidence) -> Price:
        speeds = evidence.speeds
        if self.objective == "link" and speeds is not None:
            return lambda name, compressor, shape: _link_seconds(speeds, compressor, shape)
        sent = super().price(evidence)
        weights = self._weights(evidence)
        # A layer whose bucket is not known weighs as much as the others do on average.
        average = sum(weights.values()) / len(weights) if weights else 1.0
        return lambda name, compressor, shape: weights.get(name, average) * sent(name, compressor, shape)

    def _weights(self, evidence: Evidence) -> dict[str, float]:
        """Return the cost of one byte of each layer."""
        bucket_of = evidence.bucket_of
        if self.objective != "time" or not bucket_of:
            return {}
        per_byte = _times(evidence)
        if per_byte is None:
            if not _tries(evidence):
                return {}
            # Plans that are all alike show nothing: try one that favors other buckets, within the budget.
            draw = random.Random(evidence.step)
            per_byte = [4.0 ** draw.uniform(-1, 1) for _ in range(_num_buckets(evidence))]
        least = 1e-3 * max(per_byte)
        return {name: max(per_byte[b], least) for name, b in bucket_of.items() if b < len(per_byte)}

    def choose(self, evidence: Evidence, layers: Sequence[LayerCandidates]) -> list[int]:
        reference = [layer.reference for layer in layers]
        errors = [self.layer_errors(layer) for layer in layers]
        costs = [layer.costs for layer in layers]
        if self.objective == "error":
            # The problem is the same with errors and costs exchanged.
            picked = self._best(layers, costs, errors, self.alpha * total(costs, reference))
            if total(errors, picked) >= total(errors, reference) and self.alpha == 1:
                raise InfeasibleError("no plan errs less in no more bytes")
            return picked
        budget = self.budget(layers)
        picked = self._best(layers, errors, costs, budget)
        # The reference can stay only where it is within the budget itself.
        if total(costs, picked) >= total(costs, reference) and self.alpha == 1:
            raise InfeasibleError("no plan is smaller at no more error")
        return picked

    def _best(
        self, layers: Sequence[LayerCandidates], errors: Sequence[Array], costs: Sequence[Array], budget: float
    ) -> list[int]:
        plans = cheapest_plans(layers, errors, costs, budget, self.steps)
        return min(plans, key=lambda plan: total(costs, plan))


def _num_buckets(evidence: Evidence) -> int:
    return 1 + max(evidence.bucket_of.values(), default=-1)


def _times(evidence: Evidence) -> list[float] | None:
    """Return the measured seconds of a byte of each bucket; None if they are not known."""
    per_byte = seconds_per_byte(evidence.syncs)
    return per_byte if per_byte is not None and any(per_byte) else None


def _tries(evidence: Evidence) -> bool:
    """Whether to try another plan, as long as times are not known. One bucket has nothing to compare."""
    num_buckets = _num_buckets(evidence)
    return num_buckets > 1 and evidence.trials < _MOST_PLANS_PER_BUCKET * num_buckets


def _value(compressor: Compressor) -> float:
    """Return `parameter_value`; 0 of a reference without one."""
    try:
        return parameter_value(compressor)
    except ValueError:
        return 0.0


def _link_seconds(speeds: Speeds, compressor: Compressor, shape: Sequence[int]) -> float:
    """Return the predicted seconds of a layer, with the codec time of the nearest compressor that was measured."""
    codec_s = 0.0
    if not is_raw(compressor):
        alike = [c for c in speeds.codec_s if kind_of(c) == kind_of(compressor)]
        if alike:
            nearest = min(alike, key=lambda c: abs(_value(c) - _value(compressor)))
            codec_s = speeds.codec_s[nearest]
    return codec_s * math.prod(shape) + speeds.wire_seconds(compressor, shape)
