"""Decoding buckets in Triton."""

# Triton is not installed everywhere, and its language has types of its own.
# pyright: reportMissingImports=false, reportIndexIssue=false, reportArgumentType=false, reportAssignmentType=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportAttributeAccessIssue=false
from __future__ import annotations

import triton
import triton.language as tl

from thinwire.kernels.gpu_tiles import bucket_of, codes_of, dequantize, row_of, unpack_parts, write

STORE, ADD, MEAN = 0, 1, 2
"""Modes of decoding, which write v · scale; base · weight + v · scale; (base · weight + v · scale) · after."""


@triton.jit(do_not_specialize=["bucket"])
def decode_tiles(
    message, base, y, pieces, rows, bucket, scale, weight, after,
    BITS: tl.constexpr, BUCKET: tl.constexpr, GROUPS: tl.constexpr, OFFSET2: tl.constexpr, MODE: tl.constexpr,
):  # fmt: skip
    """Decode one tile. ``BUCKET``: the bucket, if it is a multiple of the group and known when compiling, or 0."""
    piece, start, numel, _index0, payload, _site = row_of(pieces, rows)
    first = piece * (GROUPS * 128)
    if (numel - first >= GROUPS * 128) & (start % 8 == 0):
        # Computed, not hinted: Triton 3.7 forgets a hint on a value that was loaded elsewhere.
        decode_tile(
            message, base, y, start // 8 * 8, first, numel, payload, bucket, scale, weight, after,
            BITS, BUCKET, GROUPS, OFFSET2, MODE, True,
        )  # fmt: skip
    else:
        decode_tile(
            message, base, y, start, first, numel, payload, bucket, scale, weight, after,
            BITS, BUCKET, GROUPS, OFFSET2, MODE, False,
        )  # fmt: skip


@triton.jit
def decode_tile(
    message, base, y, start, first, numel, payload, bucket, scale, weight, after,
    BITS: tl.constexpr, BUCKET: tl.constexpr, GROUPS: tl.constexpr, OFFSET2: tl.constexpr, MODE: tl.constexpr,
    EVEN: tl.constexpr,
):  # fmt: skip
    buckets = (numel + bucket - 1) // bucket
    scales = (message + payload).to(tl.pointer_type(tl.float32))
    packed = codes_of(message, payload, numel, bucket, first, BITS, 2 if OFFSET2 < 0 else 1)
    parts = unpack_parts(packed, numel - first, BITS, GROUPS, EVEN)
    PARTS: tl.constexpr = len(parts)
    WIDTH: tl.constexpr = 128 // PARTS
    group = tl.arange(0, GROUPS)[:, None] * 128
    for p in tl.static_range(PARTS):
        within = group + p * WIDTH + tl.arange(0, WIDTH)[None, :]
        k = (first + group) // BUCKET if BUCKET else bucket_of(first, within, bucket)
        if OFFSET2 < 0:
            low = tl.load(scales + k, mask=k < buckets, other=0.0)
            unit = tl.load(scales + buckets + k, mask=k < buckets, other=0.0)
        else:
            unit = tl.load(scales + k, mask=k < buckets, other=0.0)
            low = -(unit * (0.5 * OFFSET2))
        value = dequantize(parts[p], low, unit)
        at = start + first + within
        if EVEN:
            write(base, y, at, value, scale, None, MODE, weight, after)
        else:
            write(base, y, at, value, scale, first + within < numel, MODE, weight, after)
