"""Decoding buckets in Triton."""

# Triton is not installed everywhere, and its language has types of its own.
# pyright: reportMissingImports=false, reportIndexIssue=false, reportArgumentType=false, reportAssignmentType=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportAttributeAccessIssue=false
from __future__ import annotations

import triton
import triton.language as tl

from thinwire.kernels.gpu_tiles import bucket_of, codes_of, dequantize, load_parts, put_parts, row_of, unpack_parts

STORE, ADD, MEAN = 0, 1, 2
"""Modes of decoding, which write v · scale; (base · weight + Σ v · scale) · after; the same without a base."""


@triton.jit(do_not_specialize=["bucket"])
def decode_tiles(
    message, base, y, pieces, rows, bucket, stride, count, weight, scale, after,
    BITS: tl.constexpr, BUCKET: tl.constexpr, GROUPS: tl.constexpr, OFFSET2: tl.constexpr, MODE: tl.constexpr,
):  # fmt: skip
    """Decode one tile of ``count`` messages, ``stride`` bytes apart. ``BUCKET``: the bucket, if it is a multiple of the
    group and known when compiling, or 0."""
    piece, start, numel, _index0, payload, _site = row_of(pieces, rows)
    first = piece * (GROUPS * 128)
    if (numel - first >= GROUPS * 128) & (start % 8 == 0):
        # Computed, not hinted: Triton 3.7 forgets a hint on a value that was loaded elsewhere.
        decode_tile(
            message, base, y, start // 8 * 8, first, numel, payload, bucket, stride, count, weight, scale, after,
            BITS, BUCKET, GROUPS, OFFSET2, MODE, True,
        )  # fmt: skip
    else:
        decode_tile(
            message, base, y, start, first, numel, payload, bucket, stride, count, weight, scale, after,
            BITS, BUCKET, GROUPS, OFFSET2, MODE, False,
        )  # fmt: skip


@triton.jit
def decode_tile(
    message, base, y, start, first, numel, payload, bucket, stride, count, weight, scale, after,
    BITS: tl.constexpr, BUCKET: tl.constexpr, GROUPS: tl.constexpr, OFFSET2: tl.constexpr, MODE: tl.constexpr,
    EVEN: tl.constexpr,
):  # fmt: skip
    left = numel - first
    if MODE == 0:
        values = decode_parts(message, payload, first, numel, bucket, BITS, BUCKET, GROUPS, OFFSET2, EVEN)
        values = scale_parts(values, scale)
    else:
        if MODE == 1:
            values = load_parts(base + start + first, base, 1.0, left, BITS, GROUPS, EVEN, False)
            values = scale_parts(values, weight)
        else:
            values = zero_parts(BITS, GROUPS)
        values = add_parts(
            values, message, payload, first, numel, bucket, stride, count, scale, BITS, BUCKET, GROUPS, OFFSET2, EVEN
        )
        values = scale_parts(values, after)
    put_parts(y + start + first, values, left, EVEN)


@triton.jit
def decode_parts(
    message, payload, first, numel, bucket,
    BITS: tl.constexpr, BUCKET: tl.constexpr, GROUPS: tl.constexpr, OFFSET2: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Return the values of a tile as :func:`load_parts` does."""
    buckets = (numel + bucket - 1) // bucket
    scales = (message + payload).to(tl.pointer_type(tl.float32))
    packed = codes_of(message, payload, numel, bucket, first, BITS, 2 if OFFSET2 < 0 else 1)
    codes = unpack_parts(packed, numel - first, BITS, GROUPS, EVEN)
    PARTS: tl.constexpr = len(codes)
    WIDTH: tl.constexpr = 128 // PARTS
    group = tl.arange(0, GROUPS)[:, None] * 128
    values = ()
    for p in tl.static_range(PARTS):
        within = group + p * WIDTH + tl.arange(0, WIDTH)[None, :]
        k = (first + group) // BUCKET if BUCKET else bucket_of(first, within, bucket)
        if OFFSET2 < 0:
            low = tl.load(scales + k, mask=k < buckets, other=0.0)
            unit = tl.load(scales + buckets + k, mask=k < buckets, other=0.0)
        else:
            unit = tl.load(scales + k, mask=k < buckets, other=0.0)
            low = -(unit * (0.5 * OFFSET2))
        values += (dequantize(codes[p], low, unit),)
    return values


@triton.jit
def add_parts(
    total, message, payload, first, numel, bucket, stride, count, scale,
    BITS: tl.constexpr, BUCKET: tl.constexpr, GROUPS: tl.constexpr, OFFSET2: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Add the values of ``count`` messages times ``scale``, in their order, to those of a tile."""
    for _ in tl.range(count):
        values = decode_parts(message, payload, first, numel, bucket, BITS, BUCKET, GROUPS, OFFSET2, EVEN)
        total = add_scaled(total, values, scale)
        message += stride
    return total


@triton.jit
def add_scaled(total, values, by):
    added = ()
    for p in tl.static_range(len(values)):
        added += (total[p] + values[p] * by,)
    return added


@triton.jit
def scale_parts(values, by):
    scaled = ()
    for p in tl.static_range(len(values)):
        scaled += (values[p] * by,)
    return scaled


@triton.jit
def zero_parts(BITS: tl.constexpr, GROUPS: tl.constexpr):
    PARTS: tl.constexpr = 2 if BITS % 4 == 0 else 4 if BITS % 2 == 0 else 8
    zeros = ()
    for _ in tl.static_range(PARTS):
        zeros += (tl.zeros((GROUPS, 128 // PARTS), tl.float32),)
    return zeros
