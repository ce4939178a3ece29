"""Uniform quantisation between the minimum and the maximum of each bucket."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar, Literal

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.compressors.base import Coded, Segments, State, check_int


@dataclass(frozen=True)
class MinMax(Coded):
    """Bucketed min-max quantiser (thesis, section 5.6.1; the default of CGX at 4 bits and buckets of 128, 3.5.3).

    Per bucket of ``bucket`` consecutive elements: ``unit = (max − min)/(2^bits − 1)``,
    ``code = floor((x − min)/unit + u)`` with ``u`` uniform in [0, 1) (stochastic, unbiased) or ½ (nearest),
    received as ``min + code · unit``. Costs ``bits + 64/bucket`` bits an element.

    A bucket that holds NaN or Inf, or whose range overflows fp32, is received as NaN throughout.
    """

    spec_name: ClassVar[str] = "minmax"

    bits: int = field(default=4, metadata={"shown": True})
    bucket: int = field(default=128, metadata={"shown": True})
    rounding: Literal["stochastic", "nearest"] = "stochastic"

    def __post_init__(self) -> None:
        check_int("bits", self.bits, 1, 8)
        check_int("bucket", self.bucket, 1, 2**31 - 1)
        if self.rounding not in ("stochastic", "nearest"):
            raise ValueError(f"rounding must be stochastic or nearest, not {self.rounding!r}")

    @property
    def unbiased(self) -> bool:
        return self.rounding == "stochastic"

    @cached_property
    def form(self) -> kernels.Format:
        """The kernels' format."""
        return kernels.Format(self.bits, self.bucket, rounding=self.rounding)

    @property
    def grain(self) -> int:
        return kernels.bucketed_grain(self.bucket)

    def payload_bytes(self, numel: int, dtype: torch.dtype) -> int:
        return kernels.bucketed_bytes(numel, self.form)

    def encode(self, x: Tensor, segments: Segments, message: Tensor, *, key: int, state: State | None = None) -> None:
        kernels.bucketed_encode(x, segments.table, message, self.form, key=key)

    def decode(
        self,
        message: Tensor,
        segments: Segments,
        y: Tensor,
        *,
        add: bool = False,
        scale: float = 1.0,
    ) -> None:
        kernels.bucketed_decode(message, segments.table, y, self.form, add=add, scale=scale)

    def reduce(
        self,
        messages: Sequence[Tensor],
        own: Tensor,
        segments: Segments,
        out_message: Tensor,
        y: Tensor,
        *,
        key: int,
        scale: float,
        state: State | None = None,
    ) -> None:
        kernels.bucketed_reduce(messages, own, segments.table, out_message, y, self.form, scale=scale, key=key)
