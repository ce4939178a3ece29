"""Natural compression: signs and exponents."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.compressors._core.coded import Coded
from thinwire.compressors._core.compressor import Count, Traits
from thinwire.compressors._core.mixins import Saturating
from thinwire.compressors._core.segments import CodecCall, Segments


@dataclass(frozen=True)
class Natural(Coded, Saturating):
    """Natural compression (Horváth et al. 2019): a sign and a power of two, in one byte an element.

    A value x becomes ``sign(x) · 2^(e + b)`` with ``e = floor(log2 |x|)`` and ``b ~ Bernoulli((|x| − 2^e) / 2^e)``.
    Unbiased; the variance is at most ``x²/8``. Magnitudes above 2^18 saturate and are counted, and those below 2^-108
    are received as zero; with a loss scale these limits are those of the unscaled values.
    """

    spec_name: ClassVar[str] = "natural"

    @property
    def traits(self) -> Traits:
        return Traits(unbiased=True, keeps_constants=False, largest=2.0**18, absolute=True)

    @property
    def grain(self) -> int:
        return kernels.bucketed_grain(1)

    def payload_bytes(self, numel: int, dtype: torch.dtype) -> int:
        return kernels.natural_bytes(numel)

    def encode(self, x: Tensor, message: Tensor, call: CodecCall) -> None:
        kernels.natural_encode(x, call.table, message, key=call.key.own, scale=call.loss_scale)

    def decode(self, message: Tensor, y: Tensor, call: CodecCall, *, add: bool = False) -> None:
        kernels.natural_decode(message, call.table, y, add=add, scale=call.scale)

    def limits(self, message: Tensor, segments: Segments) -> tuple[Count, Count]:
        return saturated(message, segments), 0


def saturated(message: Tensor, segments: Segments) -> Count:
    """Return how many values saturated, from the headers of a message."""
    if kernels.asynchronous(message):
        return kernels.header_words(message, segments.table, 1).sum()
    return sum(int(message[p.payload + 4 : p.payload + 8].view(torch.int32)) for p in segments.pieces if p.numel)
