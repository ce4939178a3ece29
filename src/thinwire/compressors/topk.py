"""The largest elements of each layer."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

from torch import Tensor

from thinwire import kernels
from thinwire.arguments import check_choice
from thinwire.compressors._core.compressor import Traits
from thinwire.compressors._core.mixins import Density, Scheduled, check_density, density_at
from thinwire.compressors._core.segments import CodecCall, Piece
from thinwire.compressors._core.sparsifier import Picked, Sparsifier
from thinwire.kernels import derive_key, site_id


@dataclass(frozen=True)
class TopK(Sparsifier, Scheduled):
    """The ``ceil(density · d)`` elements of each layer with the largest magnitude (Aji and Heafield 2017).

    Of equal magnitudes, the first are taken. ``select=sampled`` estimates the least magnitude from a sample of the
    layer. It sends at most as many elements, sometimes a few per cent fewer, and none smaller than one left
    out. Biased; a plan adds error feedback unless ``feedback=False``.

    ``density`` may be a schedule: ``((0, 0.25), (100, 0.0625), (200, 0.01))`` is the warm-up of Lin et al. (2018,
    section 3.3), which sends four times fewer in each stage.
    """

    spec_name: ClassVar[str] = "topk"

    density: Density = field(default=0.01, metadata={"shown": True})
    select: Literal["exact", "sampled"] = "exact"
    feedback: bool = True

    def __post_init__(self) -> None:
        check_density(self.density)
        check_choice("select", self.select, ("exact", "sampled"))

    @property
    def traits(self) -> Traits:
        return Traits(dense=False, wants_feedback=self.feedback)

    def at_step(self, step: int, learning_rate: float | None) -> TopK:
        return replace(self, density=density_at(self.density, step)) if isinstance(self.density, tuple) else self

    def room(self, numel: int) -> int:
        return min(numel, math.ceil(density_at(self.density, 0) * numel))

    def pick(self, x: Tensor, piece: Piece, call: CodecCall) -> Picked:
        sampled, draw = self.select == "sampled", derive_key(call.key.own, site_id(piece.site))
        return Picked(
            *kernels.select_topk(x, piece.start, piece.numel, self.room(piece.numel), sampled=sampled, key=draw)
        )
