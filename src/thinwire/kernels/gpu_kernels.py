"""Buckets in Triton. A tile has a group of 128 elements in a row, cut into 2, 4 or 8 parts of equal width.

What is computed is, bit for bit, what :mod:`thinwire.kernels.reference` says.
"""

# Triton is not installed everywhere, and its language has types of its own.
# pyright: reportMissingImports=false, reportIndexIssue=false, reportArgumentType=false, reportAssignmentType=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportAttributeAccessIssue=false
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def find_piece(pieces, rows):
    """Return the piece of the row that this program works on: (piece, start, numel, index0, payload, site)."""
    pid = tl.program_id(0).to(tl.int64)
    row = rows + 5 * tl.load(pieces + 2 * pid)
    payload = tl.multiple_of(tl.load(row + 3), 64)
    return tl.load(pieces + 2 * pid + 1), tl.load(row), tl.load(row + 1), tl.load(row + 2), payload, tl.load(row + 4)


@triton.jit
def codes_address(message, payload, numel, bucket, first, BITS: tl.constexpr, SCALES: tl.constexpr):
    """Return the address of the codes from element ``first`` (a multiple of 128), behind ``SCALES`` scales a bucket."""
    at = ((numel + bucket - 1) // bucket * (4 * SCALES) + 63) // 64 * 64
    return message + payload + tl.multiple_of(at, 64) + tl.multiple_of(first // 128 * (16 * BITS), 16)


@triton.jit
def bucket_index(first, within, bucket):
    """Return the buckets of the elements ``first + within``; the division per element stays in 32 bits where it can."""
    before = first // bucket
    return before + ((first - before * bucket).to(bucket.dtype) + within) // bucket


@triton.jit
def row_draws(key_low, key_high, site):
    """Return the two key words of a row (thinwire.kernels.rng.row_key). The key is two words, less 2^31 each."""
    key = (key_low.to(tl.int64) + 2147483648) | ((key_high.to(tl.int64) + 2147483648) << 32)
    z = key.to(tl.uint64, bitcast=True) + site.to(tl.uint64, bitcast=True) * tl.full((), 0x9E3779B97F4A7C15, tl.uint64)
    z = (z ^ (z >> 30)) * tl.full((), 0xBF58476D1CE4E5B9, tl.uint64)
    z = (z ^ (z >> 27)) * tl.full((), 0x94D049BB133111EB, tl.uint64)
    z = z ^ (z >> 31)
    return z.to(tl.uint32), (z >> 32).to(tl.uint32)


@triton.jit
def mix3(counter, k0, k1):
    """thinwire.kernels.rng.mix3 on uint32."""
    x = counter ^ k0
    x = (x ^ (x >> 17)) * tl.full((), 0xED5AD4BB, tl.uint32) + k1
    x = (x ^ (x >> 11)) * tl.full((), 0xAC4C1B51, tl.uint32)
    x = (x ^ (x >> 15)) * tl.full((), 0x31848BAB, tl.uint32)
    return x ^ (x >> 14)


@triton.jit
def load_value(x, now, loss_scale, at, mask, RESIDUAL: tl.constexpr):
    """Return the values to encode of the elements ``at``, in fp32: x, or x + loss_scale · now."""
    value = tl.load(x + at, mask=mask, other=None if mask is None else 0.0).to(tl.float32)
    if RESIDUAL:
        value = value + tl.load(now + at, mask=mask, other=None if mask is None else 0.0) * loss_scale
    return value


@triton.jit
def load_parts(
    x, now, loss_scale, left, BITS: tl.constexpr, GROUPS: tl.constexpr, EVEN: tl.constexpr, RESIDUAL: tl.constexpr
):
    """Return the tile's values as fp32: a tuple of (GROUPS, width) tensors; 0 from element ``left`` on."""
    PARTS: tl.constexpr = 2 if BITS % 4 == 0 else 4 if BITS % 2 == 0 else 8
    WIDTH: tl.constexpr = 128 // PARTS
    at = tl.arange(0, GROUPS)[:, None] * 128 + tl.arange(0, WIDTH)[None, :]
    parts = ()
    for p in tl.static_range(PARTS):
        if EVEN:
            parts += (load_value(x, now, loss_scale, at + p * WIDTH, None, RESIDUAL),)
        else:
            parts += (load_value(x, now, loss_scale, at + p * WIDTH, at + p * WIDTH < left, RESIDUAL),)
    return parts


@triton.jit
def draw_bits(counter, p: tl.constexpr, k0, k1, GROUPS: tl.constexpr, WIDTH: tl.constexpr):
    """Return 16 random bits (int32) for the elements of part ``p``, and for those 64 places behind."""
    group = tl.arange(0, GROUPS)[:, None]
    column = tl.arange(0, WIDTH)[None, :]
    word = mix3(counter.to(tl.uint32) + (group * 64 + p * WIDTH + column).to(tl.uint32), k0, k1)
    return (word & 0xFFFF).to(tl.int32), (word >> 16).to(tl.int32)


@triton.jit
def quantize_parts(
    parts, lows, units, inverses, counter, left, k0, k1,
    SCHEME: tl.constexpr, ROUNDING: tl.constexpr, OFFSET2: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Return the codes (int32) of each part, whose scales are in ``lows``, ``units`` and ``inverses``."""
    PARTS: tl.constexpr = len(parts)
    HALF: tl.constexpr = PARTS // 2
    WIDTH: tl.constexpr = 128 // PARTS
    GROUPS: tl.constexpr = parts[0].shape[0]
    below, above = (), ()
    for p in tl.static_range(HALF):
        if ROUNDING == 0:
            first, second = draw_bits(counter, p, k0, k1, GROUPS, WIDTH)
        elif ROUNDING == 1:
            first = tl.full((GROUPS, WIDTH), 0x8000, tl.int32)
            second = first
        else:
            first = tl.zeros((GROUPS, WIDTH), tl.int32) + (k0 & 0xFFFF).to(tl.int32)
            second = first
        below += (quantize(parts[p], lows[p], units[p], inverses[p], first, left, p, SCHEME, OFFSET2, EVEN),)
        above += (
            quantize(
                parts[p + HALF], lows[p + HALF], units[p + HALF], inverses[p + HALF], second, left, p + HALF,
                SCHEME, OFFSET2, EVEN,
            ),
        )  # fmt: skip
    return below + above


@triton.jit
def quantize(
    x, low, unit, inverse, draws, left, p: tl.constexpr, SCHEME: tl.constexpr, OFFSET2: tl.constexpr, EVEN: tl.constexpr
):  # fmt: skip
    """thinwire.kernels.reference.quantize. Minmax needs no clip, and gets code 0 in buckets that decode to NaN."""
    if SCHEME == 0:
        distance = tl.where(inverse == 0.0, 0.0, x - low)
        code = ((distance * inverse).to(tl.int32) + draws) >> 16
    elif SCHEME <= 2:
        MIDDLE: tl.constexpr = OFFSET2 * 32768
        position = tl.where(inverse == 0.0, 0.0, x) * inverse
        position = tl.minimum(tl.maximum(position, -1.0 * MIDDLE), 1.0 * MIDDLE)
        code = tl.where(unit == unit, (position.to(tl.int32) + MIDDLE + draws) >> 16, 0)
    else:
        code = ((x >= 0.0) & (unit == unit)).to(tl.int32)
    if not EVEN:
        GROUPS: tl.constexpr = code.shape[0]
        WIDTH: tl.constexpr = code.shape[1]
        at = tl.arange(0, GROUPS)[:, None] * 128 + p * WIDTH + tl.arange(0, WIDTH)[None, :]
        code = tl.where(at < left, code, 0)
    return code


@triton.jit
def put_parts(to, parts, left, EVEN: tl.constexpr):
    """Write the values of a tile, in the type of ``to``."""
    for p in tl.static_range(len(parts)):
        put_part(to, parts[p], p, left, EVEN)


@triton.jit
def put_part(to, values, p: tl.constexpr, left, EVEN: tl.constexpr):
    GROUPS: tl.constexpr = values.shape[0]
    WIDTH: tl.constexpr = values.shape[1]
    at = tl.arange(0, GROUPS)[:, None] * 128 + tl.arange(0, WIDTH)[None, :] + p * WIDTH
    if EVEN:
        tl.store(to + at, values.to(to.dtype.element_ty))
    else:
        tl.store(to + at, values.to(to.dtype.element_ty), mask=at < left)


@triton.jit
def put_residual(next, loss_scale, parts, codes, lows, units, left, EVEN: tl.constexpr):
    """Write the error of each value over the loss scale. ``lows`` are those that were sent."""
    tl.debug_barrier()  # ``next`` may be what other threads, whose work is the same, still read
    for p in tl.static_range(len(parts)):
        lost = parts[p] - dequantize(codes[p], lows[p], units[p])
        # Written at once: kept until all are known, they would take registers that a tile does not have.
        put_part(next, tl.div_rn(lost, tl.zeros(lost.shape, tl.float32) + loss_scale), p, left, EVEN)


@triton.jit
def pack_parts(to, codes, left, BITS: tl.constexpr, GROUPS: tl.constexpr, EVEN: tl.constexpr):
    """Write the planes of the groups that begin before element ``left``: thinwire.kernels.reference.pack."""
    if BITS & 8:
        pack_plane(to, codes, left, BITS, GROUPS, 8, EVEN)
    if BITS & 4:
        pack_plane(to, codes, left, BITS, GROUPS, 4, EVEN)
    if BITS & 2:
        pack_plane(to, codes, left, BITS, GROUPS, 2, EVEN)
    if BITS & 1:
        pack_plane(to, codes, left, BITS, GROUPS, 1, EVEN)


@triton.jit
def pack_plane(
    to, codes, left, BITS: tl.constexpr, GROUPS: tl.constexpr, PLANE: tl.constexpr, EVEN: tl.constexpr
):  # fmt: skip
    """Write the plane of ``PLANE`` bits, behind the wider ones, which contain the lower bits."""
    LOW: tl.constexpr = BITS // (2 * PLANE) * (2 * PLANE)
    PARTS: tl.constexpr = len(codes)
    WIDTH: tl.constexpr = 128 // PARTS
    PIECES: tl.constexpr = PARTS * PLANE // 8
    group = tl.arange(0, GROUPS)[:, None]
    at = to + group * (16 * BITS) + 16 * LOW + tl.arange(0, WIDTH)[None, :]
    inside = tl.broadcast_to(group * 128 < left, (GROUPS, WIDTH))
    for q in tl.static_range(PIECES):
        byte = tl.zeros((GROUPS, WIDTH), tl.int32)
        for k in tl.static_range(8 // PLANE):
            byte |= ((codes[k * PIECES + q] >> LOW) & ((1 << PLANE) - 1)) << (k * PLANE)
        if EVEN:
            tl.store(at + q * WIDTH, byte.to(tl.uint8))
        else:
            tl.store(at + q * WIDTH, byte.to(tl.uint8), mask=inside)


@triton.jit
def unpack_parts(packed, left, BITS: tl.constexpr, GROUPS: tl.constexpr, EVEN: tl.constexpr):
    """Invert :func:`pack_parts`: return a tuple of (GROUPS, width) int32 tensors."""
    PARTS: tl.constexpr = 2 if BITS % 4 == 0 else 4 if BITS % 2 == 0 else 8
    codes = ()
    for p in tl.static_range(PARTS):
        code = tl.zeros((GROUPS, 128 // PARTS), tl.int32)
        if BITS & 8:
            code |= unpack_plane(packed, left, BITS, GROUPS, 8, PARTS, p, EVEN)
        if BITS & 4:
            code |= unpack_plane(packed, left, BITS, GROUPS, 4, PARTS, p, EVEN)
        if BITS & 2:
            code |= unpack_plane(packed, left, BITS, GROUPS, 2, PARTS, p, EVEN)
        if BITS & 1:
            code |= unpack_plane(packed, left, BITS, GROUPS, 1, PARTS, p, EVEN)
        codes += (code,)
    return codes


@triton.jit
def unpack_plane(
    packed, left, BITS: tl.constexpr, GROUPS: tl.constexpr, PLANE: tl.constexpr, PARTS: tl.constexpr,
    p: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Return the fields of part ``p`` in one plane, at their place in the codes."""
    LOW: tl.constexpr = BITS // (2 * PLANE) * (2 * PLANE)
    WIDTH: tl.constexpr = 128 // PARTS
    PIECES: tl.constexpr = PARTS * PLANE // 8
    group = tl.arange(0, GROUPS)[:, None]
    at = packed + group * (16 * BITS) + 16 * LOW + (p % PIECES) * WIDTH + tl.arange(0, WIDTH)[None, :]
    if EVEN:
        byte = tl.load(at).to(tl.int32)
    else:
        byte = tl.load(at, mask=tl.broadcast_to(group * 128 < left, (GROUPS, WIDTH)), other=0).to(tl.int32)
    return ((byte >> (p // PIECES * PLANE)) & ((1 << PLANE) - 1)) << LOW


@triton.jit
def dequantize(code, low, unit):
    """Return lo + code · unit, rounded twice."""
    return low + code.to(tl.float32) * unit


@triton.jit
def write(base, y, at, value, scale, mask, MODE: tl.constexpr):
    value = value * scale
    if MODE > 0:
        value = tl.load(base + at, mask=mask).to(tl.float32) + value
    tl.store(y + at, value.to(y.dtype.element_ty), mask=mask)


# ---- Scales of buckets ---------------------------------------------------------------------------------------------


@triton.jit
def ordered_key(x):
    """Return an int32 that orders as the floats do, with NaNs beyond the infinities."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def from_key(key):
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def is_finite(x):
    return tl.abs(x) <= 3.4028234663852886e38


@triton.jit
def or_nan(value, bad):
    nan = tl.full(value.shape, 0x7FC00000, tl.int32).to(tl.float32, bitcast=True)
    return tl.where(bad, nan, value)


@triton.jit
def nearest_to_zero(low, high):
    return tl.where(low > 0.0, low, tl.where(high < 0.0, high, 0.0))


@triton.jit
def finish_scales(low, high, STEPS: tl.constexpr, OFFSET2: tl.constexpr):
    """Return lo, unit and factor of ``STEPS`` steps: from ``low`` to ``high``, or with one scale from 0 to ``high``."""
    OVER: tl.constexpr = STEPS * 65536.0 * (1.0 - 2.0**-22)
    if OFFSET2 < 0:
        low, high = low + 0.0, high + 0.0
        span = high - low
    else:
        span = high
    bad = is_finite(span) == 0
    flat = bad | (span < 7.888609052210118e-31)
    if OFFSET2 < 0:
        low = tl.where(flat, nearest_to_zero(low, high), low)
    divisor = tl.where(flat, 1.0, span)
    unit = tl.where(flat, 0.0, tl.div_rn(divisor, tl.full(divisor.shape, STEPS, tl.float32)))
    inverse = tl.where(flat, 0.0, tl.div_rn(tl.full(divisor.shape, OVER, tl.float32), divisor))
    if OFFSET2 >= 0:
        bad = bad | (is_finite(unit * (1.0 * OFFSET2)) == 0)  # what decoding would overflow
        inverse = tl.where(bad, 0.0, inverse)
    return or_nan(low, bad), or_nan(unit, bad), inverse


@triton.jit
def sent_low(low, unit, k0, ROUNDING: tl.constexpr, OFFSET2: tl.constexpr):
    """Return the decoder's ``lo``: sent (moved as the lattice is, where that is shifted), or made from ``unit``."""
    if OFFSET2 >= 0:
        low = -(unit * (0.5 * OFFSET2))
    elif ROUNDING == 2:
        low = low + unit * (0.5 - (k0 & 0xFFFF).to(tl.float32) * (1.0 / 65536.0))
    return low


@triton.jit
def summed_scales(
    x, now, loss_scale, clip, first, bucket, numel,
    SCHEME: tl.constexpr, STEPS: tl.constexpr, OFFSET2: tl.constexpr, COUNT: tl.constexpr, RESIDUAL: tl.constexpr,
):  # fmt: skip
    """Return lo, unit and factor of ``COUNT`` buckets from ``first`` on, in the schemes that need sums: norm, sides,
    sign, and maxabs with a clip.

    ``x`` and ``now`` point to the row. The order of the sums is that of thinwire.kernels.reference.lane_sums.
    """
    k = first + tl.arange(0, COUNT)
    lane = tl.arange(0, 16)
    size = tl.minimum(bucket, numel - k * bucket)
    sums = tl.zeros((COUNT, 16), tl.float64)
    others, counts = sums, sums
    top = tl.zeros((COUNT, 16), tl.int32)
    for step in tl.range(0, (tl.minimum(bucket, numel - first * bucket) + 15) // 16, loop_unroll_factor=4):
        within = step * 16 + lane
        inside = within[None, :] < size[:, None]
        value = load_value(x, now, loss_scale, (k * bucket)[:, None] + within[None, :], inside, RESIDUAL)
        wide = value.to(tl.float64)
        if SCHEME <= 2:
            sums += wide * wide
            if SCHEME == 1:
                top = tl.maximum(top, tl.abs(value).to(tl.int32, bitcast=True))
        elif SCHEME == 3:
            upper = (value >= 0.0) & inside
            sums += tl.where(upper, 0.0, wide)
            others += tl.where(upper, wide, 0.0)
            counts += upper.to(tl.float64)
        else:
            sums += tl.abs(wide)
    size = tl.maximum(size, 1).to(tl.float64)
    total = lanes_sum(sums, COUNT)
    if SCHEME == 3:
        above, below = lanes_sum(counts, COUNT), size - lanes_sum(counts, COUNT)
        low = total / tl.where(below == 0.0, 1.0, below)
        high = lanes_sum(others, COUNT) / tl.where(above == 0.0, 1.0, above)
        low, high = tl.where(below == 0.0, high, low), tl.where(above == 0.0, low, high)
        low = low.to(tl.float32)
        unit = high.to(tl.float32) - low
        bad = is_finite(unit) == 0
        low, unit, inverse = or_nan(low, bad), or_nan(unit, bad), tl.zeros((COUNT,), tl.float32)
    elif SCHEME == 4:
        unit = (2.0 * (total / size)).to(tl.float32)
        low, inverse = tl.zeros((COUNT,), tl.float32), tl.zeros((COUNT,), tl.float32)
        unit = or_nan(unit, is_finite(unit) == 0)
    else:
        if SCHEME == 1:
            largest = tl.max(top, axis=1).to(tl.float32, bitcast=True)
            bound = tl.sqrt(total / size).to(tl.float32) * clip
            largest = tl.where(is_finite(largest), tl.minimum(largest, bound), largest)
        else:
            largest = tl.sqrt(total).to(tl.float32)
        low, unit, inverse = finish_scales(tl.zeros((COUNT,), tl.float32), largest, STEPS, OFFSET2)
    return low, unit, inverse


@triton.jit
def lanes_sum(lanes, COUNT: tl.constexpr):
    """Add lane j + 8 to lane j, then j + 4, j + 2, j + 1: sums of two, which have but one order."""
    lanes = tl.sum(tl.reshape(lanes, (COUNT, 2, 8)), axis=1)
    lanes = tl.sum(tl.reshape(lanes, (COUNT, 2, 4)), axis=1)
    lanes = tl.sum(tl.reshape(lanes, (COUNT, 2, 2)), axis=1)
    return tl.sum(lanes, axis=1)


@triton.jit
def put_scales(payload, low, unit, first, buckets, COUNT: tl.constexpr, OFFSET2: tl.constexpr):
    """Write the scales of the buckets from ``first`` on, as far as the row has them: lo and unit, or unit alone."""
    at = first + tl.arange(0, COUNT)
    scales = payload.to(tl.pointer_type(tl.float32))
    if OFFSET2 < 0:
        tl.store(scales + at, low, mask=at < buckets)
        scales += buckets
    tl.store(scales + at, unit, mask=at < buckets)


@triton.jit
def zero_padding(payload, numel, bucket, BITS: tl.constexpr, SCALES: tl.constexpr):
    """Set the bytes up to the next multiple of 64 behind the scales, and behind the codes, to zero."""
    byte = tl.arange(0, 64)
    zeros = tl.zeros((64,), tl.uint8)
    scales = (numel + bucket - 1) // bucket * (4 * SCALES)
    codes_at = (scales + 63) // 64 * 64
    codes = (numel + 127) // 128 * (16 * BITS)
    tl.store(payload + scales + byte, zeros, mask=scales + byte < codes_at)
    tl.store(payload + codes_at + codes + byte, zeros, mask=codes + byte < (codes + 63) // 64 * 64)


# ---- Encoding: one launch where a program holds whole buckets, two or three otherwise --------------------------------


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
    piece, start, numel, index0, payload, site = find_piece(pieces, rows)
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
    pack_parts(codes_address(message, payload, numel, BUCKET, first, BITS, SCALES), codes, left, BITS, GROUPS, EVEN)
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
    piece, start, numel, _index0, _payload, _site = find_piece(pieces, rows)
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
    piece, start, numel, _index0, payload, site = find_piece(pieces, rows)
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
    piece, start, numel, index0, payload, site = find_piece(pieces, rows)
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
        k = bucket_index(first, within, bucket)
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
    packed = codes_address(message, payload, numel, bucket, first, BITS, 2 if OFFSET2 < 0 else 1)
    pack_parts(packed, codes, left, BITS, GROUPS, False)
    if RESIDUAL:
        put_residual(next + start + first, loss_scale, parts, codes, sents, units, left, False)


# ---- Decoding --------------------------------------------------------------------------------------------------------

STORE, ADD, MEAN = 0, 1, 2
"""Modes of decoding, which write v · scale; (base · weight + Σ v · scale) · after; the same without a base."""


@triton.jit(do_not_specialize=["bucket"])
def decode_tiles(
    message, base, y, pieces, rows, bucket, stride, count, weight, scale, after,
    BITS: tl.constexpr, BUCKET: tl.constexpr, GROUPS: tl.constexpr, OFFSET2: tl.constexpr, MODE: tl.constexpr,
):  # fmt: skip
    """Decode one tile of ``count`` messages, ``stride`` bytes apart. ``BUCKET``: the bucket, if it is a multiple of the
    group and known when compiling, or 0."""
    piece, start, numel, _index0, payload, _site = find_piece(pieces, rows)
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
    packed = codes_address(message, payload, numel, bucket, first, BITS, 2 if OFFSET2 < 0 else 1)
    codes = unpack_parts(packed, numel - first, BITS, GROUPS, EVEN)
    PARTS: tl.constexpr = len(codes)
    WIDTH: tl.constexpr = 128 // PARTS
    group = tl.arange(0, GROUPS)[:, None] * 128
    values = ()
    for p in tl.static_range(PARTS):
        within = group + p * WIDTH + tl.arange(0, WIDTH)[None, :]
        k = (first + group) // BUCKET if BUCKET else bucket_index(first, within, bucket)
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
