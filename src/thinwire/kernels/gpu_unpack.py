"""Sparse payloads of all segments of a table in Triton: unpacked and added, without a look of the host."""

# Triton is not installed everywhere, and its language has types of its own.
# pyright: reportMissingImports=false, reportIndexIssue=false, reportArgumentType=false, reportAssignmentType=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportAttributeAccessIssue=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from thinwire.kernels.gpu_launch import TILE, check_aligned, on, options
from thinwire.kernels.gpu_select import Places, before, whole
from thinwire.kernels.gpu_sparse import bits_of
from thinwire.kernels.gpu_tiles import row_of
from thinwire.kernels.table import Table


@triton.jit
def count_marked(message, pieces, rows, marks, counts, SIZE: tl.constexpr):
    """Indices in each tile of a bitmap; of a list, those of a block in the block's first tile."""
    pid = tl.program_id(0).to(tl.int64)
    piece, _start, numel, _index0, payload, _site = row_of(pieces, rows)
    mark = marks + 5 * tl.load(pieces + 2 * pid)
    if tl.load(mark + 2) == 0:
        marked = tl.sum(bits_of(message + payload + 64, piece * SIZE + tl.arange(0, SIZE), numel))
    else:
        words = (message + payload + 64).to(tl.pointer_type(tl.int32))
        count = tl.load(words + (piece * SIZE >> 16), mask=(piece * SIZE & 0xFFFF) == 0, other=0)
        marked = tl.minimum(tl.maximum(count, 0), tl.load(mark).to(tl.int32))
    tl.store(counts + pid, marked)


@triton.jit
def put_indices(message, indices, pieces, rows, firsts, marks, counts, ends, SIZE: tl.constexpr):
    """The indices of a payload, in order, to their place among all; no more than there is room for."""
    pid = tl.program_id(0).to(tl.int64)
    row = tl.load(pieces + 2 * pid)
    piece, _start, numel, _index0, payload, _site = row_of(pieces, rows)
    mark = marks + 5 * row
    room, to = tl.load(mark), indices + tl.load(mark + 1)
    blocks = tl.load(mark + 2)
    count = tl.load(counts + pid)
    place = before(ends, tl.load(firsts + row), pid) - count
    if blocks == 0:
        at = piece * SIZE + tl.arange(0, SIZE)
        bit = bits_of(message + payload + 64, at, numel)
        own = place + tl.cumsum(bit, 0) - bit
        tl.store(to + own, at.to(tl.int32), mask=(bit > 0) & (own < room))
    else:
        offsets = (message + payload + 64 + 4 * blocks).to(tl.pointer_type(tl.uint16))
        for done in range(0, count, SIZE):
            within = done + tl.arange(0, SIZE)
            own = place + within
            inside = (within < count) & (own < room) & (own >= 0)
            index = piece * SIZE + tl.load(offsets + own, mask=inside, other=0).to(tl.int64)
            tl.store(to + own, index.to(tl.int32), mask=inside & (index < numel))


@triton.jit
def clear_rows(y, message, pieces, rows, ADD: tl.constexpr, SIZE: tl.constexpr):
    """NaN where the header says so, and elsewhere, unless values are added, zeros."""
    piece, start, numel, _index0, payload, _site = row_of(pieces, rows)
    at = piece * SIZE + tl.arange(0, SIZE)
    odd = tl.load((message + payload).to(tl.pointer_type(tl.int32))) + tl.zeros((SIZE,), tl.int32)
    nan = tl.full((SIZE,), 0x7FC00000, tl.int32).to(tl.float32, bitcast=True)
    value = tl.where(odd != 0, nan, 0.0)
    written = at < numel
    if ADD:
        written = written & (odd != 0)
    tl.store(y + start + at, value.to(y.dtype.element_ty), mask=written)


@triton.jit
def add_chosen(
    y, message, values, indices, pieces, rows, marks, scale,
    FLOATS: tl.constexpr, ZERO: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Add values · scale where their indices say, or with ``ZERO`` put a zero there. NaN stays."""
    pid = tl.program_id(0).to(tl.int64)
    piece, start, _numel, _index0, payload, _site = row_of(pieces, rows)
    mark = marks + 5 * tl.load(pieces + 2 * pid)
    at = piece * SIZE + tl.arange(0, SIZE)
    inside = at < tl.load(mark)
    index = tl.load(indices + tl.load(mark + 1) + at, mask=inside, other=-1)
    inside = inside & (index >= 0)
    if ZERO:
        tl.store(y + start + index, tl.zeros((SIZE,), y.dtype.element_ty), mask=inside)
    else:
        if FLOATS:
            from_message = (message + tl.load(mark + 3)).to(tl.pointer_type(tl.float32))
            value = tl.load(from_message + at, mask=inside, other=0.0)
        else:
            value = tl.load(values + tl.load(mark + 1) + at, mask=inside, other=0.0)
        odd = tl.load((message + payload).to(tl.pointer_type(tl.int32))) + tl.zeros((SIZE,), tl.int32)
        inside = inside & (odd == 0)
        there = tl.load(y + start + index, mask=inside, other=0.0).to(tl.float32)
        tl.store(y + start + index, (there + value * scale).to(y.dtype.element_ty), mask=inside)


def unpack(message: Tensor, table: Table, places: Places) -> Tensor:
    """See :func:`thinwire.kernels.sparse_rows.unpack`."""
    check_aligned(message)
    indices = torch.full((places.num_values,), -1, dtype=torch.int32, device=message.device)
    if table.numel:
        spans, rows = whole(table, message.device), table.on(message.device)
        tiles = len(spans.pieces)
        counts = torch.empty(tiles, dtype=torch.int32, device=message.device)
        with on(message):
            count_marked[(tiles,)](message, spans.pieces, rows, places.marks, counts, SIZE=TILE, **options(8))
            put_indices[(tiles,)](
                message, indices, spans.pieces, rows, spans.firsts, places.marks, counts,
                counts.cumsum(0, dtype=torch.int32), SIZE=TILE, **options(8),
            )  # fmt: skip
    return indices


def add(
    y: Tensor,
    message: Tensor,
    table: Table,
    places: Places,
    indices: Tensor,
    values: Tensor | None,
    *,
    add: bool,
    scale: float,
) -> None:
    """See :func:`thinwire.kernels.sparse_rows.rows_add_at`."""
    if table.numel:
        spans, rows = whole(table, y.device), table.on(y.device)
        with on(y):
            clear_rows[(len(spans.pieces),)](y, message, spans.pieces, rows, ADD=add, SIZE=TILE, **options(8))
            _at_indices(y, message, table, places, indices, values, scale, zero=False)


def zero(y: Tensor, table: Table, places: Places, indices: Tensor) -> None:
    """See :func:`thinwire.kernels.sparse_rows.rows_zero_at`."""
    if table.numel:
        with on(y):
            _at_indices(y, y, table, places, indices, None, 1.0, zero=True)


def _at_indices(
    y: Tensor,
    message: Tensor,
    table: Table,
    places: Places,
    indices: Tensor,
    values: Tensor | None,
    scale: float,
    *,
    zero: bool,
) -> None:
    pieces = places.rooms.pieces
    add_chosen[(len(pieces),)](
        y, message, message if values is None else values, indices, pieces, table.on(y.device), places.marks, scale,
        FLOATS=values is None, ZERO=zero, SIZE=TILE, **options(8),
    )  # fmt: skip
