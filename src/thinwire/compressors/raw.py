"""Layers that travel as they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.compressors.base import Coded
from thinwire.compressors.pieces import Key, Segments, State


@dataclass(frozen=True)
class Raw(Coded):
    """The values themselves, in the gradient's own dtype; summed in fp32 by the owner.

    Biases, norms and small layers ride in the message of their bucket like this. If the whole plan is raw, gradients go
    by a native all-reduce instead, as without thinwire.
    """

    spec_name: ClassVar[str] = "raw"

    @property
    def unbiased(self) -> bool:
        return True

    @property
    def grain(self) -> int:
        return kernels.bucketed_grain(1)

    def payload_bytes(self, numel: int, dtype: torch.dtype) -> int:
        return kernels.align(numel * dtype.itemsize)

    def encode(self, x: Tensor, segments: Segments, message: Tensor, *, key: Key, state: State | None = None) -> None:
        kernels.raw_encode(x, segments.table, message)

    def decode(
        self,
        message: Tensor,
        segments: Segments,
        y: Tensor,
        *,
        add: bool = False,
        scale: float = 1.0,
    ) -> None:
        """As `Coded.decode`; the message holds values of the dtype of ``y``."""
        kernels.raw_decode(message, segments.table, y, add=add, scale=scale)

    def roundtrip(self, x: Tensor, key: int = 0) -> Tensor:
        if not x.dtype.is_floating_point:
            raise TypeError(f"gradients are floating-point, not {x.dtype}")
        return x.detach().to(torch.float32, copy=True)

    def reduce(
        self,
        messages: Sequence[Tensor],
        own: Tensor,
        segments: Segments,
        out_message: Tensor,
        y: Tensor,
        *,
        key: Key,
        scale: float,
        state: State | None = None,
    ) -> None:
        # Only the raw segments are touched: a copy of the whole flat tensor would cost more than the sum.
        kernels.raw_sum(messages, own, segments.table, y, scale=scale, out_message=out_message)

    def add_up(
        self, messages: Sequence[Tensor], own: Tensor, segments: Segments, total: Tensor, *, scale: float
    ) -> None:
        """As `Coded.add_up`; messages hold values of the dtype of ``total``, and the sum is taken in fp32."""
        kernels.raw_sum(messages, own, segments.table, total, scale=scale)
