"""Gradients in 16 bits, added as such."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor

from thinwire.compressors.base import Summed
from thinwire.compressors.pieces import Key, Part, State

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Plain(Summed):
    """All elements, each divided by the number of ranks and added in some dtype."""

    def part_numel(self, round: int, shape: Sequence[int]) -> int:
        return math.prod(shape)

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
            out[where].copy_(x[piece.elements].float() * scale)

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
            x[piece.elements].copy_(total[where])


@dataclass(frozen=True)
class Cast(Plain):
    """The mean in bf16 or fp16: each rank divides by the number of ranks, casts, and a native all-reduce adds.

    Dividing first keeps fp16 sums from overflowing; what overflows all the same arrives as Inf.
    """

    spec_name: ClassVar[str] = "cast"

    to: Literal["bf16", "fp16"] = field(default="bf16", metadata={"shown": True})

    def __post_init__(self) -> None:
        if self.to not in _DTYPES:
            raise ValueError(f"cast takes bf16 or fp16, not {self.to!r}")

    @property
    def largest(self) -> float:
        return torch.finfo(_DTYPES[self.to]).max

    @property
    def unbiased(self) -> bool:
        return False

    def part_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return _DTYPES[self.to]

    def __str__(self) -> str:
        return f"cast({self.to})"


@dataclass(frozen=True)
class RawSum(Plain):
    """What `Raw` becomes in a plan whose other compressors are all summed: a part of their sums, not messages of its
    own. The Wire puts it in; it has no spec."""

    spec_name: ClassVar[str] = "rawsum"

    @property
    def unbiased(self) -> bool:
        return True

    def part_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return dtype
