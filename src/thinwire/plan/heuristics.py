"""Policies that L-GreCo is held against: by order, by cluster, by Bayesian optimisation (thesis, section 3.6)."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from thinwire.compressors import Compressor, Wrapper
from thinwire.plan import allocate
from thinwire.plan.allocate import Array
from thinwire.plan.choices import Choices, with_gradient
from thinwire.plan.cost import sent_bytes
from thinwire.plan.family import family, strength
from thinwire.plan.policy import Evidence, Policy, Proposal, check_alpha

_SEED = 0

Change = Callable[[Compressor], Compressor]


@dataclass(frozen=True, kw_only=True)
class Ranged(Policy):
    """A policy that gives every layer one of a family, within ``alpha`` times the reference's error.

    A proposal over that is made weaker, all layers by one member of their family at a time, until it is within.
    """

    bounds: tuple[float, float] | None = None
    """Of the bits, rank or density, instead of the family's own."""
    step: float | None = None
    alpha: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_alpha(self.alpha)

    def check(self, reference: Mapping[str, Compressor], shapes: Mapping[str, Sequence[int]]) -> None:
        for compressor in set(reference.values()):
            family(compressor, self.bounds, self.step)

    def propose(self, evidence: Evidence) -> Proposal:
        started = time.perf_counter()
        table = self.table(evidence)
        errors_s = time.perf_counter() - started
        if not table:
            return Proposal(dict(evidence.reference), note="no layer had a gradient: the reference stays")
        budget = self.alpha * sum(float(of.errors[of.reference]) for of in table)
        picked = self.within(table, self.choose(table, budget), budget)
        layers = dict(evidence.reference) | {of.name: of.candidates[k] for of, k in zip(table, picked, strict=True)}
        return Proposal(
            layers,
            {of.name: float(of.errors[k]) for of, k in zip(table, picked, strict=True)},
            {of.name: float(of.errors[of.reference]) for of in table},
            errors_s=errors_s,
            solve_s=time.perf_counter() - started - errors_s,
        )

    def table(self, evidence: Evidence, changes: Mapping[str, Change] | None = None) -> list[Choices]:
        """What layers with a gradient may become: the strongest compression first in each.

        ``changes``: by layer, what becomes of the members of its family.
        """
        num_ranks, found = max(2, evidence.num_ranks), []
        for name, gradient in with_gradient(evidence.reference, evidence.gradients).items():
            reference = evidence.reference[name]
            members = family(reference, self.bounds, self.step)
            if changes and name in changes:
                members = [changes[name](member) for member in members]
            of = Choices.of(name, gradient, members, reference, lambda _, c, shape: sent_bytes(c, shape, num_ranks))
            if of.open:
                found.append(_sorted(of))
        return found

    @abstractmethod
    def choose(self, table: Sequence[Choices], budget: float) -> list[int]:
        """Which candidate each layer gets."""

    def within(self, table: Sequence[Choices], picked: Sequence[int], budget: float) -> list[int]:
        """``picked``, or what it becomes when all layers are compressed less until the error is within the budget."""
        errors = [of.errors for of in table]
        picked = list(picked)
        while allocate.total(errors, picked) > budget:
            more = [min(k + 1, len(of.candidates) - 1) for of, k in zip(table, picked, strict=True)]
            if more == picked:
                return [of.reference for of in table]
            picked = more
        return picked


@dataclass(frozen=True, kw_only=True)
class Linear(Ranged):
    """Layers in the order of their gradient's norm for its size; along it, compression falls linearly (thesis, 3.6)."""

    def choose(self, table: Sequence[Choices], budget: float) -> list[int]:
        order = np.argsort([of.norm / of.numel for of in table], kind="stable")
        picked = [0] * len(table)
        for place, layer in enumerate(order):
            picked[layer] = _share(place / max(1, len(table) - 1), table[layer])
        return picked


@dataclass(frozen=True, kw_only=True)
class KMeans(Ranged):
    """Layers clustered by size and by the norm of their gradient's top values (thesis, Algorithm 3.1).

    Clusters are sorted by norm − size, each scaled to [0, 1], and members of the family mapped to them linearly: large
    layers of small gradients are compressed most.
    """

    clusters: int | None = None
    """None: as many as the family has members, but at most 6 (thesis, section 4.6.3)."""
    buckets: tuple[int, ...] = ()
    """Bucket sizes to map to the clusters likewise, the first to the most compressed; none: the reference's."""
    top: float = 0.01
    """Share of the gradient's elements whose norm counts."""

    def choose(self, table: Sequence[Choices], budget: float) -> list[int]:
        return [_share(place, of) for place, of in zip(self._places(table), table, strict=True)]

    def table(self, evidence: Evidence, changes: Mapping[str, Change] | None = None) -> list[Choices]:
        found = super().table(evidence, changes)
        if not self.buckets or not found:
            return found
        # Once more in the buckets that they shall have: what these err must be within the budget, too.
        sizes = [self.buckets[round(place * (len(self.buckets) - 1))] for place in self._places(found)]
        resized = zip(found, sizes, strict=True)
        return super().table(evidence, {of.name: partial(_with_bucket, bucket=size) for of, size in resized})

    def _places(self, table: Sequence[Choices]) -> list[float]:
        """Where each layer's cluster is among all, from 0 (compress most) to 1."""
        from scipy.cluster.vq import kmeans, vq

        points = np.stack([_scaled([np.log(of.numel) for of in table]), _scaled([of.norm for of in table])], axis=1)
        count = self.clusters or min(6, max(len(of.candidates) for of in table))
        centroids, _ = kmeans(points, _far_apart(points, count))
        labels, _ = vq(points, centroids)
        order = np.argsort(centroids[:, 1] - centroids[:, 0], kind="stable")
        rank = {int(cluster): place / max(1, len(order) - 1) for place, cluster in enumerate(order)}
        return [rank[int(label)] for label in labels]


@dataclass(frozen=True, kw_only=True)
class Bayes(Ranged):
    """Bayesian optimisation over all layers' members at once: the thesis's first approach (section 3.6).

    A Gaussian process (scikit-learn) of the bytes, with a penalty on what is over the budget; where expected
    improvement is highest is tried next.
    """

    trials: int = 40
    proposals: int = 256
    """Random plans among which the next trial is chosen."""

    def choose(self, table: Sequence[Choices], budget: float) -> list[int]:
        try:
            from sklearn.gaussian_process import GaussianProcessRegressor, kernels
        except ImportError as error:
            raise ImportError("Bayes needs scikit-learn: pip install 'thinwire[repro]'") from error
        from scipy.stats import norm

        draw = np.random.default_rng(_SEED)
        most = np.array([len(of.candidates) - 1 for of in table])
        reference = np.array([of.reference for of in table])
        tried = [reference, most, *draw.integers(0, most + 1, size=(8, len(table)))]
        values = [self._value(table, plan, budget) for plan in tried]
        # With a length scale that stays: a few dozen plans say too little to fit one.
        process = GaussianProcessRegressor(
            kernels.Matern(length_scale=0.5),
            alpha=1e-4,
            normalize_y=True,
            optimizer=None,  # pyright: ignore[reportArgumentType]
        )
        while len(tried) < self.trials:
            process.fit(np.array(tried) / np.maximum(most, 1), values)
            best = tried[int(np.argmin(values))]
            near = np.clip(best + draw.integers(-1, 2, size=(self.proposals, len(table))), 0, most)
            far = draw.integers(0, most + 1, size=(self.proposals, len(table)))
            plans = np.concatenate([near, far])
            mean, deviation = process.predict(plans / np.maximum(most, 1), return_std=True)
            deviation = np.maximum(deviation, 1e-9)
            gain = (min(values) - mean) / deviation
            expected = deviation * (gain * norm.cdf(gain) + norm.pdf(gain))
            tried.append(plans[int(np.argmax(expected))])
            values.append(self._value(table, tried[-1], budget))
        return [int(k) for k in tried[int(np.argmin(values))]]

    @staticmethod
    def _value(table: Sequence[Choices], plan: Array, budget: float) -> float:
        """Cost for the reference's, and how far the error is over the budget."""
        errors = sum(float(of.errors[k]) for of, k in zip(table, plan, strict=True))
        cost = sum(float(of.costs[k]) for of, k in zip(table, plan, strict=True))
        base = sum(float(of.costs[of.reference]) for of in table)
        return cost / base + 4.0 * max(0.0, errors / budget - 1.0 if budget else errors)


def _far_apart(points: Array, count: int) -> Array:
    """Up to ``count`` different points to start from, each the farthest from those before it."""
    found = [points[0]]
    while len(found) < count:
        distance = np.min([((points - point) ** 2).sum(1) for point in found], axis=0)
        if not distance.max() > 0:
            break
        found.append(points[int(np.argmax(distance))])
    return np.array(found)


def _sorted(of: Choices) -> Choices:
    """The candidates by strength: the most compressed first."""
    order = sorted(range(len(of.candidates)), key=lambda k: strength(of.candidates[k]))
    return replace(
        of,
        candidates=tuple(of.candidates[k] for k in order),
        errors=of.errors[order],
        costs=of.costs[order],
        reference=order.index(of.reference),
    )


def _share(place: float, of: Choices) -> int:
    return round(place * (len(of.candidates) - 1))


def _scaled(values: Sequence[float]) -> Array:
    found = np.asarray(values, dtype=np.float64)
    spread = found.max() - found.min()
    return (found - found.min()) / spread if spread else np.zeros_like(found)


def _with_bucket(compressor: Compressor, bucket: int) -> Compressor:
    if isinstance(compressor, Wrapper):
        return compressor.around(_with_bucket(compressor.inner, bucket))
    return replace(compressor, bucket=bucket) if hasattr(compressor, "bucket") else compressor
