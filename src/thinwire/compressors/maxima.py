"""Integers scaled by the largest gradient of all ranks, which takes a round of its own."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from thinwire.arguments import check_choice, check_number
from thinwire.compressors._core.compressor import Traits
from thinwire.compressors._core.integers import Integers, fp32
from thinwire.compressors._core.segments import SumCall
from thinwire.compressors._core.summed import Subtract, SumShape

_ZERO, _LOWEST, _HIGHEST, _NOT_FINITE = -127, -126, 126, 127
"""Codes of layers of zeros and of layers that are not finite, and the range of exponents: all fit into one byte."""


@dataclass(frozen=True)
class ScaledByMaxima(Integers):
    """The base of compressors whose scales follow from the maxima of what all ranks measure of a layer."""

    @property
    def maxima_dtype(self) -> torch.dtype:
        """Dtype in which maxima are taken."""
        return torch.float32

    @abstractmethod
    def measure(self, values: Tensor) -> Tensor:
        """Return the scalar that a layer's values (flat) add to the maxima."""

    @abstractmethod
    def scales(self, maxima: Tensor) -> tuple[Tensor, Tensor]:
        """Return the scales (fp32) and whether layers are finite (bool) from the maxima over all ranks; all [parts]."""

    def sums(self, shape: Sequence[int], dtype: torch.dtype) -> tuple[SumShape, ...]:
        numel = math.prod(shape)
        return SumShape(1 if numel else 0, self.maxima_dtype, "max"), SumShape(self.padded(numel), self.sum_dtype)

    def rounds(self, x: Tensor, y: Tensor, call: SumCall) -> Generator[None, None, Subtract]:
        first, parts = ([part for part in parts if part.piece.numel] for parts in call.parts)
        maxima, integers = call.buffers
        for piece, where in first:
            maxima[where] = self.measure(x[piece.elements])
        yield
        scales, finite = self.scales(torch.cat([maxima[where] for _, where in first]) if first else maxima[:0])
        if parts:
            self.put(x, parts, scales, integers, call)
        yield
        if parts:
            self.get(integers, y, parts, scales, finite)
        return lambda rest: self.subtract(rest, parts, scales, call)


@dataclass(frozen=True)
class HeuristicIntSGD(ScaledByMaxima):
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

    @property
    def maxima_dtype(self) -> torch.dtype:
        return self.sum_dtype

    def measure(self, values: Tensor) -> Tensor:
        """Return ``log2(max|values|)``, rounded up or down, from −126 to 126, or one of the other codes."""
        low, high = torch.aminmax(values)
        largest = torch.maximum(-low, high).to(torch.float64)
        mantissa, exponent = torch.frexp(torch.where(torch.isfinite(largest), largest, 1.0))
        exponent = exponent - (mantissa == 0.5).int() if self.exponent == "ceil" else exponent - 1
        exponent = torch.where(largest == 0, _ZERO, exponent.clamp(_LOWEST, _HIGHEST))
        return torch.where(torch.isfinite(largest), exponent, _NOT_FINITE)

    def scales(self, maxima: Tensor) -> tuple[Tensor, Tensor]:
        exponents, finite = maxima, maxima != _NOT_FINITE
        if self.block == "buffer" and len(exponents):
            exponents = torch.where(finite, exponents, _ZERO).amax().expand_as(exponents)
        powers = torch.exp2(exponents.clamp(_LOWEST, _HIGHEST).double())
        return fp32((2 ** (self.bits - 1) - 1) / (powers * self.num_ranks)), finite


@dataclass(frozen=True)
class SharedTernGrad(ScaledByMaxima):
    """TernGrad with scaler sharing (Wen et al. 2017, section 3.2): ``s·Int(g/s)`` with ``s = max_i ‖g_i‖∞``.

    An all-reduce of maxima makes s, one number for each layer, the same on all ranks before they round, so that their
    -1, 0 and 1 can be added as integers: 8 bits an element on any number of hops, up to 127 ranks; ``bits=32`` serves
    more. Unbiased, with more variance than `TernGrad`, in which each rank has its own scale and which takes 2 bits.
    ``deviations=2.5`` first clips what is beyond 2.5 root mean squares of a rank's layer, as ``terngrad(clip=2.5)``.
    """

    spec_name: ClassVar[str] = "shared_terngrad"

    deviations: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("deviations", self.deviations, low=0, hint="a number of root mean squares, or 0 for none")

    @property
    def clip(self) -> int:
        return min(1, super().clip)

    @property
    def traits(self) -> Traits:
        unbiased = self.deviations == 0 and self.rounding == "random"
        return super().traits._replace(unbiased=unbiased, contracts=False)

    def scales(self, maxima: Tensor) -> tuple[Tensor, Tensor]:
        finite = torch.isfinite(maxima)
        return fp32(1.0 / torch.where(finite, maxima, 1.0).double()), finite

    def measure(self, values: Tensor) -> Tensor:
        """Return a layer's largest magnitude, at most so many root mean squares; Inf for one that is not finite."""
        low, high = torch.aminmax(values)
        most = torch.maximum(-low, high).float()
        if self.deviations:
            rms = torch.linalg.vector_norm(values, dtype=torch.float32) / math.sqrt(values.numel())
            most = torch.where(torch.isfinite(most), torch.minimum(most, self.deviations * rms), most)
        return torch.nan_to_num(most, nan=math.inf, posinf=math.inf)
