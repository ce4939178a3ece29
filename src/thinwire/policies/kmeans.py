"""Compression by clusters of layers (thesis, Algorithm 3.1)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from thinwire.arguments import check_int, check_number
from thinwire.compressors import Compressor, Wrapper
from thinwire.policies.allocate import Array
from thinwire.policies.budget import Adjust
from thinwire.policies.candidates import LayerCandidates, usable_gradients
from thinwire.policies.families import check_contracting
from thinwire.policies.mapped import MappedPolicy, scaled
from thinwire.policies.policy import Evidence, gradient_norm


@dataclass(frozen=True, kw_only=True)
class KMeans(MappedPolicy):
    """Clusters layers by their size and by the L2 norm of the top values of their gradient (thesis, Algorithm 3.1).

    Both are scaled to [0, 1]. Clusters are sorted by norm − size of their centroids, and bit widths (or ranks, or
    densities) and ``buckets`` are mapped to them linearly: large layers with small top values are compressed most.
    """

    clusters: int = 6
    """At most (thesis, section 4.6.3)."""
    buckets: tuple[int, ...] = ()
    """Bucket sizes to map to the clusters, the first to the most compressed; if empty, all have the reference's."""
    top: float = 0.01
    """Share of a gradient's values, those of the largest magnitude, whose norm counts."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_int("clusters", self.clusters, 1)
        check_number("top", self.top, above=0, high=1)

    def check(self, reference: Mapping[str, Compressor], shapes: Mapping[str, Sequence[int]]) -> None:
        super().check(reference, shapes)
        for compressor in set(reference.values()):
            resized = [_with_bucket(compressor, bucket) for bucket in self.buckets]
            check_contracting(f"buckets={self.buckets}", [member for member in resized if member != compressor])

    def places(self, gradients: Mapping[str, Tensor]) -> Mapping[str, float]:
        from scipy.cluster.vq import kmeans, vq

        if not gradients:
            return {}
        sizes = scaled([gradient.numel() for gradient in gradients.values()])
        norms = scaled([self._top_norm(gradient) for gradient in gradients.values()])
        points = np.stack([sizes, norms], axis=1)
        centroids, _ = kmeans(points, _far_apart(points, self.clusters))
        labels, _ = vq(points, centroids)
        order = np.argsort(centroids[:, 1] - centroids[:, 0], kind="stable")
        place = {int(cluster): k / max(1, len(order) - 1) for k, cluster in enumerate(order)}
        return {name: place[int(label)] for name, label in zip(gradients, labels, strict=True)}

    def _top_norm(self, gradient: Tensor) -> float:
        magnitudes = gradient.detach().float().abs().reshape(-1)
        return gradient_norm(magnitudes.topk(max(1, round(self.top * magnitudes.numel())), sorted=False).values)

    def evaluate(
        self, evidence: Evidence, base: Mapping[str, Compressor], adjust: Adjust | None = None
    ) -> list[LayerCandidates]:
        if not self.buckets:
            return super().evaluate(evidence, base, adjust)
        places = self.places(usable_gradients((*base, *evidence.unsuited), evidence.gradients))

        def resize(name: str, compressor: Compressor) -> Compressor:
            return _with_bucket(compressor, self.buckets[round(places[name] * (len(self.buckets) - 1))])

        return super().evaluate(evidence, base, resize)


def _far_apart(points: Array, count: int) -> Array:
    """Up to ``count`` different points to start from, each the farthest from those before it."""
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
