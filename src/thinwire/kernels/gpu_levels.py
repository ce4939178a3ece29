"""Learned levels in Triton: extrema, scales, codes."""

# Triton is not installed everywhere, and its language has types of its own.
# pyright: reportMissingImports=false, reportIndexIssue=false, reportArgumentType=false, reportAssignmentType=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportAttributeAccessIssue=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from thinwire.kernels.format import GROUP
from thinwire.kernels.gpu_encode import bucket_extrema
from thinwire.kernels.gpu_launch import TILE, check_aligned, on, options
from thinwire.kernels.gpu_scales import from_key, is_finite, nearest_to_zero, or_nan
from thinwire.kernels.gpu_tiles import bucket_of, load_parts, pack_parts, row_of, unpack_parts, write
from thinwire.kernels.table import Table


@triton.jit
def parts_of(message, payload, numel, bucket, BITS: tl.constexpr):
    """Where the levels (fp32) are, lo of the buckets, how many buckets there are, and the codes."""
    LEVELS: tl.constexpr = ((4 << BITS) + 63) // 64 * 64
    buckets = (numel + bucket - 1) // bucket
    levels = (message + payload).to(tl.pointer_type(tl.float32))
    codes = message + payload + LEVELS + tl.multiple_of((buckets * 8 + 63) // 64 * 64, 64)
    return levels, levels + LEVELS // 4, buckets, codes


@triton.jit(do_not_specialize=["bucket"])
def level_scales(
    message, levels, pieces, rows, firsts, low_keys, high_keys, inverses, bucket,
    BITS: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """lo and range of ``COUNT`` buckets, and, once a row, the levels and all padding."""
    pid = tl.program_id(0).to(tl.int64)
    row = tl.load(pieces + 2 * pid)
    piece, _start, numel, _index0, payload, _site = row_of(pieces, rows)
    level, scales, buckets, codes = parts_of(message, payload, numel, bucket, BITS)
    k = piece * COUNT + tl.arange(0, COUNT)
    at = tl.load(firsts + row) + k
    low = from_key(tl.load(low_keys + at, mask=k < buckets, other=0)) + 0.0
    high = from_key(tl.load(high_keys + at, mask=k < buckets, other=0)) + 0.0
    span = high - low
    bad = is_finite(span) == 0
    flat = bad | (span < 7.888609052210118e-31)
    inverse = tl.div_rn(tl.full((COUNT,), 1.0, tl.float32), tl.where(flat, 1.0, span))
    tl.store(inverses + at, tl.where(flat, 0.0, inverse), mask=k < buckets)
    tl.store(scales + k, or_nan(tl.where(flat, nearest_to_zero(low, high), low), bad), mask=k < buckets)
    tl.store(scales + buckets + k, or_nan(tl.where(flat, 0.0, span), bad), mask=k < buckets)
    if piece == 0:
        word = tl.arange(0, 256)
        LEVELS: tl.constexpr = 1 << BITS
        tl.store(level + word, tl.load(levels + row * LEVELS + word, mask=word < LEVELS), mask=word < LEVELS)
        tl.store(level + word, tl.zeros((256,), tl.float32), mask=(word >= LEVELS) & (word < (LEVELS + 15) // 16 * 16))
        word = tl.arange(0, 16)
        end = 2 * buckets
        tl.store(scales + end + word, tl.zeros((16,), tl.float32), mask=end + word < (end + 15) // 16 * 16)
        byte = (numel + 127) // 128 * (16 * BITS) + tl.arange(0, 64)
        size = (numel + 127) // 128 * (16 * BITS)
        tl.store(codes + byte, tl.zeros((64,), tl.uint8), mask=byte < (size + 63) // 64 * 64)


@triton.jit(do_not_specialize=["bucket"])
def level_codes(x, message, pieces, rows, firsts, inverses, bucket, BITS: tl.constexpr, GROUPS: tl.constexpr):
    """How many of the middles between levels each value reaches, found by bisection."""
    pid = tl.program_id(0).to(tl.int64)
    piece, start, numel, _index0, payload, _site = row_of(pieces, rows)
    first = piece * (GROUPS * 128)
    left = numel - first
    level, scales, _buckets, codes = parts_of(message, payload, numel, bucket, BITS)
    parts = load_parts(x + start + first, x, 1.0, left, BITS, GROUPS, False, False)
    factors = inverses + tl.load(firsts + tl.load(pieces + 2 * pid))
    PARTS: tl.constexpr = len(parts)
    WIDTH: tl.constexpr = 128 // PARTS
    places = ()
    for p in tl.static_range(PARTS):
        within = tl.arange(0, GROUPS)[:, None] * 128 + p * WIDTH + tl.arange(0, WIDTH)[None, :]
        k = bucket_of(first, within, bucket)
        inside = within < left
        low = tl.load(scales + k, mask=inside, other=0.0)
        place = (parts[p] - low) * tl.load(factors + k, mask=inside, other=0.0)
        code = tl.zeros((GROUPS, WIDTH), tl.int32)
        for i in tl.static_range(BITS):
            above = code + (1 << (BITS - 1 - i))
            middle = (tl.load(level + above - 1) + tl.load(level + above)) * 0.5
            code = tl.where(place >= middle, above, code)
        places += (tl.where(inside, code, 0),)
    pack_parts(codes + piece * (GROUPS * 16 * BITS), places, left, BITS, GROUPS, False)


@triton.jit(do_not_specialize=["bucket"])
def level_values(
    message, y, pieces, rows, bucket, scale, BITS: tl.constexpr, GROUPS: tl.constexpr, MODE: tl.constexpr
):  # fmt: skip
    piece, start, numel, _index0, payload, _site = row_of(pieces, rows)
    first = piece * (GROUPS * 128)
    level, scales, buckets, codes = parts_of(message, payload, numel, bucket, BITS)
    parts = unpack_parts(codes + piece * (GROUPS * 16 * BITS), numel - first, BITS, GROUPS, False)
    PARTS: tl.constexpr = len(parts)
    WIDTH: tl.constexpr = 128 // PARTS
    for p in tl.static_range(PARTS):
        within = tl.arange(0, GROUPS)[:, None] * 128 + p * WIDTH + tl.arange(0, WIDTH)[None, :]
        k = bucket_of(first, within, bucket)
        inside = first + within < numel
        low = tl.load(scales + k, mask=inside, other=0.0)
        span = tl.load(scales + buckets + k, mask=inside, other=0.0)
        write(y, y, start + first + within, low + span * tl.load(level + parts[p]), scale, inside, MODE)


def levels_encode(x: Tensor, table: Table, message: Tensor, levels: Tensor, *, bits: int, bucket: int) -> None:
    """See :func:`thinwire.kernels.levels_encode`."""
    check_aligned(message)
    if not table.numel:
        return
    bucket = table.clamped(bucket)
    rows, launch = table.on(x.device), options(bits)
    firsts, total = table.bucket_firsts(x.device, bucket)
    with on(x):
        low_keys = torch.full((total,), 0x7FFFFFFF, dtype=torch.int32, device=x.device)
        high_keys = torch.full((total,), -0x80000000, dtype=torch.int32, device=x.device)
        inverses = torch.empty(total, dtype=torch.float32, device=x.device)
        cols = min(triton.next_power_of_2(bucket), TILE)
        slices, across = -(-bucket // cols), TILE // cols
        pieces = table.pieces(x.device, across * bucket, each=slices)
        bucket_extrema[(len(pieces),)](
            x, x, pieces, rows, firsts, low_keys, high_keys, bucket, slices, 1.0,
            ROWS=across, COLS=cols, SCHEME=0, RESIDUAL=False, **launch,
        )  # fmt: skip
        pieces = table.pieces(x.device, GROUP * bucket)
        level_scales[(len(pieces),)](
            message, levels, pieces, rows, firsts, low_keys, high_keys, inverses, bucket,
            BITS=bits, COUNT=GROUP, **launch,
        )  # fmt: skip
        pieces = table.pieces(x.device, TILE)
        level_codes[(len(pieces),)](
            x, message, pieces, rows, firsts, inverses, bucket, BITS=bits, GROUPS=TILE // GROUP, **launch
        )


def levels_decode(message: Tensor, table: Table, y: Tensor, *, bits: int, bucket: int, add: bool, scale: float) -> None:
    """See :func:`thinwire.kernels.levels_decode`."""
    check_aligned(message)
    if not table.numel:
        return
    with on(y):
        pieces = table.pieces(y.device, TILE)
        level_values[(len(pieces),)](
            message, y, pieces, table.on(y.device), table.clamped(bucket), scale,
            BITS=bits, GROUPS=TILE // GROUP, MODE=int(add), **options(bits),
        )  # fmt: skip
