"""Layers that travel as they are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
        for values, payload in _views(x, segments, message, x.dtype):
            payload.copy_(values)

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
        for values, payload in _views(y, segments, message, y.dtype):
            if add:
                values.add_(payload, alpha=scale)
            elif scale == 1.0:
                values.copy_(payload)
            else:
                torch.mul(payload, scale, out=values)

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
        # Only the raw segments are touched: a copy of the whole flat tensor would cost more than the sum. Messages hold
        # values of the dtype of ``y``; ``own`` may be a wider sum.
        wide = torch.promote_types(own.dtype, torch.float32)
        payloads = [[payload for _, payload in _views(y, segments, m, y.dtype)] for m in messages]
        for row, (values, out) in enumerate(_views(y, segments, out_message, y.dtype)):
            total = own[segments.pieces[row].elements].to(wide, copy=True)
            for received in payloads:
                total += received[row]
            out.copy_(total.mul_(scale))
            values.copy_(out)

    def add_up(
        self, messages: Sequence[Tensor], own: Tensor, segments: Segments, total: Tensor, *, scale: float
    ) -> None:
        """As `Coded.add_up`; messages hold values of the dtype of ``total``, and the sum is taken in fp32."""
        wide = torch.promote_types(total.dtype, torch.float32)
        payloads = [[payload for _, payload in _views(total, segments, m, total.dtype)] for m in messages]
        for row, piece in enumerate(segments.pieces):
            sums = own[piece.elements].to(wide, copy=True)
            for received in payloads:
                sums += received[row]
            total[piece.elements].copy_(sums.mul_(scale))


def _views(flat: Tensor, segments: Segments, message: Tensor, dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor]]:
    """For every segment, its values in the flat tensor and its payload as a tensor of ``dtype``."""
    if message.dtype != torch.uint8:
        raise TypeError(f"a message is a uint8 tensor, not {message.dtype}")
    for piece in segments.pieces:
        stop = piece.start + piece.numel
        end = piece.payload + piece.numel * dtype.itemsize
        if end > message.numel():
            raise ValueError(f"message of {message.numel()} bytes is too short: {piece.name} ends at byte {end}")
        if stop > flat.numel():
            raise ValueError(f"{piece.name} ends at element {stop} of a tensor of {flat.numel()}")
        yield flat[piece.start : stop], message[piece.payload : end].view(dtype)
