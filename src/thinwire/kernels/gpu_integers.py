"""IntSGD's rounding to integers in Triton."""

# Triton is not installed everywhere, and its language has types of its own.
# pyright: reportMissingImports=false, reportIndexIssue=false, reportArgumentType=false, reportAssignmentType=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportAttributeAccessIssue=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from thinwire.kernels.format import GROUP
from thinwire.kernels.gpu_launch import TILE, on, options, words
from thinwire.kernels.gpu_tiles import draws_of, load_parts, row_draws, row_of
from thinwire.kernels.table import Table


@triton.jit
def nearest_even(x):
    """To the nearest integer, ties to even: 2^23 more leaves no room for a fraction."""
    size = tl.abs(x)
    whole = tl.where(size < 8388608.0, (size + 8388608.0) - 8388608.0, size)
    return tl.where(x < 0.0, -whole, whole)


@triton.jit(do_not_specialize=["key_low", "key_high"])
def round_tiles(
    x, out, alphas, clipped, pieces, rows, key_low, key_high, clip, GROUPS: tl.constexpr, NEAREST: tl.constexpr
):
    """thinwire.kernels.reference_floats.int_round."""
    row = tl.load(pieces + 2 * tl.program_id(0).to(tl.int64))
    piece, start, numel, index0, payload, site = row_of(pieces, rows)
    first = piece * (GROUPS * 128)
    parts = load_parts(x + start + first, x, 1.0, numel - first, 8, GROUPS, False, False)
    draws = draws_of((index0 + first) // 2, 0, *row_draws(key_low, key_high, site), GROUPS, 64)
    alpha = tl.load(alphas + row)
    to = out + payload // (out.dtype.element_ty.primitive_bitwidth // 8) + first
    beyond = 0
    for p in tl.static_range(2):
        at = tl.arange(0, GROUPS)[:, None] * 128 + p * 64 + tl.arange(0, 64)[None, :]
        inside = first + at < numel
        place = alpha * parts[p]
        counts = (tl.abs(parts[p]) <= 3.4028234663852886e38) & (place == place) & inside
        beyond += tl.sum(((tl.abs(place) > clip) & counts).to(tl.int32))
        place = tl.minimum(tl.maximum(tl.where(counts, place, 0.0), -clip), clip)
        if NEAREST:
            whole = nearest_even(place).to(tl.int32)
        else:
            below = tl.floor(place)
            fraction = ((place - below) * 65536.0).to(tl.int32)
            whole = below.to(tl.int32) + (fraction + draws[p] >= 65536).to(tl.int32)
        tl.store(to + at, whole.to(out.dtype.element_ty), mask=inside)
    tl.atomic_add(clipped + row, beyond.to(tl.int64), mask=beyond > 0)


@triton.jit
def scale_integers(out, y, factors, pieces, rows, SIZE: tl.constexpr):
    """factor · q."""
    row = tl.load(pieces + 2 * tl.program_id(0).to(tl.int64))
    piece, start, numel, _index0, payload, _site = row_of(pieces, rows)
    at = piece * SIZE + tl.arange(0, SIZE)
    integers = tl.load(out + payload // (out.dtype.element_ty.primitive_bitwidth // 8) + at, mask=at < numel, other=0)
    value = tl.load(factors + row) * integers.to(tl.float32)
    tl.store(y + start + at, value.to(y.dtype.element_ty), mask=at < numel)


def int_round(x: Tensor, table: Table, alphas: Tensor, out: Tensor, *, clip: float, key: int, nearest: bool) -> Tensor:
    """See :func:`thinwire.kernels.int_round`; ``clip`` is an integer that fp32 holds."""
    clipped = torch.zeros(len(table), dtype=torch.int64, device=x.device)
    if table.numel:
        with on(x):
            pieces = table.pieces(x.device, TILE)
            round_tiles[(len(pieces),)](
                x, out, alphas, clipped, pieces, table.on(x.device), *words(key), clip,
                GROUPS=TILE // GROUP, NEAREST=nearest, **options(8),
            )  # fmt: skip
    return clipped


def int_decode(out: Tensor, table: Table, y: Tensor, factors: Tensor) -> None:
    """See :func:`thinwire.kernels.int_decode`."""
    if table.numel:
        with on(y):
            pieces = table.pieces(y.device, TILE)
            scale_integers[(len(pieces),)](out, y, factors, pieces, table.on(y.device), SIZE=TILE, **options(8))
