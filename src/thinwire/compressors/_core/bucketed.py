"""The base of quantizers with a scale for each bucket: one payload format, one set of kernels."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.arguments import check_int
from thinwire.compressors._core.coded import OnePass
from thinwire.compressors._core.compressor import Traits
from thinwire.compressors._core.segments import CodecCall, Key
from thinwire.kernels import Format, Residual

WHOLE = 2**40
"""Number of elements of a bucket that is larger than any layer."""

MAX_BUCKET = 2**31 - 1


@dataclass(frozen=True)
class Bucketed(OnePass):
    """Codes of a few bits, and one or two scales for each bucket; see `thinwire.kernels.Format`."""

    @abstractmethod
    def make_format(self) -> Format:
        """Return the format of the compressor's payloads."""

    @cached_property
    def form(self) -> Format:
        return self.make_format()

    @property
    def grain(self) -> int | None:
        return None if self.form.bucket >= WHOLE else kernels.bucketed_grain(self.form.bucket)

    def draw_key(self, key: Key) -> int:
        """Return the key of the compressor's random draws."""
        return key.own

    def payload_bytes(self, numel: int, dtype: torch.dtype) -> int:
        return kernels.bucketed_bytes(numel, self.form)

    def encode(self, x: Tensor, message: Tensor, call: CodecCall, residual: Residual | None = None) -> None:
        kernels.bucketed_encode(
            x, call.segments.table, message, self.form, key=self.draw_key(call.key), residual=residual
        )

    def decode(self, message: Tensor, y: Tensor, call: CodecCall, *, add: bool = False) -> None:
        kernels.bucketed_decode(message, call.segments.table, y, self.form, add=add, scale=call.scale)

    def mean(self, messages: Sequence[Tensor], y: Tensor, call: CodecCall) -> None:
        kernels.bucketed_sum(messages, None, call.segments.table, y, self.form, scale=call.scale)

    def add_up(self, messages: Sequence[Tensor], own: Tensor, total: Tensor, call: CodecCall) -> None:
        if not self.traits.plain_sum:
            super().add_up(messages, own, total, call)
            return
        kernels.bucketed_sum(messages, own, call.segments.table, total, self.form, scale=call.scale)

    def reduce(
        self,
        messages: Sequence[Tensor],
        own: Tensor,
        out_message: Tensor,
        y: Tensor,
        call: CodecCall,
        residual: Residual | None = None,
    ) -> None:
        if not self.traits.plain_sum:
            super().reduce(messages, own, out_message, y, call)
            return
        key, form = self.draw_key(call.key), self.form
        kernels.bucketed_reduce(
            messages, own, call.segments.table, out_message, y, form, scale=call.scale, key=key, residual=residual
        )


def bucket_elements(bucket: int | str) -> int:
    """Return the elements of a bucket; "layer" is a bucket larger than any layer."""
    return WHOLE if isinstance(bucket, str) else bucket


def check_bucket(bucket: Any) -> None:
    """Raise an error if ``bucket`` is neither a number of elements nor "layer"."""
    if bucket != "layer":
        check_int('bucket (or "layer")', bucket, 1, MAX_BUCKET)


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

    def message_bytes(self, numel: int) -> int:
        """Return the bytes of ``numel`` integers in a message: the mean of what ranks send and what they receive."""
        size = self.spread_numel(numel)
        return sum(packed.payload_bytes(size, torch.float32) for packed in (self.of(1), self)) // 2

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
