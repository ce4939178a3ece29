"""All elements above a threshold."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from thinwire import kernels
from thinwire.arguments import check_number
from thinwire.compressors._core.compressor import Traits
from thinwire.compressors._core.segments import CodecCall, Piece
from thinwire.compressors._core.sparsifier import Picked, Sparsifier


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
