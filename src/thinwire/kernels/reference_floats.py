"""The specification of the element-wise formats, levels, magnitudes and integer rounding, in torch operations.

Every other execution gives the same bytes. Arithmetic is fp32, one rounding per operation. A payload of floats starts
with a header of 64 bytes (little-endian): u32 1 if a value was not finite, u32 how many saturated, f32 a, u32 b, zeros.
"""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.kernels.format import ALIGN, GROUP, Residual, align
from thinwire.kernels.reference import lane_sums, nearest_to_zero, pack, scaled, unpack
from thinwire.kernels.rng import random16, row_key
from thinwire.kernels.table import Row, Table

HEADER = ALIGN
"""Size of the header."""

MAGNITUDE = 0x7FFFFFFF
INFINITY = 0x7F800000
TINY_RANGE = 2.0**-100

NATURAL_LOWEST, NATURAL_STEPS = 18, 127
"""Biased exponent from which on down values become 0, and the number of exponents above it beyond which they
saturate."""
NATURAL_SHIFTS = -18, 109
"""Least and largest shift of the exponents."""

TRUNCATE, NEAREST, STOCHASTIC = range(3)
ROUNDINGS = {"truncate": TRUNCATE, "nearest": NEAREST, "stochastic": STOCHASTIC}


def bits_of(x: Tensor) -> Tensor:
    """Return the bits of |x| as integers (int64)."""
    return x.contiguous().view(torch.int32).to(torch.int64) & MAGNITUDE


def header(nonfinite: Tensor, saturated: Tensor, a: Tensor | None = None, b: Tensor | None = None) -> Tensor:
    """Return the 64 bytes at the start of a payload; all arguments are scalars."""
    words = torch.zeros(HEADER // 4, dtype=torch.int32, device=nonfinite.device)
    words[0] = nonfinite.any()
    words[1] = saturated.sum().clamp(max=0xFFFFFFFF)
    if a is not None and b is not None:
        words[2] = a.reshape(1).view(torch.int32)[0]
        words[3] = b
    return words.view(torch.uint8)


def draws_of(row: Row, key: int, device: torch.device) -> Tensor:
    """Return 16 random bits for each element of a row (int64)."""
    return random16(row.index0, row.numel, *row_key(key, row.site), device).to(torch.int64)


def values_of(x: Tensor, row: Row) -> Tensor:
    """Return the row's elements as contiguous fp32."""
    return x[row.start : row.start + row.numel].to(torch.float32).contiguous()


def put(payload: Tensor, row: Row, message: Tensor, num_bytes: int) -> None:
    """Write a payload into the message, with zeros behind it up to ``num_bytes``."""
    message[row.payload : row.payload + payload.numel()] = payload
    message[row.payload + payload.numel() : row.payload + num_bytes] = 0


def write(value: Tensor, row: Row, y: Tensor, add: bool, scale: float) -> None:
    """Store or add ``value · scale``."""
    out = y[row.start : row.start + row.numel]
    value = value * torch.full_like(value[:1], scale)
    out.copy_(out.to(torch.float32) + value if add else value)


def from_bits(bits: Tensor) -> Tensor:
    """Return fp32 from its bits (integers below 2^32)."""
    return bits.to(torch.int32).view(torch.float32)


def words_of(message: Tensor, at: int, count: int) -> Tensor:
    """Return ``count`` little-endian 32-bit words (int32) at byte ``at``."""
    return message[at : at + 4 * count].clone().view(torch.int32)


# ---- Natural compression: powers of two ---------------------------------------------------------------------------


def natural_encode(x: Tensor, table: Table, message: Tensor, *, key: int, shift: int = 0) -> None:
    """See :func:`thinwire.kernels.natural_encode`."""
    for row in table.segments:
        if not row.numel:
            continue
        values = values_of(x, row)
        bits = bits_of(values)
        exponent = (bits + (draws_of(row, key, x.device) << 7) + 64) >> 23
        finite = bits < INFINITY
        steps = exponent - NATURAL_LOWEST - shift
        saturated = (steps > NATURAL_STEPS) & finite
        magnitude = steps.clamp(0, NATURAL_STEPS)
        codes = torch.where(magnitude > 0, magnitude | torch.signbit(values).to(torch.int64) << 7, 0)
        head = header(~finite, saturated)
        head.view(torch.int32)[2] = shift
        put(torch.cat((head, codes.to(torch.uint8))), row, message, HEADER + align(row.numel))


def natural_decode(message: Tensor, table: Table, y: Tensor, *, add: bool, scale: float) -> None:
    """See :func:`thinwire.kernels.natural_decode`."""
    for row in table.segments:
        if not row.numel:
            continue
        nonfinite, _, shift = words_of(message, row.payload, 3)
        codes = message[row.payload + HEADER : row.payload + HEADER + row.numel].to(torch.int64)
        magnitude = codes & 127
        lowest = NATURAL_LOWEST + shift.clamp(*NATURAL_SHIFTS).to(torch.int64)
        value = from_bits((magnitude + lowest) << 23 | (codes >> 7) << 31)
        value = torch.where(magnitude == 0, 0.0, value)
        write(torch.where(nonfinite != 0, torch.nan, value), row, y, add, scale)


# ---- Range floats: N bits between −max and max ----------------------------------------------------------------------


def rangefloat_first(largest: Tensor, mantissa: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``p``, the shift 23 − m and whether both are valid, of ``max`` (fp32) and ``m`` (int64): scalars."""
    valid = (mantissa >= 0) & (mantissa <= 22)
    shift = 23 - torch.where(valid, mantissa, 0)
    word = largest.reshape(1).view(torch.int32)[0].to(torch.int64)
    first = (word >> shift) + 2 - (1 << (bits - 1))
    return first, shift, valid & (word < INFINITY) & (first >= 1)


def rangefloat_codes(x: Tensor, largest: Tensor, mantissa: Tensor, bits: int, rounding: int, draws: Tensor) -> Tensor:
    """Return codes (int64) of the finite fp32 ``x`` in a valid format; ``draws`` are 16 random bits an element."""
    positives = (1 << (bits - 1)) - 1
    first, shift, _ = rangefloat_first(largest, mantissa, bits)
    top = first + positives - 1
    eps = from_bits((first << shift).reshape(1))
    magnitude = torch.minimum(x.abs(), largest)
    word = bits_of(magnitude)
    if rounding == NEAREST:
        step = ((word + (1 << (shift - 1))) >> shift).clamp(max=top)
        below = magnitude >= eps * 0.5
    elif rounding == STOCHASTIC:
        up = (7 - mantissa).clamp(min=0)
        random = ((draws << up) >> (mantissa - 7).clamp(min=0)) + ((1 << up) >> 1)
        step = ((word + random) >> shift).clamp(max=top)
        factor = (torch.full_like(eps, 65536.0) / eps).clamp(max=torch.finfo(torch.float32).max)
        below = draws < (magnitude * factor).to(torch.int64)
    else:
        step, below = word >> shift, torch.zeros_like(word, dtype=torch.bool)
    code = torch.where(word < first << shift, below.to(torch.int64), step - first + 1)
    return torch.where((code > 0) & torch.signbit(x), code + positives, code)


def rangefloat_encode(
    x: Tensor, table: Table, message: Tensor, params: Tensor, *, bits: int, rounding: int, key: int
) -> None:
    """See :func:`thinwire.kernels.rangefloat_encode`."""
    for row, (largest, given) in zip(table.segments, params, strict=True):
        if not row.numel:
            continue
        values = values_of(x, row)
        whole = (given >= 0) & (given <= 22) & (given == given.floor())
        mantissa = torch.where(whole, given, -1.0).to(torch.int64)
        valid = rangefloat_first(largest, mantissa, bits)[2]
        nonfinite = bits_of(values) >= INFINITY
        usable = torch.where(valid, largest, 1.0), torch.where(valid, mantissa, 22)
        codes = rangefloat_codes(values, *usable, bits, rounding, draws_of(row, key, x.device))
        codes = torch.where(nonfinite, (1 << bits) - 1, codes)
        codes = torch.where(valid, codes, 0)
        start = header(nonfinite, (values.abs() > largest) & ~nonfinite & valid, largest, mantissa)
        put(torch.cat((start, pack_wide(codes, bits))), row, message, rangefloat_size(row.numel, bits))


def rangefloat_decode(message: Tensor, table: Table, y: Tensor, *, bits: int, add: bool, scale: float) -> None:
    """See :func:`thinwire.kernels.rangefloat_decode`."""
    for row in table.segments:
        if not row.numel:
            continue
        words = words_of(message, row.payload, 4)
        first, shift, valid = rangefloat_first(words[2:3].view(torch.float32), words[3].to(torch.int64), bits)
        at = row.payload + HEADER
        codes = unpack_wide(message[at : at + -(-row.numel // GROUP) * 16 * bits], row.numel, bits)
        write(rangefloat_values(codes, first, shift, valid, bits), row, y, add, scale)


def rangefloat_values(codes: Tensor, first: Tensor, shift: Tensor, valid: Tensor, bits: int) -> Tensor:
    """Return the values (fp32) that codes (int64) stand for."""
    positives = (1 << (bits - 1)) - 1
    negative = codes > positives
    step = torch.where(negative, codes - positives, codes) + first - 1
    value = from_bits((step << shift) & MAGNITUDE | negative.to(torch.int64) << 31)
    value = torch.where(codes == 0, 0.0, value)
    return torch.where((codes == (1 << bits) - 1) | ~valid, torch.nan, value)


def rangefloat_size(numel: int, bits: int) -> int:
    """Return the payload bytes of ``numel`` elements."""
    return HEADER + align(-(-numel // GROUP) * 16 * bits) if numel else 0


def pack_wide(codes: Tensor, bits: int) -> Tensor:
    """Pack codes (int64) of up to 15 bits: per group of 128, a byte each if bits >= 8, then narrower planes."""
    low = pack((codes & 255).to(torch.uint8), min(bits, 8)).view(-1, 16 * min(bits, 8))
    if bits <= 8:
        return low.view(-1)
    high = pack((codes >> 8).to(torch.uint8), bits - 8).view(-1, 16 * (bits - 8))
    return torch.cat((low, high), dim=1).view(-1)


def unpack_wide(packed: Tensor, numel: int, bits: int) -> Tensor:
    """Invert :func:`pack_wide`: return ``numel`` codes (int64)."""
    if bits <= 8:
        return unpack(packed, numel, bits).to(torch.int64)
    groups = packed.view(-1, 16 * bits)
    low = unpack(groups[:, :GROUP].reshape(-1), numel, 8).to(torch.int64)
    return low | unpack(groups[:, GROUP:].reshape(-1), numel, bits - 8).to(torch.int64) << 8


# ---- Learned levels -------------------------------------------------------------------------------------------------


def levels_parts(numel: int, bits: int, bucket: int) -> tuple[int, int, int]:
    """Return the bytes at which the buckets' lo and range, and the codes, start in a payload, and its size."""
    meta = align(4 << bits)
    codes = meta + align(8 * -(-numel // bucket))
    return meta, codes, codes + align(-(-numel // GROUP) * 16 * bits)


def levels_encode(x: Tensor, table: Table, message: Tensor, levels: Tensor, *, bits: int, bucket: int) -> None:
    """See :func:`thinwire.kernels.levels_encode`."""
    for row, level in zip(table.segments, levels, strict=True):
        if not row.numel:
            continue
        values, size = values_of(x, row), min(bucket, row.numel)
        padding = -(-row.numel // size) * size - row.numel
        buckets = torch.cat((values, values[-1:].expand(padding))).view(-1, size)
        low, high = torch.aminmax(buckets, dim=1)
        low, high = low + 0.0, high + 0.0
        span = high - low
        bad = ~torch.isfinite(span)
        flat = bad | (span < TINY_RANGE)
        span = torch.where(bad, torch.nan, torch.where(flat, 0.0, span))
        low = torch.where(bad, torch.nan, torch.where(flat, nearest_to_zero(low, high), low))
        inverse = torch.where(flat, 0.0, torch.ones_like(span) / torch.where(flat, 1.0, span))
        place = (buckets - low[:, None]) * inverse[:, None]
        middles = (level[:-1] + level[1:]) * 0.5
        codes = torch.zeros_like(place, dtype=torch.uint8)
        for middle in middles:
            codes += place >= middle
        meta, at, num_bytes = levels_parts(row.numel, bits, bucket)
        payload = torch.zeros(num_bytes, dtype=torch.uint8, device=x.device)
        payload[: 4 << bits] = level.contiguous().view(torch.uint8)
        scales = torch.cat((low, span)).view(torch.uint8)
        payload[meta : meta + scales.numel()] = scales
        packed = pack(codes.view(-1)[: row.numel], bits)
        payload[at : at + packed.numel()] = packed
        put(payload, row, message, num_bytes)


def levels_decode(message: Tensor, table: Table, y: Tensor, *, bits: int, bucket: int, add: bool, scale: float) -> None:
    """See :func:`thinwire.kernels.levels_decode`."""
    for row in table.segments:
        if not row.numel:
            continue
        meta, at, _ = levels_parts(row.numel, bits, bucket)
        count, size = -(-row.numel // bucket), min(bucket, row.numel)
        level = words_of(message, row.payload, 1 << bits).view(torch.float32)
        scales = words_of(message, row.payload + meta, 2 * count).view(torch.float32)
        start = row.payload + at
        codes = unpack(message[start : start + -(-row.numel // GROUP) * 16 * bits], row.numel, bits)
        low, span = (v.repeat_interleave(size)[: row.numel] for v in (scales[:count], scales[count:]))
        write(low + span * level[codes.to(torch.int64)], row, y, add, scale)


# ---- Magnitudes -----------------------------------------------------------------------------------------------------


def magnitudes_parts(numel: int, bits: int, bucket: int) -> tuple[int, int]:
    """Return the byte at which the codes start in a payload, and its size."""
    codes = align(4 * -(-numel // bucket))
    return codes, codes + align(-(-numel // GROUP) * 16 * bits)


def magnitudes_encode(
    x: Tensor,
    table: Table,
    message: Tensor,
    magnitudes: Tensor,
    *,
    bits: int,
    bucket: int,
    residual: Residual | None = None,
) -> None:
    """See :func:`thinwire.kernels.magnitudes_encode`."""
    for row in table.segments:
        if not row.numel:
            continue
        values, size = values_of(x, row), min(bucket, row.numel)
        span = slice(row.start, row.start + row.numel)
        if residual is not None:
            values = values + scaled(residual.now[span], residual.loss_scale)
        count = -(-row.numel // size)
        elements = torch.full((count,), size, dtype=torch.float64, device=x.device)
        elements[-1] = row.numel - (count - 1) * size
        scales = (lane_sums(values.double().square(), size) / elements).sqrt().to(torch.float32)
        scales = torch.where(torch.isfinite(scales), scales, torch.nan)
        each = scales.repeat_interleave(size)[: row.numel]
        codes = (values < 0).to(torch.uint8) * len(magnitudes)
        for middle in (magnitudes[:-1] + magnitudes[1:]) * 0.5:
            codes += values.abs() >= each * middle
        if residual is not None:
            sent = torch.cat((magnitudes, -magnitudes))[codes.to(torch.int64)] * each
            residual.next[span] = (values - sent) / torch.full_like(values, residual.loss_scale)
        at, num_bytes = magnitudes_parts(row.numel, bits, bucket)
        payload = torch.zeros(num_bytes, dtype=torch.uint8, device=x.device)
        payload[: 4 * count] = scales.view(torch.uint8)
        packed = pack(codes, bits)
        payload[at : at + packed.numel()] = packed
        put(payload, row, message, num_bytes)


def magnitudes_decode(
    message: Tensor, table: Table, y: Tensor, magnitudes: Tensor, *, bits: int, bucket: int, add: bool, scale: float
) -> None:
    """See :func:`thinwire.kernels.magnitudes_decode`."""
    values = torch.cat((magnitudes, -magnitudes))
    for row in table.segments:
        if not row.numel:
            continue
        at = row.payload + magnitudes_parts(row.numel, bits, bucket)[0]
        scales = words_of(message, row.payload, -(-row.numel // bucket)).view(torch.float32)
        codes = unpack(message[at : at + -(-row.numel // GROUP) * 16 * bits], row.numel, bits)
        each = scales.repeat_interleave(min(bucket, row.numel))[: row.numel]
        write(values[codes.to(torch.int64)] * each, row, y, add, scale)


# ---- Integers (IntSGD) ----------------------------------------------------------------------------------------------


def int_round(x: Tensor, table: Table, alphas: Tensor, out: Tensor, *, clip: float, key: int, nearest: bool) -> Tensor:
    """See :func:`thinwire.kernels.int_round`; ``clip`` is an integer that fp32 represents."""
    clipped = torch.zeros(len(table), dtype=torch.int64, device=x.device)
    for i, row in enumerate(table.segments):
        if not row.numel:
            continue
        values = values_of(x, row)
        place = alphas[i] * values
        counts = torch.isfinite(values) & ~torch.isnan(place)
        clipped[i] = ((place.abs() > clip) & counts).sum()
        place = torch.where(counts, place, 0.0).clamp(-clip, clip)
        if nearest:
            whole = place.round().to(torch.int64)
        else:
            below = place.floor()
            fraction = ((place - below) * 65536.0).to(torch.int64)
            whole = below.to(torch.int64) + (fraction + draws_of(row, key, x.device) >= 65536)
        at = row.payload // out.element_size()
        out[at : at + row.numel] = whole.to(out.dtype)
    return clipped


def int_decode(out: Tensor, table: Table, y: Tensor, factors: Tensor) -> None:
    """See :func:`thinwire.kernels.int_decode`."""
    for row, factor in zip(table.segments, factors, strict=True):
        if row.numel:
            at = row.payload // out.element_size()
            y[row.start : row.start + row.numel] = (factor * out[at : at + row.numel].to(torch.float32)).to(y.dtype)
