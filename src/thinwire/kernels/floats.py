"""Element-wise formats (powers of two, range floats), learned levels, magnitudes, and rounding to integers.

A payload of floats starts with a header of 64 bytes (little-endian): u32 1 if a value was not finite, u32 how many
saturated, f32 max and u32 mantissa bits of a range float, zeros.
"""

from __future__ import annotations

import math
import struct
from functools import lru_cache
from math import lcm

import torch
from torch import Tensor

from thinwire.kernels import native, reference_floats
from thinwire.kernels.format import GROUP, MAX_BUCKET, Residual, align
from thinwire.kernels.native import MASK64
from thinwire.kernels.ops import _check_flat, _check_message, _check_residual, _check_values
from thinwire.kernels.reference_floats import (
    HEADER,
    NATURAL_SHIFTS,
    ROUNDINGS,
    levels_parts,
    magnitudes_parts,
    rangefloat_size,
)
from thinwire.kernels.table import Table

_CLIPS = {torch.int8: 127, torch.int32: 2**31 - 128}
"""The largest magnitudes of integers that fp32 represents exactly."""


def _check_numel(numel: int) -> None:
    if numel < 0:
        raise ValueError(f"numel must not be negative, got {numel}")


def _check_bucket(bucket: int) -> None:
    if not isinstance(bucket, int) or not 1 <= bucket <= MAX_BUCKET:
        raise ValueError(f"bucket must be 1 to 2**62 elements, not {bucket}")


def _check_per_row(name: str, tensor: Tensor, shape: tuple[int, ...], like: Tensor) -> None:
    if not isinstance(tensor, Tensor) or tensor.dtype != torch.float32:
        raise TypeError(f"{name} must be a float32 tensor")
    if tuple(tensor.shape) != shape or not tensor.is_contiguous():
        raise ValueError(
            f"{name} must be contiguous and of shape {shape}, one row a segment, not {tuple(tensor.shape)}"
        )
    if tensor.device != like.device:
        raise ValueError(f"{name} is on {tensor.device}, but the values are on {like.device}: move one of them")


def header_words(message: Tensor, table: Table, word: int) -> Tensor:
    """Return a word of the header of every payload, int32 (segments,); 0 of segments without elements."""
    rows = table.on(message.device)
    at = torch.where(rows[:, 1] > 0, rows[:, 3] // 4 + word, 0)
    return torch.where(rows[:, 1] > 0, message.view(torch.int32)[at], 0)


# ---- Natural compression ------------------------------------------------------------------------------------------


def natural_bytes(numel: int) -> int:
    """Return the payload bytes of a segment: a header of 64, one for each element, zeros to a multiple of 64."""
    _check_numel(numel)
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
    _check_values("x", x, table, x)
    num_bytes = table.message_bytes("natural", natural_bytes)
    _check_message("message", message, num_bytes, x)
    shift = min(max(math.frexp(scale)[1] - 1, NATURAL_SHIFTS[0]), NATURAL_SHIFTS[1])
    if not native.computes(x):
        return reference_floats.natural_encode(x, table, message, key=key, shift=shift)
    to = native.address("message", message, torch.uint8, num_bytes)
    native.core().natural_encode(*native.source("x", x, table), to, shift, key & MASK64)
    return None


def natural_decode(message: Tensor, table: Table, y: Tensor, *, add: bool = False, scale: float = 1.0) -> None:
    """Write ``v · scale`` into the table's segments of ``y``, or add it. Any bytes decode.

    Shapes and errors are those of :func:`natural_encode`.
    """
    _check_values("y", y, table, y)
    num_bytes = table.message_bytes("natural", natural_bytes)
    _check_message("message", message, num_bytes, y)
    if not native.computes(y):
        return reference_floats.natural_decode(message, table, y, add=add, scale=scale)
    received = native.address("message", message, torch.uint8, num_bytes)
    native.core().natural_decode(received, *native.target(table, y), add, scale)
    return None


# ---- Range floats -------------------------------------------------------------------------------------------------


@lru_cache(maxsize=64, typed=True)
def _check_bits(bits: int, low: int, high: int) -> None:
    if not isinstance(bits, int) or isinstance(bits, bool):
        raise TypeError(f"bits must be an int, not {type(bits).__name__}")
    if not low <= bits <= high:
        raise ValueError(f"bits must be {low} to {high}, not {bits}")


def rangefloat_eps(bits: int, mantissa: int, max: float) -> tuple[int, float]:
    """Return ``(p, eps)``: the integer of the top bits of the smallest positive value, and that value.

    With m = ``mantissa`` bits, p = (bits32(max) >> (23 − m)) + 1 − P and P = 2^(bits−1) − 1 positive codes (spectral
    sparsification, section 3.2.1). Raises ``ValueError``, naming the mantissas that work, unless p >= 1.
    """
    _check_bits(bits, 3, 15)
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
    _check_bits(bits, 3, 15)
    _check_numel(numel)
    return rangefloat_size(numel, bits)


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
    _check_values("x", x, table, x)
    num_bytes = _rangefloat_bytes(table, bits)
    _check_message("message", message, num_bytes, x)
    _check_per_row("params", params, (len(table), 2), x)
    if rounding not in ROUNDINGS:
        raise ValueError(f"rounding must be one of {', '.join(ROUNDINGS)}, not {rounding!r}")
    how = ROUNDINGS[rounding]
    if not native.computes(x):
        return reference_floats.rangefloat_encode(x, table, message, params, bits=bits, rounding=how, key=key)
    to = native.address("message", message, torch.uint8, num_bytes)
    where = to, native.address("params", params, torch.float32, 2 * len(table))
    native.core().rangefloat_encode(*native.source("x", x, table), *where, bits, how, key & MASK64)
    return None


def rangefloat_decode(
    message: Tensor, table: Table, y: Tensor, *, bits: int, add: bool = False, scale: float = 1.0
) -> None:
    """Write ``v · scale`` into the table's segments of ``y``, or add it. max and m come from the message.

    Shapes and errors are those of :func:`natural_encode`; any bytes decode.
    """
    _check_values("y", y, table, y)
    num_bytes = _rangefloat_bytes(table, bits)
    _check_message("message", message, num_bytes, y)
    if not native.computes(y):
        return reference_floats.rangefloat_decode(message, table, y, bits=bits, add=add, scale=scale)
    received = native.address("message", message, torch.uint8, num_bytes)
    native.core().rangefloat_decode(received, *native.target(table, y), bits, add, scale)
    return None


def _rangefloat_bytes(table: Table, bits: int) -> int:
    return table.message_bytes(("range float", bits), lambda numel: rangefloat_bytes(numel, bits))


# ---- Learned levels -----------------------------------------------------------------------------------------------


def levels_bytes(numel: int, bits: int, bucket: int) -> int:
    """Return the payload bytes of a segment: 2^bits levels, lo and range of buckets, codes, each padded to 64."""
    _check_bits(bits, 1, 8)
    _check_numel(numel)
    _check_bucket(bucket)
    return levels_parts(numel, bits, bucket)[2] if numel else 0


def levels_encode(x: Tensor, table: Table, message: Tensor, levels: Tensor, *, bits: int, bucket: int) -> None:
    """Code each value as the nearest of 2^bits learned levels between its bucket's ends (thesis, Alg. 5.1).

    ``levels`` (segments, 2^bits) fp32, ascending within [0, 1] (the codes of others are unspecified); they are sent
    in the message. A bucket with NaN or Inf, or whose range overflows, decodes to NaN; one with a range below
    2^-100 to its minimum. ``index0`` must be a multiple of lcm(bucket, 128).

    Other shapes and errors are those of :func:`natural_encode`.
    """
    _check_values("x", x, table, x)
    num_bytes = _levels_bytes(table, bits, bucket)
    _check_message("message", message, num_bytes, x)
    _check_per_row("levels", levels, (len(table), 1 << bits), x)
    if not native.computes(x):
        return reference_floats.levels_encode(x, table, message, levels, bits=bits, bucket=bucket)
    to = native.address("message", message, torch.uint8, num_bytes)
    where = to, native.address("levels", levels, torch.float32, len(table) << bits)
    native.core().levels_encode(*native.source("x", x, table), *where, bits, bucket)
    return None


def levels_decode(
    message: Tensor, table: Table, y: Tensor, *, bits: int, bucket: int, add: bool = False, scale: float = 1.0
) -> None:
    """Write ``v · scale``, v = lo + range · level, into the table's segments of ``y``, or add it.

    Shapes and errors are those of :func:`natural_encode`; any bytes decode.
    """
    _check_values("y", y, table, y)
    num_bytes = _levels_bytes(table, bits, bucket)
    _check_message("message", message, num_bytes, y)
    if not native.computes(y):
        return reference_floats.levels_decode(message, table, y, bits=bits, bucket=bucket, add=add, scale=scale)
    received = native.address("message", message, torch.uint8, num_bytes)
    native.core().levels_decode(received, *native.target(table, y), bits, bucket, add, scale)
    return None


def _levels_bytes(table: Table, bits: int, bucket: int) -> int:
    grain = lcm(bucket, GROUP) if isinstance(bucket, int) and bucket > 0 else GROUP
    return table.message_bytes(("levels", bits, bucket), lambda numel: levels_bytes(numel, bits, bucket), grain)


# ---- Magnitudes ---------------------------------------------------------------------------------------------------


def magnitudes_bytes(numel: int, bits: int, bucket: int) -> int:
    """Return the payload bytes of a segment: a scale for each bucket, and codes, each padded to 64."""
    _check_bits(bits, 1, 4)
    _check_numel(numel)
    _check_bucket(bucket)
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
    _check_values("x", x, table, x)
    num_bytes = _magnitudes_bytes(table, bits, bucket)
    _check_message("message", message, num_bytes, x)
    _check_per_row("magnitudes", magnitudes, (1 << (bits - 1),), x)
    if residual is not None:
        _check_residual(residual, table, x)
    if not native.computes(x):
        how = {"bits": bits, "bucket": bucket, "residual": residual}
        return reference_floats.magnitudes_encode(x, table, message, magnitudes, **how)
    to = native.address("message", message, torch.uint8, num_bytes)
    form = native.address("magnitudes", magnitudes, torch.float32, 1 << (bits - 1)), bits, bucket
    native.core().magnitudes_encode(*native.source("x", x, table), to, *form, *native.addresses(residual, table))
    return None


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
    _check_values("y", y, table, y)
    num_bytes = _magnitudes_bytes(table, bits, bucket)
    _check_message("message", message, num_bytes, y)
    _check_per_row("magnitudes", magnitudes, (1 << (bits - 1),), y)
    if not native.computes(y):
        how = {"bits": bits, "bucket": bucket, "add": add, "scale": scale}
        return reference_floats.magnitudes_decode(message, table, y, magnitudes, **how)
    received = native.address("message", message, torch.uint8, num_bytes)
    form = native.address("magnitudes", magnitudes, torch.float32, 1 << (bits - 1)), bits, bucket
    native.core().magnitudes_decode(received, *native.target(table, y), *form, add, scale)
    return None


def _magnitudes_bytes(table: Table, bits: int, bucket: int) -> int:
    grain = lcm(bucket, GROUP) if isinstance(bucket, int) and bucket > 0 else GROUP
    return table.message_bytes(("magnitudes", bits, bucket), lambda n: magnitudes_bytes(n, bits, bucket), grain)


# ---- Integers -----------------------------------------------------------------------------------------------------


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
    _check_values("x", x, table, x)
    count = _check_integers(out, table, x)
    _check_per_row("alphas", alphas, (len(table),), x)
    if not 1 <= clip <= 2 ** (8 * out.element_size() - 1) - 1:
        raise ValueError(f"clip must be 1 to the largest {out.dtype}, not {clip}")
    limit = _not_above(min(int(clip), _CLIPS[out.dtype]))
    if not native.computes(x):
        return reference_floats.int_round(x, table, alphas, out, clip=limit, key=key, nearest=nearest)
    clipped = torch.empty(len(table), dtype=torch.int64, device="cpu")
    by = native.address("alphas", alphas, torch.float32, len(table))
    to = by, native.address("out", out, out.dtype, count), out.element_size()
    counts = native.address("clipped", clipped, torch.int64, len(table))
    native.core().int_round(*native.source("x", x, table), *to, limit, key & MASK64, nearest, counts)
    return clipped


def int_decode(out: Tensor, table: Table, y: Tensor, factors: Tensor) -> None:
    """Set ``y = factor · q`` for the integers of :func:`int_round`, or sums of them; ``factors`` (segments,) fp32."""
    _check_values("y", y, table, y)
    count = _check_integers(out, table, y)
    _check_per_row("factors", factors, (len(table),), y)
    if not native.computes(y):
        return reference_floats.int_decode(out, table, y, factors)
    given = native.address("out", out, out.dtype, count), out.element_size()
    by = native.address("factors", factors, torch.float32, len(table))
    native.core().int_decode(*given, *native.target(table, y), by)
    return None


def _check_integers(out: Tensor, table: Table, like: Tensor) -> int:
    """Return how many integers there must be. Raise an error if there are fewer."""
    if not isinstance(out, Tensor) or out.dtype not in _CLIPS:
        raise TypeError("out must be an int8 or int32 tensor")
    _check_flat("out", out, like)
    size = out.element_size()
    num_bytes = table.message_bytes(("integers", size), lambda numel: numel * size)
    if out.numel() * size < num_bytes:
        raise ValueError(f"out has {out.numel() * size} bytes, but the table's payloads take {num_bytes}")
    return -(-num_bytes // size)


@lru_cache(maxsize=64)
def _not_above(clip: int) -> float:
    """Return the largest fp32 value that is not above an integer."""
    return float(clip if clip < 2**24 else clip >> (clip.bit_length() - 24) << (clip.bit_length() - 24))
