"""Gradients in 16 bits, added in that precision."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch

from thinwire.arguments import check_choice
from thinwire.compressors._core.compressor import Traits
from thinwire.compressors._core.summed import Plain

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Cast(Plain):
    """The mean in bf16 or fp16: each rank divides by the number of ranks and casts, and a native all-reduce adds.

    Dividing first keeps fp16 sums from overflowing. Values that overflow nevertheless are received as Inf.
    """

    spec_name: ClassVar[str] = "cast"

    to: Literal["bf16", "fp16"] = field(default="bf16", metadata={"shown": True})

    def __post_init__(self) -> None:
        check_choice("to", self.to, tuple(_DTYPES))

    @property
    def traits(self) -> Traits:
        return Traits(largest=torch.finfo(_DTYPES[self.to]).max)

    def sum_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return _DTYPES[self.to]

    def __str__(self) -> str:
        return f"cast({self.to})"
