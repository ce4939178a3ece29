"""Messages of integers with only as many bits as their sums need."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from thinwire.compressors._core.bucketed import Bucketed
from thinwire.compressors._core.compressor import Traits
from thinwire.kernels import Format

_BUCKET = 1024
_MOST = 127
"""Largest magnitude of a sum that codes of 8 bits can represent."""


@dataclass(frozen=True)
class Packed(Bucketed):
    """Sums of ``terms`` integers of magnitudes up to ``limit`` each, exact, in the fewest bits that suffice.

    Integers are sent as codes of `Format`'s max-abs quantizer, with ``terms · limit`` levels on each side of zero. The
    last element of each bucket is the bound itself, so that its scale is 1 and every code its integer (`spread`). The
    bounds of ranks add up to that of the sum as their integers do. It has no spec.
    """

    spec_name: ClassVar[str] = "packed"

    limit: int
    terms: int = 1

    def __post_init__(self) -> None:
        if self.limit < 1 or self.terms < 1 or self.bound > _MOST:
            raise ValueError(f"sums of {self.terms} integers up to {self.limit} do not fit into 8 bits")

    @property
    def bound(self) -> int:
        """Largest magnitude of a sum."""
        return self.limit * self.terms

    @property
    def bits(self) -> int:
        """Number of bits of a sum in a message."""
        return (2 * self.bound).bit_length()

    @property
    def traits(self) -> Traits:
        return Traits(largest=float(self.bound))

    def of(self, terms: int) -> Packed:
        """Return the compressor of sums of ``terms`` ranks' integers."""
        return replace(self, terms=terms)

    def make_format(self) -> Format:
        return Format(self.bits, _BUCKET, scheme="maxabs", rounding="nearest", levels=self.bound)

    @staticmethod
    def spread_numel(numel: int) -> int:
        """Return the elements that `spread` takes for ``numel`` integers."""
        return -(-numel // (_BUCKET - 1)) * _BUCKET

    def spread(self, integers: Tensor, out: Tensor) -> None:
        """Set ``out`` (fp32) to a rank's ``integers``, in buckets that end with the limit."""
        buckets, places = out.view(-1, _BUCKET), _BUCKET - 1
        whole = integers.numel() // places
        buckets[:whole, :places] = integers[: whole * places].view(whole, places)
        rest = integers[whole * places :]
        buckets[whole:, :places] = 0.0
        buckets[whole:, : rest.numel()] = rest
        buckets[:, places] = float(self.limit)

    @staticmethod
    def collect(sums: Tensor, out: Tensor) -> None:
        """Set ``out`` to the integers that are in the buckets of ``sums`` (fp32)."""
        buckets, places = sums.view(-1, _BUCKET), _BUCKET - 1
        whole = out.numel() // places
        out[: whole * places].view(whole, places).copy_(buckets[:whole, :places])
        rest = out[whole * places :]
        if rest.numel():
            rest.copy_(buckets[whole, : rest.numel()])


def message_bytes(packed: Packed, numel: int) -> int:
    """Return the bytes of ``numel`` integers in a message: the mean of what ranks send and what they receive."""
    size = packed.spread_numel(numel)
    return sum(p.payload_bytes(size, torch.float32) for p in (packed.of(1), packed)) // 2
