"""Plain values of the segments of a table in Triton: :mod:`thinwire.kernels.rows`, one launch for all segments."""

# Triton is not installed everywhere, and its language has types of its own.
# pyright: reportMissingImports=false, reportIndexIssue=false, reportArgumentType=false, reportAssignmentType=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportAttributeAccessIssue=false
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from thinwire.kernels.format import before_sum
from thinwire.kernels.gpu_launch import TILE, check_aligned, on, options
from thinwire.kernels.gpu_tiles import row_of, write
from thinwire.kernels.table import Table


@triton.jit
def put_rows(x, message, pieces, rows, SIZE: tl.constexpr):
    piece, start, numel, _index0, payload, _site = row_of(pieces, rows)
    at = piece * SIZE + tl.arange(0, SIZE)
    to = (message + payload).to(tl.pointer_type(x.dtype.element_ty))
    tl.store(to + at, tl.load(x + start + at, mask=at < numel), mask=at < numel)


@triton.jit
def take_rows(message, y, pieces, rows, scale, SIZE: tl.constexpr, MODE: tl.constexpr):
    piece, start, numel, _index0, payload, _site = row_of(pieces, rows)
    at = piece * SIZE + tl.arange(0, SIZE)
    value = tl.load((message + payload).to(tl.pointer_type(y.dtype.element_ty)) + at, mask=at < numel)
    write(y, y, start + at, value.to(tl.float32), scale, at < numel, MODE)


@triton.jit
def sum_rows(
    message, base, total, out_message, y, pieces, rows, weight, before, after,
    SIZE: tl.constexpr, MESSAGE: tl.constexpr, LAST: tl.constexpr, SEND: tl.constexpr,
):  # fmt: skip
    """Write ``base · weight`` and, with ``MESSAGE``, a payload times ``before``, in fp32: to ``total``, or if it is the
    ``LAST``, times ``after``, to the places of the mean. Payloads have the dtype of ``y``."""
    piece, start, numel, _index0, payload, _site = row_of(pieces, rows)
    at = piece * SIZE + tl.arange(0, SIZE)
    inside = at < numel
    kind: tl.constexpr = y.dtype.element_ty
    value = tl.load(base + start + at, mask=inside, other=0.0).to(tl.float32) * weight
    if MESSAGE:
        received = tl.load((message + payload).to(tl.pointer_type(kind)) + at, mask=inside, other=0.0)
        value += received.to(tl.float32) * before
    if LAST:
        mean = (value * after).to(kind)
        if SEND:
            tl.store((out_message + payload).to(tl.pointer_type(kind)) + at, mean, mask=inside)
        tl.store(y + start + at, mean, mask=inside)
    else:
        tl.store(total + start + at, value, mask=inside)


@triton.jit
def add_rows(x, other, out, pieces, rows, alpha, SIZE: tl.constexpr):
    piece, start, numel, _index0, _payload, _site = row_of(pieces, rows)
    at = piece * SIZE + tl.arange(0, SIZE)
    value = tl.load(x + start + at, mask=at < numel, other=0.0).to(tl.float32)
    value += tl.load(other + start + at, mask=at < numel, other=0.0).to(tl.float32) * alpha
    tl.store(out + start + at, value.to(out.dtype.element_ty), mask=at < numel)


@triton.jit
def scale_rows(x, out, pieces, rows, by, over, SIZE: tl.constexpr):
    piece, start, numel, _index0, _payload, _site = row_of(pieces, rows)
    at = piece * SIZE + tl.arange(0, SIZE)
    value = tl.load(x + start + at, mask=at < numel, other=0.0).to(tl.float32) * by
    value = tl.div_rn(value, tl.zeros((SIZE,), tl.float32) + over)
    tl.store(out + start + at, value.to(out.dtype.element_ty), mask=at < numel)


def raw_encode(x: Tensor, table: Table, message: Tensor) -> None:
    """See :func:`thinwire.kernels.rows.raw_encode`."""
    check_aligned(message)
    _launch(put_rows, x, table, x, message)


def raw_decode(message: Tensor, table: Table, y: Tensor, *, add: bool, scale: float) -> None:
    """See :func:`thinwire.kernels.rows.raw_decode`."""
    check_aligned(message)
    _launch(take_rows, y, table, message, y, after=(scale,), MODE=int(add))


def raw_sum(
    messages: Sequence[Tensor], own: Tensor, table: Table, y: Tensor, *, scale: float, out_message: Tensor | None
) -> None:
    """See :func:`thinwire.kernels.rows.raw_sum`."""
    for message in messages if out_message is None else (*messages, out_message):
        check_aligned(message)
    base, sent = own, y if out_message is None else out_message
    before = weight = before_sum(scale)
    if len(messages) > 1:
        total = torch.empty(own.numel(), dtype=torch.float32, device=own.device)
        for message in messages[:-1]:
            given = (message, base, total, sent, y)
            factors = weight, before, 1.0
            _launch(sum_rows, y, table, *given, after=factors, MESSAGE=True, LAST=False, SEND=False)
            base, weight = total, 1.0
    given = (messages[-1] if messages else sent, base, base, sent, y)
    send = out_message is not None
    factors = weight, before, scale / before
    _launch(sum_rows, y, table, *given, after=factors, MESSAGE=bool(messages), LAST=True, SEND=send)


def rows_add(x: Tensor, other: Tensor, table: Table, out: Tensor, *, alpha: float) -> None:
    """See :func:`thinwire.kernels.rows.rows_add`."""
    _launch(add_rows, out, table, x, other, out, after=(alpha,))


def rows_scale(x: Tensor, table: Table, out: Tensor, *, by: float, over: float) -> None:
    """See :func:`thinwire.kernels.rows.rows_scale`."""
    _launch(scale_rows, out, table, x, out, after=(by, over))


def _launch(kernel: Any, like: Tensor, table: Table, *given: Any, after: tuple[float, ...] = (), **known: Any) -> None:
    """Run a kernel on the tiles of all segments: its tensors, then the table's, then scalars."""
    if table.numel:
        with on(like):
            pieces = table.pieces(like.device, TILE)
            kernel[(len(pieces),)](*given, pieces, table.on(like.device), *after, SIZE=TILE, **known, **options(8))
