"""Ternary gradients, with a scale of each rank or one that all ranks share."""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor

from thinwire.arguments import check_number
from thinwire.compressors._core.bucketed import Bucketed, bucket_elements, check_bucket
from thinwire.compressors._core.compressor import Traits
from thinwire.compressors._core.integers import Integers, fp32
from thinwire.compressors._core.segments import SumCall
from thinwire.compressors._core.summed import Subtract, SumShape
from thinwire.kernels import Format


@dataclass(frozen=True)
class TernGrad(Bucketed):
    """``‖g‖∞ · sign(g) · Bernoulli(|g|/‖g‖∞)`` (Wen et al. 2017), 2 bits an element, one scale a layer. Unbiased.

    ``clip=2.5`` first clips what is beyond 2.5 root mean squares of the layer (a gradient's mean is taken as zero), as
    its authors do: less variance, some bias. They also leave the last layer as it is: ``exclude=["head"]``. ``bucket``
    gives a number of elements a scale of their own instead of the layer.
    """

    spec_name: ClassVar[str] = "terngrad"

    clip: float = 0.0
    bucket: int | Literal["layer"] = field(default="layer")

    def __post_init__(self) -> None:
        check_bucket(self.bucket)
        check_number("clip", self.clip, low=0, hint="a number of root mean squares, or 0 for none")

    @property
    def traits(self) -> Traits:
        return Traits(unbiased=self.clip == 0, contracts=False)

    def make_format(self) -> Format:
        return Format(2, bucket_elements(self.bucket), scheme="maxabs", levels=1, clip=float(self.clip))


@dataclass(frozen=True)
class SharedTernGrad(Integers):
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

    def sums(self, shape: Sequence[int], dtype: torch.dtype) -> tuple[SumShape, ...]:
        numel = math.prod(shape)
        return SumShape(1 if numel else 0, torch.float32, "max"), SumShape(self.padded(numel), self.sum_dtype)

    def rounds(self, x: Tensor, y: Tensor, call: SumCall) -> Generator[None, None, Subtract]:
        def scales(largest: Tensor) -> tuple[Tensor, Tensor]:
            finite = torch.isfinite(largest)
            return fp32(1.0 / torch.where(finite, largest, 1.0).double()), finite

        return self.rounds_after_maxima(x, y, call, self._largest, scales)

    def _largest(self, values: Tensor) -> Tensor:
        """Return a layer's largest magnitude, at most so many root mean squares; Inf for one that is not finite."""
        low, high = torch.aminmax(values)
        most = torch.maximum(-low, high).float()
        if self.deviations:
            rms = torch.linalg.vector_norm(values, dtype=torch.float32) / math.sqrt(values.numel())
            most = torch.where(torch.isfinite(most), torch.minimum(most, self.deviations * rms), most)
        return torch.nan_to_num(most, nan=math.inf, posinf=math.inf)
