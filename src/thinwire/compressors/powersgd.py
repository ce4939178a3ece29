"""Low-rank gradients."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import ClassVar

import torch
from torch import Tensor

from thinwire.compressors._core.checks import check_int
from thinwire.compressors._core.matrices import Decode, SummedMatrices, matrix_shape, normal_matrix, scaled_to_one
from thinwire.compressors._core.slots import Slot
from thinwire.compressors._core.traits import Traits


@dataclass(frozen=True)
class PowerSGD(SummedMatrices):
    """PowerSGD (Vogels et al. 2019): a gradient matrix ``M`` is sent as two factors of ``rank`` columns.

    ``P = mean(M Q)`` is made orthonormal, then ``Q = mean(Mᵀ P)``, and ``P Qᵀ`` is received. Q is kept for the next
    step. Biased; a plan adds error feedback unless ``feedback=False``. Layers with fewer than two axes, or whose
    factors would take more than half of their size, are sent raw. Costs ``(n + m) · rank`` fp32 values in two rounds.
    """

    spec_name: ClassVar[str] = "powersgd"

    rank: int = field(default=4, metadata={"shown": True})
    feedback: bool = True

    def __post_init__(self) -> None:
        check_int("rank", self.rank, 1)

    @property
    def traits(self) -> Traits:
        return Traits(exact_bits=False, dense=False, wants_feedback=self.feedback)

    @property
    def slots(self) -> tuple[Slot, ...]:
        return (Slot("q", shape=self._q_shape, initial=normal_matrix(self._q_shape), shared=True, columns=True),)

    def factor_shapes(self, rows: int, columns: int) -> tuple[tuple[int, int], ...]:
        rank = min(self.rank, rows, columns)
        return (rows, rank), (columns, rank)

    def _q_shape(self, layer: Sequence[int]) -> tuple[int, int]:
        return self.factor_shapes(*matrix_shape(layer))[1]

    def factors(self, m: Tensor, slot: SimpleNamespace) -> Generator[Tensor, Tensor, Decode]:
        p = torch.linalg.qr((yield m @ scaled_to_one(slot.q))).Q  # orthonormal even where columns are zero or equal
        slot.q = yield m.mT @ p
        return lambda q: p @ q.mT
