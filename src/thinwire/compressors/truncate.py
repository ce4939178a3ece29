"""The thesis's synthetic probe of what compression could buy at all (section 3.2, Figure 3.1)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from thinwire.compressors.base import Summed
from thinwire.compressors.checks import not_finite
from thinwire.compressors.pieces import Key, Part, State


@dataclass(frozen=True)
class Truncate(Summed):
    """The first ``d/γ`` elements of each layer, added as they are; the others are received as zero.

    It compresses at no cost in time, and ruins training: what it measures is how fast a step would be if ``γ`` times
    fewer bytes travelled. One more element says whether the layer held NaN or Inf.
    """

    spec_name: ClassVar[str] = "truncate"

    gamma: float = field(default=10.0, metadata={"shown": True})

    def __post_init__(self) -> None:
        if not isinstance(self.gamma, int | float) or not 1 <= self.gamma < math.inf:
            raise ValueError(f"gamma must be at least 1, not {self.gamma!r}: how many times fewer elements are sent")

    @property
    def dense(self) -> bool:
        return self.gamma == 1

    @property
    def unbiased(self) -> bool:
        return self.gamma == 1

    def part_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return dtype

    def part_numel(self, round: int, shape: Sequence[int]) -> int:
        numel = math.prod(shape)
        return math.ceil(numel / self.gamma) + 1 if numel else 0

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
            mine = out[where]
            if mine.numel():
                values = x[piece.elements]
                torch.mul(values[: mine.numel() - 1], scale, out=mine[:-1])
                mine[-1] = not_finite(values)

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
            mine = total[where]
            if mine.numel():
                values = x[piece.elements]
                values[: mine.numel() - 1] = mine[:-1] + mine[-1]
                values[mine.numel() - 1 :] = mine[-1]
