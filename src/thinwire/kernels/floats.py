"""Element-wise formats (powers of two, range floats), learned levels, magnitudes, and rounding to integers.

The torch operations in each function specify its result, bit for bit: fp32, with one rounding per operation. A payload
of floats starts with a header of 64 bytes (little-endian): u32 1 if a value was not finite, u32 how many saturated,
f32 max and u32 mantissa bits of a range float, zeros.
"""

from __future__ import annotations

import math
import struct
from functools import lru_cache

import torch
from torch import Tensor

from thinwire.arguments import check_choice, check_int
from thinwire.kernels import native
from thinwire.kernels.format import ALIGN, GROUP, MAX_BUCKET, Residual, align, code_bytes, num_buckets
from thinwire.kernels.native import MASK64
from thinwire.kernels.reference import (
    TINY_RANGE,
    bucket_counts,
    bucket_rows,
    lane_sums,
    nearest_to_zero,
    pack,
    per_element,
    scaled,
    unpack,
    write,
)
from thinwire.kernels.rng import random16, row_key
from thinwire.kernels.table import Row, Table

HEADER = ALIGN
"""Size of the header."""

MAGNITUDE = 0x7FFFFFFF
INFINITY = 0x7F800000

NATURAL_LOWEST, NATURAL_STEPS = 18, 127
"""Biased exponent from which on down values become 0, and the number of exponents above it beyond which they
saturate."""
NATURAL_SHIFTS = -18, 109
"""Least and largest shift of the exponents."""

ROUNDINGS = ("truncate", "nearest", "stochastic")

_CLIPS = {torch.int8: 127, torch.int32: 2**31 - 128}
"""The largest magnitudes of integers that fp32 represents exactly."""


def header_words(message: Tensor, table: Table, word: int) -> Tensor:
    """Return a word of the header of every payload, int32 (segments,); 0 of segments without elements."""
    rows = table.on(message.device)
    at = torch.where(rows[:, 1] > 0, rows[:, 3] // 4 + word, 0)
    return torch.where(rows[:, 1] > 0, message.view(torch.int32)[at], 0)


def magnitude_bits(x: Tensor) -> Tensor:
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


def draw_bits(row: Row, key: int, device: torch.device) -> Tensor:
    """Return 16 random bits for each element of a row (int64)."""
    return random16(row.index0, row.numel, *row_key(key, row.site), device).to(torch.int64)


def row_values(x: Tensor, row: Row) -> Tensor:
    """Return the row's elements as contiguous fp32."""
    return x[row.elements].to(torch.float32).contiguous()


def put(payload: Tensor, row: Row, message: Tensor, num_bytes: int) -> None:
    """Write a payload into the message, with zeros behind it up to ``num_bytes``."""
    message[row.payload : row.payload + payload.numel()] = payload
    message[row.payload + payload.numel() : row.payload + num_bytes] = 0


def from_bits(bits: Tensor) -> Tensor:
    """Return fp32 from its bits (integers below 2^32)."""
    return bits.to(torch.int32).view(torch.float32)


def read_words(message: Tensor, at: int, count: int) -> Tensor:
    """Return ``count`` little-endian 32-bit words (int32) at byte ``at``."""
    return message[at : at + 4 * count].clone().view(torch.int32)


# ---- Natural compression: powers of two ------------------------------------------------------------------------------


def natural_bytes(numel: int) -> int:
    """Return the payload bytes of a segment: a header of 64, one for each element, zeros to a multiple of 64."""
    if numel < 0:
        raise ValueError(f"numel must not be negative, not {numel}")
    return HEADER + align(numel) if numel else 0


def natural_encode(x: Tensor, table: Table, message: Tensor, *, key: int, scale: float = 1.0) -> None:
    """Round each value to one of the two powers of two around it, unbiased, in one byte (Horváth et al. 2019).

    The byte is sign << 7 | (biased exponent − 18), for exponents 19 to 145 (2^-108 to 2^18). Values that round
    to less become 0, and those that round to more become ±2^18 and are counted as saturated. A segment with NaN or Inf
    decodes to NaN throughout. Values that are ``scale`` times too large have a range that is as much higher: by the
    power of two below ``scale``, whose exponent is in the header.

    Shapes: ``x`` (elements,) fp32, bf16 or fp16; ``message`` (bytes,) uint8; both contiguous and on one device.
    ``key`` is taken modulo 2^64. Raises ``TypeError`` for a wrong dtype, ``ValueError`` for a size or a device.
    """
    given = native.segments("x", x, table, x)
    to = native.message("message", message, table.message_bytes("natural", natural_bytes), x)
    shift = min(max(math.frexp(scale)[1] - 1, NATURAL_SHIFTS[0]), NATURAL_SHIFTS[1])
    if native.computes(x):
        native.core().natural_encode(*given, *table.native, to, shift, key & MASK64)
        return
    for _, row in table.filled:
        values = row_values(x, row)
        bits = magnitude_bits(values)
        exponent = (bits + (draw_bits(row, key, x.device) << 7) + 64) >> 23
        finite = bits < INFINITY
        steps = exponent - NATURAL_LOWEST - shift
        saturated = (steps > NATURAL_STEPS) & finite
        magnitude = steps.clamp(0, NATURAL_STEPS)
        codes = torch.where(magnitude > 0, magnitude | torch.signbit(values).to(torch.int64) << 7, 0)
        head = header(~finite, saturated)
        head.view(torch.int32)[2] = shift
        put(torch.cat((head, codes.to(torch.uint8))), row, message, HEADER + align(row.numel))


def natural_decode(message: Tensor, table: Table, y: Tensor, *, add: bool = False, scale: float = 1.0) -> None:
    """Write ``v · scale`` into the table's segments of ``y``, or add it. Any bytes decode.

    Shapes and errors are those of :func:`natural_encode`.
    """
    to = native.segments("y", y, table, y)
    received = native.message("message", message, table.message_bytes("natural", natural_bytes), y)
    if native.computes(y):
        native.core().natural_decode(received, *table.native, *to, add, scale)
        return
    for _, row in table.filled:
        nonfinite, _, shift = read_words(message, row.payload, 3)
        codes = message[row.payload + HEADER : row.payload + HEADER + row.numel].to(torch.int64)
        magnitude = codes & 127
        lowest = NATURAL_LOWEST + shift.clamp(*NATURAL_SHIFTS).to(torch.int64)
        value = from_bits((magnitude + lowest) << 23 | (codes >> 7) << 31)
        value = torch.where(magnitude == 0, 0.0, value)
        write(torch.where(nonfinite != 0, torch.nan, value), row, y, add, scale)


# ---- Range floats: N bits between −max and max -----------------------------------------------------------------------


def rangefloat_eps(bits: int, mantissa: int, max: float) -> tuple[int, float]:
    """Return ``(p, eps)``: the integer of the top bits of the smallest positive value, and that value.

    With m = ``mantissa`` bits, p = (bits32(max) >> (23 − m)) + 1 − P and P = 2^(bits−1) − 1 positive codes (spectral
    sparsification, section 3.2.1). Raises ``ValueError``, naming the mantissas that work, unless p >= 1.
    """
    check_int("bits", bits, 3, 15)
    (word,) = struct.unpack("<i", struct.pack("<f", max))
    if not (max > 0 and math.isfinite(max) and word > 0):
        raise ValueError(f"max must be a positive, finite fp32 value, not {max}")
    firsts = {m: (word >> (23 - m)) + 2 - (1 << (bits - 1)) for m in range(23)}
    valid = [m for m, first in firsts.items() if first >= 1]
    if mantissa not in valid:
        which = f"{valid[0]} to {valid[-1]}" if valid else "none"
        raise ValueError(f"mantissa={mantissa} does not work with bits={bits} and max={max:g}; these do: {which}")
    first = firsts[mantissa]
    return first, struct.unpack("<f", struct.pack("<i", first << (23 - mantissa)))[0]


def rangefloat_bytes(numel: int, bits: int) -> int:
    """Return the payload bytes of a segment: a header of 64, and 16 · bits for each group of 128, padded to 64."""
    check_int("bits", bits, 3, 15)
    return HEADER + align(code_bytes(numel, bits)) if numel else 0


def rangefloat_encode(
    x: Tensor, table: Table, message: Tensor, params: Tensor, *, bits: int, rounding: str = "nearest", key: int = 0
) -> None:
    """Code each value as a float of ``bits`` bits between −max and max (spectral sparsification, section 3.2.1).

    ``params`` (segments, 2) fp32 has max and the number m of mantissa bits (0..22) of each segment; a pair that
    :func:`rangefloat_eps` refuses makes its segment decode to NaN. ``rounding`` is "truncate" (the paper's), "nearest"
    or "stochastic" (unbiased up to max). |x| beyond max becomes max and is counted as saturated; NaN and Inf are
    received as NaN. Codes: 0; 1..P positive; P+1..2P negative; 2P+1 not finite.

    Other shapes and errors are those of :func:`natural_encode`.
    """
    given = native.segments("x", x, table, x)
    to = native.message("message", message, _rangefloat_bytes(table, bits), x)
    by = native.numbers("params", params, (len(table), 2), x)
    check_choice("rounding", rounding, ROUNDINGS)
    if native.computes(x):
        native.core().rangefloat_encode(*given, *table.native, to, by, bits, ROUNDINGS.index(rounding), key & MASK64)
        return
    for i, row in table.filled:
        (largest, bits_given), values = params[i], row_values(x, row)
        whole = (bits_given >= 0) & (bits_given <= 22) & (bits_given == bits_given.floor())
        mantissa = torch.where(whole, bits_given, -1.0).to(torch.int64)
        valid = rangefloat_first(largest, mantissa, bits)[2]
        nonfinite = magnitude_bits(values) >= INFINITY
        usable = torch.where(valid, largest, 1.0), torch.where(valid, mantissa, 22)
        codes = rangefloat_codes(values, *usable, bits, rounding, draw_bits(row, key, x.device))
        codes = torch.where(nonfinite, (1 << bits) - 1, codes)
        codes = torch.where(valid, codes, 0)
        start = header(nonfinite, (values.abs() > largest) & ~nonfinite & valid, largest, mantissa)
        put(torch.cat((start, pack_wide(codes, bits))), row, message, rangefloat_bytes(row.numel, bits))


def rangefloat_decode(
    message: Tensor, table: Table, y: Tensor, *, bits: int, add: bool = False, scale: float = 1.0
) -> None:
    """Write ``v · scale`` into the table's segments of ``y``, or add it. max and m come from the message.

    Shapes and errors are those of :func:`natural_encode`; any bytes decode.
    """
    to = native.segments("y", y, table, y)
    received = native.message("message", message, _rangefloat_bytes(table, bits), y)
    if native.computes(y):
        native.core().rangefloat_decode(received, *table.native, *to, bits, add, scale)
        return
    for _, row in table.filled:
        words = read_words(message, row.payload, 4)
        first, shift, valid = rangefloat_first(words[2:3].view(torch.float32), words[3].to(torch.int64), bits)
        codes = unpack_wide(message[row.payload + HEADER :], row.numel, bits)
        write(rangefloat_values(codes, first, shift, valid, bits), row, y, add, scale)


def _rangefloat_bytes(table: Table, bits: int) -> int:
    return table.message_bytes(("range float", bits), lambda numel: rangefloat_bytes(numel, bits))


def rangefloat_first(largest: Tensor, mantissa: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``p``, the shift 23 − m and whether both are valid, of ``max`` (fp32) and ``m`` (int64): scalars."""
    valid = (mantissa >= 0) & (mantissa <= 22)
    shift = 23 - torch.where(valid, mantissa, 0)
    word = largest.reshape(1).view(torch.int32)[0].to(torch.int64)
    first = (word >> shift) + 2 - (1 << (bits - 1))
    return first, shift, valid & (word < INFINITY) & (first >= 1)


def rangefloat_codes(x: Tensor, largest: Tensor, mantissa: Tensor, bits: int, rounding: str, draws: Tensor) -> Tensor:
    """Return codes (int64) of the finite fp32 ``x`` in a valid format; ``draws`` are 16 random bits an element."""
    positives = (1 << (bits - 1)) - 1
    first, shift, _ = rangefloat_first(largest, mantissa, bits)
    top = first + positives - 1
    eps = from_bits((first << shift).reshape(1))
    magnitude = torch.minimum(x.abs(), largest)
    word = magnitude_bits(magnitude)
    if rounding == "nearest":
        step = ((word + (1 << (shift - 1))) >> shift).clamp(max=top)
        below = magnitude >= eps * 0.5
    elif rounding == "stochastic":
        up = (7 - mantissa).clamp(min=0)
        random = ((draws << up) >> (mantissa - 7).clamp(min=0)) + ((1 << up) >> 1)
        step = ((word + random) >> shift).clamp(max=top)
        factor = (torch.full_like(eps, 65536.0) / eps).clamp(max=torch.finfo(torch.float32).max)
        below = draws < (magnitude * factor).to(torch.int64)
    else:
        step, below = word >> shift, torch.zeros_like(word, dtype=torch.bool)
    code = torch.where(word < first << shift, below.to(torch.int64), step - first + 1)
    return torch.where((code > 0) & torch.signbit(x), code + positives, code)


def rangefloat_values(codes: Tensor, first: Tensor, shift: Tensor, valid: Tensor, bits: int) -> Tensor:
    """Return the values (fp32) that codes (int64) stand for."""
    positives = (1 << (bits - 1)) - 1
    negative = codes > positives
    step = torch.where(negative, codes - positives, codes) + first - 1
    value = from_bits((step << shift) & MAGNITUDE | negative.to(torch.int64) << 31)
    value = torch.where(codes == 0, 0.0, value)
    return torch.where((codes == (1 << bits) - 1) | ~valid, torch.nan, value)


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
    groups = packed[: code_bytes(numel, bits)].view(-1, 16 * bits)
    low = unpack(groups[:, :GROUP].reshape(-1), numel, 8).to(torch.int64)
    return low | unpack(groups[:, GROUP:].reshape(-1), numel, bits - 8).to(torch.int64) << 8


# ---- Learned levels --------------------------------------------------------------------------------------------------


def levels_bytes(numel: int, bits: int, bucket: int) -> int:
    """Return the payload bytes of a segment: 2^bits levels, lo and range of buckets, codes, each padded to 64."""
    check_int("bits", bits, 1, 8)
    check_int("bucket", bucket, 1, MAX_BUCKET)
    return levels_parts(numel, bits, bucket)[2] if numel else 0


def levels_encode(x: Tensor, table: Table, message: Tensor, levels: Tensor, *, bits: int, bucket: int) -> None:
    """Code each value as the nearest of 2^bits learned levels between its bucket's ends (thesis, Alg. 5.1).

    ``levels`` (segments, 2^bits) fp32, ascending within [0, 1] (the codes of others are unspecified); they are sent
    in the message. A bucket with NaN or Inf, or whose range overflows, decodes to NaN; one with a range below
    2^-100 to its minimum. ``index0`` must be a multiple of lcm(bucket, 128).

    Other shapes and errors are those of :func:`natural_encode`.
    """
    given = native.segments("x", x, table, x)
    to = native.message("message", message, _levels_bytes(table, bits, bucket), x)
    by = native.numbers("levels", levels, (len(table), 1 << bits), x)
    if native.computes(x):
        native.core().levels_encode(*given, *table.native, to, by, bits, bucket)
        return
    for i, row in table.filled:
        level, values = levels[i], row_values(x, row)
        buckets = bucket_rows(values, bucket, fill=values[-1])
        low, high = torch.aminmax(buckets, dim=1)
        low, high = low + 0.0, high + 0.0
        span = high - low
        bad = ~torch.isfinite(span)
        flat = bad | (span < TINY_RANGE)
        span = torch.where(bad, torch.nan, torch.where(flat, 0.0, span))
        low = torch.where(bad, torch.nan, torch.where(flat, nearest_to_zero(low, high), low))
        inverse = torch.where(flat, 0.0, torch.ones_like(span) / torch.where(flat, 1.0, span))
        place = (buckets - low[:, None]) * inverse[:, None]
        codes = torch.zeros_like(place, dtype=torch.uint8)
        for middle in (level[:-1] + level[1:]) * 0.5:
            codes += place >= middle
        meta, at, num_bytes = levels_parts(row.numel, bits, bucket)
        payload = message[row.payload : row.payload + num_bytes].zero_()
        payload[: 4 << bits] = level.contiguous().view(torch.uint8)
        payload[meta : meta + 8 * len(low)] = torch.cat((low, span)).view(torch.uint8)
        payload[at : at + code_bytes(row.numel, bits)] = pack(codes.view(-1)[: row.numel], bits)


def levels_decode(
    message: Tensor, table: Table, y: Tensor, *, bits: int, bucket: int, add: bool = False, scale: float = 1.0
) -> None:
    """Write ``v · scale``, v = lo + range · level, into the table's segments of ``y``, or add it.

    Shapes and errors are those of :func:`natural_encode`; any bytes decode.
    """
    to = native.segments("y", y, table, y)
    received = native.message("message", message, _levels_bytes(table, bits, bucket), y)
    if native.computes(y):
        native.core().levels_decode(received, *table.native, *to, bits, bucket, add, scale)
        return
    for _, row in table.filled:
        meta, at, _ = levels_parts(row.numel, bits, bucket)
        count = num_buckets(row.numel, bucket)
        level = read_words(message, row.payload, 1 << bits).view(torch.float32)
        scales = read_words(message, row.payload + meta, 2 * count).view(torch.float32)
        codes = unpack(message[row.payload + at :], row.numel, bits)
        low, span = (per_element(v, row.numel, bucket) for v in (scales[:count], scales[count:]))
        write(low + span * level[codes.to(torch.int64)], row, y, add, scale)


def _levels_bytes(table: Table, bits: int, bucket: int) -> int:
    return table.message_bytes(("levels", bits, bucket), lambda n: levels_bytes(n, bits, bucket), bucket)


def levels_parts(numel: int, bits: int, bucket: int) -> tuple[int, int, int]:
    """Return the bytes at which the buckets' lo and range, and the codes, start in a payload, and its size."""
    meta = align(4 << bits)
    codes = meta + align(8 * num_buckets(numel, bucket))
    return meta, codes, codes + align(code_bytes(numel, bits))


# ---- Magnitudes ------------------------------------------------------------------------------------------------------


def magnitudes_bytes(numel: int, bits: int, bucket: int) -> int:
    """Return the payload bytes of a segment: a scale for each bucket, and codes, each padded to 64."""
    check_int("bits", bits, 1, 4)
    check_int("bucket", bucket, 1, MAX_BUCKET)
    return magnitudes_parts(numel, bits, bucket)[1] if numel else 0


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
    """Code each value as its sign and the nearest of 2^(bits−1) magnitudes, in units of its bucket's root mean square.

    ``magnitudes`` (2^(bits−1),) fp32, ascending and not negative; both sides know them. A bucket with NaN or Inf
    decodes to NaN. ``index0`` must be a multiple of lcm(bucket, 128). ``residual`` is used as in
    :func:`bucketed_encode`; ``x`` may be its ``next``.

    Other shapes and errors are those of :func:`natural_encode`.
    """
    given = native.segments("x", x, table, x)
    to = native.message("message", message, _magnitudes_bytes(table, bits, bucket), x)
    by = native.numbers("magnitudes", magnitudes, (1 << (bits - 1),), x)
    both = native.residual(residual, table, x)
    if native.computes(x):
        native.core().magnitudes_encode(*given, *table.native, to, by, bits, bucket, *both)
        return
    for _, row in table.filled:
        values = row_values(x, row)
        if residual is not None:
            values = values + scaled(residual.now[row.elements], residual.loss_scale)
        means = lane_sums(values.double().square(), bucket) / bucket_counts(values, bucket)
        scales = means.sqrt().to(torch.float32)
        scales = torch.where(torch.isfinite(scales), scales, torch.nan)
        each = per_element(scales, row.numel, bucket)
        codes = (values < 0).to(torch.uint8) * len(magnitudes)
        for middle in (magnitudes[:-1] + magnitudes[1:]) * 0.5:
            codes += values.abs() >= each * middle
        if residual is not None:
            sent = torch.cat((magnitudes, -magnitudes))[codes.to(torch.int64)] * each
            residual.next[row.elements] = (values - sent) / torch.full_like(values, residual.loss_scale)
        at, num_bytes = magnitudes_parts(row.numel, bits, bucket)
        payload = message[row.payload : row.payload + num_bytes].zero_()
        payload[: 4 * len(scales)] = scales.view(torch.uint8)
        payload[at : at + code_bytes(row.numel, bits)] = pack(codes, bits)


def magnitudes_decode(
    message: Tensor,
    table: Table,
    y: Tensor,
    magnitudes: Tensor,
    *,
    bits: int,
    bucket: int,
    add: bool = False,
    scale: float = 1.0,
) -> None:
    """Write ``v · scale``, v = ± magnitude · root mean square, into the table's segments of ``y``, or add it.

    Shapes and errors are those of :func:`magnitudes_encode`; any bytes decode.
    """
    to = native.segments("y", y, table, y)
    received = native.message("message", message, _magnitudes_bytes(table, bits, bucket), y)
    by = native.numbers("magnitudes", magnitudes, (1 << (bits - 1),), y)
    if native.computes(y):
        native.core().magnitudes_decode(received, *table.native, *to, by, bits, bucket, add, scale)
        return
    values = torch.cat((magnitudes, -magnitudes))
    for _, row in table.filled:
        at = row.payload + magnitudes_parts(row.numel, bits, bucket)[0]
        scales = read_words(message, row.payload, num_buckets(row.numel, bucket)).view(torch.float32)
        codes = unpack(message[at:], row.numel, bits)
        write(values[codes.to(torch.int64)] * per_element(scales, row.numel, bucket), row, y, add, scale)


def _magnitudes_bytes(table: Table, bits: int, bucket: int) -> int:
    return table.message_bytes(("magnitudes", bits, bucket), lambda n: magnitudes_bytes(n, bits, bucket), bucket)


def magnitudes_parts(numel: int, bits: int, bucket: int) -> tuple[int, int]:
    """Return the byte at which the codes start in a payload, and its size."""
    codes = align(4 * num_buckets(numel, bucket))
    return codes, codes + align(code_bytes(numel, bits))


# ---- Integers (IntSGD) -----------------------------------------------------------------------------------------------


def int_round(
    x: Tensor, table: Table, alphas: Tensor, out: Tensor, *, clip: int, key: int = 0, nearest: bool = False
) -> Tensor:
    """Round ``α · x`` (``Int`` of IntSGD), clipped to ±clip: down or up at random, unbiased, or to nearest even.

    ``alphas`` (segments,) fp32; ``out`` (values,) int8 or int32, where a segment's integers start at byte ``payload``.
    Values that are not finite become 0, and the caller sends a flag. Returns how many values of each segment were
    clipped: int64 (segments,) on the device of ``x``.

    Other shapes and errors are those of :func:`natural_encode`; ``ValueError`` for a ``clip`` beyond the range of
    ``out``.
    """
    given, to = native.segments("x", x, table, x), _check_integers(out, table, x)
    by = native.numbers("alphas", alphas, (len(table),), x)
    if not 1 <= clip <= 2 ** (8 * out.element_size() - 1) - 1:
        raise ValueError(f"clip must be 1 to the largest {out.dtype}, not {clip}")
    limit, size = _not_above(min(int(clip), _CLIPS[out.dtype])), out.element_size()
    clipped = torch.zeros(len(table), dtype=torch.int64, device=x.device)
    if native.computes(x):
        count = native.flat("clipped", clipped, x)
        native.core().int_round(*given, *table.native, by, to, size, limit, key & MASK64, nearest, count)
        return clipped
    for i, row in table.filled:
        values = row_values(x, row)
        place = alphas[i] * values
        counts = torch.isfinite(values) & ~torch.isnan(place)
        clipped[i] = ((place.abs() > limit) & counts).sum()
        place = torch.where(counts, place, 0.0).clamp(-limit, limit)
        if nearest:
            whole = place.round().to(torch.int64)
        else:
            below = place.floor()
            fraction = ((place - below) * 65536.0).to(torch.int64)
            whole = below.to(torch.int64) + (fraction + draw_bits(row, key, x.device) >= 65536)
        at = row.payload // size
        out[at : at + row.numel] = whole.to(out.dtype)
    return clipped


def int_decode(out: Tensor, table: Table, y: Tensor, factors: Tensor) -> None:
    """Set ``y = factor · q`` for the integers of :func:`int_round`, or sums of them; ``factors`` (segments,) fp32."""
    to, given = native.segments("y", y, table, y), _check_integers(out, table, y)
    by = native.numbers("factors", factors, (len(table),), y)
    if native.computes(y):
        native.core().int_decode(given, out.element_size(), *table.native, *to, by)
        return
    for i, row in table.filled:
        at = row.payload // out.element_size()
        y[row.elements] = (factors[i] * out[at : at + row.numel].to(torch.float32)).to(y.dtype)


def _check_integers(out: Tensor, table: Table, like: Tensor) -> int:
    """Return the address of the integers. Raise an error if there are fewer than the table says."""
    if not isinstance(out, Tensor) or out.dtype not in _CLIPS:
        raise TypeError("out must be an int8 or int32 tensor")
    address, size = native.flat("out", out, like), out.element_size()
    num_bytes = table.message_bytes(("integers", size), lambda numel: numel * size)
    if out.numel() * size < num_bytes:
        raise ValueError(f"out has {out.numel() * size} bytes, but the table's payloads take {num_bytes}")
    return address


@lru_cache(maxsize=64)
def _not_above(clip: int) -> float:
    """Return the largest fp32 value that is not above an integer."""
    return float(clip if clip < 2**24 else clip >> (clip.bit_length() - 24) << (clip.bit_length() - 24))
