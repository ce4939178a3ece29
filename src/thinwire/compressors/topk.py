"""The largest elements: of each layer, of all layers together, or all above a threshold."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.arguments import check_choice, check_number
from thinwire.compressors._core.compressor import Traits
from thinwire.compressors._core.mixins import StepEnd, WithDensity
from thinwire.compressors._core.segments import CodecCall, Piece
from thinwire.compressors._core.slots import LayerState, Slot
from thinwire.compressors._core.sparsifier import Picked, Sparsifier
from thinwire.kernels import derive_key, site_id

_BINS = 2048
_BIN_SHIFT = 20


@dataclass(frozen=True)
class TopK(Sparsifier, WithDensity):
    """The ``ceil(density · d)`` elements of each layer with the largest magnitude (Aji and Heafield 2017).

    Of equal magnitudes, the first are taken. ``select=sampled`` estimates the least magnitude from a sample of the
    layer. It sends at most as many elements, sometimes a few per cent fewer, and none smaller than one left
    out. Biased; a plan adds error feedback unless ``feedback=False``.

    ``density`` may be a schedule: ``((0, 0.25), (100, 0.0625), (200, 0.01))`` is the warm-up of Lin et al. (2018,
    section 3.3), which sends four times fewer in each stage.
    """

    spec_name: ClassVar[str] = "topk"

    select: Literal["exact", "sampled"] = "exact"
    feedback: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("select", self.select, ("exact", "sampled"))

    @property
    def traits(self) -> Traits:
        return Traits(dense=False, wants_feedback=self.feedback)

    def room(self, numel: int) -> int:
        return min(numel, math.ceil(self.share * numel))

    def pick(self, x: Tensor, piece: Piece, call: CodecCall) -> Picked:
        sampled, draw = self.select == "sampled", derive_key(call.key.own, site_id(piece.site))
        return Picked(
            *kernels.select_topk(x, piece.start, piece.numel, self.room(piece.numel), sampled=sampled, key=draw)
        )


@dataclass(frozen=True)
class GlobalTopK(Sparsifier, StepEnd, WithDensity):
    """The ``density · D`` largest elements of all layers, which have ``D`` elements together, on each rank.

    Layers are sent while gradients of others are still being computed, so the threshold comes from the step before.
    Each step counts magnitudes in bins of an eighth of a power of two, and the histogram over all layers gives the
    threshold of the next step; the first step takes the largest elements of each layer. A message has space for
    ``capacity`` times a layer's share. Elements beyond that are counted, and error feedback keeps them. Biased; a plan
    adds error feedback unless ``feedback=False``. ``density`` may be a schedule, as of `TopK`.
    """

    spec_name: ClassVar[str] = "globaltopk"

    capacity: float = 8.0
    feedback: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("capacity", self.capacity, low=1)

    @property
    def traits(self) -> Traits:
        return Traits(dense=False, wants_feedback=self.feedback, bounded=True)

    @property
    def slots(self) -> tuple[Slot, ...]:
        return (
            Slot("histogram", torch.int32, shape=lambda layer: (_BINS,)),
            Slot("threshold", shape=lambda layer: (1,)),
        )

    def room(self, numel: int) -> int:
        return min(numel, math.ceil(self.capacity * self.share * numel))

    def pick(self, x: Tensor, piece: Piece, call: CodecCall) -> Picked:
        assert call.state is not None, "the threshold is kept in a slot"
        slots = call.state.layers[piece.name]
        slots.next["histogram"].copy_(kernels.abs_histogram(x, piece.start, piece.numel))
        slots.next["threshold"].copy_(slots.now["threshold"])
        least = float(slots.now["threshold"]) * call.state.loss_scale
        if least == 0.0:
            share = min(piece.numel, math.ceil(self.share * piece.numel))
            return Picked(*kernels.select_topk(x, piece.start, piece.numel, share))
        return Picked(*kernels.select_threshold(x, piece.start, piece.numel, least, self.room(piece.numel)))

    def end_step(self, layers: Sequence[LayerState], loss_scale: float) -> None:
        """Set the threshold of all layers to the least of this step's largest magnitudes."""
        counts = torch.stack([slots.next["histogram"] for slots in layers]).sum(0, dtype=torch.int64)
        # Tensors, so that the host does not wait for a device.
        wanted = torch.ceil(self.share * counts.sum().double())
        from_top = counts.flip(0).cumsum(0)
        highest = (_BINS - 1 - (from_top < wanted).sum()).clamp(min=1).to(torch.int32)
        least = (highest << _BIN_SHIFT).view(1).view(torch.float32) / loss_scale
        for slots in layers:
            slots.next["threshold"].copy_(least)


@dataclass(frozen=True)
class Threshold(Sparsifier):
    """All elements whose magnitude is above ``lam`` (Sahu et al. 2021, Rethinking gradient sparsification).

    Their number depends on the data, so ranks exchange the size of one message for each DDP bucket. A message has space
    for a share ``capacity`` of each layer. If there are more elements, the largest are sent and the others are counted;
    error feedback keeps them. Biased; a plan adds error feedback unless ``feedback=False``.
    """

    spec_name: ClassVar[str] = "threshold"

    lam: float = field(default=0.01, metadata={"shown": True})
    capacity: float = 0.1
    feedback: bool = True

    def __post_init__(self) -> None:
        check_number("lam", self.lam, low=0)
        check_number("capacity", self.capacity, above=0, high=1)

    @property
    def traits(self) -> Traits:
        return Traits(dense=False, wants_feedback=self.feedback, bounded=True, absolute=True)

    def room(self, numel: int) -> int:
        return min(numel, math.ceil(self.capacity * numel))

    def pick(self, x: Tensor, piece: Piece, call: CodecCall) -> Picked:
        # Gradients are multiplied by the loss scale, and lam is not.
        lam = self.lam * call.loss_scale
        return Picked(*kernels.select_threshold(x, piece.start, piece.numel, lam, self.room(piece.numel)))
