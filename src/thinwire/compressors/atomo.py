"""Unbiased sparsification of singular values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor

from thinwire.arguments import check_int
from thinwire.compressors._core.coded import Coded
from thinwire.compressors._core.compressor import Compressor, Traits
from thinwire.compressors._core.matrices import check_matrix
from thinwire.compressors._core.segments import CodecCall, Piece
from thinwire.compressors._core.sparsifier import HEADER, check_place, put_floats, put_header, read_header
from thinwire.kernels import align, derive_key, site_id

_SEED = 2**63 - 1


@dataclass(frozen=True)
class Atomo(Coded):
    """Spectral ATOMO (Wang et al. 2018): ``rank`` terms of a gradient matrix's singular value decomposition.

    Of ``M = Σ σ_i u_i v_iᵀ`` each term is sent with a probability p_i, as ``σ_i/p_i · u_i v_iᵀ``, so that the expected
    value is M. Probabilities are those of the least variance, ``p_i = min(1, c·σ_i)`` with ``Σ p_i = rank`` (their
    algorithm 1). Terms are drawn by systematic sampling, which keeps every p_i and always takes exactly ``rank`` of
    them, so that messages have one size. Costs ``(n + m) · rank`` fp32 values, and a decomposition on every rank;
    layers stay whole and are gathered. Layers with fewer than two axes, or whose terms would take more than half of
    their size, are sent raw.
    """

    spec_name: ClassVar[str] = "atomo"

    rank: int = field(default=4, metadata={"shown": True})
    columns: int = 0
    """Columns of the layer's matrix; `fit` sets them."""

    def __post_init__(self) -> None:
        check_int("rank", self.rank, 1)
        check_int("columns", self.columns, 0)

    @property
    def traits(self) -> Traits:
        # Terms are divided by small probabilities, and squares of what is left must stay finite.
        return Traits(unbiased=True, exact_bits=False, dense=False, contracts=False, largest=2.0**60)

    def fit(self, shape: Sequence[int]) -> Compressor:
        check_matrix(self, shape, lambda rows, columns: min(self.rank, rows, columns) * (rows + columns))
        return replace(self, columns=math.prod(shape[1:]))

    def _sides(self, numel: int) -> tuple[int, int, int]:
        """Return rows, columns and the number of terms of a layer of ``numel`` elements."""
        columns = self.columns or numel
        return numel // columns, columns, min(self.rank, columns, numel // columns)

    def payload_bytes(self, numel: int, dtype: torch.dtype) -> int:
        if not numel:
            return 0
        rows, columns, terms = self._sides(numel)
        return HEADER + align(4 * (rows + columns) * terms)

    def encode(self, x: Tensor, message: Tensor, call: CodecCall) -> None:
        for piece in call.pieces:
            if not piece.numel:
                continue
            rows, columns, terms = self._sides(piece.numel)
            matrix = x[piece.elements].float().view(rows, columns)
            finite = bool(torch.isfinite(matrix).all())
            put_header(message, piece, [int(not finite)])
            left, sizes, right = torch.linalg.svd(matrix if finite else torch.zeros_like(matrix), full_matrices=False)
            p = probabilities(sizes, terms)
            chosen = _systematic(p, terms, derive_key(call.key.own, site_id(piece.name)))
            left = left[:, chosen] * (sizes.double() / p)[chosen].float()
            values = torch.cat((left.reshape(-1), right[chosen].reshape(-1)))
            put_floats(message, piece.payload + HEADER, values, values.numel())

    def decode(self, message: Tensor, y: Tensor, call: CodecCall, *, add: bool = False) -> None:
        check_place(message, call.pieces, y, self.payload_bytes)
        for piece in call.pieces:
            if piece.numel:
                received = self._matrix(message, piece).mul_(call.scale).view(-1).to(y.dtype)
                out = y[piece.elements]
                out.copy_(out + received if add else received)

    def _matrix(self, message: Tensor, piece: Piece) -> Tensor:
        rows, columns, terms = self._sides(piece.numel)
        if read_header(message, piece)[0]:
            return torch.full((rows, columns), math.nan, dtype=torch.float32, device=message.device)
        at = piece.payload + HEADER
        values = message[at : at + 4 * (rows + columns) * terms].view(torch.float32)
        left, right = values.split([rows * terms, terms * columns])
        return left.view(rows, terms) @ right.view(terms, columns)


def probabilities(sizes: Tensor, terms: int) -> Tensor:
    """Return ``p_i = min(1, c·sizes_i)`` with a sum of ``terms`` (fp64); ``sizes`` descend and are not negative."""
    sizes = sizes.double() + 1e-300  # a layer of zeros has equal probabilities
    p = torch.ones_like(sizes)
    for certain in range(terms):
        rest = sizes[certain:] / sizes[certain:].sum() * (terms - certain)
        if float(rest[0]) <= 1.0:
            p[certain:] = rest
            break
    else:
        p[terms:] = 0.0
    return p


def _systematic(p: Tensor, terms: int, key: int) -> Tensor:
    """Return ``terms`` different indices, each i with probability ``p[i]``."""
    generator = torch.Generator().manual_seed(key & _SEED)
    start = torch.rand(1, generator=generator, dtype=torch.float64, device="cpu").to(p.device)
    ends = p.cumsum(0) * (terms / p.sum())
    at = torch.searchsorted(ends, start + torch.arange(terms, dtype=torch.float64, device=p.device), right=True)
    return at.clamp(max=p.numel() - 1)
