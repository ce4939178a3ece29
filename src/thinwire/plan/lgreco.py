"""L-GreCo: the smallest plan that errs no more than one that is known to train well (thesis, chapter 4)."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from thinwire.compressors import Compressor, Raw, bare, check_choice, check_int, parse
from thinwire.plan import allocate
from thinwire.plan.allocate import Array
from thinwire.plan.choices import Choices, Price, dressed, with_gradient
from thinwire.plan.cost import Speeds, sent_bytes
from thinwire.plan.family import family, strength
from thinwire.plan.policy import Evidence, Policy, Proposal, check_alpha
from thinwire.plan.timing import seconds_per_byte

Objective = Literal["bytes", "priority", "time", "link"]
_CURVED = {"squared": 1.0, "l2": 0.5}


@dataclass(frozen=True, kw_only=True)
class LGreco(Policy):
    """Minimises what is sent, subject to the error of the reference (thesis, Algorithm 4.1).

        wire = thinwire.compress(model, "topk(density=0.01)", adapt=thinwire.LGreco(every=500))

    The reference is what the rules name for each layer, or another policy's choice. Every candidate of every layer is
    tried on the sum of some steps' gradients, without error feedback; of all plans whose errors sum up to no more than
    the reference's, the cheapest is taken. Layers that had no gradient keep their reference.
    """

    families: tuple[str, ...] = ()
    """Specs whose families are the candidates (`thinwire.plan.family`); none: the family of each layer's reference. Of
    several, each layer gets the best one (the thesis's future work), with error feedback around all if one wants it."""
    bounds: tuple[float, float] | None = None
    """Of the bits, rank or density, instead of the family's own."""
    step: float | None = None
    """Between candidates."""
    solver: Literal["dp", "exact"] = "dp"
    """The thesis's dynamic programme, or an integer programme solved to the optimum (needs scipy)."""
    steps: int = allocate.STEPS
    """D of the dynamic programme."""
    error: Literal["squared", "l2"] = "squared"
    """What is summed over layers: squared L2 norms of errors, which make up that of the whole gradient, or norms."""
    alpha: float = 1.0
    """Times the reference's error that the plan may have."""
    objective: Objective = "bytes"
    """``bytes``; ``priority`` weighs those of later buckets more (thesis, B.1); ``time`` weighs each bucket's by the
    time that they were measured to take, after a few plans tried for that (4.5); ``link`` minimises the predicted time
    of encoding, sending at the measured rate, and decoding, raw layers included."""
    reference: Policy | None = None
    """Whose choice sets the error to be kept: `Accordion`'s, say (4.6.3)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, choices in (("solver", ("dp", "exact")), ("error", tuple(_CURVED))):
            check_choice(name, getattr(self, name), choices)
        check_choice("objective", self.objective, ("bytes", "priority", "time", "link"))
        check_alpha(self.alpha)
        check_int("steps", self.steps, 1)
        if not isinstance(self.families, tuple):
            raise TypeError(f"families must be a tuple of specs, not {self.families!r}")
        if not (self.reference is None or isinstance(self.reference, Policy)):
            raise TypeError(f"reference must be a policy, such as accordion(), not {self.reference!r}")
        for spec in self.families:
            family(parse(spec), self.bounds, self.step)

    @property
    def memory_size(self) -> int:
        return 0 if self.reference is None else self.reference.memory_size

    @property
    def wants_syncs(self) -> bool:
        return self.objective == "time"

    def to_time(self, reference: Mapping[str, Compressor]) -> frozenset[Compressor]:
        if self.objective != "link":
            return frozenset()
        timed: set[Compressor] = set()
        for compressor in set(reference.values()):
            found = self._candidates(compressor)
            # Speeds hardly depend on the strength: three of each kind stand for all.
            for kind in {_kind(c) for c in found}:
                alike = sorted((c for c in found if _kind(c) == kind), key=_strength)
                timed |= {alike[0], alike[len(alike) // 2], alike[-1]}
        return frozenset(timed)

    def check(self, reference: Mapping[str, Compressor], shapes: Mapping[str, Sequence[int]]) -> None:
        for compressor in set(reference.values()):
            self._candidates(compressor)
        if self.reference is not None:
            self.reference.check(reference, shapes)

    def propose(self, evidence: Evidence) -> Proposal:
        started = time.perf_counter()
        base, memory = evidence.reference, evidence.memory
        if self.reference is not None:
            chosen = self.reference.propose(evidence)
            base, memory = chosen.layers, chosen.memory
        table = self._table(evidence, base)
        errors_s = time.perf_counter() - started
        note, picked = self._solve(table)
        layers = dict(base)
        layers |= {of.name: of.candidates[k] for of, k in zip(table, picked, strict=True)}
        return Proposal(
            layers,
            {of.name: float(of.errors[k]) for of, k in zip(table, picked, strict=True)},
            {of.name: float(of.errors[of.reference]) for of in table},
            note,
            memory,
            errors_s,
            time.perf_counter() - started - errors_s,
        )

    def _candidates(self, reference: Compressor) -> tuple[Compressor, ...]:
        if not self.families:
            return family(reference, self.bounds, self.step)
        found = [member for spec in self.families for member in family(parse(spec), self.bounds, self.step)]
        return dressed([*found, reference])

    def _table(self, evidence: Evidence, base: Mapping[str, Compressor]) -> list[Choices]:
        gradients = with_gradient(base, evidence.gradients)
        price = self._price(evidence)
        candidates: dict[Compressor, tuple[Compressor, ...]] = {}
        found = []
        for name, gradient in gradients.items():
            default = evidence.reference[name]
            if default not in candidates:
                candidates[default] = self._candidates(default)
                if self.objective == "link":
                    candidates[default] += (Raw(),)
            reference = base[name]
            if self.families:
                # With error feedback where the candidates have it: the last of them, that is.
                reference = dressed([*candidates[default], reference])[-1]
            of = Choices.of(name, gradient, candidates[default], reference, price)
            if of.open:
                found.append(of)
        return found

    def _price(self, evidence: Evidence) -> Price:
        num_ranks = max(2, evidence.num_ranks)
        speeds = evidence.speeds
        if self.objective == "link" and speeds is not None:
            return lambda name, c, shape: _link_seconds(speeds, c, shape)
        weights = self._weights(evidence)
        # Of a layer that no bucket is known of: as those of the others, in the mean.
        usual = sum(weights.values()) / len(weights) if weights else 1.0

        def price(name: str, compressor: Compressor, shape: Sequence[int]) -> float:
            times = weights.get(name, usual) * evidence.times.get(name, 1.0)
            return sent_bytes(compressor, shape, num_ranks) * times

        return price

    def _weights(self, evidence: Evidence) -> dict[str, float]:
        """By layer, what one of its bytes counts."""
        of = evidence.bucket_of
        if self.objective == "priority":
            return {name: 1.0 + bucket for name, bucket in of.items()}
        if self.objective != "time" or not of:
            return {}
        per_byte = seconds_per_byte(evidence.syncs)
        if per_byte is None or not any(per_byte):
            # Nothing can be told from plans that are all alike: try one that favours other buckets, within the budget.
            draw = random.Random(evidence.step)
            per_byte = [4.0 ** draw.uniform(-1, 1) for _ in range(1 + max(of.values()))]
        least = 1e-3 * max(per_byte)
        return {name: max(per_byte[b], least) for name, b in of.items() if b < len(per_byte)}

    def _solve(self, table: Sequence[Choices]) -> tuple[str, list[int]]:
        """What is to be said, and which candidate each layer gets."""
        reference = [of.reference for of in table]
        if not table:
            return "no layer had a gradient: the reference stays", reference
        errors = [of.errors ** _CURVED[self.error] for of in table]
        costs = [of.costs for of in table]
        budget = self.alpha * allocate.total(errors, reference)
        try:
            picked = self._best(table, errors, costs, budget)
        except allocate.Infeasible as why:
            return f"{why}: the reference stays", reference
        if allocate.total(errors, picked) > budget * (1 + 1e-9):
            return "the plan found is not within the error: the reference stays", reference
        if allocate.total(costs, picked) >= allocate.total(costs, reference) and self.alpha <= 1:
            return "no plan is smaller at no more error: the reference stays", reference
        return "", picked

    def _best(
        self, table: Sequence[Choices], errors: Sequence[Array], costs: Sequence[Array], budget: float
    ) -> list[int]:
        """Of all candidates and of each kind alone: errors that are rounded could let a part win over the whole."""
        plans = [self._picked(errors, costs, budget)]
        kinds = dict.fromkeys(_kind(c) for of in table for c in of.candidates if not isinstance(c, Raw))
        for kind in kinds if self.solver == "dp" and len(kinds) > 1 else ():
            kept = [
                [k for k, c in enumerate(of.candidates) if k == of.reference or _kind(c) in (kind, Raw)] for of in table
            ]
            try:
                found = self._picked(_at(errors, kept), _at(costs, kept), budget)
            except allocate.Infeasible:
                continue
            plans.append([ks[k] for ks, k in zip(kept, found, strict=True)])
        return min(plans, key=lambda plan: allocate.total(costs, plan))

    def _picked(self, errors: Sequence[Array], costs: Sequence[Array], budget: float) -> list[int]:
        if self.solver == "exact":
            return allocate.exact(errors, costs, budget)
        return allocate.dynamic_programme(errors, costs, budget, self.steps)


def _at(values: Sequence[Array], kept: Sequence[Sequence[int]]) -> list[Array]:
    return [of[list(ks)] for of, ks in zip(values, kept, strict=True)]


def _kind(compressor: Compressor) -> type[Compressor]:
    return type(bare(compressor))


def _strength(compressor: Compressor) -> float:
    """`strength`; 0 of a reference that has none."""
    try:
        return strength(compressor)
    except ValueError:
        return 0.0


def _link_seconds(speeds: Speeds, compressor: Compressor, shape: Sequence[int]) -> float:
    """Seconds that a layer takes: those of the nearest compressor whose speed was measured, and of its bytes."""
    codec_s = 0.0
    if not isinstance(compressor, Raw):
        alike = [c for c in speeds.codec_s if _kind(c) == _kind(compressor)]
        if alike:
            nearest = min(alike, key=lambda c: abs(_strength(c) - _strength(compressor)))
            codec_s = speeds.codec_s[nearest]
    return codec_s * int(np.prod(shape)) + speeds.wire_seconds(compressor, shape)
