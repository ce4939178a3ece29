"""Random sparsification: all ranks pick the same elements, so no index travels."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from thinwire.compressors.base import Piece, State, Summed
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
        if not isinstance(self.density, int | float) or not 0 < self.density <= 1:
            raise ValueError(f"density must be above 0 and at most 1, not {self.density!r}")

    @property
    def dense(self) -> bool:
        return self.density == 1

    @property
    def unbiased(self) -> bool:
        return self.scaled

    def part_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return torch.float32

    def part_numel(self, round: int, numel: int) -> int:
        return self._k(numel) + 1 if numel else 0

    def part(
        self,
        round: int,
        x: Tensor,
        piece: Piece,
        out: Tensor,
        *,
        key: int,
        scale: float,
        state: State | None = None,
    ) -> None:
        if not piece.numel:
            return
        values = x[piece.elements]
        k = self._k(piece.numel)
        picked = values[self._indices(piece, k, key)].float()
        out[:k] = picked * (scale * piece.numel / k if self.scaled else scale)
        # A sum with a weight of zero is zero, or NaN if anything in it is not finite.
        out[k] = torch.linalg.vector_norm(values.float(), math.inf) * 0.0

    def absorb(
        self, round: int, total: Tensor, x: Tensor, piece: Piece, *, key: int, state: State | None = None
    ) -> None:
        if not piece.numel:
            return
        k = self._k(piece.numel)
        values = x[piece.elements]
        values.copy_(total[k].expand_as(values))
        values[self._indices(piece, k, key)] = (total[:k] + total[k]).to(x.dtype)

    def _k(self, numel: int) -> int:
        return min(numel, math.ceil(self.density * numel))

    def _indices(self, piece: Piece, k: int, key: int) -> Tensor:
        return sample_indices(piece.numel, k, derive_key(key, site_id(piece.name)))
