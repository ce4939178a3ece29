"""1-bit SGD: one bit says whether a value is below zero."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from thinwire.compressors._core.bucketed import Bucketed, bucket_elements, check_bucket
from thinwire.compressors._core.compressor import Traits
from thinwire.kernels import Format


@dataclass(frozen=True)
class OneBit(Bucketed):
    """1-bit SGD (Seide et al. 2014): in each bucket, values below zero become their mean, and so do all others.

    Biased; a plan adds error feedback unless ``feedback=False``. Costs ``1 + 64/bucket`` bits an element.
    """

    spec_name: ClassVar[str] = "onebit"

    bucket: int | Literal["layer"] = field(default=512, metadata={"shown": True})
    feedback: bool = True

    def __post_init__(self) -> None:
        check_bucket(self.bucket)

    @property
    def traits(self) -> Traits:
        return Traits(wants_feedback=self.feedback)

    def make_format(self) -> Format:
        return Format(1, bucket_elements(self.bucket), scheme="sides")
