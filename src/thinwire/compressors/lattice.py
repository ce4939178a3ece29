"""QSDP's quantizer: a lattice that is shifted at random as a whole."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from thinwire.arguments import check_int
from thinwire.compressors._core.bucketed import MAX_BUCKET, Bucketed
from thinwire.compressors._core.compressor import Traits
from thinwire.compressors._core.segments import Key
from thinwire.kernels import Format


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

    def key_of(self, key: Key) -> int:
        return key.shared

    def make_format(self) -> Format:
        return Format(self.bits, self.bucket, rounding="shift")
