"""What all quantisers with a scale for each bucket have in common: one payload layout, one set of kernels."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.compressors.base import Coded
from thinwire.compressors.checks import check_int
from thinwire.compressors.pieces import Key, Segments, State
from thinwire.kernels import Format, Residual

WHOLE = 2**40
"""A bucket that holds any layer."""

MAX_BUCKET = 2**31 - 1


@dataclass(frozen=True)
class Bucketed(Coded):
    """Codes of a few bits, and one or two numbers for each bucket (`thinwire.kernels.Format`)."""

    @abstractmethod
    def make_format(self) -> Format:
        """How its payloads are laid out and made."""

    @cached_property
    def form(self) -> Format:
        return self.make_format()

    @property
    def grain(self) -> int | None:
        return None if self.form.bucket >= WHOLE else kernels.bucketed_grain(self.form.bucket)

    def key_of(self, key: Key) -> int:
        """The key of its draws."""
        return key.own

    def payload_bytes(self, numel: int, dtype: torch.dtype) -> int:
        return kernels.bucketed_bytes(numel, self.form)

    def encode(self, x: Tensor, segments: Segments, message: Tensor, *, key: Key, state: State | None = None) -> None:
        kernels.bucketed_encode(x, segments.table, message, self.form, key=self.key_of(key))

    def decode(self, message: Tensor, segments: Segments, y: Tensor, *, add: bool = False, scale: float = 1.0) -> None:
        kernels.bucketed_decode(message, segments.table, y, self.form, add=add, scale=scale)

    def mean(self, messages: Sequence[Tensor], segments: Segments, y: Tensor, *, scale: float) -> None:
        kernels.bucketed_sum(messages, None, segments.table, y, self.form, scale=scale)

    def add_up(
        self, messages: Sequence[Tensor], own: Tensor, segments: Segments, total: Tensor, *, scale: float
    ) -> None:
        if not self.plain_sum:
            super().add_up(messages, own, segments, total, scale=scale)
            return
        kernels.bucketed_sum(messages, own, segments.table, total, self.form, scale=scale)

    def reduce(
        self,
        messages: Sequence[Tensor],
        own: Tensor,
        segments: Segments,
        out_message: Tensor,
        y: Tensor,
        *,
        key: Key,
        scale: float,
        state: State | None = None,
    ) -> None:
        if not self.plain_sum:
            super().reduce(messages, own, segments, out_message, y, key=key, scale=scale, state=state)
            return
        kernels.bucketed_reduce(
            messages, own, segments.table, out_message, y, self.form, scale=scale, key=self.key_of(key)
        )

    def encode_rest(
        self,
        x: Tensor,
        segments: Segments,
        message: Tensor,
        now: Tensor,
        after: Tensor,
        *,
        key: Key,
        loss_scale: float,
        state: State | None = None,
    ) -> None:
        residual = Residual(now, after, loss_scale)
        kernels.bucketed_encode(x, segments.table, message, self.form, key=self.key_of(key), residual=residual)

    def reduce_rest(
        self,
        messages: Sequence[Tensor],
        own: Tensor,
        segments: Segments,
        out_message: Tensor,
        y: Tensor,
        now: Tensor,
        after: Tensor,
        *,
        key: Key,
        scale: float,
        loss_scale: float,
        state: State | None = None,
    ) -> None:
        if not self.plain_sum:
            options = {"key": key, "scale": scale, "loss_scale": loss_scale, "state": state}
            super().reduce_rest(messages, own, segments, out_message, y, now, after, **options)
            return
        kernels.bucketed_reduce(
            messages,
            own,
            segments.table,
            out_message,
            y,
            self.form,
            scale=scale,
            key=self.key_of(key),
            residual=Residual(now, after, loss_scale),
        )


def bucket_elements(bucket: int | str) -> int:
    """Elements of a bucket; "layer" is one that holds any."""
    return WHOLE if isinstance(bucket, str) else bucket


def check_bucket(bucket: Any) -> None:
    """Raise if ``bucket`` is neither a number of elements nor "layer"."""
    if bucket != "layer":
        check_int('bucket (or "layer")', bucket, 1, MAX_BUCKET)
