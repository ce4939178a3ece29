"""Natural compression: signs and exponents."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.compressors.base import Coded, Count
from thinwire.compressors.pieces import Key, Segments, State


@dataclass(frozen=True)
class Natural(Coded):
    """NatSGD (Horváth et al. 2019; S4, section 5): a power of two, one byte an element.

    ``sign · 2^(e + Bernoulli((|x| − 2^e)/2^e))`` with ``e = floor(log2 |x|)``. Unbiased, and its variance is at most an
    eighth of the square. Magnitudes above 2^18 saturate, and are counted; below 2^-108 they are received as zero.
    """

    spec_name: ClassVar[str] = "natural"

    @property
    def unbiased(self) -> bool:
        return True

    @property
    def keeps_constants(self) -> bool:
        return False

    @property
    def largest(self) -> float:
        return 2.0**18

    @property
    def grain(self) -> int:
        return kernels.bucketed_grain(1)

    def payload_bytes(self, numel: int, dtype: torch.dtype) -> int:
        return kernels.natural_bytes(numel)

    def encode(self, x: Tensor, segments: Segments, message: Tensor, *, key: Key, state: State | None = None) -> None:
        kernels.natural_encode(x, segments.table, message, key=key.own)

    def decode(self, message: Tensor, segments: Segments, y: Tensor, *, add: bool = False, scale: float = 1.0) -> None:
        kernels.natural_decode(message, segments.table, y, add=add, scale=scale)

    def limits(self, message: Tensor, segments: Segments) -> tuple[Count, Count]:
        return saturated(message, segments), 0


def saturated(message: Tensor, segments: Segments) -> Count:
    """Values that saturated, as the headers of a message encoded here say."""
    if kernels.asynchronous(message):
        return kernels.header_words(message, segments.table, 1).sum()
    return sum(int(message[p.payload + 4 : p.payload + 8].view(torch.int32)) for p in segments.pieces if p.numel)
