"""Choices that keep the compression error within a budget: L-GreCo's problem (thesis, sections 3.6 and 4.4)."""

from __future__ import annotations

import math
import time
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from thinwire.arguments import check_choice, check_number
from thinwire.compressors import Compressor, Raw, Wrapper, unwrap
from thinwire.plan.cost import sent_bytes
from thinwire.plan.sites import SITES
from thinwire.policies.candidates import (
    Array,
    LayerCandidates,
    Price,
    fed_like,
    squared_errors,
    usable_gradients,
    with_error_feedback,
)
from thinwire.policies.families import contracts, family, members_that_fit
from thinwire.policies.policy import Evidence, Policy, Proposal

Adjust = Callable[[str, Compressor], Compressor]
"""A function that changes a candidate of a layer of this name."""

STEPS = 10_000
"""Number of steps into which the budget is cut: the thesis's D."""


@dataclass(frozen=True, kw_only=True)
class BudgetedPolicy(Policy):
    """A policy that chooses one candidate a layer, so that the error stays within ``alpha`` times the reference's.

    The reference is what the rules name for each layer, and the candidates are its family
    (`thinwire.policies.family`). A layer that the rules leave raw because its shape does not suit their compressor
    may get another one of its family: a lower rank. Errors are taken on the sum of some steps' gradients, without error
    feedback.
    """

    bounds: tuple[float, float] | None = None
    """Range of the bits, rank or density of candidates, in place of the family's own."""
    step: float | None = None
    """Distance of two candidates, in the same units."""
    error: Literal["l2", "squared"] | Callable[[str, Compressor], float] = "l2"
    """The error of a plan. ``l2`` is the sum over layers of the L2 norms of their errors, as the thesis has it (section
    4.4); ``squared`` is the L2 norm of the error of the whole gradient, whose square is the sum of the layers'
    squares. A function of a layer's name and a candidate is any other sensitivity, at least 0, of which the sum over
    layers counts (section 4.6.4); rank 0 calls it in each decision."""
    alpha: float = 1.0
    """Largest ratio of the plan's error to the reference's."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not callable(self.error):
            check_choice("error", self.error, ("l2", "squared"))
        check_number("alpha", self.alpha, above=0)

    def check(self, reference: Mapping[str, Compressor], shapes: Mapping[str, Sequence[int]]) -> None:
        for compressor in set(reference.values()):
            self.family(compressor)

    def family(self, reference: Compressor) -> tuple[Compressor, ...]:
        """Return the candidates of a layer with this reference."""
        return family(reference, self.bounds, self.step)

    def propose(self, evidence: Evidence) -> Proposal:
        started = time.perf_counter()
        base, memory = self.base(evidence)
        layers = self.evaluate(evidence, base)
        errors_s = time.perf_counter() - started
        picked = [layer.reference for layer in layers]
        note = "no layer had a gradient: the reference stays"
        if layers:
            try:
                picked, note = self.choose(evidence, layers), ""
            except InfeasibleError as error:
                note = f"{error}: the reference stays"
        return Proposal(
            dict(base) | {layer.name: layer.candidates[k] for layer, k in zip(layers, picked, strict=True)},
            {layer.name: float(layer.errors[k]) for layer, k in zip(layers, picked, strict=True)},
            {layer.name: float(layer.errors[layer.reference]) for layer in layers},
            note,
            memory,
            errors_s,
            time.perf_counter() - started - errors_s,
        )

    @abstractmethod
    def choose(self, evidence: Evidence, layers: Sequence[LayerCandidates]) -> list[int]:
        """Return the index of the candidate that each layer gets.

        Raises:
            InfeasibleError: the reference is to stay.
        """

    def base(self, evidence: Evidence) -> tuple[Mapping[str, Compressor], Mapping[str, tuple[float, ...]]]:
        """Return the compressors whose error sets the budget, and the policy's memory."""
        return evidence.reference, evidence.memory

    def price(self, evidence: Evidence) -> Price:
        """Return the cost of candidates: by default the bytes that a rank sends for one in a step."""
        num_ranks = max(2, evidence.num_ranks)
        return lambda name, compressor, shape: (
            sent_bytes(compressor, shape, num_ranks, crossings=evidence.crossings) * evidence.times.get(name, 1.0)
        )

    def evaluate(
        self, evidence: Evidence, base: Mapping[str, Compressor], adjust: Adjust | None = None
    ) -> list[LayerCandidates]:
        price = self.price(evidence)
        table = []
        for name, gradient in usable_gradients((*base, *evidence.unsuited), evidence.gradients).items():
            reference, candidates = self.candidates(evidence, base, name, gradient.shape)
            if adjust is not None:
                candidates = tuple(filter(contracts, (adjust(name, candidate) for candidate in candidates)))
            layer = LayerCandidates.evaluate(name, gradient, candidates, reference, price)
            if layer.has_budget:
                table.append(layer)
        return table

    def candidates(
        self, evidence: Evidence, base: Mapping[str, Compressor], name: str, shape: Sequence[int]
    ) -> tuple[Compressor, tuple[Compressor, ...]]:
        if name in base:
            return base[name], self.family(evidence.reference[name])
        lower = members_that_fit(evidence.unsuited[name], shape, self.bounds)
        lower = filter(contracts, with_error_feedback(lower))
        return self.raw(evidence, name), (*lower, self.raw(evidence, name))

    @staticmethod
    def raw(evidence: Evidence, name: str) -> Compressor:
        """Return the compressor that sends a layer raw, with its residual if error feedback may have left one."""
        present = evidence.present.get(name, Raw())
        return fed_like(present, Raw()) if isinstance(present, Wrapper) and not is_raw(present) else Raw()

    def layer_errors(self, layer: LayerCandidates) -> Array:
        """Return the errors of a layer's candidates, whose sum `budget` bounds."""
        if callable(self.error):
            found = [self.error(layer.name, candidate) for candidate in layer.candidates]
            for value in found:
                check_number(f"{layer.name}: the error of a candidate", value, low=0)
            return np.array(found, dtype=np.float64)
        return layer.errors**0.5 if self.error == "l2" else layer.errors

    def budget(self, layers: Sequence[LayerCandidates]) -> float:
        """Return the upper bound of the sum of `layer_errors`."""
        of_reference = total([self.layer_errors(layer) for layer in layers], [layer.reference for layer in layers])
        return (self.alpha**2 if self.error == "squared" else self.alpha) * of_reference


def is_raw(compressor: Compressor) -> bool:
    """Whether a compressor sends values as they are, with error feedback or without."""
    return isinstance(unwrap(compressor), Raw)


def kind_of(compressor: Compressor) -> type[Compressor]:
    return type(unwrap(compressor))


def balanced(evidence: Evidence, gathers: float) -> Evidence:
    """Scale evidence so that weights' and gradients' squared errors with the reference's compressors are each 1 in all.

    One budget then serves both (the thesis leaves it open, section 6.2): bytes saved in weights may be spent on
    gradients, and the sum of relative errors stays. ``gathers``: the number of times that weights are sent for each
    reduction. Rank 0 has one shard of each layer, of which a rank sends as many as there are ranks.
    """
    scaled, times = {}, {}
    for site in SITES:
        names = [name for name in evidence.gradients if name.startswith(f"{site}/") and name in evidence.reference]
        errors = sum(squared_errors(evidence.gradients[n], [evidence.reference[n]])[0] for n in names)
        scale = 1 / math.sqrt(errors) if errors > 0 and math.isfinite(errors) else 1.0
        scaled |= {name: evidence.gradients[name] * scale for name in names}
        if site == "weights":
            times |= dict.fromkeys(names, gathers * evidence.num_ranks)
    return replace(evidence, gradients=scaled, times=times)


class InfeasibleError(ValueError):
    """No choice stays within the budget."""


def dynamic_program(errors: Sequence[Array], costs: Sequence[Array], budget: float, steps: int = STEPS) -> list[int]:
    """Return the choice for each layer by the thesis's Algorithm 4.1: ``O(steps · Σ choices)``, a vector at a time.

    Errors are counted in ``steps``-ths of the budget, rounded up, so that the bound holds; what that leaves of the
    budget is then spent, largest saving first.

    Args:
        errors: the errors of each layer's choices, at least 0.
        costs: the costs of each layer's choices.
        budget: the largest sum of errors.
        steps: the number of steps into which the budget is cut.

    Raises:
        InfeasibleError: no choice stays within the budget.
    """
    # least[e] is the least cost of the layers so far with errors of at most e steps; it never rises with e.
    least = np.zeros(steps + 1)
    taken = []
    for errors_of, costs_of in zip(errors, costs, strict=True):
        units = _units(errors_of, budget, steps)
        best, choice = np.full(steps + 1, np.inf), np.zeros(steps + 1, dtype=np.int32)
        for k in _not_dominated(errors_of, costs_of):
            unit = int(units[k])
            if unit > steps:
                continue
            now = best[unit:]
            candidate = least[: steps + 1 - unit] + costs_of[k]
            better = candidate < now
            now[better] = candidate[better]
            choice[unit:][better] = k
        taken.append((choice, units))
        least = best
    if not np.isfinite(least[steps]):
        # Errors that meet a budget may exceed it when they are rounded up, even the least ones.
        chosen = [int(np.argmin(errors_of)) for errors_of in errors]
        if not total(errors, chosen) <= budget:
            raise InfeasibleError(f"no choice keeps the error within {budget:.4g}")
        return _spend(chosen, errors, costs, budget)
    chosen, left = [], steps
    for choice, units in reversed(taken):
        k = int(choice[left])
        chosen.append(k)
        left -= int(units[k])
    return _spend(chosen[::-1], errors, costs, budget)


def total(values: Sequence[Array], chosen: Sequence[int] | Array) -> float:
    return float(sum(array[k] for array, k in zip(values, chosen, strict=True)))


def _units(errors: Array, budget: float, steps: int) -> Array:
    """Return errors in steps of the budget, rounded up; ``steps + 1`` for those beyond it."""
    if budget <= 0:
        return np.where(errors > 0, steps + 1, 0)
    return np.minimum(np.ceil(errors / budget * steps - 1e-9), steps + 1)


def _not_dominated(errors: Array, costs: Array) -> list[int]:
    """Return the choices that no other beats in both, in the order of their costs."""
    front: list[int] = []
    for k in np.lexsort((errors, costs)):
        if not front or errors[k] < errors[front[-1]]:
            front.append(int(k))
    return front


def _spend(chosen: list[int], errors: Sequence[Array], costs: Sequence[Array], budget: float) -> list[int]:
    """Spend the rest of the budget, one layer at a time, the largest saving first."""
    left = budget - total(errors, chosen)
    while True:
        best, where = 0.0, (-1, -1)
        for layer, k in enumerate(chosen):
            fits = errors[layer] - errors[layer][k] <= left
            saved = np.where(fits, costs[layer][k] - costs[layer], 0.0)
            most = int(np.argmax(saved))
            if saved[most] > best:
                best, where = float(saved[most]), (layer, most)
        if where[0] < 0:
            return chosen
        layer, k = where
        left -= float(errors[layer][k] - errors[layer][chosen[layer]])
        chosen[layer] = k


def cheapest_plans(
    layers: Sequence[LayerCandidates],
    errors: Sequence[Array],
    costs: Sequence[Array],
    budget: float,
    steps: int = STEPS,
) -> list[list[int]]:
    """Return the plans of `dynamic_program` of all candidates, and of each kind alone, which may be cheaper after
    rounding; references and raw layers count among all kinds.

    Raises:
        InfeasibleError: no choice stays within the budget.
    """
    if not layers:
        return [[]]
    plans = [dynamic_program(errors, costs, budget, steps)]
    kinds = dict.fromkeys(kind_of(c) for layer in layers for c in layer.candidates if not is_raw(c))
    for kind in kinds if len(kinds) > 1 else ():
        kept = [
            [k for k, c in enumerate(layer.candidates) if k == layer.reference or kind_of(c) in (kind, Raw)]
            for layer in layers
        ]
        some_errors, some_costs = (
            [array[ks] for array, ks in zip(values, kept, strict=True)] for values in (errors, costs)
        )
        try:
            picked = dynamic_program(some_errors, some_costs, budget, steps)
        except InfeasibleError:
            continue
        plans.append([ks[k] for ks, k in zip(kept, picked, strict=True)])
    return plans
