"""The base of compressors that add all elements in some dtype."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Generator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.compressors._core.calls import SumCall
from thinwire.compressors._core.summed import Subtract, Summed, SumShape


@dataclass(frozen=True)
class Plain(Summed):
    """A compressor that divides all elements by the number of ranks and adds them in one dtype."""

    @abstractmethod
    def sum_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which gradients of ``dtype`` are added."""

    def sums(self, shape: Sequence[int], dtype: torch.dtype) -> tuple[SumShape, ...]:
        return (SumShape(math.prod(shape), self.sum_dtype(dtype)),)

    def rounds(self, x: Tensor, y: Tensor, call: SumCall) -> Generator[None, None, Subtract]:
        (parts,), (buffer,) = call.parts, call.buffers
        own = buffer[parts.where]
        if x.dtype is own.dtype:
            # One operation for all layers, many of which are small.
            torch.cat([x[piece.elements] for piece, _ in parts], out=own)
            own.mul_(call.scale)
        else:
            for piece, where in parts:
                torch.mul(x[piece.elements].float(), call.scale, out=buffer[where])
        yield
        for (piece, _), values in zip(parts, own.split([piece.numel for piece, _ in parts]), strict=True):
            y[piece.elements].copy_(values)

        def subtract(rest: Tensor) -> None:
            for piece, _ in parts:
                values = rest[piece.elements]
                values.sub_((values * call.scale).to(buffer.dtype).float(), alpha=1.0 / call.scale)

        return subtract
