"""Operations of the Triton kernels on a tile: a group of 128 elements a row, cut into 2, 4 or 8 parts of equal
width."""

# Triton is not installed everywhere, and its language has types of its own.
# pyright: reportMissingImports=false, reportIndexIssue=false, reportArgumentType=false, reportAssignmentType=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportAttributeAccessIssue=false
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def row_of(pieces, rows):
    """Return the piece of the row that this program works on: (piece, start, numel, index0, payload, site)."""
    pid = tl.program_id(0).to(tl.int64)
    row = rows + 5 * tl.load(pieces + 2 * pid)
    payload = tl.multiple_of(tl.load(row + 3), 64)
    return tl.load(pieces + 2 * pid + 1), tl.load(row), tl.load(row + 1), tl.load(row + 2), payload, tl.load(row + 4)


@triton.jit
def codes_of(message, payload, numel, bucket, first, BITS: tl.constexpr, SCALES: tl.constexpr):
    """Return the address of the codes from element ``first`` (a multiple of 128), behind ``SCALES`` scales a bucket."""
    at = ((numel + bucket - 1) // bucket * (4 * SCALES) + 63) // 64 * 64
    return message + payload + tl.multiple_of(at, 64) + tl.multiple_of(first // 128 * (16 * BITS), 16)


@triton.jit
def bucket_of(first, within, bucket):
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
def draws_of(counter, p: tl.constexpr, k0, k1, GROUPS: tl.constexpr, WIDTH: tl.constexpr):
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
            first, second = draws_of(counter, p, k0, k1, GROUPS, WIDTH)
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
    PARTS: tl.constexpr = len(parts)
    WIDTH: tl.constexpr = 128 // PARTS
    GROUPS: tl.constexpr = parts[0].shape[0]
    at = tl.arange(0, GROUPS)[:, None] * 128 + tl.arange(0, WIDTH)[None, :]
    for p in tl.static_range(PARTS):
        value = parts[p].to(to.dtype.element_ty)
        if EVEN:
            tl.store(to + at + p * WIDTH, value)
        else:
            tl.store(to + at + p * WIDTH, value, mask=at + p * WIDTH < left)


@triton.jit
def put_residual(next, loss_scale, parts, codes, lows, units, left, EVEN: tl.constexpr):
    """Write the error of each value over the loss scale. ``lows`` are those that were sent."""
    tl.debug_barrier()  # ``next`` may be what other threads, whose work is the same, still read
    kept = ()
    for p in tl.static_range(len(parts)):
        lost = parts[p] - dequantize(codes[p], lows[p], units[p])
        kept += (tl.div_rn(lost, tl.zeros(lost.shape, tl.float32) + loss_scale),)
    put_parts(next, kept, left, EVEN)


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
