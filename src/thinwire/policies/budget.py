"""The base of policies that keep the compression error within that of a reference (thesis, sections 3.6 and 4.4)."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from thinwire.arguments import check_choice, check_number
from thinwire.compressors import Compressor, Raw, Wrapper, ef, unwrap
from thinwire.plan.cost import sent_bytes
from thinwire.policies import allocate
from thinwire.policies.allocate import Array
from thinwire.policies.candidates import LayerCandidates, Price, usable_gradients, with_error_feedback
from thinwire.policies.families import contracts, family, members_that_fit
from thinwire.policies.policy import Evidence, Policy, Proposal

Adjust = Callable[[str, Compressor], Compressor]
"""A function that changes a candidate of a layer of this name."""


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
    error: Literal["l2", "squared"] = "l2"
    """The error of a plan. ``l2`` is the sum over layers of the L2 norms of their errors, as the thesis has it (section
    4.4); ``squared`` is the L2 norm of the error of the whole gradient, whose square is the sum of the layers'
    squares."""
    alpha: float = 1.0
    """Largest ratio of the plan's error to the reference's."""

    def __post_init__(self) -> None:
        super().__post_init__()
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
            except allocate.Infeasible as error:
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
            Infeasible: the reference is to stay.
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
        """Return the candidates of every layer with a gradient, evaluated."""
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
        """Return the reference of a layer, and its candidates."""
        if name in base:
            return base[name], self.family(evidence.reference[name])
        lower = members_that_fit(evidence.unsuited[name], shape, self.bounds)
        lower = filter(contracts, with_error_feedback(lower))
        return self.raw(evidence, name), (*lower, self.raw(evidence, name))

    @staticmethod
    def raw(evidence: Evidence, name: str) -> Compressor:
        """Return the compressor that sends a layer raw, with its residual if error feedback may have left one."""
        present = evidence.present.get(name, Raw())
        return ef(Raw()) if isinstance(present, Wrapper) and not is_raw(present) else Raw()

    def layer_errors(self, layer: LayerCandidates) -> Array:
        """Return the errors of a layer's candidates, whose sum `budget` bounds."""
        return layer.errors**0.5 if self.error == "l2" else layer.errors

    def budget(self, layers: Sequence[LayerCandidates]) -> float:
        """Return the upper bound of the sum of `layer_errors`."""
        total = allocate.total([self.layer_errors(layer) for layer in layers], [layer.reference for layer in layers])
        return (self.alpha if self.error == "l2" else self.alpha**2) * total


def is_raw(compressor: Compressor) -> bool:
    """Whether a compressor sends values as they are, with error feedback or without."""
    return isinstance(unwrap(compressor), Raw)
