"""The ways that weights and gradients travel in the thesis's chapter 5, as a rank process can be told them."""

# No `from __future__ import annotations` here: rank processes make ways of plain values.

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch import nn

import thinwire
from thinwire.repro.qsdp.sharding import cut_short

BUCKET = 1024
"""The thesis's universal choice (section 5.6.1)."""
LARGE_BUCKET = 16384
"""Of figure C.4."""
UNBUCKETED = 2**31 - 1
"""One scale for all of a layer that a rank sends: "directly using INT8 quantization, without bucketing" (5.7.1)."""
_NOT_COMPRESSED = 32
_MOST_LEARNED_BITS = 6
"""Learning "has no effect for bit-widths higher than 6 bits" (section 5.7.1)."""

Rounding = Literal["stochastic", "nearest"]


@dataclass(frozen=True)
class Way:
    """How weights and gradients travel.

    ``stock``: as FSDP2 has them travel, with gradients in fp16 if ``half``; with ratios above 1 only so many times
    fewer elements do, and with infinite ones none. ``thinwire``: as the specs ``weights`` and ``gradients`` say.
    """

    name: str
    title: str
    colour: str
    kind: Literal["stock", "thinwire"] = "thinwire"
    weights: str = "raw"
    gradients: str = "raw"
    half: bool = False
    weights_ratio: float = 1.0
    gradients_ratio: float = 1.0
    topology: str = "sra"
    transport: Literal["auto", "group", "shared"] = "group"

    @property
    def exact(self) -> bool:
        """Whether its loss is a result: False where a part of what was to be sent is missing."""
        return self.weights_ratio == self.gradients_ratio == 1.0

    def attach(self, model: nn.Module, seed: int = 0) -> thinwire.ShardedWire | None:
        """Have the weights and gradients of a sharded ``model`` travel so; the Wire where there is one."""
        if self.kind == "stock":
            if not self.exact:
                cut_short(model, self.weights_ratio, self.gradients_ratio)
            return None
        return thinwire.compress(
            model,
            weights=self.weights,
            gradients=self.gradients,
            seed=seed,
            decline=False,
            topology=self.topology,
            transport=self.transport,
        )


FP16 = Way("fp16", "FSDP2, weights fp32, gradients fp16", "#555555", kind="stock", half=True)
"""The thesis's baseline (section 5.7.1)."""
FP32 = Way("fp32", "FSDP2, all fp32", "#222222", kind="stock")
RAW = Way("raw", "thinwire's exchange, all fp32", "#8250c4")
NOTHING = Way("nothing", "nothing sent", "#aaaaaa", kind="stock", weights_ratio=math.inf, gradients_ratio=math.inf)
"""The ceiling: the same ranks on the same cores, without communication."""


def uniform(weights: int, gradients: int, *, bucket: int = BUCKET, rounding: Rounding = "stochastic") -> Way:
    """Min-max of so many bits, as W8G8; 32 bits are left as they are."""
    name = f"W{weights}G{gradients}"
    if bucket != BUCKET:
        name += " unbucketed" if bucket == UNBUCKETED else f" bucket {bucket}"
    if rounding != "stochastic":
        name += f" {rounding}"
    specs = [_minmax(bits, bucket, rounding) for bits in (weights, gradients)]
    return Way(name, name, "#0a7d4f", weights=specs[0], gradients=specs[1])


def learned(weights: int, gradients: int, learn_at: Sequence[int], min_numel: int = 0) -> Way:
    """The same with levels that are learned at these steps, where they have any effect.

    ``min_numel``: of the layers that learn; the thesis's 10^5 would be none of these networks'.
    """

    def spec(bits: int) -> str:
        if bits > _MOST_LEARNED_BITS:
            return _minmax(bits, BUCKET, "stochastic")
        return f"levels(bits={bits}, bucket={BUCKET}, learn_at={tuple(learn_at)}, min_numel={min_numel})"

    name = f"W{weights}G{gradients} learned"
    return Way(name, name, "#1f6fb2", weights=spec(weights), gradients=spec(gradients))


def shortened(weights_ratio: float, gradients_ratio: float) -> Way:
    """So many times fewer elements are sent, at no cost: the thesis's synthetic experiment (C.2)."""
    title = f"weights 1/{weights_ratio:g}, gradients 1/{gradients_ratio:g}"
    return Way(
        title,
        title,
        "#0a7d4f",
        kind="stock",
        weights_ratio=weights_ratio,
        gradients_ratio=gradients_ratio,
    )


def _minmax(bits: int, bucket: int, rounding: Rounding) -> str:
    if bits == _NOT_COMPRESSED:
        return "raw"
    suffix = "" if rounding == "stochastic" else f", rounding={rounding}"
    return f"minmax(bits={bits}, bucket={bucket}{suffix})"


W8G8 = uniform(8, 8)
W4G4 = uniform(4, 4)
