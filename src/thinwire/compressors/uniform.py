"""Uniform quantization of buckets: between their minimum and maximum, or on both sides of zero."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

from thinwire.arguments import check_choice, check_int, check_number
from thinwire.compressors._core.bucketed import MAX_BUCKET, WHOLE, Bucketed, bucket_elements, check_bucket
from thinwire.compressors._core.compressor import Compressor, Traits
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
        bucket = self.bucket if self.scale == "bucket" else WHOLE
        rounding = "nearest" if self.rounding == "nearest" else "stochastic"
        return Format(self.bits, bucket, scheme="maxabs", rounding=rounding, midrise=self.midrise)


@dataclass(frozen=True)
class QSGD(Bucketed):
    """Norm-scaled QSGD (Alistarh et al. 2017; thesis, section 2.2.3): ``‖v‖ · sign(x) · ℓ/s``,
    ``ℓ = floor(s·|x|/‖v‖ + u)``, per bucket, with ``s = 2^(bits−1) − 1`` steps on each side of zero.

    ``levels`` sets s instead of ``bits`` (IntSGD, section C.1: 64, with the layer as bucket). A code holds sign and
    step together, so x and −x round with different draws, but with the distribution of the formula. Unbiased. Costs
    ``bits + 32/bucket`` bits an element.
    """

    spec_name: ClassVar[str] = "qsgd"

    bits: int = field(default=4, metadata={"shown": True})
    bucket: int | Literal["layer"] = field(default=128, metadata={"shown": True})
    norm: Literal["l2", "linf"] = "l2"
    levels: int = 0

    def __post_init__(self) -> None:
        check_int("bits", self.bits, 2, 8)
        check_bucket(self.bucket)
        check_choice("norm", self.norm, ("l2", "linf"))
        check_int("levels (0: those of bits)", self.levels, 0, 127)

    @property
    def traits(self) -> Traits:
        # The error of rounding in steps of ‖v‖/s is up to half a step in standard deviation, on each element of the
        # bucket. In steps of the largest magnitude that is below it, but for a single step in all but small buckets.
        bucket, steps = bucket_elements(self.bucket), self._steps
        contracts = steps > 1 or bucket <= 32 if self.norm == "linf" else bucket < 4 * steps**2
        return Traits(unbiased=True, keeps_constants=self.norm == "linf", contracts=contracts)

    @property
    def _steps(self) -> int:
        return self.levels or (1 << (self.bits - 1)) - 1

    def make_format(self) -> Format:
        bits = (2 * self.levels).bit_length() if self.levels else self.bits
        scheme = "norm" if self.norm == "l2" else "maxabs"
        return Format(max(2, bits), bucket_elements(self.bucket), scheme=scheme, levels=self.levels)


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
