"""Low-rank approximation of gradients."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from thinwire.arguments import check_choice, check_int
from thinwire.compressors._core.compressor import Traits
from thinwire.compressors._core.matrices import SummedMatrices, matrix_shape
from thinwire.compressors._core.mixins import Scheduled, stage_at, stages
from thinwire.compressors._core.slots import Slot
from thinwire.kernels import MOST_NARROW_COLUMNS, narrow_product, orthonormal_basis, site_id


@dataclass(frozen=True)
class PowerSGD(SummedMatrices, Scheduled):
    """PowerSGD (Vogels et al. 2019): a gradient matrix ``M`` is sent as two factors of ``rank`` columns.

    ``P = mean(M Q)`` is made orthonormal, then ``Q = mean(Mᵀ P)``, and ``P Qᵀ`` is received. Q is kept for the next
    step. Biased; a plan adds error feedback unless ``feedback=False``. Layers with fewer than two axes, or whose
    factors would take more than half of their size, are sent raw. Costs ``(n + m) · rank`` values in two rounds.

    ``dtype=bf16`` sends and adds both factors in 16 bits, half of the bytes. What rounding takes from a rank's own
    factor goes into its residual.

    ``rank`` may be a schedule, ``((0, 8), (1000, 4))``: columns of Q that a stage shares with the one before it stay.
    A layer has to suit the first of its ranks. Up to 16 columns, the native core computes the same bits on any CPU;
    with more, all machines must be alike.

    A rank's residual loses what this rank itself has sent, ``P Pᵀ M`` (Algorithm 2). Where ranks' gradients differ in
    every step outside the range of P, their residuals grow apart, in ways that cancel in the mean and are never sent:
    the mean of all residuals stays bounded. A plan that gives such a layer another kind of compressor averages the
    residuals over the ranks first.
    """

    spec_name: ClassVar[str] = "powersgd"

    rank: int | tuple[tuple[int, int], ...] = field(default=4, metadata={"shown": True})
    feedback: bool = True
    dtype: Literal["fp32", "bf16"] = "fp32"

    def __post_init__(self) -> None:
        for _, rank in stages("rank", self.rank):
            check_int("rank", rank, 1)
        check_choice("dtype", self.dtype, ("fp32", "bf16"))

    @property
    def sum_dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.dtype == "bf16" else torch.float32

    @property
    def traits(self) -> Traits:
        natively = max(rank for _, rank in stages("rank", self.rank)) <= MOST_NARROW_COLUMNS
        return Traits(exact_bits=False, exact_natively=natively, dense=False, wants_feedback=self.feedback)

    @property
    def first_rank(self) -> int:
        return stages("rank", self.rank)[0][1]

    def at_step(self, step: int, learning_rate: float | None) -> PowerSGD:
        return replace(self, rank=stage_at(self.rank, step)) if isinstance(self.rank, tuple) else self

    @property
    def slots(self) -> tuple[Slot, ...]:
        return (Slot("q", shape=self._q_shape, initial=self._initial, shared=True, columns=True),)

    def factor_shapes(self, rows: int, columns: int) -> tuple[tuple[int, int], ...]:
        rank = min(self.first_rank, rows, columns)
        return (rows, rank), (columns, rank)

    def _q_shape(self, layer: Sequence[int]) -> tuple[int, int]:
        return self.factor_shapes(*matrix_shape(layer))[1]

    def _initial(self, layer: Sequence[int], name: str) -> Tensor:
        generator = torch.Generator().manual_seed(site_id(name))  # so that ranks agree
        return torch.randn(self._q_shape(layer), generator=generator, dtype=torch.float32, device="cpu")

    def factors(self, m: Tensor, slot: SimpleNamespace) -> Generator[Tensor, Tensor, Tensor]:
        product = yield narrow_product(m, slot.q, normalized=True)
        p = orthonormal_basis(product)
        slot.q = yield narrow_product(m.mT, p)
        return p
