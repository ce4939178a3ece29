"""The kernels of buckets and of plain values in Triton, for CUDA tensors (and, for tests, in its interpreter).

A group of 128 codes is held as 2, 4 or 8 register tiles, so many that the fields of a byte of the narrowest plane lie
in different tiles at the same place: packing is then element by element, without a shuffle. Loads and stores are 128
bits wide where a segment starts at a multiple of 8 elements.

The bits are those of :mod:`thinwire.kernels.reference`: hence no fused multiply-add (``enable_fp_fusion=False``) and
correctly rounded division (``tl.div_rn``). Host work is constant per call, and nothing waits for the device. Imported
when first needed.
"""

# Triton is not installed everywhere, and its language has types of its own.
# pyright: reportMissingImports=false, reportIndexIssue=false, reportArgumentType=false, reportAssignmentType=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportAttributeAccessIssue=false
from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from thinwire.kernels import reference
from thinwire.kernels.format import GROUP, ROUNDINGS, SCHEMES, Format, Residual, before_sum
from thinwire.kernels.gpu_kernels import (
    ADD,
    MEAN,
    STORE,
    bucket_extrema,
    bucket_scales,
    decode_tiles,
    encode_codes,
    encode_tiles,
    find_piece,
    write,
)
from thinwire.kernels.table import Table

TILE = 2048
"""Number of elements of one program."""

MAX_TILE_BUCKET = 4096
"""Largest bucket for a single launch; larger ones, and those that are not a power of two times 128, take two or
three."""


def options(bits: int) -> dict[str, int | bool]:
    """Return launch options; the narrow parts of odd widths need fewer warps for loads of 128 bits a thread."""
    return {"enable_fp_fusion": False, "num_warps": 2 if bits % 2 else 4}


def on(tensor: Tensor) -> AbstractContextManager[None]:
    """Make the tensor's device the current one, on which Triton launches."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


def words(key: int) -> tuple[int, int]:
    """Return the two halves of a key, less 2^31 each: int32, whatever the key."""
    return (key & 0xFFFFFFFF) - 2**31, (key >> 32 & 0xFFFFFFFF) - 2**31


def check_aligned(message: Tensor) -> None:
    """Raise ``ValueError`` unless the kernels can read 32-bit words of a message."""
    if message.data_ptr() % 4:
        raise ValueError("a message on a GPU must start at a multiple of 4 bytes: slice it at a multiple of 64")


def runs(messages: Sequence[Tensor]) -> list[tuple[Tensor, int, int]]:
    """Return messages as runs that lie evenly in memory: the first message, the bytes between two, and the number.

    One launch reads a run. Messages that were received together are one.
    """
    found: list[tuple[Tensor, int, int]] = []
    for message in messages:
        check_aligned(message)
        first, stride, count = found.pop() if found else (message, 0, 0)
        apart = message.data_ptr() - first.data_ptr()
        if count <= 1 or apart == count * stride:
            found.append((first, apart, count + 1) if count <= 1 else (first, stride, count + 1))
        else:
            found += [(first, stride, count), (message, 0, 1)]
    return found


def bucketed_encode(
    x: Tensor, table: Table, message: Tensor, form: Format, *, key: int, residual: Residual | None = None
) -> None:
    """See :func:`thinwire.kernels.bucketed_encode`."""
    check_aligned(message)
    if not table.numel:
        return
    bucket = table.clamped(form.bucket)
    if fits_tile(bucket):
        _encode_tiles(x, table, message, form, bucket, key=key, residual=residual)
    else:
        with on(x):
            _encode_any_bucket(x, table, message, form, bucket, key=key, residual=residual)


def _encode_tiles(
    x: Tensor, table: Table, message: Tensor, form: Format, bucket: int, *, key: int, residual: Residual | None,
    received: tuple[Tensor, int, int] | None = None, scale: float = 1.0, y: Tensor | None = None,
) -> None:  # fmt: skip
    """Encode in one launch; with messages that were received, their mean, and write its decoded values to ``y``."""
    tile = encode_tile_size(form.bits, bucket)
    pieces, before = table.pieces(x.device, tile), before_sum(scale)
    now, next, loss_scale = residual or Residual(x, x)
    with on(x):
        encode_tiles[(len(pieces),)](
            x, now, next, message, pieces, table.on(x.device), *words(key), loss_scale, form.clip,
            *(received or (message, 0, 0)), before, scale / before, x if y is None else y,
            BITS=form.bits, BUCKET=bucket, GROUPS=tile // GROUP, STEPS=form.steps, SUMS=needs_sums(form),
            RESIDUAL=residual is not None, REDUCE=y is not None, **coding_constants(form), **options(form.bits),
        )  # fmt: skip


def _encode_any_bucket(
    x: Tensor, table: Table, message: Tensor, form: Format, bucket: int, *, key: int, residual: Residual | None
) -> None:
    """Encode extrema of all buckets (unless the scheme needs sums), then their scales, then the codes."""
    rows, coding, sums = table.on(x.device), coding_constants(form), needs_sums(form)
    launch = options(form.bits)
    firsts, total = table.bucket_firsts(x.device, bucket)
    inverses = torch.empty(total, dtype=torch.float32, device=x.device)
    now, next, loss_scale = residual or Residual(x, x)
    fused = residual is not None
    low_keys = high_keys = firsts
    if not sums:
        low_keys = torch.full((total,), 0x7FFFFFFF, dtype=torch.int32, device=x.device)
        high_keys = torch.full((total,), -0x80000000, dtype=torch.int32, device=x.device)
        cols = min(triton.next_power_of_2(bucket), TILE)
        slices, across = -(-bucket // cols), TILE // cols
        pieces = table.pieces(x.device, across * bucket, each=slices)
        bucket_extrema[(len(pieces),)](
            x, now, pieces, rows, firsts, low_keys, high_keys, bucket, slices, loss_scale,
            ROWS=across, COLS=cols, SCHEME=coding["SCHEME"], RESIDUAL=fused, **launch,
        )  # fmt: skip
    count = 8 if sums else GROUP
    pieces = table.pieces(x.device, count * bucket)
    bucket_scales[(len(pieces),)](
        x, now, message, pieces, rows, firsts, low_keys, high_keys, inverses, *words(key), bucket, loss_scale,
        form.clip, BITS=form.bits, STEPS=form.steps, SUMS=sums, RESIDUAL=fused, COUNT=count, **coding, **launch,
    )  # fmt: skip
    pieces = table.pieces(x.device, TILE)
    encode_codes[(len(pieces),)](
        x, now, next, message, pieces, rows, firsts, low_keys, inverses, *words(key), bucket, loss_scale,
        BITS=form.bits, GROUPS=TILE // GROUP, RESIDUAL=fused, **coding, **launch,
    )  # fmt: skip


def bucketed_decode(
    message: Tensor, table: Table, y: Tensor, form: Format, *, add: bool = False, scale: float = 1.0
) -> None:
    """See :func:`thinwire.kernels.bucketed_decode`."""
    _decode((message, 0, 1), table, y, y, form, scale=scale, mode=ADD if add else STORE)


def bucketed_sum(
    messages: Sequence[Tensor], own: Tensor | None, table: Table, y: Tensor, form: Format, *, scale: float = 1.0
) -> None:
    """See :func:`thinwire.kernels.bucketed_sum`."""
    if not messages:
        reference.bucketed_sum(messages, own, table, y, form, scale=scale)
        return
    sums = y if y.dtype == torch.float32 else torch.empty(y.shape, dtype=torch.float32, device=y.device)
    base, mode = (y, MEAN) if own is None else (own, ADD)
    before = weight = before_sum(scale)
    *others, last = runs(messages)
    for run in others:
        _decode(run, table, base, sums, form, scale=before, mode=mode, weight=weight)
        base, mode, weight = sums, ADD, 1.0
    _decode(last, table, base, y, form, scale=before, mode=mode, weight=weight, after=scale / before)


def bucketed_reduce(
    messages: Sequence[Tensor],
    own: Tensor,
    table: Table,
    out_message: Tensor,
    y: Tensor,
    form: Format,
    *,
    scale: float,
    key: int,
    residual: Residual | None = None,
) -> None:
    """See :func:`thinwire.kernels.bucketed_reduce`."""
    bucket, received = table.clamped(form.bucket), runs(messages)
    if len(received) == 1 and fits_tile(bucket) and not needs_sums(form) and table.numel:
        check_aligned(out_message)
        fused = {"received": received[0], "scale": scale, "y": y}
        _encode_tiles(own, table, out_message, form, bucket, key=key, residual=residual, **fused)
        return
    mean = y if y.dtype == torch.float32 else torch.empty(y.shape, dtype=torch.float32, device=y.device)
    bucketed_sum(messages, own, table, mean, form, scale=scale)
    bucketed_encode(mean, table, out_message, form, key=key, residual=residual)
    bucketed_decode(out_message, table, y, form)


def _decode(
    run: tuple[Tensor, int, int],
    table: Table,
    base: Tensor,
    y: Tensor,
    form: Format,
    *,
    scale: float,
    mode: int,
    weight: float = 1.0,
    after: float = 1.0,
) -> None:
    message, stride, count = run
    check_aligned(message)
    pieces = table.pieces(y.device, TILE)
    bucket = table.clamped(form.bucket)
    known = bucket if bucket % GROUP == 0 and bucket <= MAX_TILE_BUCKET else 0
    if len(pieces):
        with on(y):
            decode_tiles[(len(pieces),)](
                message, base, y, pieces, table.on(y.device), bucket, stride, count, weight, scale, after,
                BITS=form.bits, BUCKET=known, GROUPS=TILE // GROUP, OFFSET2=int(2 * form.offset), MODE=mode,
                **options(form.bits),
            )  # fmt: skip


def encode_tile_size(bits: int, bucket: int) -> int:
    """Return the elements of a program, 32 a thread: with 16, its row, keys and scales cost a quarter of its time."""
    return max(32 * 32 * int(options(bits)["num_warps"]), bucket)


def coding_constants(form: Format) -> dict[str, int]:
    """Return a kernel's constants for the format. What does not round is compiled once, not per rounding."""
    scheme = SCHEMES.index(form.scheme)
    rounding = ROUNDINGS.index(form.rounding) if scheme <= 2 else ROUNDINGS.index("nearest")
    return {"SCHEME": scheme, "ROUNDING": rounding, "OFFSET2": int(2 * form.offset)}


def fits_tile(bucket: int) -> bool:
    """Return whether a program can encode whole buckets of this size."""
    groups = bucket // GROUP
    return bucket % GROUP == 0 and bucket <= MAX_TILE_BUCKET and groups & (groups - 1) == 0


def needs_sums(form: Format) -> bool:
    return form.scheme in ("norm", "sides", "sign") or form.clip > 0


# ---- Values without a code: one launch for all segments --------------------------------------------------------------


@triton.jit
def put_rows(x, message, pieces, rows, SIZE: tl.constexpr):
    piece, start, numel, _index0, payload, _site = find_piece(pieces, rows)
    at = piece * SIZE + tl.arange(0, SIZE)
    to = (message + payload).to(tl.pointer_type(x.dtype.element_ty))
    tl.store(to + at, tl.load(x + start + at, mask=at < numel), mask=at < numel)


@triton.jit
def take_rows(message, y, pieces, rows, scale, SIZE: tl.constexpr, MODE: tl.constexpr):
    piece, start, numel, _index0, payload, _site = find_piece(pieces, rows)
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
    piece, start, numel, _index0, payload, _site = find_piece(pieces, rows)
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
    piece, start, numel, _index0, _payload, _site = find_piece(pieces, rows)
    at = piece * SIZE + tl.arange(0, SIZE)
    value = tl.load(x + start + at, mask=at < numel, other=0.0).to(tl.float32)
    value += tl.load(other + start + at, mask=at < numel, other=0.0).to(tl.float32) * alpha
    tl.store(out + start + at, value.to(out.dtype.element_ty), mask=at < numel)


@triton.jit
def scale_rows(x, out, pieces, rows, by, over, SIZE: tl.constexpr):
    piece, start, numel, _index0, _payload, _site = find_piece(pieces, rows)
    at = piece * SIZE + tl.arange(0, SIZE)
    value = tl.load(x + start + at, mask=at < numel, other=0.0).to(tl.float32) * by
    value = tl.div_rn(value, tl.zeros((SIZE,), tl.float32) + over)
    tl.store(out + start + at, value.to(out.dtype.element_ty), mask=at < numel)


def raw_encode(x: Tensor, table: Table, message: Tensor) -> None:
    """See :func:`thinwire.kernels.raw_encode`."""
    check_aligned(message)
    _launch(put_rows, x, table, x, message)


def raw_decode(message: Tensor, table: Table, y: Tensor, *, add: bool, scale: float) -> None:
    """See :func:`thinwire.kernels.raw_decode`."""
    check_aligned(message)
    _launch(take_rows, y, table, message, y, after=(scale,), MODE=int(add))


def raw_sum(
    messages: Sequence[Tensor], own: Tensor, table: Table, y: Tensor, *, scale: float, out_message: Tensor | None
) -> None:
    """See :func:`thinwire.kernels.raw_sum`."""
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
    """See :func:`thinwire.kernels.rows_add`."""
    _launch(add_rows, out, table, x, other, out, after=(alpha,))


def rows_scale(x: Tensor, table: Table, out: Tensor, *, by: float, over: float) -> None:
    """See :func:`thinwire.kernels.rows_scale`."""
    _launch(scale_rows, out, table, x, out, after=(by, over))


def _launch(kernel: Any, like: Tensor, table: Table, *given: Any, after: tuple[float, ...] = (), **known: Any) -> None:
    """Run a kernel on the tiles of all segments: its tensors, then the table's, then scalars."""
    if table.numel:
        with on(like):
            pieces = table.pieces(like.device, TILE)
            kernel[(len(pieces),)](*given, pieces, table.on(like.device), *after, SIZE=TILE, **known, **options(8))
