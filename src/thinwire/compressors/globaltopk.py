"""The largest elements of all layers together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.arguments import check_number
from thinwire.compressors._core.compressor import Traits
from thinwire.compressors._core.mixins import Density, Scheduled, StepEnd, check_density, density_at
from thinwire.compressors._core.segments import CodecCall, Piece
from thinwire.compressors._core.slots import LayerState, Slot
from thinwire.compressors._core.sparsifier import Picked, Sparsifier

_BINS = 2048
_BIN_SHIFT = 20


@dataclass(frozen=True)
class GlobalTopK(Sparsifier, StepEnd, Scheduled):
    """The ``density · D`` largest elements of all layers, which have ``D`` elements together, on each rank.

    Layers are sent while gradients of others are still being computed, so the threshold comes from the step before.
    Each step counts magnitudes in bins of an eighth of a power of two, and the histogram over all layers gives the
    threshold of the next step; the first step takes the largest elements of each layer. A message has space for
    ``capacity`` times a layer's share. Elements beyond that are counted, and error feedback keeps them. Biased; a plan
    adds error feedback unless ``feedback=False``. ``density`` may be a schedule, as of `TopK`.
    """

    spec_name: ClassVar[str] = "globaltopk"

    density: Density = field(default=0.01, metadata={"shown": True})
    capacity: float = 8.0
    feedback: bool = True

    def __post_init__(self) -> None:
        check_density(self.density)
        check_number("capacity", self.capacity, low=1)

    @property
    def traits(self) -> Traits:
        return Traits(dense=False, wants_feedback=self.feedback, bounded=True)

    def at_step(self, step: int, learning_rate: float | None) -> GlobalTopK:
        return replace(self, density=density_at(self.density, step)) if isinstance(self.density, tuple) else self

    @property
    def _share(self) -> float:
        return density_at(self.density, 0)

    @property
    def slots(self) -> tuple[Slot, ...]:
        return (
            Slot("histogram", torch.int32, shape=lambda layer: (_BINS,)),
            Slot("threshold", shape=lambda layer: (1,)),
        )

    def room(self, numel: int) -> int:
        return min(numel, math.ceil(self.capacity * self._share * numel))

    def pick(self, x: Tensor, piece: Piece, call: CodecCall) -> Picked:
        assert call.state is not None, "the threshold is kept in a slot"
        slots = call.state.layers[piece.name]
        slots.next["histogram"].copy_(kernels.abs_histogram(x, piece.start, piece.numel))
        slots.next["threshold"].copy_(slots.now["threshold"])
        least = float(slots.now["threshold"]) * call.state.loss_scale
        if least == 0.0:
            share = min(piece.numel, math.ceil(self._share * piece.numel))
            return Picked(*kernels.select_topk(x, piece.start, piece.numel, share))
        return Picked(*kernels.select_threshold(x, piece.start, piece.numel, least, self.room(piece.numel)))

    def end_step(self, layers: Sequence[LayerState], loss_scale: float) -> None:
        """Set the threshold of all layers to the least of this step's largest magnitudes."""
        counts = torch.stack([slots.next["histogram"] for slots in layers]).sum(0, dtype=torch.int64)
        # Tensors, so that the host does not wait for a device.
        wanted = torch.ceil(self._share * counts.sum().double())
        from_top = counts.flip(0).cumsum(0)
        highest = (_BINS - 1 - (from_top < wanted).sum()).clamp(min=1).to(torch.int32)
        least = (highest << _BIN_SHIFT).view(1).view(torch.float32) / loss_scale
        for slots in layers:
            slots.next["threshold"].copy_(least)
