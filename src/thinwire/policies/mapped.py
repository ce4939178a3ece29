"""The base of policies that order layers and map the order linearly to compression (thesis, section 3.6)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from thinwire.policies import allocate
from thinwire.policies.allocate import Array
from thinwire.policies.budget import BudgetedPolicy, is_raw
from thinwire.policies.candidates import LayerCandidates
from thinwire.policies.families import parameter_value
from thinwire.policies.policy import Evidence

_LEAST_GRID = 24


@dataclass(frozen=True, kw_only=True)
class MappedPolicy(BudgetedPolicy):
    """A policy that places every layer between the most and the least compression of a range.

    Places are mapped linearly to the candidates between the two ends of the range. The thesis tuned the ends by hand
    ("the best range was from 8 to 64", section 4.6.3); here all of them are tried, and the cheapest plan whose error is
    within the budget is taken.
    """

    @abstractmethod
    def places(self, gradients: Mapping[str, Tensor]) -> Mapping[str, float]:
        """By layer, its position from 0 (compressed most) to 1."""

    def choose(self, evidence: Evidence, layers: Sequence[LayerCandidates]) -> list[int]:
        places = self.places({layer.name: evidence.gradients[layer.name] for layer in layers})
        where = np.array([places[layer.name] for layer in layers])
        ladders = [ladder(layer) for layer in layers]
        errors = [self.layer_errors(layer)[rungs] for layer, rungs in zip(layers, ladders, strict=True)]
        costs = [layer.costs[rungs] for layer, rungs in zip(layers, ladders, strict=True)]
        grid = max(_LEAST_GRID, *(len(rungs) - 1 for rungs in ladders))
        budget, best = self.budget(layers), None
        # Layers that the reference leaves raw force both ends of a range up, and with them all others.
        reference = allocate.total([layer.costs for layer in layers], [layer.reference for layer in layers])
        cheapest = reference if self.alpha >= 1 else np.inf
        for low in range(grid + 1):
            for high in range(low, grid + 1):
                share = (low + where * (high - low)) / grid
                picked = [round(s * (len(rungs) - 1)) for s, rungs in zip(share, ladders, strict=True)]
                cost = allocate.total(costs, picked)
                if cost < cheapest and allocate.total(errors, picked) <= budget:
                    best, cheapest = picked, cost
        if best is None:
            smaller = "" if cheapest == np.inf else " and sends less than the reference"
            raise allocate.Infeasible(f"no range keeps the error within {budget:.4g}{smaller}")
        return [int(rungs[k]) for rungs, k in zip(ladders, best, strict=True)]


def ladder(layer: LayerCandidates) -> list[int]:
    """Indices of a layer's candidates from the most compression to the least."""
    own = [k for k in range(len(layer.candidates)) if k != layer.reference or layer.offers_reference]
    return sorted(own, key=lambda k: _kept(layer, k))


def _kept(layer: LayerCandidates, k: int) -> float:
    return float("inf") if is_raw(layer.candidates[k]) else parameter_value(layer.candidates[k])


def scaled(values: Sequence[float]) -> Array:
    """``values`` scaled linearly to [0, 1]; zeros if all are equal."""
    array = np.asarray(values, dtype=np.float64)
    spread = array.max() - array.min()
    return (array - array.min()) / spread if spread else np.zeros_like(array)
