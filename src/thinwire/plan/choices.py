"""What each layer may become, and what each choice errs and costs: the table that policies choose from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from thinwire.compressors import Compressor, Unsuited, Wrapper, ef
from thinwire.plan.allocate import Array
from thinwire.plan.errors import squared_errors
from thinwire.plan.policy import norm_of

Price = Callable[[str, Compressor, Sequence[int]], float]
"""What a compressor costs for a layer, of its name and shape."""


@dataclass(frozen=True)
class Choices:
    """What one layer may become, in parallel sequences."""

    name: str
    numel: int
    norm: float
    """Of its gradient."""
    candidates: tuple[Compressor, ...]
    errors: Array
    """Squared L2; infinite where what arrives is not finite."""
    costs: Array
    reference: int
    """Which candidate is the reference."""

    @property
    def open(self) -> bool:
        """Whether there is anything to keep to: what the reference errs is a number."""
        return bool(np.isfinite(self.errors[self.reference]))

    @staticmethod
    def of(
        name: str, gradient: Tensor, candidates: Iterable[Compressor], reference: Compressor, price: Price
    ) -> Choices:
        """``candidates`` that take a layer of this shape, and ``reference``, in any case."""
        shape = tuple(gradient.shape)
        fitting = [reference]
        for candidate in candidates:
            try:
                fitting.append(candidate.fit(shape))
            except Unsuited:
                continue
        kept = tuple(dict.fromkeys(fitting))
        errors = np.array(squared_errors(gradient, kept))
        # What arrives as NaN, of values out of its range, is nothing to choose.
        errors[~np.isfinite(errors)] = np.inf
        costs = np.array([price(name, candidate, shape) for candidate in kept], dtype=np.float64)
        return Choices(name, gradient.numel(), norm_of(gradient), kept, errors, costs, 0)


def with_gradient(reference: Mapping[str, Compressor], gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Gradients of the layers that may change, those alone that say something: not zero, and finite throughout.

    A layer that was frozen or unused in the interval has none; nothing is decided for it.
    """
    return {name: g for name, g in gradients.items() if name in reference and 0 < norm_of(g) < float("inf")}


def dressed(candidates: Iterable[Compressor]) -> tuple[Compressor, ...]:
    """``candidates`` with error feedback around all of them if one wants it: what is owed survives a change then."""
    found = tuple(candidates)
    if not any(c.wants_feedback or isinstance(c, Wrapper) for c in found):
        return found
    return tuple(c if isinstance(c, Wrapper) else ef(c) for c in found)
