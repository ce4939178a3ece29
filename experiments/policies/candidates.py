"""What policies may choose from in the laboratory, with bytes and errors on each snapshot."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from experiments.papers.lgreco.gradients import NUM_RANKS, Snapshot, Training
from thinwire.compressors import Compressor, MinMax, PowerSGD, Raw, TopK, UnsuitedError, unwrap
from thinwire.plan import Plan, sent_bytes
from thinwire.policies import Evidence
from thinwire.policies.candidates import LayerCandidates, squared_errors


@dataclass(frozen=True)
class Family:
    """Compressors that differ in one parameter. Every layer is offered all that suit its shape, and is raw at a level
    that does not suit it, as under uniform compression.

    ``levels`` are the members whose error, where all layers have it, is a budget.
    """

    name: str
    title: str
    members: tuple[Compressor, ...]
    levels: tuple[Compressor, ...]

    def at(self, level: Compressor, shape: Sequence[int]) -> Compressor:
        """What a layer of this shape has under uniform compression."""
        try:
            return level.fit(shape)
        except UnsuitedError:
            return Raw()


_DENSITIES = tuple(TopK(density=float(f"{0.001 * 500 ** (i / 23):.4g}")) for i in range(24))
"""From 0.001 to 0.5, evenly spaced in their logarithm."""
_RANKS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64)

FAMILIES = (
    Family(
        "bits",
        "min-max, buckets of 128",
        tuple(MinMax(bits=bits, bucket=128) for bits in range(1, 9)),
        tuple(MinMax(bits=bits, bucket=128) for bits in range(2, 8)),
    ),
    Family("topk", "top-k", _DENSITIES, _DENSITIES[2:22:3]),
    Family(
        "powersgd",
        "PowerSGD",
        tuple(PowerSGD(rank=rank) for rank in _RANKS),
        tuple(PowerSGD(rank=rank) for rank in (2, 4, 8, 16, 32)),
    ),
)


@dataclass(frozen=True)
class Point:
    """A plan on a snapshot: bytes that a rank sends in a step, and the sum over layers of the L2 norms of their errors,
    for that of the gradients' norms (thesis, section 4.4)."""

    sent_bytes: float
    error: float


@dataclass
class Table:
    """One snapshot and one family: every layer's candidates evaluated. Layers that no rule compresses are raw in all
    plans; their bytes count."""

    family: Family
    snapshot: Snapshot
    training: Training
    layers: list[LayerCandidates] = field(init=False)
    raw_bytes: float = field(init=False)
    _errors: dict[tuple[str, Compressor], float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        gradients = self.snapshot.gradients
        shapes = {name: tuple(gradient.shape) for name, gradient in gradients.items()}
        # As thinwire's own filter: vectors and small layers are sent raw.
        rules = Plan.build(shapes, "minmax(bits=4, bucket=128)").layers
        chosen = [name for name, compressor in rules.items() if not isinstance(compressor, Raw)]
        self.layers = [self._layer(name) for name in chosen if float(gradients[name].norm()) > 0]
        kept = {layer.name for layer in self.layers}
        self.raw_bytes = sum(sent_bytes(Raw(), shape, NUM_RANKS) for name, shape in shapes.items() if name not in kept)

    def _layer(self, name: str) -> LayerCandidates:
        gradient = self.snapshot.gradients[name]
        offered = {self.family.at(member, gradient.shape): None for member in self.family.members}
        return LayerCandidates.evaluate(name, gradient, offered, next(iter(offered)), _price)

    def evidence(self, memory: Mapping[str, tuple[float, ...]] | None = None) -> Evidence:
        """What a policy is shown, apart from its reference."""
        gradients = {layer.name: self.snapshot.gradients[layer.name] for layer in self.layers}
        reference = {layer.name: layer.candidates[layer.reference] for layer in self.layers}
        return Evidence(
            reference,
            reference,
            gradients,
            num_ranks=NUM_RANKS,
            step=self.snapshot.step,
            learning_rate=self.snapshot.learning_rate,
            bucket_of=self.training.bucket_of,
            memory=memory or {},
        )

    def uniform(self, level: Compressor) -> dict[str, Compressor]:
        """The plan of uniform compression."""
        return {layer.name: self.family.at(level, self._shape(layer)) for layer in self.layers}

    def beside(self, plan: Mapping[str, Compressor]) -> list[LayerCandidates]:
        """All candidates, with the compressors of ``plan`` as the reference that sets the budget."""
        return [self._with_reference(layer, plan[layer.name]) for layer in self.layers]

    def point(self, plan: Mapping[str, Compressor]) -> Point:
        """What a plan sends, and how far from the gradient it is."""
        errors = math.fsum(math.sqrt(self._error(layer, plan[layer.name])) for layer in self.layers)
        sent = self.raw_bytes + sum(_price(layer.name, plan[layer.name], self._shape(layer)) for layer in self.layers)
        return Point(sent, errors / math.fsum(layer.norm for layer in self.layers))

    def by_bucket(self, plan: Mapping[str, Compressor]) -> list[float]:
        """Bytes of each DDP bucket, in the order in which they are sent, without those of raw layers."""
        buckets = self.training.bucket_of
        sums = [0.0] * (1 + max(buckets.values()))
        for layer in self.layers:
            sums[buckets[layer.name]] += _price(layer.name, plan[layer.name], self._shape(layer))
        return sums

    def _shape(self, layer: LayerCandidates) -> tuple[int, ...]:
        return tuple(self.snapshot.gradients[layer.name].shape)

    def _with_reference(self, layer: LayerCandidates, compressor: Compressor) -> LayerCandidates:
        wanted = unwrap(compressor)
        if wanted in layer.candidates:
            return replace(layer, reference=layer.candidates.index(wanted))
        error = self._error(layer, wanted)
        cost = _price(layer.name, wanted, self._shape(layer))
        return replace(
            layer,
            candidates=(*layer.candidates, wanted),
            errors=np.append(layer.errors, error),
            costs=np.append(layer.costs, cost),
            reference=len(layer.candidates),
            offers_reference=False,
        )

    def _error(self, layer: LayerCandidates, compressor: Compressor) -> float:
        wanted = unwrap(compressor)
        if wanted in layer.candidates:
            return float(layer.errors[layer.candidates.index(wanted)])
        key = layer.name, wanted
        if key not in self._errors:
            self._errors[key] = squared_errors(self.snapshot.gradients[layer.name], [wanted])[0]
        return self._errors[key]


def _price(name: str, compressor: Compressor, shape: Sequence[Any]) -> float:
    return sent_bytes(unwrap(compressor), shape, NUM_RANKS)
