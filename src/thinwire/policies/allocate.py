"""The problem at the heart of L-GreCo: one choice for each layer, least cost, error within a budget (thesis, 4.4)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

STEPS = 10_000
"""Number of steps into which the budget is cut: the thesis's D."""


class Infeasible(ValueError):
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
        Infeasible: no choice stays within the budget.
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
            raise Infeasible(f"no choice keeps the error within {budget:.4g}")
        return _spend(chosen, errors, costs, budget)
    chosen, left = [], steps
    for choice, units in reversed(taken):
        k = int(choice[left])
        chosen.append(k)
        left -= int(units[k])
    return _spend(chosen[::-1], errors, costs, budget)


def total(values: Sequence[Array], chosen: Sequence[int] | Array) -> float:
    """Return the sum of the values that are chosen."""
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
