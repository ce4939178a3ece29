"""The kernels in Triton, for CUDA tensors (and in Triton's interpreter, for tests). Imported only when one comes.

A group of 128 codes is held as 2, 4 or 8 register tiles, so many that the fields of a byte of the narrowest plane lie
in different tiles at the same place: packing is then element by element, without a shuffle. Loads and stores are 128
bits wide where a segment starts at a multiple of 8 elements.

The bits are those of :mod:`thinwire.kernels.reference`: hence no fused multiply-add (``enable_fp_fusion=False``) and
correctly rounded division (``tl.div_rn``).
"""

# Triton is not installed everywhere, and its language has types of its own.
# pyright: reportMissingImports=false, reportIndexIssue=false, reportArgumentType=false, reportAssignmentType=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false
from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor

from thinwire.kernels import reference
from thinwire.kernels.gpu_tiles import (
    bucket_of,
    codes_of,
    dequantise,
    finish_scales,
    from_key,
    load_parts,
    ordered_key,
    pack_parts,
    quantise_parts,
    row_draws,
    row_of,
    unpack_parts,
)
from thinwire.kernels.layout import GROUP, Format, Residual
from thinwire.kernels.table import Table

TILE = 2048
"""Elements of one program; encoding takes as many to a thread as :func:`_encode_tile_size` says."""

MAX_TILE_BUCKET = 4096
"""Larger buckets, and those that are not a power of two times 128, take three launches instead of one."""

STORE, ADD, MEAN = 0, 1, 2
"""What decoding writes: v · scale; base + v · scale; (base + v) · scale."""


def _options(bits: int) -> dict[str, int | bool]:
    """Launch options; the narrow parts of odd widths need fewer warps for loads of 128 bits a thread."""
    return {"enable_fp_fusion": False, "num_warps": 2 if bits % 2 else 4}


def _encode_tile_size(bits: int, bucket: int) -> int:
    """32 elements a thread: with 16, what a program does once (its row, keys, scales) costs a quarter of its time."""
    return max(32 * 32 * int(_options(bits)["num_warps"]), bucket)


def _device(tensor: Tensor) -> AbstractContextManager[None]:
    """Triton launches on the current device, which need not be the tensor's."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


@triton.jit(do_not_specialize=["key_low", "key_high"])
def encode_tiles(
    x, message, pieces, rows, key_low, key_high,
    BITS: tl.constexpr, BUCKET: tl.constexpr, GROUPS: tl.constexpr, NEAREST: tl.constexpr,
):  # fmt: skip
    """Scales and codes of one tile of whole buckets."""
    piece, start, numel, index0, payload, site = row_of(pieces, rows)
    first = piece * (GROUPS * 128)
    if (numel - first >= GROUPS * 128) & (start % 8 == 0):
        encode_tile(
            x, message, tl.multiple_of(start, 8), first, numel, index0, payload, site, key_low, key_high,
            BITS, BUCKET, GROUPS, NEAREST, True,
        )  # fmt: skip
    else:
        encode_tile(
            x, message, start, first, numel, index0, payload, site, key_low, key_high,
            BITS, BUCKET, GROUPS, NEAREST, False,
        )  # fmt: skip


@triton.jit
def encode_tile(
    x, message, start, first, numel, index0, payload, site, key_low, key_high,
    BITS: tl.constexpr, BUCKET: tl.constexpr, GROUPS: tl.constexpr, NEAREST: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    PER_BUCKET: tl.constexpr = BUCKET // 128
    BUCKETS: tl.constexpr = GROUPS // PER_BUCKET
    parts = load_parts(x + start + first, numel - first, BITS, GROUPS, EVEN)
    low_key, high_key = extrema(parts, numel - first, GROUPS, EVEN)
    low_key = tl.min(tl.reshape(low_key, (BUCKETS, PER_BUCKET)), axis=1)
    high_key = tl.max(tl.reshape(high_key, (BUCKETS, PER_BUCKET)), axis=1)
    low, unit, inverse = finish_scales(from_key(low_key), from_key(high_key), BITS)
    put_scales(message + payload, low, unit, first // BUCKET, (numel + BUCKET - 1) // BUCKET, BUCKETS)
    low = tl.reshape(tl.broadcast_to(low[:, None], (BUCKETS, PER_BUCKET)), (GROUPS,))[:, None]
    inverse = tl.reshape(tl.broadcast_to(inverse[:, None], (BUCKETS, PER_BUCKET)), (GROUPS,))[:, None]
    lows, inverses = (), ()
    for _ in tl.static_range(len(parts)):
        lows += (low,)
        inverses += (inverse,)
    k0, k1 = row_draws(key_low, key_high, site)
    fixed = quantise_parts(parts, lows, inverses, (index0 + first) // 2, numel - first, k0, k1, NEAREST, EVEN)
    packed = codes_of(message, payload, numel, BUCKET, first, BITS)
    pack_parts(packed, fixed, numel - first, BITS, GROUPS, EVEN)
    if first + GROUPS * 128 >= numel:
        zero_padding(message + payload, numel, BUCKET, BITS)


@triton.jit
def extrema(parts, left, GROUPS: tl.constexpr, EVEN: tl.constexpr):
    """Ordered keys of the minimum and the maximum of each group."""
    PARTS: tl.constexpr = len(parts)
    WIDTH: tl.constexpr = 128 // PARTS
    low = tl.full((GROUPS, WIDTH), 0x7FFFFFFF, tl.int32)
    high = tl.full((GROUPS, WIDTH), -0x80000000, tl.int32)
    at = tl.arange(0, GROUPS)[:, None] * 128 + tl.arange(0, WIDTH)[None, :]
    for p in tl.static_range(PARTS):
        key = ordered_key(parts[p])
        if EVEN:
            low, high = tl.minimum(low, key), tl.maximum(high, key)
        else:
            inside = at + p * WIDTH < left
            low = tl.where(inside, tl.minimum(low, key), low)
            high = tl.where(inside, tl.maximum(high, key), high)
    return tl.min(low, axis=1), tl.max(high, axis=1)


@triton.jit
def put_scales(payload, low, unit, first, buckets, COUNT: tl.constexpr):
    """lo and unit of the buckets from ``first`` on, as far as the row has them."""
    at = first + tl.arange(0, COUNT)
    scales = payload.to(tl.pointer_type(tl.float32))
    tl.store(scales + at, low, mask=at < buckets)
    tl.store(scales + buckets + at, unit, mask=at < buckets)


@triton.jit
def zero_padding(payload, numel, bucket, BITS: tl.constexpr):
    """The bytes up to the next multiple of 64 behind the scales, and behind the codes."""
    byte = tl.arange(0, 64)
    zeros = tl.zeros((64,), tl.uint8)
    scales = (numel + bucket - 1) // bucket * 8
    codes_at = (scales + 63) // 64 * 64
    codes = (numel + 127) // 128 * (16 * BITS)
    tl.store(payload + scales + byte, zeros, mask=scales + byte < codes_at)
    tl.store(payload + codes_at + codes + byte, zeros, mask=codes + byte < (codes + 63) // 64 * 64)


@triton.jit(do_not_specialize=["bucket", "slices"])
def bucket_extrema(
    x, pieces, rows, firsts, low_keys, high_keys, bucket, slices, ROWS: tl.constexpr, COLS: tl.constexpr
):
    """Merges the extrema of one slice of ``ROWS`` buckets into their keys; ``firsts``: the buckets before each row."""
    pid = tl.program_id(0).to(tl.int64)
    piece, start, numel, _index0, _payload, _site = row_of(pieces, rows)
    first = tl.load(firsts + tl.load(pieces + 2 * pid))
    k = piece // slices * ROWS + tl.arange(0, ROWS)
    within = piece % slices * COLS + tl.arange(0, COLS)
    at = k[:, None] * bucket + within[None, :]
    inside = (within[None, :] < bucket) & (at < numel)
    key = ordered_key(tl.load(x + start + at, mask=inside, other=0.0).to(tl.float32))
    low = tl.min(tl.where(inside, key, 0x7FFFFFFF), axis=1)
    high = tl.max(tl.where(inside, key, -0x80000000), axis=1)
    exists = k * bucket < numel
    tl.atomic_min(low_keys + first + k, low, mask=exists)
    tl.atomic_max(high_keys + first + k, high, mask=exists)


@triton.jit(do_not_specialize=["bucket"])
def bucket_scales(
    message, pieces, rows, firsts, low_keys, high_keys, inverses, bucket, BITS: tl.constexpr, COUNT: tl.constexpr
):  # fmt: skip
    """Scales of ``COUNT`` buckets from their extrema: into the message, and the factor into ``inverses``."""
    pid = tl.program_id(0).to(tl.int64)
    piece, _start, numel, _index0, payload, _site = row_of(pieces, rows)
    first = tl.load(firsts + tl.load(pieces + 2 * pid))
    buckets = (numel + bucket - 1) // bucket
    k = piece * COUNT + tl.arange(0, COUNT)
    low_key = tl.load(low_keys + first + k, mask=k < buckets, other=0)
    high_key = tl.load(high_keys + first + k, mask=k < buckets, other=0)
    low, unit, inverse = finish_scales(from_key(low_key), from_key(high_key), BITS)
    put_scales(message + payload, low, unit, piece * COUNT, buckets, COUNT)
    tl.store(inverses + first + k, inverse, mask=k < buckets)
    if piece == 0:
        zero_padding(message + payload, numel, bucket, BITS)


@triton.jit(do_not_specialize=["key_low", "key_high", "bucket"])
def encode_codes(
    x, message, pieces, rows, firsts, inverses, key_low, key_high, bucket,
    BITS: tl.constexpr, GROUPS: tl.constexpr, NEAREST: tl.constexpr,
):  # fmt: skip
    """Codes of one tile, with the scale of each element looked up."""
    pid = tl.program_id(0).to(tl.int64)
    piece, start, numel, index0, payload, site = row_of(pieces, rows)
    first = piece * (GROUPS * 128)
    parts = load_parts(x + start + first, numel - first, BITS, GROUPS, False)
    lows = (message + payload).to(tl.pointer_type(tl.float32))
    factors = inverses + tl.load(firsts + tl.load(pieces + 2 * pid))
    low, inverse = (), ()
    PARTS: tl.constexpr = len(parts)
    WIDTH: tl.constexpr = 128 // PARTS
    for p in tl.static_range(PARTS):
        within = tl.arange(0, GROUPS)[:, None] * 128 + p * WIDTH + tl.arange(0, WIDTH)[None, :]
        k = bucket_of(first, within, bucket)
        low += (tl.load(lows + k, mask=first + within < numel, other=0.0),)
        inverse += (tl.load(factors + k, mask=first + within < numel, other=0.0),)
    k0, k1 = row_draws(key_low, key_high, site)
    fixed = quantise_parts(parts, low, inverse, (index0 + first) // 2, numel - first, k0, k1, NEAREST, False)
    packed = codes_of(message, payload, numel, bucket, first, BITS)
    pack_parts(packed, fixed, numel - first, BITS, GROUPS, False)


@triton.jit(do_not_specialize=["bucket"])
def decode_tiles(
    message, base, y, pieces, rows, bucket, scale,
    BITS: tl.constexpr, BUCKET: tl.constexpr, GROUPS: tl.constexpr, MODE: tl.constexpr,
):  # fmt: skip
    """Values of one tile. ``BUCKET``: the bucket, if it is a multiple of the group and known when compiling, or 0."""
    piece, start, numel, _index0, payload, _site = row_of(pieces, rows)
    first = piece * (GROUPS * 128)
    if (numel - first >= GROUPS * 128) & (start % 8 == 0):
        start = tl.multiple_of(start, 8)
        decode_tile(message, base, y, start, first, numel, payload, bucket, scale, BITS, BUCKET, GROUPS, MODE, True)
    else:
        decode_tile(message, base, y, start, first, numel, payload, bucket, scale, BITS, BUCKET, GROUPS, MODE, False)


@triton.jit
def decode_tile(
    message, base, y, start, first, numel, payload, bucket, scale,
    BITS: tl.constexpr, BUCKET: tl.constexpr, GROUPS: tl.constexpr, MODE: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    buckets = (numel + bucket - 1) // bucket
    lows = (message + payload).to(tl.pointer_type(tl.float32))
    parts = unpack_parts(codes_of(message, payload, numel, bucket, first, BITS), numel - first, BITS, GROUPS, EVEN)
    PARTS: tl.constexpr = len(parts)
    WIDTH: tl.constexpr = 128 // PARTS
    group = tl.arange(0, GROUPS)[:, None] * 128
    for p in tl.static_range(PARTS):
        within = group + p * WIDTH + tl.arange(0, WIDTH)[None, :]
        k = (first + group) // BUCKET if BUCKET else bucket_of(first, within, bucket)
        low = tl.load(lows + k, mask=k < buckets, other=0.0)
        unit = tl.load(lows + buckets + k, mask=k < buckets, other=0.0)
        value = dequantise(parts[p], low, unit)
        at = start + first + within
        if EVEN:
            write(base, y, at, value, scale, None, MODE)
        else:
            write(base, y, at, value, scale, first + within < numel, MODE)


@triton.jit
def write(base, y, at, value, scale, mask, MODE: tl.constexpr):
    if MODE == 0:
        value = value * scale
    else:
        before = tl.load(base + at, mask=mask).to(tl.float32)
        value = before + value * scale if MODE == 1 else (before + value) * scale
    tl.store(y + at, value.to(y.dtype.element_ty), mask=mask)


def bucketed_encode(
    x: Tensor, table: Table, message: Tensor, form: Format, *, key: int, residual: Residual | None = None
) -> None:
    """See :func:`thinwire.kernels.bucketed_encode`."""
    _check_known(form, residual)
    _check_aligned(message)
    bits, bucket, nearest = form.bits, _clamped(table, form.bucket), form.rounding == "nearest"
    key_words = (key & 0xFFFFFFFF) - 2**31, (key >> 32 & 0xFFFFFFFF) - 2**31  # int32, whatever the key
    per_bucket = bucket // GROUP
    with _device(x):
        if bucket % GROUP == 0 and bucket <= MAX_TILE_BUCKET and per_bucket & (per_bucket - 1) == 0:
            tile = _encode_tile_size(bits, bucket)
            pieces = table.pieces(x.device, tile)
            if len(pieces):
                encode_tiles[(len(pieces),)](
                    x, message, pieces, table.on(x.device), *key_words,
                    BITS=bits, BUCKET=bucket, GROUPS=tile // GROUP, NEAREST=nearest, **_options(bits),
                )  # fmt: skip
        elif table.numel:
            _encode_any_bucket(x, table, message, key_words, bits=bits, bucket=bucket, nearest=nearest)


def _encode_any_bucket(
    x: Tensor, table: Table, message: Tensor, key_words: tuple[int, int], *, bits: int, bucket: int, nearest: bool
) -> None:
    """Extrema of all buckets, then their scales, then the codes: three launches."""
    rows, options = table.on(x.device), _options(bits)
    firsts, total = table.bucket_firsts(x.device, bucket)
    low_keys = torch.full((total,), 0x7FFFFFFF, dtype=torch.int32, device=x.device)
    high_keys = torch.full((total,), -0x80000000, dtype=torch.int32, device=x.device)
    inverses = torch.empty(total, dtype=torch.float32, device=x.device)
    cols = min(triton.next_power_of_2(bucket), TILE)
    slices, across = -(-bucket // cols), TILE // cols
    pieces = table.pieces(x.device, across * bucket, each=slices)
    bucket_extrema[(len(pieces),)](
        x, pieces, rows, firsts, low_keys, high_keys, bucket, slices, ROWS=across, COLS=cols, **options
    )  # fmt: skip
    pieces = table.pieces(x.device, GROUP * bucket)
    bucket_scales[(len(pieces),)](
        message, pieces, rows, firsts, low_keys, high_keys, inverses, bucket, BITS=bits, COUNT=GROUP, **options
    )  # fmt: skip
    pieces = table.pieces(x.device, TILE)
    encode_codes[(len(pieces),)](
        x, message, pieces, rows, firsts, inverses, *key_words, bucket,
        BITS=bits, GROUPS=TILE // GROUP, NEAREST=nearest, **options,
    )  # fmt: skip


def bucketed_decode(
    message: Tensor, table: Table, y: Tensor, form: Format, *, add: bool = False, scale: float = 1.0
) -> None:
    """See :func:`thinwire.kernels.bucketed_decode`."""
    _check_known(form)
    _decode(message, table, y, y, bits=form.bits, bucket=form.bucket, scale=scale, mode=ADD if add else STORE)


def bucketed_sum(
    messages: Sequence[Tensor], own: Tensor | None, table: Table, y: Tensor, form: Format, *, scale: float = 1.0
) -> None:
    """See :func:`thinwire.kernels.bucketed_sum`."""
    _check_known(form)
    if not messages:
        reference.bucketed_sum(messages, own, table, y, form, scale=scale)
        return
    sums = y if y.dtype == torch.float32 else torch.empty(y.shape, dtype=torch.float32, device=y.device)
    base = torch.zeros(y.shape, dtype=torch.float32, device=y.device) if own is None else own
    for message in messages[:-1]:
        _decode(message, table, base, sums, bits=form.bits, bucket=form.bucket, scale=1.0, mode=ADD)
        base = sums
    _decode(messages[-1], table, base, y, bits=form.bits, bucket=form.bucket, scale=scale, mode=MEAN)


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
    _check_known(form, residual)
    mean = y if y.dtype == torch.float32 else torch.empty(y.shape, dtype=torch.float32, device=y.device)
    bucketed_sum(messages, own, table, mean, form, scale=scale)
    bucketed_encode(mean, table, out_message, form, key=key)
    bucketed_decode(out_message, table, y, form)


def _decode(
    message: Tensor, table: Table, base: Tensor, y: Tensor, *, bits: int, bucket: int, scale: float, mode: int
) -> None:
    _check_aligned(message)
    pieces = table.pieces(y.device, TILE)
    bucket = _clamped(table, bucket)
    known = bucket if bucket % GROUP == 0 and bucket <= MAX_TILE_BUCKET else 0
    if len(pieces):
        with _device(y):
            decode_tiles[(len(pieces),)](
                message, base, y, pieces, table.on(y.device), bucket, scale,
                BITS=bits, BUCKET=known, GROUPS=TILE // GROUP, MODE=mode, **_options(bits),
            )  # fmt: skip


def _clamped(table: Table, bucket: int) -> int:
    """A bucket larger than every segment is as good as the largest segment, rounded up to whole groups."""
    return min(bucket, -(-table.largest // GROUP) * GROUP or GROUP)


def _check_known(form: Format, residual: Residual | None = None) -> None:
    if form.scheme != "minmax" or form.rounding == "shift":
        raise NotImplementedError(
            f"{form} does not run on GPUs: use scheme minmax, rounded stochastically or to nearest"
        )
    if residual is not None:
        raise NotImplementedError("error feedback is not fused on GPUs: encode, decode and subtract, without residual=")


def _check_aligned(message: Tensor) -> None:
    if message.data_ptr() % 4:
        raise ValueError("a message on a GPU must start at a multiple of 4 bytes: slice it at a multiple of 64")
