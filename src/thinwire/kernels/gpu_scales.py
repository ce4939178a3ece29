"""The scales of buckets in Triton, bit for bit those of :func:`thinwire.kernels.reference.scales`."""

# Triton is not installed everywhere, and its language has types of its own.
# pyright: reportMissingImports=false, reportIndexIssue=false, reportArgumentType=false, reportAssignmentType=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportAttributeAccessIssue=false
from __future__ import annotations

import triton
import triton.language as tl

from thinwire.kernels.gpu_tiles import load_value


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
