"""Quantization to the optimal levels for a normal distribution."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import ClassVar

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.arguments import check_choice, check_int
from thinwire.compressors._core.bucketed import MAX_BUCKET
from thinwire.compressors._core.coded import OnePass
from thinwire.compressors._core.compressor import Traits
from thinwire.compressors._core.segments import CodecCall
from thinwire.kernels import Residual

MAGNITUDES = {
    2: (0.4527800, 1.5104176),
    3: (0.2450942, 0.7560053, 1.3439093, 2.1519457),
    4: (0.1283950, 0.3880483, 0.6567590, 0.9423403, 1.2562311, 1.6180464, 2.0690167, 2.7325896),
}
"""Magnitudes with the least squared error for the unit normal distribution (Lloyd 1982), by bits."""


@cache
def _on_host(bits: int) -> Tensor:
    return torch.tensor(MAGNITUDES[bits], dtype=torch.float32, device="cpu")


def _magnitudes(bits: int, device: torch.device) -> Tensor:
    return kernels.to_device(_on_host(bits), device)


@dataclass(frozen=True)
class Gaussian(OnePass):
    """Lloyd–Max quantizer for the normal distribution (Max 1960): ``sign(x) · s · m`` with the nearest magnitude m.

    ``s`` is the root mean square of ``bucket`` consecutive elements. At 2 bits ``|x| > .9816 s`` is received as 1.510 s
    and the rest as .4528 s. Biased; costs ``bits + 32/bucket`` bits an element. A bucket with NaN or Inf becomes NaN.
    """

    spec_name: ClassVar[str] = "gaussian"

    bits: int = field(default=2, metadata={"shown": True})
    bucket: int = field(default=128, metadata={"shown": True})

    def __post_init__(self) -> None:
        check_choice("bits", self.bits, tuple(MAGNITUDES))
        check_int("bucket", self.bucket, 1, MAX_BUCKET)

    @property
    def traits(self) -> Traits:
        return Traits(keeps_constants=False)

    @property
    def grain(self) -> int:
        return kernels.bucketed_grain(self.bucket)

    def payload_bytes(self, numel: int, dtype: torch.dtype) -> int:
        return kernels.magnitudes_bytes(numel, self.bits, self.bucket)

    def encode(self, x: Tensor, message: Tensor, call: CodecCall, residual: Residual | None = None) -> None:
        how = {"bits": self.bits, "bucket": self.bucket, "residual": residual}
        kernels.magnitudes_encode(x, call.table, message, _magnitudes(self.bits, x.device), **how)

    def decode(self, message: Tensor, y: Tensor, call: CodecCall, *, add: bool = False) -> None:
        how = {"bits": self.bits, "bucket": self.bucket}
        kernels.magnitudes_decode(
            message, call.table, y, _magnitudes(self.bits, y.device), **how, add=add, scale=call.scale
        )
