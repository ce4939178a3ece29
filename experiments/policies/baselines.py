"""Policies that the thesis compares with (sections 3.6 and B.1), and that no training is advised to use."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from thinwire.policies import Evidence, LGreco
from thinwire.policies.budget import BudgetedPolicy, InfeasibleError, total
from thinwire.policies.candidates import Array, LayerCandidates
from thinwire.policies.kmeans import MappedPolicy, ladder
from thinwire.policies.policy import gradient_norm

_SEED = 0
_MOST_CHANGED = 3
_LEARN_EVERY = 4
"""Trials between two fits of the length scales, which take most of the time."""


@dataclass(frozen=True, kw_only=True)
class Linear(MappedPolicy):
    """Sorts layers by the norm of their gradient over their size; the first are compressed most (thesis, 3.6)."""

    def places(self, gradients: Mapping[str, Tensor]) -> Mapping[str, float]:
        order = sorted(gradients, key=lambda name: gradient_norm(gradients[name]) / gradients[name].numel())
        return {name: place / max(1, len(order) - 1) for place, name in enumerate(order)}


@dataclass(frozen=True, kw_only=True)
class ByPriority(LGreco):
    """L-GreCo that weighs the bytes of later buckets more (thesis, B.1)."""

    def _weights(self, evidence: Evidence) -> dict[str, float]:
        return {name: 1.0 + bucket for name, bucket in evidence.bucket_of.items()}


@dataclass(frozen=True, kw_only=True)
class Bayes(BudgetedPolicy):
    """Bayesian optimization of the bytes under the bound on the error: the thesis's first approach (section 3.6).

    The bytes of a plan are known; its error is what a trial finds out. A Gaussian process with a learned length scale
    for each layer predicts the logarithm of the error, and the plan with the largest expected improvement under the
    constraint (Gardner et al., Bayesian Optimization with Inequality Constraints, ICML 2014) is tried next, among plans
    that differ from the best one so far in up to three layers. Needs scikit-learn.
    """

    trials: int = 40
    """Plans whose error is evaluated. More layers take more of them: at least four for each."""
    proposals: int = 512
    """Plans among which the next trial is chosen."""

    def choose(self, evidence: Evidence, layers: Sequence[LayerCandidates]) -> list[int]:
        from scipy.stats import norm
        from sklearn.exceptions import ConvergenceWarning
        from sklearn.gaussian_process import GaussianProcessRegressor, kernels

        draw = np.random.default_rng(_SEED)
        ladders = [ladder(layer) for layer in layers]
        errors = [self.layer_errors(layer)[rungs] for layer, rungs in zip(layers, ladders, strict=True)]
        costs = [layer.costs[rungs] for layer, rungs in zip(layers, ladders, strict=True)]
        most = np.array([len(rungs) - 1 for rungs in ladders])
        budget = self.budget(layers)
        start = np.array([_reference_rung(layer, rungs) for layer, rungs in zip(layers, ladders, strict=True)])
        # Before anything is learned: the reference, and all layers one candidate stronger and one weaker.
        tried = list(np.unique([np.clip(start + by, 0, most) for by in (0, -1, 1)], axis=0))
        tried_errors = [total(errors, plan) for plan in tried]
        tiny = 1e-12 * budget or 1e-30
        scales = kernels.Matern([1.0] * len(layers), (5e-2, 1e2), nu=2.5)  # pyright: ignore[reportArgumentType]
        kernel = kernels.ConstantKernel(1.0, (1e-2, 1e3)) * scales
        while len(tried) < self.trials:
            best = _cheapest(tried, tried_errors, costs, budget)
            plans = self._proposals(draw, tried[best] if best is not None else most, most, tried)
            if not len(plans):
                break
            process = GaussianProcessRegressor(kernel, alpha=1e-6, normalize_y=True, random_state=_SEED)
            if len(tried) % _LEARN_EVERY:
                process.set_params(optimizer=None)
            with warnings.catch_warnings():
                # A length scale at its bound says that a layer hardly matters.
                warnings.simplefilter("ignore", ConvergenceWarning)
                process.fit(np.array(tried) / np.maximum(most, 1), np.log(np.maximum(tried_errors, tiny)))
            kernel = process.kernel_
            mean, deviation = process.predict(plans / np.maximum(most, 1), return_std=True)
            within = norm.cdf((np.log(max(budget, tiny)) - mean) / np.maximum(deviation, 1e-9))
            cost = np.array([total(costs, plan) for plan in plans])
            now = total(costs, tried[best]) if best is not None else cost.max() * (1 + 1e-9)
            tried.append(plans[int(np.argmax(np.maximum(now - cost, 0.0) * within))])
            tried_errors.append(total(errors, tried[-1]))
        best = _cheapest(tried, tried_errors, costs, budget)
        if best is None:
            raise InfeasibleError(f"no plan that was tried keeps the error within {budget:.4g}")
        return [int(rungs[k]) for rungs, k in zip(ladders, tried[best], strict=True)]

    def _proposals(self, draw: np.random.Generator, best: Array, most: Array, tried: Sequence[Array]) -> Array:
        """Plans that differ from the best one in one layer, in all ways, and in a few layers, drawn at random."""
        plans = {tuple(int(k) for k in best)}
        for layer in range(len(most)):
            for by in (-2, -1, 1, 2):
                plan = best.copy()
                plan[layer] = np.clip(plan[layer] + by, 0, most[layer])
                plans.add(tuple(int(k) for k in plan))
        for _ in range(self.proposals):
            plan = best.copy()
            layers = draw.choice(
                len(most), size=min(len(most), int(draw.integers(2, _MOST_CHANGED + 1))), replace=False
            )
            plan[layers] = np.clip(plan[layers] + draw.integers(-2, 3, size=len(layers)), 0, most[layers])
            plans.add(tuple(int(k) for k in plan))
        known = {tuple(int(k) for k in plan) for plan in tried}
        return np.array(sorted(plans - known))


def _reference_rung(layer: LayerCandidates, rungs: Sequence[int]) -> int:
    """Index of the reference among the candidates, or of the least compression if it is not among them."""
    return rungs.index(layer.reference) if layer.reference in rungs else len(rungs) - 1


def _cheapest(tried: Sequence[Array], errors: Sequence[float], costs: Sequence[Array], budget: float) -> int | None:
    """The cheapest plan within the budget."""
    within = [i for i, error in enumerate(errors) if error <= budget]
    return min(within, key=lambda i: total(costs, tried[i]), default=None)
