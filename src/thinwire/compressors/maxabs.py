"""Symmetric quantisation in steps of the largest magnitude: AQ-SGD's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

from thinwire.compressors.base import Compressor
from thinwire.compressors.bucketed import MAX_BUCKET, Bucketed
from thinwire.compressors.checks import check_choice, check_int
from thinwire.kernels import Format


@dataclass(frozen=True)
class MaxAbs(Bucketed):
    """Max-abs quantiser (S0, section 4.1): ``a = max|x|``, levels −L..L with ``L = 2^(bits−1) − 1``,
    ``code = floor(L·x/a + u)``, received as ``a·code/L``. Zero is a level and the grid is symmetric.

    ``scale`` says what shares an ``a``: a ``bucket`` of so many elements, a ``row`` (the last axis), a ``channel`` (all
    of one index of the first axis) or the ``layer``. ``midrise=True`` is the seed's wording: ``2^bits`` intervals on
    [−a, a], received as their midpoints, without a zero; its outermost values saturate. Stochastic rounding is
    unbiased, as the seed's Theorem 3.1 asks; its authors' code rounds to nearest. Costs ``bits + 32/bucket`` bits.
    """

    spec_name: ClassVar[str] = "maxabs"

    bits: int = field(default=4, metadata={"shown": True})
    scale: Literal["bucket", "row", "channel", "layer"] = "bucket"
    bucket: int = field(default=128, metadata={"shown": True})
    rounding: Literal["stochastic", "nearest"] = "stochastic"
    midrise: bool = False

    def __post_init__(self) -> None:
        check_int("bits", self.bits, 1 if self.midrise else 2, 8)
        check_choice("scale", self.scale, ("bucket", "row", "channel", "layer"))
        check_int("bucket", self.bucket, 1, MAX_BUCKET)
        check_choice("rounding", self.rounding, ("stochastic", "nearest"))

    @property
    def unbiased(self) -> bool:
        return self.rounding == "stochastic" and not self.midrise

    @property
    def keeps_constants(self) -> bool:
        return not self.midrise

    def fit(self, shape: Sequence[int]) -> Compressor:
        if self.scale in ("bucket", "layer"):
            return self
        together = math.prod(shape[1:]) if self.scale == "channel" else (shape[-1] if shape else 1)
        return replace(self, scale="bucket", bucket=min(max(1, together), MAX_BUCKET))

    def make_format(self) -> Format:
        bucket = self.bucket if self.scale == "bucket" else 2**40
        return Format(self.bits, bucket, scheme="maxabs", rounding=self.rounding, midrise=self.midrise)
