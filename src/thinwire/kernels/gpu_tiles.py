"""What the Triton kernels do with one tile: a group of 128 elements a row, cut into 2, 4 or 8 parts of equal width."""

# Triton is not installed everywhere, and its language has types of its own.
# pyright: reportMissingImports=false, reportIndexIssue=false, reportArgumentType=false, reportAssignmentType=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def row_of(pieces, rows):
    """Which piece of which row this program works on: (piece, start, numel, index0, payload, site)."""
    pid = tl.program_id(0).to(tl.int64)
    row = rows + 5 * tl.load(pieces + 2 * pid)
    payload = tl.multiple_of(tl.load(row + 3), 64)
    return tl.load(pieces + 2 * pid + 1), tl.load(row), tl.load(row + 1), tl.load(row + 2), payload, tl.load(row + 4)


@triton.jit
def codes_of(message, payload, numel, bucket, first, BITS: tl.constexpr):
    """Where the codes from element ``first`` (a multiple of 128) on lie."""
    at = ((numel + bucket - 1) // bucket * 8 + 63) // 64 * 64
    return message + payload + tl.multiple_of(at, 64) + tl.multiple_of(first // 128 * (16 * BITS), 16)


@triton.jit
def bucket_of(first, within, bucket):
    """The buckets of the elements ``first + within``; the division per element stays in 32 bits where it can."""
    before = first // bucket
    return before + ((first - before * bucket).to(bucket.dtype) + within) // bucket


@triton.jit
def ordered_key(x):
    """An int32 that orders as the floats do, with NaNs beyond the infinities."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def from_key(key):
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def finish_scales(low, high, BITS: tl.constexpr):
    """lo, unit and factor from the extrema: thinwire.kernels.reference.scales."""
    LEVELS: tl.constexpr = 2**BITS - 1
    OVER: tl.constexpr = LEVELS * 65536.0 * (1.0 - 2.0**-22)
    low = low + 0.0
    span = (high + 0.0) - low
    bad = (span <= 3.4028234663852886e38) == 0
    flat = bad | (span < 7.888609052210118e-31)
    divisor = tl.where(flat, 1.0, span)
    unit = tl.div_rn(divisor, tl.full(divisor.shape, LEVELS, tl.float32))
    inverse = tl.div_rn(tl.full(divisor.shape, OVER, tl.float32), divisor)
    nan = tl.full(divisor.shape, 0x7FC00000, tl.int32).to(tl.float32, bitcast=True)
    unit = tl.where(bad, nan, tl.where(flat, 0.0, unit))
    return tl.where(bad, nan, low), unit, tl.where(flat, 0.0, inverse)


@triton.jit
def row_draws(key_low, key_high, site):
    """The two key words of a row: thinwire.kernels.rng.row_key. The key comes in two words, less 2^31 each."""
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
def load_parts(x, left, BITS: tl.constexpr, GROUPS: tl.constexpr, EVEN: tl.constexpr):
    """The tile's values as fp32: a tuple of (GROUPS, width) tensors; 0 from element ``left`` on."""
    PARTS: tl.constexpr = 2 if BITS % 4 == 0 else 4 if BITS % 2 == 0 else 8
    WIDTH: tl.constexpr = 128 // PARTS
    at = tl.arange(0, GROUPS)[:, None] * 128 + tl.arange(0, WIDTH)[None, :]
    parts = ()
    for p in tl.static_range(PARTS):
        if EVEN:
            values = tl.load(x + at + p * WIDTH)
        else:
            values = tl.load(x + at + p * WIDTH, mask=at + p * WIDTH < left, other=0.0)
        parts += (values.to(tl.float32),)
    return parts


@triton.jit
def quantise_parts(parts, lows, inverses, counter, left, k0, k1, NEAREST: tl.constexpr, EVEN: tl.constexpr):
    """Codes (int32) of each part, whose scales are the part's own in ``lows`` and ``inverses``."""
    PARTS: tl.constexpr = len(parts)
    HALF: tl.constexpr = PARTS // 2
    WIDTH: tl.constexpr = 128 // PARTS
    GROUPS: tl.constexpr = parts[0].shape[0]
    group = tl.arange(0, GROUPS)[:, None]
    column = tl.arange(0, WIDTH)[None, :]
    below, above = (), ()
    for p in tl.static_range(HALF):
        if NEAREST:
            first = tl.full((GROUPS, WIDTH), 0x8000, tl.int32)
            second = first
        else:
            index = counter.to(tl.uint32) + (group * 64 + p * WIDTH + column).to(tl.uint32)
            word = mix3(index, k0, k1)
            first = (word & 0xFFFF).to(tl.int32)
            second = (word >> 16).to(tl.int32)
        below += (quantise(parts[p], lows[p], inverses[p], first, left, p, EVEN),)
        above += (quantise(parts[p + HALF], lows[p + HALF], inverses[p + HALF], second, left, p + HALF, EVEN),)
    return below + above


@triton.jit
def quantise(x, low, inverse, draws, left, p: tl.constexpr, EVEN: tl.constexpr):
    distance = tl.where(inverse == 0.0, 0.0, x - low)
    code = ((distance * inverse).to(tl.int32) + draws) >> 16
    if not EVEN:
        GROUPS: tl.constexpr = code.shape[0]
        WIDTH: tl.constexpr = code.shape[1]
        at = tl.arange(0, GROUPS)[:, None] * 128 + p * WIDTH + tl.arange(0, WIDTH)[None, :]
        code = tl.where(at < left, code, 0)
    return code


@triton.jit
def pack_parts(to, codes, left, BITS: tl.constexpr, GROUPS: tl.constexpr, EVEN: tl.constexpr):
    """Stores the planes of the groups that begin before element ``left``: thinwire.kernels.reference.pack."""
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
    """The plane of ``PLANE`` bits, behind the wider ones, which hold the lower bits."""
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
    """The inverse of :func:`pack_parts`: a tuple of (GROUPS, width) int32 tensors."""
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
    """The fields of part ``p`` in one plane, at their place in the codes."""
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
def dequantise(code, low, unit):
    """lo + code · unit, rounded twice."""
    return low + code.to(tl.float32) * unit
