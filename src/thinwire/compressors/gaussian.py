"""Quantisation to the optimal levels for a normal distribution."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from thinwire.compressors._core.bucketed import MAX_BUCKET
from thinwire.compressors._core.checks import check_choice, check_int
from thinwire.compressors._core.coded_rows import CodedRows
from thinwire.compressors._core.norms import root_mean_squares

MAGNITUDES = {
    2: (0.4527800, 1.5104176),
    3: (0.2450942, 0.7560053, 1.3439093, 2.1519457),
    4: (0.1283950, 0.3880483, 0.6567590, 0.9423403, 1.2562311, 1.6180464, 2.0690167, 2.7325896),
}
"""Magnitudes with the least squared error for the unit normal distribution (Lloyd 1982), by bits."""


@dataclass(frozen=True)
class Gaussian(CodedRows):
    """Lloyd–Max quantiser for the normal distribution (Max 1960): ``sign(x) · s · m`` with the nearest magnitude m.

    ``s`` is the root mean square of ``bucket`` consecutive elements. At 2 bits ``|x| > .9816 s`` is received as 1.510 s
    and the rest as .4528 s. Biased; costs ``bits + 32/bucket`` bits an element. A bucket with NaN or Inf becomes NaN.
    """

    spec_name: ClassVar[str] = "gaussian"

    bits: int = field(default=2, metadata={"shown": True})

    def __post_init__(self) -> None:
        check_choice("bits", self.bits, tuple(MAGNITUDES))
        check_int("bucket", self.bucket, 1, MAX_BUCKET)

    def scales(self, rows: Tensor, counts: Tensor) -> Tensor:
        return root_mean_squares(rows, counts)

    def codes(self, scaled: Tensor) -> Tensor:
        magnitudes = torch.tensor(MAGNITUDES[self.bits], device=scaled.device)
        nearest = torch.bucketize(scaled.abs(), (magnitudes[1:] + magnitudes[:-1]) / 2)
        return nearest + (scaled < 0) * magnitudes.numel()

    def values(self, codes: Tensor) -> Tensor:
        magnitudes = torch.tensor(MAGNITUDES[self.bits], device=codes.device)
        return torch.cat((magnitudes, -magnitudes))[codes]
