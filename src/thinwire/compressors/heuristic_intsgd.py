"""Integers scaled by the largest gradient of all ranks, which takes a round of its own."""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from thinwire.arguments import check_choice
from thinwire.compressors._core.compressor import Traits
from thinwire.compressors._core.integers import Integers, fp32
from thinwire.compressors._core.segments import SumCall
from thinwire.compressors._core.summed import Subtract, SumShape

_ZERO, _LOWEST, _HIGHEST, _NOT_FINITE = -127, -126, 126, 127
"""Codes of layers of zeros and of layers that are not finite, and the range of exponents: all fit into one byte."""


@dataclass(frozen=True)
class HeuristicIntSGD(Integers):
    """SwitchML's profiled scale (Sapio et al. 2021; IntSGD, section 5.2).

    The scale is ``α = (2^(bits−1) − 1) / (n · 2^ceil(log2 M))``, where ``M`` is the largest magnitude of a layer on any
    of the n ranks. An all-reduce of maxima gives its exponent, one integer for each layer, before the integers can be
    sent. ``rounding`` is determ (to the nearest integer), as in SwitchML, or random. There is no proof of convergence:
    one large value leaves few codes to all others.

    The code published with the IntSGD paper takes one M for a whole buffer (here a DDP bucket) and ``floor`` in the
    place of ``ceil``, which clips values above ``2^floor(log2 M)``: ``block=buffer, exponent=floor``.
    """

    spec_name: ClassVar[str] = "heuristic_intsgd"

    rounding: Literal["random", "determ"] = "determ"
    block: Literal["layer", "buffer"] = "layer"
    exponent: Literal["ceil", "floor"] = "ceil"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("block", self.block, ("layer", "buffer"))
        check_choice("exponent", self.exponent, ("ceil", "floor"))

    @property
    def traits(self) -> Traits:
        return super().traits._replace(largest=2.0**_HIGHEST)

    def sums(self, shape: Sequence[int], dtype: torch.dtype) -> tuple[SumShape, ...]:
        numel = math.prod(shape)
        return SumShape(1 if numel else 0, self.sum_dtype, "max"), SumShape(self.padded(numel), self.sum_dtype)

    def rounds(self, x: Tensor, y: Tensor, call: SumCall) -> Generator[None, None, Subtract]:
        up = self.exponent == "ceil"
        return self.rounds_after_maxima(x, y, call, lambda values: _exponent(values, up=up), self._scales)

    def _scales(self, exponents: Tensor) -> tuple[Tensor, Tensor]:
        finite = exponents != _NOT_FINITE
        if self.block == "buffer" and len(exponents):
            exponents = torch.where(finite, exponents, _ZERO).amax().expand_as(exponents)
        powers = torch.exp2(exponents.clamp(_LOWEST, _HIGHEST).double())
        return fp32((2 ** (self.bits - 1) - 1) / (powers * self.num_ranks)), finite


def _exponent(values: Tensor, *, up: bool) -> Tensor:
    """Return ``log2(max|values|)``, rounded up or down, an integer from −126 to 126, or one of the other codes."""
    low, high = torch.aminmax(values)
    largest = torch.maximum(-low, high).to(torch.float64)
    mantissa, exponent = torch.frexp(torch.where(torch.isfinite(largest), largest, 1.0))
    exponent = (exponent - (mantissa == 0.5).int() if up else exponent - 1).clamp(_LOWEST, _HIGHEST)
    exponent = torch.where(largest == 0, _ZERO, exponent)
    return torch.where(torch.isfinite(largest), exponent, _NOT_FINITE)
