"""Truncated gradients: an upper bound of the gain of compression (thesis, section 3.2, Figure 3.1)."""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from thinwire.arguments import check_number
from thinwire.compressors._core.compressor import Traits, not_finite
from thinwire.compressors._core.segments import SumCall
from thinwire.compressors._core.summed import Subtract, Summed, SumShape


@dataclass(frozen=True)
class Truncate(Summed):
    """The first ``d/γ`` of the d elements of each layer, added in the gradient's dtype; others are received as zero.

    It takes no time and ruins training. It measures how fast a step would be if ``γ`` times fewer bytes were sent. One
    more element is NaN if the layer has NaN or Inf.
    """

    spec_name: ClassVar[str] = "truncate"

    gamma: float = field(default=10.0, metadata={"shown": True})

    def __post_init__(self) -> None:
        check_number("gamma", self.gamma, low=1)

    @property
    def traits(self) -> Traits:
        return Traits(unbiased=self.gamma == 1, dense=self.gamma == 1)

    def sums(self, shape: Sequence[int], dtype: torch.dtype) -> tuple[SumShape, ...]:
        numel = math.prod(shape)
        return (SumShape(math.ceil(numel / self.gamma) + 1 if numel else 0, dtype),)

    def rounds(self, x: Tensor, y: Tensor, call: SumCall) -> Generator[None, None, Subtract]:
        (buffer,) = call.buffers
        parts = [(x[piece.elements], y[piece.elements], buffer[where]) for piece, where in call.parts[0] if piece.numel]
        for given, _, mine in parts:
            mine[:-1].copy_(given[: mine.numel() - 1] * call.scale)
            mine[-1] = not_finite(given)
        yield
        for _, received, total in parts:
            received[: total.numel() - 1] = total[:-1] + total[-1]
            received[total.numel() - 1 :] = total[-1]

        def subtract(rest: Tensor) -> None:
            for piece, where in call.parts[0]:
                sent = rest[piece.elements][: max(0, where.stop - where.start - 1)]
                sent.sub_((sent * call.scale).to(buffer.dtype).float(), alpha=1.0 / call.scale)

        return subtract
