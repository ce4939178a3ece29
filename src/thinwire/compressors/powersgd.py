"""Low-rank gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from thinwire.compressors.base import Compressor, Summed, Unsuited
from thinwire.compressors.checks import check_int, not_finite
from thinwire.compressors.pieces import Key, Part, Slot, State
from thinwire.kernels import site_id

_LEAST_RATIO = 2
_SMALL = 1 << 14
"""Elements. Matrices up to this size are multiplied in batches: a copy then costs less than a call for each."""


@dataclass(frozen=True)
class PowerSGD(Summed):
    """PowerSGD (Vogels et al. 2019): ``P = MQ``, summed and orthogonalised; ``Q = MᵀP``, summed; received as ``PQᵀ``.

    ``M`` is the gradient with its first axis as rows and all others as columns. Q is kept for the next step (warm
    start). Biased: a plan puts error feedback around it unless ``feedback=False``. Layers with fewer than two axes, and
    those whose factors would take more than half of their bytes, travel raw. Costs ``(n + m)·rank`` fp32 values for an
    n × m matrix, in two sums.
    """

    spec_name: ClassVar[str] = "powersgd"

    rank: int = field(default=4, metadata={"shown": True})
    feedback: bool = True

    def __post_init__(self) -> None:
        check_int("rank", self.rank, 1)

    @property
    def exact_bits(self) -> bool:
        return False

    @property
    def dense(self) -> bool:
        return False

    @property
    def unbiased(self) -> bool:
        return False

    @property
    def wants_feedback(self) -> bool:
        return self.feedback

    @property
    def rounds(self) -> int:
        return 2

    @property
    def slots(self) -> tuple[Slot, ...]:
        q = Slot("q", shape=self._q_shape, initial=self._first_q, shared=True, columns=True)
        return q, Slot("p", shape=self._p_shape, shared=True, scratch=True)

    def fit(self, shape: Sequence[int]) -> Compressor:
        if len(shape) < 2 or not math.prod(shape):
            raise Unsuited(f"{self} factors matrices: a layer of shape {tuple(shape)} is none")
        rows, columns = matrix_shape(shape)
        if rows * columns < _LEAST_RATIO * (rows + columns) * self._rank(shape):
            raise Unsuited(f"{self} would take more than half of the bytes of a layer of shape {tuple(shape)}")
        return self

    def _rank(self, shape: Sequence[int]) -> int:
        return min(self.rank, *matrix_shape(shape))

    def _q_shape(self, shape: Sequence[int]) -> tuple[int, int]:
        return matrix_shape(shape)[1], self._rank(shape)

    def _p_shape(self, shape: Sequence[int]) -> tuple[int, int]:
        return matrix_shape(shape)[0], self._rank(shape)

    def _first_q(self, shape: Sequence[int], name: str) -> Tensor:
        # Of its name alone, so that all ranks start alike without a word; the generator is nobody else's.
        return torch.randn(self._q_shape(shape), generator=torch.Generator().manual_seed(site_id(name)))

    def part_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return torch.float32

    def part_numel(self, round: int, shape: Sequence[int]) -> int:
        return math.prod(self._q_shape(shape) if round else self._p_shape(shape))

    def wire_bytes(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> int:
        try:
            self.fit(shape)
        except Unsuited:
            return math.prod(shape) * dtype.itemsize
        return super().wire_bytes(shape, dtype)

    def part(
        self,
        round: int,
        x: Tensor,
        parts: Sequence[Part],
        out: Tensor,
        *,
        key: Key,
        scale: float,
        state: State | None = None,
    ) -> None:
        for alike in _by_shape(parts):
            matrices = [x[piece.elements].view(matrix_shape(piece.shape)).float() for piece, _ in alike]
            factors = [_slot(state, piece.name, "p" if round else "q") for piece, _ in alike]
            if round:
                matrices = [m.T for m in matrices]
            outs = [
                out[where].view(m.shape[0], f.shape[1])
                for (_, where), m, f in zip(alike, matrices, factors, strict=True)
            ]
            _multiply(matrices, factors, outs)
            for product in outs:
                product.mul_(scale)

    def absorb(
        self,
        round: int,
        total: Tensor,
        x: Tensor,
        parts: Sequence[Part],
        *,
        key: Key,
        state: State | None = None,
    ) -> None:
        for alike in _by_shape(parts):
            if round == 0:
                p = torch.stack([total[where].view(self._p_shape(piece.shape)) for piece, where in alike])
                for (piece, _), orthogonal in zip(alike, orthogonalised(p), strict=True):
                    _slot(state, piece.name, "p").copy_(orthogonal)
                continue
            for piece, where in alike:
                q, p = total[where].view(self._q_shape(piece.shape)), _slot(state, piece.name, "p")
                # NaN in the small factor spreads over the whole product.
                _product(p + not_finite(total[where]), q.T, x[piece.elements].view(matrix_shape(piece.shape)))
                _slot(state, piece.name, "q", after=True).copy_(q)


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """Rows and columns of a layer as a matrix: its first axis, and all others together."""
    return shape[0], math.prod(shape[1:])


def orthogonalised(p: Tensor) -> Tensor:
    """Orthonormal columns that span those of each matrix of ``p [count, n, rank]``, whatever they are.

    A QR decomposition: where columns are zero or alike it puts others in their place, so that no direction is lost for
    good once a gradient was zero.
    """
    return torch.linalg.qr(p).Q


def _by_shape(parts: Sequence[Part]) -> list[list[Part]]:
    alike: dict[tuple[int, int], list[Part]] = {}
    for part in parts:
        alike.setdefault(matrix_shape(part.piece.shape), []).append(part)
    return list(alike.values())


def _multiply(matrices: Sequence[Tensor], factors: Sequence[Tensor], outs: Sequence[Tensor]) -> None:
    """``outs = matrices @ factors``, in one batch where matrices are small or on an accelerator."""
    first = matrices[0]
    if len(matrices) > 1 and (first.numel() <= _SMALL or not first.is_cpu):
        products = torch.bmm(torch.stack(tuple(matrices)), torch.stack(tuple(factors)))
        for out, product in zip(outs, products, strict=True):
            out.copy_(product)
        return
    for matrix, factor, out in zip(matrices, factors, outs, strict=True):
        torch.mm(matrix, factor, out=out)


def _product(left: Tensor, right: Tensor, out: Tensor) -> None:
    if out.dtype == torch.float32:
        torch.mm(left, right, out=out)
    else:
        out.copy_(torch.mm(left, right))


def _slot(state: State | None, name: str, slot: str, *, after: bool = False) -> Tensor:
    if state is None:
        raise ValueError("PowerSGD needs its factors: pass state=")
    of = state.layers[name]
    return of.next[slot] if after else of.now[slot]
