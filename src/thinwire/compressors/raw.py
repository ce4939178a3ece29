"""Layers in full precision, or in 16 bits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.arguments import check_choice
from thinwire.compressors._core.coded import Coded
from thinwire.compressors._core.compressor import Traits
from thinwire.compressors._core.segments import CodecCall
from thinwire.compressors._core.summed import Plain

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Raw(Coded):
    """A compressor that sends gradients in their own dtype; the owner of a chunk sums in fp32.

    Biases, norms and small layers are sent like this, in the same messages as compressed layers. If the whole plan is
    raw, gradients are reduced by a native all-reduce instead, as without thinwire.
    """

    spec_name: ClassVar[str] = "raw"

    @property
    def traits(self) -> Traits:
        return Traits(unbiased=True)

    @property
    def grain(self) -> int:
        return kernels.bucketed_grain(1)

    def payload_bytes(self, numel: int, dtype: torch.dtype) -> int:
        return kernels.align(numel * dtype.itemsize)

    def encode(self, x: Tensor, message: Tensor, call: CodecCall) -> None:
        kernels.raw_encode(x, call.segments.table, message)

    def decode(self, message: Tensor, y: Tensor, call: CodecCall, *, add: bool = False) -> None:
        """See `Coded.decode`. The message has values of the dtype of ``y``."""
        kernels.raw_decode(message, call.segments.table, y, add=add, scale=call.scale)

    def roundtrip(self, x: Tensor, key: int = 0) -> Tensor:
        if not x.dtype.is_floating_point:
            raise TypeError(f"gradients are floating-point, not {x.dtype}")
        return x.detach().to(torch.float32, copy=True)

    def reduce(self, messages: Sequence[Tensor], own: Tensor, out_message: Tensor, y: Tensor, call: CodecCall) -> None:
        # In place, because a copy of the flat tensor would take longer than the sum.
        kernels.raw_sum(messages, own, call.segments.table, y, scale=call.scale, out_message=out_message)

    def add_up(self, messages: Sequence[Tensor], own: Tensor, total: Tensor, call: CodecCall) -> None:
        """See `Coded.add_up`. Messages have values of the dtype of ``total``, and the sum is taken in fp32."""
        kernels.raw_sum(messages, own, call.segments.table, total, scale=call.scale)

    def mean(self, messages: Sequence[Tensor], y: Tensor, call: CodecCall) -> None:
        """See `Coded.mean`. Messages have values of the dtype of ``y``, and the sum is taken in fp32."""
        kernels.raw_decode(messages[0], call.segments.table, y)
        kernels.raw_sum(messages[1:], y, call.segments.table, y, scale=call.scale)


@dataclass(frozen=True)
class RawSum(Plain):
    """`Raw` in a plan whose other compressors are all summed: layers join the sums instead of needing messages.

    The handle puts it in; it has no spec.
    """

    spec_name: ClassVar[str] = "rawsum"

    @property
    def traits(self) -> Traits:
        return Traits(unbiased=True)

    def sum_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return dtype


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
