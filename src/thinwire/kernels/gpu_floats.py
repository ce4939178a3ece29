"""Natural compression and range floats in Triton: headers first, then codes, whose programs count into the headers."""

# Triton is not installed everywhere, and its language has types of its own.
# pyright: reportMissingImports=false, reportIndexIssue=false, reportArgumentType=false, reportAssignmentType=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportAttributeAccessIssue=false
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from thinwire.kernels.format import GROUP
from thinwire.kernels.gpu_launch import TILE, check_aligned, on, options, words
from thinwire.kernels.gpu_tiles import draws_of, load_parts, pack_parts, row_draws, row_of, unpack_parts, write
from thinwire.kernels.table import Table

ONE_A_ROW = 2**62
"""As the size of a piece, this makes one piece of each segment."""


@triton.jit
def float_headers(message, params, pieces, rows, PARAMS: tl.constexpr):
    """The header of one row: nothing counted yet; max and mantissa (or −1) of a range float."""
    pid = tl.program_id(0).to(tl.int64)
    _piece, _start, _numel, _index0, payload, _site = row_of(pieces, rows)
    at = tl.arange(0, 16)
    words = tl.zeros((16,), tl.int32)
    if PARAMS:
        largest, mantissa = params_of(params + 2 * tl.load(pieces + 2 * pid))
        words = tl.where(at == 2, largest, tl.where(at == 3, mantissa, words))
    tl.store((message + payload).to(tl.pointer_type(tl.int32)) + at, words)


@triton.jit
def params_of(params):
    """The bits of max, and the mantissa bits as an integer, −1 if they are none."""
    given = tl.load(params + 1)
    whole = (given >= 0.0) & (given <= 22.0)
    rounded = tl.where(whole, given, 0.0).to(tl.int32)
    whole = whole & (rounded.to(tl.float32) == given)
    return tl.load(params).to(tl.int32, bitcast=True), tl.where(whole, rounded, -1)


@triton.jit
def count(message, payload, nonfinite, saturated):
    """Add what one program saw to the header."""
    header = (message + payload).to(tl.pointer_type(tl.int32))
    tl.atomic_or(header, 1, mask=nonfinite > 0)
    tl.atomic_add(header + 1, saturated, mask=saturated > 0)


@triton.jit
def zero_behind(payload, at, end):
    """Zeros from byte ``at`` to the next multiple of 64."""
    byte = at + tl.arange(0, 64)
    tl.store(payload + byte, tl.zeros((64,), tl.uint8), mask=byte < end)


# ---- Natural compression ------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["shift", "key_low", "key_high"])
def natural_codes(x, message, pieces, rows, shift, key_low, key_high, GROUPS: tl.constexpr):
    """One byte a value: thinwire.kernels.reference_floats.natural_encode."""
    piece, start, numel, index0, payload, site = row_of(pieces, rows)
    first = piece * (GROUPS * 128)
    parts = load_parts(x + start + first, x, 1.0, numel - first, 8, GROUPS, False, False)
    draws = draws_of((index0 + first) // 2, 0, *row_draws(key_low, key_high, site), GROUPS, 64)
    to = message + payload + 64 + first
    nonfinite, saturated = 0, 0
    for p in tl.static_range(2):
        signed = parts[p].to(tl.int32, bitcast=True)
        word = signed & 0x7FFFFFFF
        finite = word < 0x7F800000
        exponent = (tl.minimum(word, 0x7F800000) + (draws[p] << 7) + 64) >> 23
        nonfinite += tl.sum((finite == 0).to(tl.int32))
        steps = exponent - 18 - shift
        saturated += tl.sum(((steps > 127) & finite).to(tl.int32))
        magnitude = tl.minimum(tl.maximum(steps, 0), 127)
        code = tl.where(magnitude > 0, magnitude | ((signed >> 24) & 0x80), 0)
        at = tl.arange(0, GROUPS)[:, None] * 128 + p * 64 + tl.arange(0, 64)[None, :]
        tl.store(to + at, code.to(tl.uint8), mask=first + at < numel)
    count(message, payload, nonfinite, saturated)
    if piece == 0:
        tl.store((message + payload).to(tl.pointer_type(tl.int32)) + 2, shift)
    if first + GROUPS * 128 >= numel:
        zero_behind(message + payload + 64, numel, (numel + 63) // 64 * 64)


@triton.jit
def natural_values(message, y, pieces, rows, scale, SIZE: tl.constexpr, MODE: tl.constexpr):
    """The inverse of :func:`natural_codes`."""
    piece, start, numel, _index0, payload, _site = row_of(pieces, rows)
    at = piece * SIZE + tl.arange(0, SIZE)
    header = (message + payload).to(tl.pointer_type(tl.int32))
    nonfinite = tl.load(header) != 0
    lowest = tl.minimum(tl.maximum(tl.load(header + 2), -18), 109) + 18
    code = tl.load(message + payload + 64 + at, mask=at < numel, other=0).to(tl.int32)
    magnitude = code & 127
    bits = tl.where(magnitude == 0, 0, ((magnitude + lowest) << 23) | ((code >> 7) << 31))
    bits = tl.where(nonfinite, 0x7FC00000, bits)
    write(y, y, start + at, bits.to(tl.float32, bitcast=True), scale, at < numel, MODE)


def natural_encode(x: Tensor, table: Table, message: Tensor, *, key: int, shift: int = 0) -> None:
    """See :func:`thinwire.kernels.natural_encode`."""
    check_aligned(message)
    if not table.numel:
        return
    rows, launch = table.on(x.device), options(8)
    with on(x):
        pieces = table.pieces(x.device, ONE_A_ROW)
        float_headers[(len(pieces),)](message, message, pieces, rows, PARAMS=False, **launch)
        pieces = table.pieces(x.device, TILE)
        natural_codes[(len(pieces),)](x, message, pieces, rows, shift, *words(key), GROUPS=TILE // GROUP, **launch)


def natural_decode(message: Tensor, table: Table, y: Tensor, *, add: bool, scale: float) -> None:
    """See :func:`thinwire.kernels.natural_decode`."""
    check_aligned(message)
    if not table.numel:
        return
    with on(y):
        pieces = table.pieces(y.device, TILE)
        natural_values[(len(pieces),)](
            message, y, pieces, table.on(y.device), scale, SIZE=TILE, MODE=int(add), **options(8)
        )


# ---- Range floats -------------------------------------------------------------------------------------------------


@triton.jit
def range_of(largest, mantissa, BITS: tl.constexpr):
    """``p``, the shift 23 − m, and whether max (its bits) and m are valid."""
    valid = (mantissa >= 0) & (mantissa <= 22)
    shift = 23 - tl.where(valid, mantissa, 0)
    first = (largest >> shift) + (2 - (1 << (BITS - 1)))
    return first, shift, valid & (largest < 0x7F800000) & (first >= 1)


@triton.jit
def range_code(x, draws, largest, mantissa, first, shift, BITS: tl.constexpr, ROUNDING: tl.constexpr):
    """thinwire.kernels.reference_floats.rangefloat_codes; ``largest`` is the bits of max, and the format valid."""
    POSITIVES: tl.constexpr = (1 << (BITS - 1)) - 1
    signed = x.to(tl.int32, bitcast=True)
    word = tl.minimum(signed & 0x7FFFFFFF, largest)
    magnitude = word.to(tl.float32, bitcast=True)
    lowest = first << shift
    eps = lowest.to(tl.float32, bitcast=True)
    if ROUNDING == 0:
        step = word >> shift
        below = tl.zeros_like(word)
    elif ROUNDING == 1:
        step = (word + (1 << (shift - 1))) >> shift
        below = (magnitude >= eps * 0.5).to(tl.int32)
    else:
        up = tl.maximum(7 - mantissa, 0)
        step = (word + ((draws << up) >> tl.maximum(mantissa - 7, 0)) + ((1 << up) >> 1)) >> shift
        factor = tl.minimum(tl.div_rn(65536.0 + 0.0 * eps, eps), 3.4028234663852886e38)
        place = tl.minimum(magnitude * factor, 65536.0)  # beyond: not below eps
        below = (draws < place.to(tl.int32)).to(tl.int32)
    step = tl.minimum(step, first + (POSITIVES - 1))
    code = tl.where(word < lowest, below, step - first + 1)
    return tl.where((code > 0) & (signed < 0), code + POSITIVES, code)


@triton.jit(do_not_specialize=["key_low", "key_high"])
def range_codes(
    x, message, pieces, rows, key_low, key_high, BITS: tl.constexpr, GROUPS: tl.constexpr, ROUNDING: tl.constexpr
):
    """Codes of one tile, in the format that the header names."""
    piece, start, numel, index0, payload, site = row_of(pieces, rows)
    first_at = piece * (GROUPS * 128)
    left = numel - first_at
    header = (message + payload).to(tl.pointer_type(tl.int32))
    largest, mantissa = tl.load(header + 2), tl.load(header + 3)
    _first, _shift, valid = range_of(largest, mantissa, BITS)
    largest, mantissa = tl.where(valid, largest, 0x3F800000), tl.where(valid, mantissa, 22)
    first, shift, _valid = range_of(largest, mantissa, BITS)
    parts = load_parts(x + start + first_at, x, 1.0, left, BITS, GROUPS, False, False)
    k0, k1 = row_draws(key_low, key_high, site)
    PARTS: tl.constexpr = len(parts)
    HALF: tl.constexpr = PARTS // 2
    WIDTH: tl.constexpr = 128 // PARTS
    draws, behind = (), ()
    for p in tl.static_range(HALF):
        if ROUNDING == 2:
            one, other = draws_of((index0 + first_at) // 2, p, k0, k1, GROUPS, WIDTH)
        else:
            one, other = 0, 0
        draws += (one,)
        behind += (other,)
    draws += behind
    codes = ()
    nonfinite, saturated = 0, 0
    for p in tl.static_range(PARTS):
        word = parts[p].to(tl.int32, bitcast=True) & 0x7FFFFFFF
        finite = word < 0x7F800000
        nonfinite += tl.sum((finite == 0).to(tl.int32))
        saturated += tl.sum(((word > largest) & finite & valid).to(tl.int32))
        code = range_code(parts[p], draws[p], largest, mantissa, first, shift, BITS, ROUNDING)
        code = tl.where(finite, code, (1 << BITS) - 1)
        at = tl.arange(0, GROUPS)[:, None] * 128 + p * WIDTH + tl.arange(0, WIDTH)[None, :]
        codes += (tl.where(valid & (at < left), code, 0),)  # with a subnormal eps even 0 may have another code
    pack_parts(message + payload + 64 + piece * (GROUPS * 16 * BITS), codes, left, BITS, GROUPS, False)
    count(message, payload, nonfinite, saturated)
    if left <= GROUPS * 128:
        size = (numel + 127) // 128 * (16 * BITS)
        zero_behind(message + payload + 64, size, (size + 63) // 64 * 64)


@triton.jit
def range_values(
    message, y, pieces, rows, scale, BITS: tl.constexpr, GROUPS: tl.constexpr, MODE: tl.constexpr
):  # fmt: skip
    """Values of one tile; max and m come from the header."""
    POSITIVES: tl.constexpr = (1 << (BITS - 1)) - 1
    piece, start, numel, _index0, payload, _site = row_of(pieces, rows)
    first_at = piece * (GROUPS * 128)
    header = (message + payload).to(tl.pointer_type(tl.int32))
    first, shift, valid = range_of(tl.load(header + 2), tl.load(header + 3), BITS)
    packed = message + payload + 64 + piece * (GROUPS * 16 * BITS)
    parts = unpack_parts(packed, numel - first_at, BITS, GROUPS, False)
    PARTS: tl.constexpr = len(parts)
    WIDTH: tl.constexpr = 128 // PARTS
    for p in tl.static_range(PARTS):
        code = parts[p]
        negative = code > POSITIVES
        step = tl.where(negative, code - POSITIVES, code) + (first - 1)
        bits = ((step << shift) & 0x7FFFFFFF) | (negative.to(tl.int32) << 31)
        bits = tl.where(code == 0, 0, bits)
        bits = tl.where((code == (1 << BITS) - 1) | (valid == 0), 0x7FC00000, bits)
        at = first_at + tl.arange(0, GROUPS)[:, None] * 128 + p * WIDTH + tl.arange(0, WIDTH)[None, :]
        write(y, y, start + at, bits.to(tl.float32, bitcast=True), scale, at < numel, MODE)


def rangefloat_encode(
    x: Tensor, table: Table, message: Tensor, params: Tensor, *, bits: int, rounding: int, key: int
) -> None:
    """See :func:`thinwire.kernels.rangefloat_encode`."""
    check_aligned(message)
    if not table.numel:
        return
    rows, launch = table.on(x.device), options(bits)
    with on(x):
        pieces = table.pieces(x.device, ONE_A_ROW)
        float_headers[(len(pieces),)](message, params, pieces, rows, PARAMS=True, **launch)
        pieces = table.pieces(x.device, TILE)
        range_codes[(len(pieces),)](
            x, message, pieces, rows, *words(key), BITS=bits, GROUPS=TILE // GROUP, ROUNDING=rounding, **launch
        )


def rangefloat_decode(message: Tensor, table: Table, y: Tensor, *, bits: int, add: bool, scale: float) -> None:
    """See :func:`thinwire.kernels.rangefloat_decode`."""
    check_aligned(message)
    if not table.numel:
        return
    with on(y):
        pieces = table.pieces(y.device, TILE)
        range_values[(len(pieces),)](
            message, y, pieces, table.on(y.device), scale,
            BITS=bits, GROUPS=TILE // GROUP, MODE=int(add), **options(bits),
        )  # fmt: skip
