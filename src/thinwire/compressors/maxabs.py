"""Symmetric quantization in steps of the largest magnitude."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

from thinwire.arguments import check_choice, check_int
from thinwire.compressors._core.bucketed import MAX_BUCKET, Bucketed
from thinwire.compressors._core.compressor import Compressor, Traits
from thinwire.kernels import Format


@dataclass(frozen=True)
class MaxAbs(Bucketed):
    """Max-abs quantizer (AQ-SGD, Wang et al. 2022, section 4.1): ``a = max|x|``, levels −L..L with
    ``L = 2^(bits−1) − 1``, ``code = floor(L·x/a + u)``, decoded to ``a·code/L``. Zero is a level.

    The scale ``a`` is shared by a ``bucket`` of consecutive elements, a ``row`` (the last axis), a ``channel`` (one
    index of the first axis) or the ``layer``. ``midrise=True`` is the paper's description: ``2^bits`` intervals on
    [−a, a], decoded to their midpoints, so that zero is no level and the outermost values saturate. Stochastic rounding
    is unbiased, as Theorem 3.1 requires; the authors' code rounds to nearest. By default, gradients are rounded
    stochastically, and weights, deltas and error feedback as in `rounded_for`. Costs ``bits + 32/bucket``
    bits an element.
    """

    spec_name: ClassVar[str] = "maxabs"

    bits: int = field(default=4, metadata={"shown": True})
    scale: Literal["bucket", "row", "channel", "layer"] = "bucket"
    bucket: int = field(default=128, metadata={"shown": True})
    rounding: Literal["auto", "stochastic", "nearest"] = "auto"
    midrise: bool = False

    def __post_init__(self) -> None:
        check_int("bits", self.bits, 1 if self.midrise else 2, 8)
        check_choice("scale", self.scale, ("bucket", "row", "channel", "layer"))
        check_int("bucket", self.bucket, 1, MAX_BUCKET)
        if self.rounding != "auto":
            check_choice("rounding", self.rounding, ("stochastic", "nearest"))

    @property
    def traits(self) -> Traits:
        nearest = self.rounding == "nearest"
        # A single step on each side of zero is, in all but small buckets, longer than most values are large.
        most = (128 if nearest else 16) if self.midrise else 32
        small = self.scale == "bucket" and self.bucket <= most
        one_step = self.bits == 1 or (self.bits == 2 and not self.midrise and not nearest)
        return Traits(
            unbiased=not nearest and not self.midrise, keeps_constants=not self.midrise, contracts=small or not one_step
        )

    def fit(self, shape: Sequence[int]) -> Compressor:
        if self.scale in ("bucket", "layer"):
            return self
        together = math.prod(shape[1:]) if self.scale == "channel" else (shape[-1] if shape else 1)
        return replace(self, scale="bucket", bucket=min(max(1, together), MAX_BUCKET))

    def make_format(self) -> Format:
        bucket = self.bucket if self.scale == "bucket" else 2**40
        rounding = "nearest" if self.rounding == "nearest" else "stochastic"
        return Format(self.bits, bucket, scheme="maxabs", rounding=rounding, midrise=self.midrise)
