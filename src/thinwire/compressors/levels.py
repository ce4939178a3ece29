"""Quantisation to levels that are learned."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.compressors.base import Coded, Compressor
from thinwire.compressors.bucketed import MAX_BUCKET
from thinwire.compressors.checks import check_int
from thinwire.compressors.minmax import MinMax
from thinwire.compressors.pieces import Key, Segments, Slot, State

_RATE = 0.01
_BATCH = 1024


@dataclass(frozen=True)
class Levels(Coded):
    """QSDP's learned levels (thesis, section 5.4, Algorithm 5.1): ``2^bits`` of them in [0, 1], for each layer.

    A bucket is scaled to [0, 1] by its minimum and range, and each value takes the nearest level. The levels start out
    uniform; at the steps ``learn_at`` (C.3: after the warm-up, then rarely) rank 0 moves them towards its gradient's
    values, ``q ← q − α·mean(q − v)`` over the values next to each, in batches of 1024, and gives them to all ranks.
    Layers of fewer than ``min_numel`` elements take `MinMax` of the same size, which has no levels to learn.
    Costs ``bits + 64/bucket`` bits an element, and ``4 · 2^bits`` bytes a piece.
    """

    spec_name: ClassVar[str] = "levels"

    bits: int = field(default=4, metadata={"shown": True})
    bucket: int = field(default=1024, metadata={"shown": True})
    learn_at: tuple[int, ...] = (400, 1900, 3800)
    min_numel: int = 100_000

    def __post_init__(self) -> None:
        check_int("bits", self.bits, 1, 8)
        check_int("bucket", self.bucket, 1, MAX_BUCKET)
        check_int("min_numel", self.min_numel, 0)
        if not isinstance(self.learn_at, tuple) or not all(isinstance(s, int) and s >= 0 for s in self.learn_at):
            raise ValueError(f"learn_at must be a tuple of steps such as (400, 1900), not {self.learn_at!r}")

    @property
    def unbiased(self) -> bool:
        return False

    @property
    def grain(self) -> int:
        return kernels.bucketed_grain(self.bucket)

    @property
    def slots(self) -> tuple[Slot, ...]:
        return (Slot("levels", shape=self._shape, initial=self._uniform, shared=True, learned=True),)

    def _shape(self, layer: Sequence[int]) -> tuple[int]:
        return (1 << self.bits,)

    def _uniform(self, layer: Sequence[int], name: str) -> Tensor:
        return torch.linspace(0.0, 1.0, 1 << self.bits)

    def fit(self, shape: Sequence[int]) -> Compressor:
        return self if math.prod(shape) >= self.min_numel else MinMax(self.bits, self.bucket)

    @property
    def learns_at(self) -> tuple[int, ...]:
        return self.learn_at

    def learn(self, values: Tensor, slots: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return {"levels": learned_levels(values, slots["levels"], self.bucket)}

    def payload_bytes(self, numel: int, dtype: torch.dtype) -> int:
        return kernels.levels_bytes(numel, self.bits, self.bucket)

    def encode(self, x: Tensor, segments: Segments, message: Tensor, *, key: Key, state: State | None = None) -> None:
        assert state is not None, "levels are kept in a slot"
        levels = torch.stack([state.layers[piece.name].now["levels"] for piece in segments.pieces])
        kernels.levels_encode(x, segments.table, message, levels, bits=self.bits, bucket=self.bucket)

    def decode(self, message: Tensor, segments: Segments, y: Tensor, *, add: bool = False, scale: float = 1.0) -> None:
        kernels.levels_decode(message, segments.table, y, bits=self.bits, bucket=self.bucket, add=add, scale=scale)


def learned_levels(values: Tensor, levels: Tensor, bucket: int) -> Tensor:
    """Algorithm 5.1: levels after one pass over ``values`` (flat), starting from ``levels`` (ascending, in [0, 1]).

    Buckets that hold NaN or Inf, and constant ones, teach nothing.
    """
    numel = values.numel()
    bucket = max(1, min(bucket, numel))
    padded = torch.nn.functional.pad(values.float(), (0, -numel % bucket), value=math.nan).view(-1, bucket)
    low = torch.nan_to_num(padded, nan=math.inf).amin(1, keepdim=True)
    span = torch.nan_to_num(padded, nan=-math.inf).amax(1, keepdim=True) - low
    scaled = ((padded - low) / span).view(-1)
    scaled = scaled[torch.isfinite(scaled)]
    learned = levels.double().clone()
    for batch in scaled.double().split(_BATCH):
        nearest = torch.bucketize(batch, (learned[1:] + learned[:-1]) / 2, right=True)
        count = torch.bincount(nearest, minlength=learned.numel())
        off = torch.bincount(nearest, learned[nearest] - batch, minlength=learned.numel())
        learned -= _RATE * off / count.clamp(min=1)
    return learned.float().sort().values
