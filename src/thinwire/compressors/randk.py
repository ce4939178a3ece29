"""Random sparsification: all ranks choose the same elements, so that no indices are sent."""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from thinwire.compressors._core.compressor import Traits, not_finite
from thinwire.compressors._core.mixins import WithDensity
from thinwire.compressors._core.segments import Piece, SumCall
from thinwire.compressors._core.summed import Subtract, Summed, SumShape
from thinwire.kernels import derive_key, sample_indices, site_id


@dataclass(frozen=True)
class RandK(Summed, WithDensity):
    """Random-k: ``k = ceil(density · d)`` of the d elements of each layer (Stich et al. 2018), added in fp32.

    The elements are drawn in each step from a key that all ranks share. Scaling by d/k makes the result unbiased; in
    error feedback it would diverge, so ``ef`` sets ``scaled=False``. One more element is NaN if the layer had NaN or
    Inf, so that those are received even where they were not drawn. ``density`` may be a schedule, as of `TopK`.
    """

    spec_name: ClassVar[str] = "randk"

    scaled: bool = True

    @property
    def traits(self) -> Traits:
        return Traits(unbiased=self.scaled, dense=self.density == 1)

    def sums(self, shape: Sequence[int], dtype: torch.dtype) -> tuple[SumShape, ...]:
        numel = math.prod(shape)
        return (SumShape(self._k(numel) + 1 if numel else 0, torch.float32),)

    def rounds(self, x: Tensor, y: Tensor, call: SumCall) -> Generator[None, None, Subtract]:
        (buffer,) = call.buffers
        chosen = [(piece, where, self._indices(piece, call.key.shared, x)) for piece, where in call.parts[0]]
        for piece, where, indices in chosen:
            if piece.numel:
                values, mine = x[piece.elements], buffer[where]
                by = call.scale * piece.numel / indices.numel() if self.scaled else call.scale
                mine[:-1] = values[indices].float() * by
                mine[-1] = not_finite(values)
        yield
        for piece, where, indices in chosen:
            if piece.numel:
                values, total = y[piece.elements], buffer[where]
                values.copy_(total[-1].expand_as(values))
                values[indices] = (total[:-1] + total[-1]).to(y.dtype)

        def subtract(rest: Tensor) -> None:
            for piece, _, indices in chosen:
                values = rest[piece.elements]
                by = piece.numel / max(1, indices.numel()) if self.scaled else 1.0
                values[indices] -= values[indices] * by

        return subtract

    def _k(self, numel: int) -> int:
        return min(numel, math.ceil(self.share * numel))

    def _indices(self, piece: Piece, key: int, like: Tensor) -> Tensor:
        return sample_indices(piece.numel, self._k(piece.numel), derive_key(key, site_id(piece.name)), like)
