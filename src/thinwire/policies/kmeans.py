"""Compression by clusters of layers (thesis, Algorithm 3.1), mapped linearly to their order (section 3.6)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from thinwire.arguments import check_int
from thinwire.compressors import Compressor, Wrapper
from thinwire.policies.budget import Adjust, BudgetedPolicy, InfeasibleError, is_raw, total
from thinwire.policies.candidates import Array, LayerCandidates, usable_gradients
from thinwire.policies.families import check_contracting, parameter_value
from thinwire.policies.policy import Evidence, gradient_norm

_LEAST_GRID = 24
_TOP = 0.01
"""Share of a gradient's values, those of the largest magnitude, whose norm counts."""


@dataclass(frozen=True, kw_only=True)
class MappedPolicy(BudgetedPolicy):
    """A policy that places every layer between the most and the least compression of a range.

    Places are mapped linearly to the candidates between the two ends of the range. The thesis tuned the ends by hand
    ("the best range was from 8 to 64", section 4.6.3); here all of them are tried, and the cheapest plan whose error is
    within the budget is taken.
    """

    @abstractmethod
    def places(self, gradients: Mapping[str, Tensor]) -> Mapping[str, float]:
        """Return the position of each layer from 0 (compressed most) to 1."""

    def choose(self, evidence: Evidence, layers: Sequence[LayerCandidates]) -> list[int]:
        places = self.places({layer.name: evidence.gradients[layer.name] for layer in layers})
        where = np.array([places[layer.name] for layer in layers])
        ladders = [ladder(layer) for layer in layers]
        errors = [self.layer_errors(layer)[rungs] for layer, rungs in zip(layers, ladders, strict=True)]
        costs = [layer.costs[rungs] for layer, rungs in zip(layers, ladders, strict=True)]
        grid = max(_LEAST_GRID, *(len(rungs) - 1 for rungs in ladders))
        budget, best = self.budget(layers), None
        # Layers that the reference leaves raw force both ends of a range up, and with them all others.
        reference = total([layer.costs for layer in layers], [layer.reference for layer in layers])
        cheapest = reference if self.alpha >= 1 else np.inf
        for low in range(grid + 1):
            for high in range(low, grid + 1):
                share = (low + where * (high - low)) / grid
                picked = [round(s * (len(rungs) - 1)) for s, rungs in zip(share, ladders, strict=True)]
                cost = total(costs, picked)
                if cost < cheapest and total(errors, picked) <= budget:
                    best, cheapest = picked, cost
        if best is None:
            smaller = "" if cheapest == np.inf else " and sends less than the reference"
            raise InfeasibleError(f"no range keeps the error within {budget:.4g}{smaller}")
        return [int(rungs[k]) for rungs, k in zip(ladders, best, strict=True)]


@dataclass(frozen=True, kw_only=True)
class KMeans(MappedPolicy):
    """A policy that clusters layers by size and by the L2 norm of their gradient's top values (thesis, Algorithm 3.1).

    Both are scaled to [0, 1]. Clusters are sorted by norm − size of their centroids, and bit widths (or ranks, or
    densities) and ``buckets`` are mapped to them linearly: large layers with small top values are compressed most.
    """

    clusters: int = 6
    """Largest number of clusters (thesis, section 4.6.3)."""
    buckets: tuple[int, ...] = ()
    """Bucket sizes to map to the clusters, the first to the most compressed; if empty, all have the reference's."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_int("clusters", self.clusters, 1)

    def check(self, reference: Mapping[str, Compressor], shapes: Mapping[str, Sequence[int]]) -> None:
        super().check(reference, shapes)
        for compressor in set(reference.values()):
            resized = [_with_bucket(compressor, bucket) for bucket in self.buckets]
            check_contracting(f"buckets={self.buckets}", [member for member in resized if member != compressor])

    def places(self, gradients: Mapping[str, Tensor]) -> Mapping[str, float]:
        from scipy.cluster.vq import kmeans, vq

        if not gradients:
            return {}
        sizes = _scaled([gradient.numel() for gradient in gradients.values()])
        magnitudes = (gradient.detach().float().abs().reshape(-1) for gradient in gradients.values())
        tops = (m.topk(max(1, round(_TOP * m.numel())), sorted=False).values for m in magnitudes)
        norms = _scaled(list(map(gradient_norm, tops)))
        points = np.stack([sizes, norms], axis=1)
        centroids, _ = kmeans(points, _far_apart(points, self.clusters))
        labels, _ = vq(points, centroids)
        order = np.argsort(centroids[:, 1] - centroids[:, 0], kind="stable")
        place = {int(cluster): k / max(1, len(order) - 1) for k, cluster in enumerate(order)}
        return {name: place[int(label)] for name, label in zip(gradients, labels, strict=True)}

    def evaluate(
        self, evidence: Evidence, base: Mapping[str, Compressor], adjust: Adjust | None = None
    ) -> list[LayerCandidates]:
        if not self.buckets:
            return super().evaluate(evidence, base, adjust)
        places = self.places(usable_gradients((*base, *evidence.unsuited), evidence.gradients))

        def resize(name: str, compressor: Compressor) -> Compressor:
            return _with_bucket(compressor, self.buckets[round(places[name] * (len(self.buckets) - 1))])

        return super().evaluate(evidence, base, resize)


def ladder(layer: LayerCandidates) -> list[int]:
    """Return the indices of a layer's candidates from the most compression to the least."""
    own = [k for k in range(len(layer.candidates)) if k != layer.reference or layer.offers_reference]
    return sorted(own, key=lambda k: _kept(layer, k))


def _kept(layer: LayerCandidates, k: int) -> float:
    return float("inf") if is_raw(layer.candidates[k]) else parameter_value(layer.candidates[k])


def _scaled(values: Sequence[float]) -> Array:
    """Return ``values`` scaled linearly to [0, 1]; zeros if all are equal."""
    array = np.asarray(values, dtype=np.float64)
    spread = array.max() - array.min()
    return (array - array.min()) / spread if spread else np.zeros_like(array)


def _far_apart(points: Array, count: int) -> Array:
    """Return up to ``count`` different points to start from, each the farthest from those before it."""
    chosen = [points[0]]
    while len(chosen) < count:
        distance = np.min([((points - point) ** 2).sum(1) for point in chosen], axis=0)
        if not distance.max() > 0:
            break
        chosen.append(points[int(np.argmax(distance))])
    return np.array(chosen)


def _with_bucket(compressor: Compressor, bucket: int) -> Compressor:
    if isinstance(compressor, Wrapper):
        return compressor.around(_with_bucket(compressor.inner, bucket))
    return replace(compressor, bucket=bucket) if hasattr(compressor, "bucket") else compressor
