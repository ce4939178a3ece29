"""Quantization to levels that are learned, or that are the best ones for a normal distribution."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import ClassVar

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.arguments import check_choice, check_int
from thinwire.compressors._core.bucketed import MAX_BUCKET
from thinwire.compressors._core.coded import Coded, OnePass
from thinwire.compressors._core.compressor import Compressor, Traits
from thinwire.compressors._core.mixins import Learned
from thinwire.compressors._core.segments import CodecCall
from thinwire.compressors._core.slots import Slot
from thinwire.compressors.uniform import MinMax
from thinwire.kernels import Residual

_PASSES = 100
_MOST_VALUES = 1 << 18
MAGNITUDES = {
    2: (0.4527800, 1.5104176),
    3: (0.2450942, 0.7560053, 1.3439093, 2.1519457),
    4: (0.1283950, 0.3880483, 0.6567590, 0.9423403, 1.2562311, 1.6180464, 2.0690167, 2.7325896),
}
"""Magnitudes with the least squared error for the unit normal distribution (Lloyd 1982), by bits."""


@dataclass(frozen=True)
class Levels(Coded, Learned):
    """QSDP's learned levels (thesis, section 5.4, Algorithm 5.1): ``2^bits`` of them in [0, 1], for each layer.

    A bucket is scaled to [0, 1] by its minimum and range, and each value takes the nearest level. The levels start out
    uniform; at the steps ``learn_at`` (C.3: after the warm-up, then rarely) rank 0 moves each to the mean of its
    gradient's values next to it until they rest (`learned_levels`), and gives them to all ranks. Under FSDP2 each rank
    learns what it sends with, and its levels are sent in its messages.
    Layers of fewer than ``min_numel`` elements take `MinMax` of the same size, which has no levels to learn.
    Costs ``bits + 64/bucket`` bits an element, and ``4 · 2^bits`` bytes a piece.
    """

    spec_name: ClassVar[str] = "levels"

    bits: int = field(default=4, metadata={"shown": True})
    bucket: int = field(default=1024, metadata={"shown": True})
    learn_at: tuple[int, ...] = (400, 1900, 3800)
    min_numel: int = 100_000

    def __post_init__(self) -> None:
        check_int("bits", self.bits, 1, 8)
        check_int("bucket", self.bucket, 1, MAX_BUCKET)
        check_int("min_numel", self.min_numel, 0)
        if not isinstance(self.learn_at, tuple) or not all(isinstance(s, int) and s >= 0 for s in self.learn_at):
            raise ValueError(f"learn_at must be a tuple of steps such as (400, 1900), not {self.learn_at!r}")

    @property
    def grain(self) -> int:
        return kernels.bucketed_grain(self.bucket)

    @property
    def slots(self) -> tuple[Slot, ...]:
        return (Slot("levels", shape=lambda _: (1 << self.bits,), initial=self._uniform, shared=True, learned=True),)

    def _uniform(self, layer: Sequence[int], name: str) -> Tensor:
        # Divisions have the same bits on every machine; `torch.linspace` has those of the vector width.
        return torch.arange(1 << self.bits, dtype=torch.float32, device="cpu") / ((1 << self.bits) - 1)

    def fit(self, shape: Sequence[int]) -> Compressor:
        return self if math.prod(shape) >= self.min_numel else MinMax(self.bits, self.bucket)

    @property
    def learns_at(self) -> tuple[int, ...]:
        return self.learn_at

    def learn(self, values: Tensor, slots: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return {"levels": learned_levels(values, slots["levels"], self.bucket)}

    def payload_bytes(self, numel: int, dtype: torch.dtype) -> int:
        return kernels.levels_bytes(numel, self.bits, self.bucket)

    def encode(self, x: Tensor, message: Tensor, call: CodecCall) -> None:
        assert call.state is not None, "levels are kept in a slot"
        levels = torch.stack([call.state.layers[piece.name].now["levels"] for piece in call.pieces])
        kernels.levels_encode(x, call.table, message, levels, bits=self.bits, bucket=self.bucket)

    def decode(self, message: Tensor, y: Tensor, call: CodecCall, *, add: bool = False) -> None:
        kernels.levels_decode(message, call.table, y, bits=self.bits, bucket=self.bucket, add=add, scale=call.scale)


def learned_levels(values: Tensor, levels: Tensor, bucket: int) -> Tensor:
    """Return the levels to which Algorithm 5.1 converges on ``values`` (flat) from ``levels`` (ascending, in [0, 1]).

    Its steps ``q ← q − α·mean(q − v)`` over the values v that are nearest to q rest where each level is the
    mean of these values, which is Lloyd's condition. In the sorted values a level's neighbors are a range and their
    mean a difference of two prefix sums, so that a step takes a few look-ups: a hundred are made with α = 1, on the
    buckets of at most a quarter of a million values. Buckets with NaN or Inf, and constant ones, teach nothing.
    """
    numel = values.numel()
    bucket = max(1, min(bucket, numel))
    stride = max(1, -(-numel // _MOST_VALUES))
    padded = torch.nn.functional.pad(values.float(), (0, -numel % bucket), value=math.nan).view(-1, bucket)[::stride]
    low = torch.nan_to_num(padded, nan=math.inf).amin(1, keepdim=True)
    span = torch.nan_to_num(padded, nan=-math.inf).amax(1, keepdim=True) - low
    scaled = ((padded - low) / span).view(-1)
    ordered = scaled[torch.isfinite(scaled)].double().sort().values
    sums = torch.nn.functional.pad(ordered.cumsum(0), (1, 0))
    learned = levels.double()
    for _ in range(_PASSES):
        cuts = torch.searchsorted(ordered, (learned[1:] + learned[:-1]) / 2)
        edges = torch.nn.functional.pad(torch.nn.functional.pad(cuts, (1, 0)), (0, 1), value=ordered.numel())
        count, total = edges.diff(), sums[edges].diff()
        learned = torch.where(count > 0, total / count.clamp(min=1), learned)
    return learned.float()


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
