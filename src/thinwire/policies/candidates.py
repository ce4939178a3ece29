"""The candidates that policies choose from: compressors for each layer, with their errors and costs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from thinwire.compressors import Compressor, Unsuited, Wrapper, ef
from thinwire.policies.allocate import Array
from thinwire.policies.errors import squared_errors
from thinwire.policies.policy import gradient_norm

Price = Callable[[str, Compressor, Sequence[int]], float]
"""A function that returns a compressor's cost for a layer, given the layer's name, the compressor and a shape."""


@dataclass(frozen=True)
class LayerCandidates:
    """The candidates of one layer, in parallel sequences."""

    name: str
    numel: int
    norm: float
    """L2 norm of the layer's gradient."""
    candidates: tuple[Compressor, ...]
    errors: Array
    """Squared L2 error of each candidate; infinite where decoded values are not finite."""
    costs: Array
    reference: int
    """Index of the reference, whose error counts toward the budget."""
    offers_reference: bool = True
    """Whether the reference is itself a candidate. If not, it only sets the budget."""

    @property
    def has_budget(self) -> bool:
        """Whether the error of the reference is finite."""
        return bool(np.isfinite(self.errors[self.reference]))

    @staticmethod
    def evaluate(
        name: str, gradient: Tensor, candidates: Iterable[Compressor], reference: Compressor, price: Price
    ) -> LayerCandidates:
        """Evaluate ``reference``, and those of ``candidates`` that suit a layer of this shape, on its gradient."""
        shape = tuple(gradient.shape)
        suited = []
        for candidate in candidates:
            try:
                suited.append(candidate.fit(shape))
            except Unsuited:
                continue
        kept = tuple(dict.fromkeys((reference, *suited)))
        errors = np.array(squared_errors(gradient, kept))
        errors[~np.isfinite(errors)] = np.inf
        costs = np.array([price(name, candidate, shape) for candidate in kept], dtype=np.float64)
        return LayerCandidates(
            name,
            gradient.numel(),
            gradient_norm(gradient),
            kept,
            errors,
            costs,
            0,
            offers_reference=reference in suited,
        )


def usable_gradients(names: Iterable[str], gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the gradients of those layers of ``names`` that are neither zero nor infinite nor NaN.

    A layer that was frozen or unused in the interval has none, and nothing is decided for it.
    """
    return {
        name: gradients[name] for name in names if name in gradients and 0 < gradient_norm(gradients[name]) < np.inf
    }


def with_error_feedback(candidates: Iterable[Compressor]) -> tuple[Compressor, ...]:
    """Return all candidates with error feedback if one has or wants it, so that residuals survive a change."""
    listed = tuple(candidates)
    if not any(c.traits.wants_feedback or isinstance(c, Wrapper) for c in listed):
        return listed
    return tuple(c if isinstance(c, Wrapper) else ef(c) for c in listed)
