"""Ternary gradients."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from thinwire.arguments import check_number
from thinwire.compressors._core.bucketed import Bucketed, bucket_elements, check_bucket
from thinwire.compressors._core.compressor import Traits
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
