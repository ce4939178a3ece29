"""Quantization in steps of each bucket's norm."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from thinwire.arguments import check_choice, check_int
from thinwire.compressors._core.bucketed import Bucketed, bucket_elements, check_bucket
from thinwire.compressors._core.compressor import Traits
from thinwire.kernels import Format

_MAX_LEVELS = 127


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
        check_int("levels (0: those of bits)", self.levels, 0, _MAX_LEVELS)

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
