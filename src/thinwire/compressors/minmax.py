"""Uniform quantization between the minimum and the maximum of a bucket, and QSDP's lattice, shifted at random."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from thinwire.arguments import check_choice, check_int
from thinwire.compressors._core.bucketed import MAX_BUCKET, Bucketed
from thinwire.compressors._core.compressor import Traits
from thinwire.compressors._core.segments import Key
from thinwire.kernels import Format


@dataclass(frozen=True)
class MinMax(Bucketed):
    """Bucketed min-max quantizer (thesis, section 5.6.1; the default of CGX at 4 bits and buckets of 128, 3.5.3).

    Per bucket of ``bucket`` consecutive elements: ``unit = (max − min)/(2^bits − 1)``,
    ``code = floor((x − min)/unit + u)`` with ``u`` uniform in [0, 1) (stochastic, unbiased) or ½ (nearest),
    decoded to ``min + code · unit``. Costs ``bits + 64/bucket`` bits an element. By default, gradients are rounded
    stochastically, and weights, deltas and gradients with error feedback as in `rounded_for`.

    A bucket with NaN or Inf, or whose range overflows fp32, is decoded to NaN throughout.
    """

    spec_name: ClassVar[str] = "minmax"

    bits: int = field(default=4, metadata={"shown": True})
    bucket: int = field(default=128, metadata={"shown": True})
    rounding: Literal["auto", "stochastic", "nearest"] = "auto"

    def __post_init__(self) -> None:
        check_int("bits", self.bits, 1, 8)
        check_int("bucket", self.bucket, 1, MAX_BUCKET)
        if self.rounding != "auto":
            check_choice("rounding", self.rounding, ("stochastic", "nearest"))

    @property
    def traits(self) -> Traits:
        # Two levels lie at the ends of a bucket, in all but small ones further from most values than zero does.
        most = {1: 8} if self.rounding == "nearest" else {1: 4, 2: 1024}
        return Traits(unbiased=self.rounding != "nearest", contracts=self.bucket <= most.get(self.bits, self.bucket))

    def make_format(self) -> Format:
        return Format(self.bits, self.bucket, rounding="nearest" if self.rounding == "nearest" else "stochastic")


@dataclass(frozen=True)
class Lattice(Bucketed):
    """Random-shift quantizer of weights (thesis, Definition 1): ``δ · round((x − r)/δ) + r``, ``r = δρ``.

    ``ρ`` is uniform in [−½, ½), one draw for a whole tensor and step, the same on all ranks; ``δ`` is that of `MinMax`
    and ``r`` counts from the bucket's minimum. Unbiased over ρ with an error of variance δ²/12: less than stochastic
    rounding's, which has up to δ²/4. Costs ``bits + 64/bucket`` bits an element.
    """

    spec_name: ClassVar[str] = "lattice"

    bits: int = field(default=8, metadata={"shown": True})
    bucket: int = field(default=1024, metadata={"shown": True})

    def __post_init__(self) -> None:
        check_int("bits", self.bits, 1, 8)
        check_int("bucket", self.bucket, 1, MAX_BUCKET)

    @property
    def traits(self) -> Traits:
        return Traits(unbiased=True)

    def draw_key(self, key: Key) -> int:
        return key.shared

    def make_format(self) -> Format:
        return Format(self.bits, self.bucket, rounding="shift")
