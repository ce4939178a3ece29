"""The base of quantizers with a scale for each bucket: one payload format, one set of kernels."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.arguments import check_int
from thinwire.compressors._core.calls import CodecCall
from thinwire.compressors._core.coded import OnePass
from thinwire.compressors._core.segments import Key
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

    def key_of(self, key: Key) -> int:
        """Return the key of the compressor's random draws."""
        return key.own

    def payload_bytes(self, numel: int, dtype: torch.dtype) -> int:
        return kernels.bucketed_bytes(numel, self.form)

    def encode(self, x: Tensor, message: Tensor, call: CodecCall, residual: Residual | None = None) -> None:
        kernels.bucketed_encode(x, call.table, message, self.form, key=self.key_of(call.key), residual=residual)

    def decode(self, message: Tensor, y: Tensor, call: CodecCall, *, add: bool = False) -> None:
        kernels.bucketed_decode(message, call.table, y, self.form, add=add, scale=call.scale)

    def mean(self, messages: Sequence[Tensor], y: Tensor, call: CodecCall) -> None:
        kernels.bucketed_sum(messages, None, call.table, y, self.form, scale=call.scale)

    def add_up(self, messages: Sequence[Tensor], own: Tensor, total: Tensor, call: CodecCall) -> None:
        if not self.traits.plain_sum:
            super().add_up(messages, own, total, call)
            return
        kernels.bucketed_sum(messages, own, call.table, total, self.form, scale=call.scale)

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
        key, form = self.key_of(call.key), self.form
        kernels.bucketed_reduce(
            messages, own, call.table, out_message, y, form, scale=call.scale, key=key, residual=residual
        )


def bucket_elements(bucket: int | str) -> int:
    """Return the elements of a bucket; "layer" is a bucket larger than any layer."""
    return WHOLE if isinstance(bucket, str) else bucket


def check_bucket(bucket: Any) -> None:
    """Raise an error if ``bucket`` is neither a number of elements nor "layer"."""
    if bucket != "layer":
        check_int('bucket (or "layer")', bucket, 1, MAX_BUCKET)
