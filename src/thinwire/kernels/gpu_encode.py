"""Encoding buckets in Triton: in one launch where a program holds whole buckets, and in two or three otherwise."""

# Triton is not installed everywhere, and its language has types of its own.
# pyright: reportMissingImports=false, reportIndexIssue=false, reportArgumentType=false, reportAssignmentType=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportAttributeAccessIssue=false
from __future__ import annotations

import triton
import triton.language as tl

from thinwire.kernels.gpu_decode import add_parts, add_scaled, scale_parts
from thinwire.kernels.gpu_scales import (
    finish_scales,
    from_key,
    ordered_key,
    put_scales,
    sent_low,
    summed_scales,
    zero_padding,
)
from thinwire.kernels.gpu_tiles import (
    bucket_of,
    codes_of,
    dequantize,
    load_parts,
    load_value,
    pack_parts,
    put_parts,
    put_residual,
    quantize_parts,
    row_draws,
    row_of,
)


@triton.jit(do_not_specialize=["key_low", "key_high"])
def encode_tiles(
    x, now, next, message, pieces, rows, key_low, key_high, loss_scale, clip, received, stride, count, scale, after, y,
    BITS: tl.constexpr, BUCKET: tl.constexpr, GROUPS: tl.constexpr, SCHEME: tl.constexpr, ROUNDING: tl.constexpr,
    STEPS: tl.constexpr, OFFSET2: tl.constexpr, SUMS: tl.constexpr, RESIDUAL: tl.constexpr, REDUCE: tl.constexpr,
):  # fmt: skip
    """Encode scales and codes of one tile of whole buckets. ``OFFSET2``: twice the format's offset.

    With ``REDUCE``, encode ``(x · scale + Σ v · scale) · after`` of ``count`` received messages, ``stride`` bytes
    apart, and write its decoded values to ``y``, which may be ``x``.
    """
    piece, start, numel, index0, payload, site = row_of(pieces, rows)
    first = piece * (GROUPS * 128)
    if (numel - first >= GROUPS * 128) & (start % 8 == 0):
        # Computed, not hinted: Triton 3.7 forgets a hint on a value that was loaded elsewhere.
        encode_tile(
            x, now, next, message, start // 8 * 8, first, numel, index0, payload, site, key_low, key_high,
            loss_scale, clip, received, stride, count, scale, after, y,
            BITS, BUCKET, GROUPS, SCHEME, ROUNDING, STEPS, OFFSET2, SUMS, RESIDUAL, REDUCE, True,
        )  # fmt: skip
    else:
        encode_tile(
            x, now, next, message, start, first, numel, index0, payload, site, key_low, key_high,
            loss_scale, clip, received, stride, count, scale, after, y,
            BITS, BUCKET, GROUPS, SCHEME, ROUNDING, STEPS, OFFSET2, SUMS, RESIDUAL, REDUCE, False,
        )  # fmt: skip


@triton.jit
def encode_tile(
    x, now, next, message, start, first, numel, index0, payload, site, key_low, key_high, loss_scale, clip,
    received, stride, count, scale, after, y,
    BITS: tl.constexpr, BUCKET: tl.constexpr, GROUPS: tl.constexpr, SCHEME: tl.constexpr, ROUNDING: tl.constexpr,
    STEPS: tl.constexpr, OFFSET2: tl.constexpr, SUMS: tl.constexpr, RESIDUAL: tl.constexpr, REDUCE: tl.constexpr,
    EVEN: tl.constexpr,
):  # fmt: skip
    PER_BUCKET: tl.constexpr = BUCKET // 128
    BUCKETS: tl.constexpr = GROUPS // PER_BUCKET
    SCALES: tl.constexpr = 2 if OFFSET2 < 0 else 1
    left = numel - first
    if REDUCE:
        total = scale_parts(load_parts(x + start + first, x, 1.0, left, BITS, GROUPS, EVEN, False), scale)
        total = add_parts(
            total, received, payload, first, numel, BUCKET, stride, count, scale, BITS, BUCKET, GROUPS, OFFSET2, EVEN
        )
        parts = scale_parts(total, after)
        if RESIDUAL:
            kept = load_parts(now + start + first, now, 1.0, left, BITS, GROUPS, EVEN, False)
            parts = add_scaled(parts, kept, loss_scale)
    else:
        parts = load_parts(x + start + first, now + start + first, loss_scale, left, BITS, GROUPS, EVEN, RESIDUAL)
    if SUMS:  # the lanes of a sum lie otherwise than the parts: the tile is read once more, from the cache
        low, unit, inverse = summed_scales(
            x + start, now + start, loss_scale, clip, first // BUCKET, BUCKET, numel,
            SCHEME, STEPS, OFFSET2, BUCKETS, RESIDUAL,
        )  # fmt: skip
    else:
        low_key, high_key = extrema(parts, left, GROUPS, SCHEME, EVEN)
        low_key = tl.min(tl.reshape(low_key, (BUCKETS, PER_BUCKET)), axis=1)
        high_key = tl.max(tl.reshape(high_key, (BUCKETS, PER_BUCKET)), axis=1)
        low, unit, inverse = finish_scales(from_key(low_key), from_key(high_key), STEPS, OFFSET2)
    k0, k1 = row_draws(key_low, key_high, site)
    sent = sent_low(low, unit, k0, ROUNDING, OFFSET2)
    put_scales(message + payload, sent, unit, first // BUCKET, (numel + BUCKET - 1) // BUCKET, BUCKETS, OFFSET2)
    low, sent = of_groups(low, PER_BUCKET, GROUPS), of_groups(sent, PER_BUCKET, GROUPS)
    unit, inverse = of_groups(unit, PER_BUCKET, GROUPS), of_groups(inverse, PER_BUCKET, GROUPS)
    lows, sents, units, inverses = (), (), (), ()
    for _ in tl.static_range(len(parts)):
        lows += (low,)
        sents += (sent,)
        units += (unit,)
        inverses += (inverse,)
    counter = (index0 + first) // 2
    codes = quantize_parts(parts, lows, units, inverses, counter, left, k0, k1, SCHEME, ROUNDING, OFFSET2, EVEN)
    pack_parts(codes_of(message, payload, numel, BUCKET, first, BITS, SCALES), codes, left, BITS, GROUPS, EVEN)
    if RESIDUAL:
        put_residual(next + start + first, loss_scale, parts, codes, sents, units, left, EVEN)
    if REDUCE:
        tl.debug_barrier()  # as before residuals
        decoded = ()
        for p in tl.static_range(len(parts)):
            decoded += (dequantize(codes[p], sents[p], units[p]),)
        put_parts(y + start + first, decoded, left, EVEN)
    if first + GROUPS * 128 >= numel:
        zero_padding(message + payload, numel, BUCKET, BITS, SCALES)


@triton.jit
def of_groups(value, PER_BUCKET: tl.constexpr, GROUPS: tl.constexpr):
    """Repeat the value of each bucket for each of its groups: (groups, 1)."""
    spread = tl.broadcast_to(value[:, None], (GROUPS // PER_BUCKET, PER_BUCKET))
    return tl.reshape(spread, (GROUPS,))[:, None]


@triton.jit
def extrema(parts, left, GROUPS: tl.constexpr, SCHEME: tl.constexpr, EVEN: tl.constexpr):
    """Return ordered keys of the minimum and the maximum of each group; with maxabs of |x|, the maximum alone."""
    PARTS: tl.constexpr = len(parts)
    WIDTH: tl.constexpr = 128 // PARTS
    low = tl.full((GROUPS, WIDTH), 0x7FFFFFFF if SCHEME == 0 else 0, tl.int32)
    high = tl.full((GROUPS, WIDTH), -0x80000000, tl.int32)
    at = tl.arange(0, GROUPS)[:, None] * 128 + tl.arange(0, WIDTH)[None, :]
    for p in tl.static_range(PARTS):
        key = ordered_key(parts[p] if SCHEME == 0 else tl.abs(parts[p]))
        if not EVEN:
            inside = at + p * WIDTH < left
            high = tl.where(inside, tl.maximum(high, key), high)
            if SCHEME == 0:
                low = tl.where(inside, tl.minimum(low, key), low)
        else:
            high = tl.maximum(high, key)
            if SCHEME == 0:
                low = tl.minimum(low, key)
    return tl.min(low, axis=1), tl.max(high, axis=1)


@triton.jit(do_not_specialize=["bucket", "slices"])
def bucket_extrema(
    x, now, pieces, rows, firsts, low_keys, high_keys, bucket, slices, loss_scale,
    ROWS: tl.constexpr, COLS: tl.constexpr, SCHEME: tl.constexpr, RESIDUAL: tl.constexpr,
):  # fmt: skip
    """Merge the extrema of one slice of ``ROWS`` buckets into their keys; ``firsts``: the buckets before each row."""
    pid = tl.program_id(0).to(tl.int64)
    piece, start, numel, _index0, _payload, _site = row_of(pieces, rows)
    first = tl.load(firsts + tl.load(pieces + 2 * pid))
    k = piece // slices * ROWS + tl.arange(0, ROWS)
    within = piece % slices * COLS + tl.arange(0, COLS)
    at = k[:, None] * bucket + within[None, :]
    inside = (within[None, :] < bucket) & (at < numel)
    value = load_value(x + start, now + start, loss_scale, at, inside, RESIDUAL)
    key = ordered_key(value if SCHEME == 0 else tl.abs(value))
    exists = k * bucket < numel
    tl.atomic_max(high_keys + first + k, tl.max(tl.where(inside, key, -0x80000000), axis=1), mask=exists)
    if SCHEME == 0:
        tl.atomic_min(low_keys + first + k, tl.min(tl.where(inside, key, 0x7FFFFFFF), axis=1), mask=exists)


@triton.jit(do_not_specialize=["bucket", "key_low", "key_high"])
def bucket_scales(
    x, now, message, pieces, rows, firsts, low_keys, high_keys, inverses, key_low, key_high, bucket, loss_scale, clip,
    BITS: tl.constexpr, SCHEME: tl.constexpr, ROUNDING: tl.constexpr, STEPS: tl.constexpr, OFFSET2: tl.constexpr,
    SUMS: tl.constexpr, RESIDUAL: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """Write the scales of ``COUNT`` buckets, from their extrema or from sums taken here, into the message, and the
    factor into ``inverses``."""
    pid = tl.program_id(0).to(tl.int64)
    piece, start, numel, _index0, payload, site = row_of(pieces, rows)
    first = tl.load(firsts + tl.load(pieces + 2 * pid))
    buckets = (numel + bucket - 1) // bucket
    k = piece * COUNT + tl.arange(0, COUNT)
    if SUMS:
        low, unit, inverse = summed_scales(
            x + start, now + start, loss_scale, clip, piece * COUNT, bucket, numel,
            SCHEME, STEPS, OFFSET2, COUNT, RESIDUAL,
        )  # fmt: skip
    else:
        low_key = tl.load(low_keys + first + k, mask=k < buckets, other=0)
        high_key = tl.load(high_keys + first + k, mask=k < buckets, other=0)
        low, unit, inverse = finish_scales(from_key(low_key), from_key(high_key), STEPS, OFFSET2)
    k0, _k1 = row_draws(key_low, key_high, site)
    sent = sent_low(low, unit, k0, ROUNDING, OFFSET2)
    put_scales(message + payload, sent, unit, piece * COUNT, buckets, COUNT, OFFSET2)
    tl.store(inverses + first + k, inverse, mask=k < buckets)
    if piece == 0:
        zero_padding(message + payload, numel, bucket, BITS, 2 if OFFSET2 < 0 else 1)


@triton.jit(do_not_specialize=["key_low", "key_high", "bucket"])
def encode_codes(
    x, now, next, message, pieces, rows, firsts, low_keys, inverses, key_low, key_high, bucket, loss_scale,
    BITS: tl.constexpr, GROUPS: tl.constexpr, SCHEME: tl.constexpr, ROUNDING: tl.constexpr, OFFSET2: tl.constexpr,
    RESIDUAL: tl.constexpr,
):  # fmt: skip
    """Encode the codes of one tile, with the scales of each element looked up."""
    pid = tl.program_id(0).to(tl.int64)
    piece, start, numel, index0, payload, site = row_of(pieces, rows)
    first = piece * (GROUPS * 128)
    left = numel - first
    parts = load_parts(x + start + first, now + start + first, loss_scale, left, BITS, GROUPS, False, RESIDUAL)
    before = tl.load(firsts + tl.load(pieces + 2 * pid))
    sent_lows = (message + payload).to(tl.pointer_type(tl.float32))
    sent_units = sent_lows + ((numel + bucket - 1) // bucket if OFFSET2 < 0 else 0)
    PARTS: tl.constexpr = len(parts)
    WIDTH: tl.constexpr = 128 // PARTS
    lows, sents, units, inverses_ = (), (), (), ()
    k0, k1 = row_draws(key_low, key_high, site)
    for p in tl.static_range(PARTS):
        within = tl.arange(0, GROUPS)[:, None] * 128 + p * WIDTH + tl.arange(0, WIDTH)[None, :]
        k = bucket_of(first, within, bucket)
        inside = within < left
        unit = tl.load(sent_units + k, mask=inside, other=0.0)
        units += (unit,)
        if OFFSET2 >= 0:
            lows += (unit,)  # not looked at
            sents += (sent_low(unit, unit, k0, ROUNDING, OFFSET2),)
        else:
            sents += (tl.load(sent_lows + k, mask=inside, other=0.0),)
            if SCHEME == 0:  # the minimum itself: what is sent may be shifted
                lows += (from_key(tl.load(low_keys + before + k, mask=inside, other=0)) + 0.0,)
            else:
                lows += (unit,)
        if SCHEME <= 2:
            inverses_ += (tl.load(inverses + before + k, mask=inside, other=0.0),)
        else:
            inverses_ += (unit,)
    counter = (index0 + first) // 2
    codes = quantize_parts(parts, lows, units, inverses_, counter, left, k0, k1, SCHEME, ROUNDING, OFFSET2, False)
    packed = codes_of(message, payload, numel, bucket, first, BITS, 2 if OFFSET2 < 0 else 1)
    pack_parts(packed, codes, left, BITS, GROUPS, False)
    if RESIDUAL:
        put_residual(next + start + first, loss_scale, parts, codes, sents, units, left, False)
