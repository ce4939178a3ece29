"""Deep gradient compression: momentum before sparsification."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor

from thinwire.arguments import check_number, check_type
from thinwire.compressors._core.coded import CodedWrapper
from thinwire.compressors._core.compressor import Compressor
from thinwire.compressors._core.mixins import WorldSized
from thinwire.compressors._core.segments import CodecCall
from thinwire.compressors._core.slots import Slot
from thinwire.compressors._core.sparsifier import Sparsifier
from thinwire.compressors.ef import subtract_sent

MOMENTUM, VELOCITY = Slot("momentum"), Slot("velocity")


@dataclass(frozen=True)
class DGC(CodedWrapper, WorldSized):
    """Momentum correction with factor masking (Lin et al. 2018) around a sparsifier, instead of error feedback.

    ``u = m·u + g; v = v + u``; the largest of ``v`` are sent, and both are forgotten where they were. With
    ``nesterov=True``, ``u = m·(u + g); v = v + u + g``, their appendix B. Their warm-up of the density is a schedule of
    the sparsifier's (`TopK`). Train with plain SGD without momentum: the momentum is in here, on each rank, before its
    gradients are chosen from.

    ``clip`` is their local gradient clipping (section 3.2): before g is added, it is scaled down to an L2 norm of at
    most ``clip / √n`` on each of n ranks, so that the sum of n independent gradients is about as long as one clipped
    to ``clip``. The norm is that of a layer, since a layer is sent before the others are known; the
    norm of the whole model in the step before would let the spike through that clipping is for. 0: none.
    """

    spec_name: ClassVar[str] = "dgc"

    inner: Sparsifier  # pyright: ignore[reportIncompatibleVariableOverride] - frozen, so narrower is sound
    momentum: float = field(default=0.9)
    nesterov: bool = False
    clip: float = 0.0
    num_ranks: int = field(default=1, kw_only=True)
    """The world size; the handle sets it."""

    def __post_init__(self) -> None:
        check_type("dgc's inner", self.inner, Sparsifier, "a sparsifier such as topk(density=0.001)")
        check_number("momentum", self.momentum, low=0, below=1)
        check_number("clip", self.clip, low=0, hint="the norm that a layer's gradient may have, or 0 for any")

    def around(self, inner: Compressor) -> Compressor:
        assert isinstance(inner, Sparsifier)
        return replace(self, inner=inner)

    def for_world(self, num_ranks: int, numel: int) -> DGC:
        return replace(self, num_ranks=num_ranks) if self.clip else self

    @property
    def slots(self) -> tuple[Slot, ...]:
        return (*self.inner.slots, MOMENTUM, VELOCITY)

    def encode(self, x: Tensor, message: Tensor, call: CodecCall) -> None:
        assert call.state is not None, "momentum is kept in a slot"
        now, after, scale = call.state.now, call.state.next, call.loss_scale
        momentum, velocity = after[MOMENTUM.name], after[VELOCITY.name]
        for piece in call.pieces:
            part = piece.elements
            gradient = x[part].float() / scale
            if self.clip:
                # A factor of at most 1 in which a norm of Inf or NaN still shows.
                norm = torch.linalg.vector_norm(gradient)
                gradient *= 1.0 / torch.clamp(norm * (math.sqrt(self.num_ranks) / self.clip), min=1.0)
            u = now[MOMENTUM.name][part] * self.momentum
            u += gradient * (self.momentum if self.nesterov else 1.0)
            momentum[part] = u
            if self.nesterov:
                u = u + gradient
            # The gradient's units, in which elements are chosen.
            velocity[part] = (now[VELOCITY.name][part] + u).mul_(scale)
        self.inner.encode(velocity, message, call)
        subtract_sent(self.inner, message, velocity, call, over=call.loss_scale)
        self.inner.forget_sent(message, call.segments, momentum)

    def __str__(self) -> str:
        nesterov = ", nesterov=True" if self.nesterov else ""
        clip = f", clip={self.clip}" if self.clip else ""
        return f"dgc({self.inner}, momentum={self.momentum}{nesterov}{clip})"
