"""Random sparsification: all ranks pick the same elements, so no index travels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from thinwire.compressors.base import Summed
from thinwire.compressors.checks import check_share, not_finite
from thinwire.compressors.pieces import Key, Part, Piece, State
from thinwire.kernels import derive_key, sample_indices, site_id


@dataclass(frozen=True)
class RandK(Summed):
    """``ceil(density · d)`` elements of each layer, drawn anew each step by a key that all ranks share, added in fp32.

    Scaled by d/k the result is unbiased; inside error feedback it must not be (``scaled=False``, which ``ef`` sets).
    One more element says whether the layer held NaN or Inf where nobody looked.
    """

    spec_name: ClassVar[str] = "randk"

    density: float = field(default=0.01, metadata={"shown": True})
    scaled: bool = True

    def __post_init__(self) -> None:
        check_share("density", self.density)

    @property
    def dense(self) -> bool:
        return self.density == 1

    @property
    def unbiased(self) -> bool:
        return self.scaled

    def part_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return torch.float32

    def part_numel(self, round: int, shape: Sequence[int]) -> int:
        numel = math.prod(shape)
        return self._k(numel) + 1 if numel else 0

    def part(
        self,
        round: int,
        x: Tensor,
        parts: Sequence[Part],
        out: Tensor,
        *,
        key: Key,
        scale: float,
        state: State | None = None,
    ) -> None:
        for piece, where in parts:
            if piece.numel:
                values, k = x[piece.elements], self._k(piece.numel)
                picked = values[self._indices(piece, k, key.shared)].float()
                out[where][:k] = picked * (scale * piece.numel / k if self.scaled else scale)
                out[where][k] = not_finite(values)

    def absorb(
        self,
        round: int,
        total: Tensor,
        x: Tensor,
        parts: Sequence[Part],
        *,
        key: Key,
        state: State | None = None,
    ) -> None:
        for piece, where in parts:
            if piece.numel:
                k, values, mine = self._k(piece.numel), x[piece.elements], total[where]
                values.copy_(mine[k].expand_as(values))
                values[self._indices(piece, k, key.shared)] = (mine[:k] + mine[k]).to(x.dtype)

    def _k(self, numel: int) -> int:
        return min(numel, math.ceil(self.density * numel))

    def _indices(self, piece: Piece, k: int, key: int) -> Tensor:
        return sample_indices(piece.numel, k, derive_key(key, site_id(piece.name)))
