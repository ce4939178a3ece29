"""The specification of the kernels, in torch operations: every other execution gives the same bytes.

Also the fallback where no native core is built and no Triton runs. Takes fp32, bf16 and fp16 tensors (fp64 in tests)
on any device; the arithmetic is fp32 throughout, one rounding per operation, but for sums (:func:`lane_sums`).

A payload of n elements has the scales of its ceil(n / bucket) buckets: ``lo`` of all of them, then ``unit`` of all,
or ``unit`` alone where the format has one scale (fp32, little-endian); zeros up to a multiple of 64 bytes; the codes in
groups of 128 (:func:`pack`), and zeros up to a multiple of 64 bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from thinwire.kernels.format import (
    GROUP,
    Format,
    Residual,
    before_sum,
    bucketed_bytes,
    code_bytes,
    codes_at,
    num_buckets,
)
from thinwire.kernels.rng import random16, row_key
from thinwire.kernels.table import Row, Table

TINY_RANGE = 2.0**-100
"""Range, or a, below which it counts as zero: its inverse could overflow. Values become the one nearest to zero."""

ONE = 1 << 16
"""Number of positions between two codes, in 16-bit fixed point."""

CHECKED = 1 << 22
"""Number of words that a checksum takes at a time."""

LANES = 16
"""Number of lanes in which sums are taken."""


class Scales(NamedTuple):
    """Scales of every bucket, fp32. A NaN in ``unit`` (and ``low``, where it is sent) makes the bucket decode to
    NaN."""

    low: Tensor
    """The number subtracted before coding: the minimum, or 0 for codes on both sides of zero."""
    unit: Tensor
    inverse: Tensor
    """Factor from value to 16.16 code; 0 where all of a bucket gets one code."""


def numerator(steps: int) -> float:
    """Return the number that a range of ``steps`` units divides to give the factor from value to 16.16 code.

    It lies 2^-22 below steps · 2^16, so that rounding can never reach one more code and no clip is needed.
    Exactly representable in fp32 after one rounding.
    """
    return torch.tensor(steps * ONE * (1.0 - 2.0**-22), dtype=torch.float32, device="cpu").item()


def scales(x: Tensor, form: Format) -> Scales:
    """Return the scales of every bucket of the flat fp32 tensor ``x`` (not empty)."""
    if form.scheme == "minmax":
        low, high = torch.aminmax(bucket_rows(x, form.bucket, fill=x[-1]), dim=1)
        low, high = low + 0.0, high + 0.0  # −0 becomes +0: which of the two aminmax picks is not defined
        span = high - low
        low = torch.where(span < TINY_RANGE, nearest_to_zero(low, high), low)
        return _ranged(low, span, form, bad=~torch.isfinite(span))
    if form.scheme == "sides":
        low, high = _sides(x, form.bucket)
        unit = high - low
        bad = ~torch.isfinite(unit)
        return Scales(_or_nan(low, bad), _or_nan(unit, bad), torch.zeros_like(unit))
    if form.scheme == "sign":
        mean = lane_sums(x.abs(), form.bucket) / bucket_counts(x, form.bucket)
        unit = (2.0 * mean).to(torch.float32)
        return Scales(torch.zeros_like(unit), _or_nan(unit, ~torch.isfinite(unit)), torch.zeros_like(unit))
    largest = _largest(x, form)
    ranged = _ranged(torch.zeros_like(largest), largest, form, bad=~torch.isfinite(largest))
    bad = ~torch.isfinite(ranged.unit * torch.full_like(ranged.unit, form.max_code))  # what decoding would overflow
    return Scales(ranged.low, _or_nan(ranged.unit, bad), torch.where(bad, 0.0, ranged.inverse))


def _ranged(low: Tensor, span: Tensor, form: Format, *, bad: Tensor) -> Scales:
    """Return the scales with ``unit`` and ``inverse`` of ``form.steps`` steps over ``span``."""
    flat = bad | (span < TINY_RANGE)
    divisor = torch.where(flat, 1.0, span)
    unit = divisor / torch.full_like(divisor, form.steps)  # by a tensor: a scalar may become a reciprocal
    inverse = torch.full_like(divisor, numerator(form.steps)) / divisor
    unit, inverse = (torch.where(flat, 0.0, v) for v in (unit, inverse))
    return Scales(_or_nan(low, bad) if form.num_scales == 2 else low, _or_nan(unit, bad), inverse)


def nearest_to_zero(low: Tensor, high: Tensor) -> Tensor:
    """Return the value between ``low`` and ``high`` that is nearest to zero: no error is then larger than its value."""
    return torch.where(low > 0, low, torch.where(high < 0, high, 0.0))


def _largest(x: Tensor, form: Format) -> Tensor:
    """Return a of every bucket: the value of the outermost code, or the end of the outermost interval."""
    if form.scheme == "norm":
        return lane_sums(x.double().square(), form.bucket).sqrt().to(torch.float32)
    largest = bucket_rows(x.abs(), form.bucket).amax(dim=1)
    if not form.clip:
        return largest
    mean = lane_sums(x.double().square(), form.bucket) / bucket_counts(x, form.bucket)
    bound = mean.sqrt().to(torch.float32) * torch.full_like(largest, form.clip)
    return torch.where(torch.isfinite(largest), torch.minimum(largest, bound), largest)


def _sides(x: Tensor, bucket: int) -> tuple[Tensor, Tensor]:
    """Return the means of the negative values and of the others; a side that is empty takes the other's."""
    upper = x >= 0
    counts = bucket_counts(x, bucket)
    above = bucket_rows(upper.double(), bucket).sum(dim=1)
    low = lane_sums(torch.where(upper, 0.0, x), bucket) / (counts - above)
    high = lane_sums(torch.where(upper, x, 0.0), bucket) / above
    low, high = torch.where(above == counts, high, low), torch.where(above == 0, low, high)
    return low.to(torch.float32), high.to(torch.float32)


def _or_nan(value: Tensor, bad: Tensor) -> Tensor:
    return torch.where(bad, torch.nan, value)


def bucket_rows(x: Tensor, bucket: int, fill: Tensor | float = 0.0) -> Tensor:
    """Return the values as rows of one bucket each, the last one completed with ``fill``."""
    bucket = min(bucket, x.numel())
    padded = torch.empty(num_buckets(x.numel(), bucket) * bucket, dtype=x.dtype, device=x.device)
    padded[: x.numel()] = x
    padded[x.numel() :] = fill
    return padded.view(-1, bucket)


def bucket_counts(x: Tensor, bucket: int) -> Tensor:
    """Return the number of elements of every bucket, fp64."""
    counts = x.new_full((num_buckets(x.numel(), bucket),), min(bucket, x.numel()), dtype=torch.float64)
    counts[-1] = x.numel() - (counts.numel() - 1) * min(bucket, x.numel())
    return counts


def lane_sums(x: Tensor, bucket: int) -> Tensor:
    """Return the sum of every bucket, fp64, in an order that all executions keep: element i of a bucket is added to
    lane i % 16, one after the other; then lane j takes lane j + 8, then j + 4, j + 2, and j + 1.
    """
    rows = bucket_rows(x.double(), bucket)
    steps = -(-rows.shape[1] // LANES)
    padded = torch.nn.functional.pad(rows, (0, steps * LANES - rows.shape[1])).view(-1, steps, LANES)
    lanes = torch.zeros_like(padded[:, 0])
    for step in padded.unbind(1):
        lanes = lanes + step
    for width in (8, 4, 2, 1):
        lanes = lanes[:, :width] + lanes[:, width:]
    return lanes[:, 0]


def sent_low(scales: Scales, form: Format, k0: int) -> Tensor:
    """Return ``lo`` as it is sent: with rounding "shift", moved by as much as the lattice is, −½ to ½ units."""
    if form.rounding != "shift":
        return scales.low
    return scales.low + scales.unit * torch.full_like(scales.unit, 0.5 - (k0 & 0xFFFF) / ONE)


def per_element(value: Tensor, numel: int, bucket: int) -> Tensor:
    """Return the value of each element's bucket: shape (numel,)."""
    return value.repeat_interleave(min(bucket, numel))[:numel]


def quantize(x: Tensor, scales: Scales, form: Format, noise: Tensor | int) -> Tensor:
    """Return codes (uint8) of the flat fp32 tensor ``x``: 16.16 positions plus ``noise`` (16 bits), cut off.

    Buckets that decode to NaN have codes 0.
    """
    low, unit, inverse = (per_element(v, x.numel(), form.bucket) for v in scales)
    if form.scheme in ("sides", "sign"):
        codes = (x >= 0).to(torch.uint8)
    else:
        position = torch.where(inverse == 0, 0.0, x - low) * inverse
        middle = 0
        if form.offset >= 0:
            middle = int(form.offset * ONE)
            position = position.clamp(-middle, middle)
        codes = ((position.to(torch.int32) + middle + noise) >> 16).to(torch.uint8)
    return torch.where(torch.isnan(unit), 0, codes)


def noise16(form: Format, row: Row, numel: int, key: int, device: torch.device) -> Tensor | int:
    """Return the noise that is added to positions, in units of 2^-16 codes, before they are cut off."""
    k0, k1 = row_key(key, row.site)
    if form.rounding == "stochastic":
        return random16(row.index0, numel, k0, k1, device)
    return ONE // 2 if form.rounding == "nearest" else k0 & 0xFFFF


def planes(bits: int) -> list[tuple[int, int]]:
    """Return the planes that carry codes of ``bits`` bits, as (width, lowest bit): 4, 2, 1 wide, low bits first."""
    widths, low = [], 0
    for width in (8, 4, 2, 1):
        if bits & width:
            widths.append((width, low))
            low += width
    return widths


def pack(codes: Tensor, bits: int) -> Tensor:
    """Pack codes (uint8) into bytes: per group of 128, each plane of width w takes 16·w bytes.

    Byte j of a plane holds the field of code j + 16·w·k at bits k·w, for all k. Missing codes of the last group are 0.
    """
    groups = -(-codes.numel() // GROUP)
    padded = codes.new_zeros(groups * GROUP)
    padded[: codes.numel()] = codes
    packed = []
    for width, low in planes(bits):
        field = ((padded >> low) & ((1 << width) - 1)).view(groups, 8 // width, 16 * width)
        byte = torch.zeros_like(field[:, 0])
        for k in range(8 // width):
            byte |= field[:, k] << (k * width)
        packed.append(byte)
    return torch.cat(packed, dim=1).view(-1)


def unpack(packed: Tensor, numel: int, bits: int) -> Tensor:
    """Invert :func:`pack`: return ``numel`` codes (uint8), with which ``packed`` begins."""
    groups = packed[: code_bytes(numel, bits)].view(-1, 16 * bits)
    codes = packed.new_zeros(groups.shape[0], GROUP)
    at = 0
    for width, low in planes(bits):
        byte = groups[:, at : at + 16 * width]
        field = torch.cat([(byte >> (k * width)) & ((1 << width) - 1) for k in range(8 // width)], dim=1)
        codes |= field << low
        at += 16 * width
    return codes.view(-1)[:numel]


def encode_row(x: Tensor, row: Row, form: Format, *, key: int) -> Tensor:
    """Return the payload (uint8) of one segment; ``x`` contains its elements in fp32."""
    row_scales = scales(x, form)
    codes = quantize(x, row_scales, form, noise16(form, row, x.numel(), key, x.device))
    payload = torch.zeros(bucketed_bytes(x.numel(), form), dtype=torch.uint8, device=x.device)
    sent = (sent_low(row_scales, form, row_key(key, row.site)[0]), row_scales.unit)[-form.num_scales :]
    meta = torch.cat(sent).view(torch.uint8)
    packed = pack(codes, form.bits)
    at = codes_at(x.numel(), form)
    payload[: meta.numel()] = meta
    payload[at : at + packed.numel()] = packed
    return payload


def decode_row(message: Tensor, row: Row, form: Format) -> Tensor:
    """Return the values (fp32) of one segment: ``lo + code · unit``, rounded after each of the two operations.

    With one scale, ``lo = −(offset · unit)``, so that the code ``offset`` is received as 0.
    """
    count = num_buckets(row.numel, form.bucket)
    meta = message[row.payload : row.payload + 4 * form.num_scales * count].clone().view(torch.float32)
    unit = meta[-count:]
    low = meta[:count] if form.num_scales == 2 else -(torch.full_like(unit, form.offset) * unit)
    codes = unpack(message[row.payload + codes_at(row.numel, form) :], row.numel, form.bits).to(torch.float32)
    low, unit = (per_element(v, row.numel, form.bucket) for v in (low, unit))
    return low + codes * unit


def send_row(values: Tensor, row: Row, message: Tensor, form: Format, *, key: int, residual: Residual | None) -> Tensor:
    """Put the payload of a segment with these values (fp32) into ``message``; return the values that it decodes to."""
    if residual is not None:
        values = values + scaled(residual.now[row.elements], residual.loss_scale)
    payload = encode_row(values, row, form, key=key)
    message[row.payload : row.payload + payload.numel()] = payload
    decoded = decode_row(message, row, form)
    if residual is not None:
        residual.next[row.elements] = (values - decoded) / torch.full_like(values, residual.loss_scale)
    return decoded


def bucketed_encode(
    x: Tensor, table: Table, message: Tensor, form: Format, *, key: int, residual: Residual | None = None
) -> None:
    """See :func:`thinwire.kernels.bucketed_encode`."""
    for _, row in table.filled:
        values = x[row.elements].to(torch.float32)
        send_row(values, row, message, form, key=key, residual=residual)


def bucketed_decode(
    message: Tensor, table: Table, y: Tensor, form: Format, *, add: bool = False, scale: float = 1.0
) -> None:
    """See :func:`thinwire.kernels.bucketed_decode`."""
    for _, row in table.filled:
        write(decode_row(message, row, form), row, y, add, scale)


def bucketed_sum(
    messages: Sequence[Tensor], own: Tensor | None, table: Table, y: Tensor, form: Format, *, scale: float = 1.0
) -> None:
    """See :func:`thinwire.kernels.bucketed_sum`."""
    for _, row in table.filled:
        total = sum_row(messages, own, row, y.device, form, scale=scale)
        y[row.elements] = total.to(y.dtype)


def bucketed_reduce(
    messages: Sequence[Tensor],
    own: Tensor,
    table: Table,
    out_message: Tensor,
    y: Tensor,
    form: Format,
    *,
    scale: float,
    key: int,
    residual: Residual | None = None,
) -> None:
    """See :func:`thinwire.kernels.bucketed_reduce`."""
    for _, row in table.filled:
        mean = sum_row(messages, own, row, y.device, form, scale=scale)
        decoded = send_row(mean, row, out_message, form, key=key, residual=residual)
        y[row.elements] = decoded.to(y.dtype)


def sum_row(
    messages: Sequence[Tensor], own: Tensor | None, row: Row, device: torch.device, form: Format, *, scale: float
) -> Tensor:
    """Return ``scale`` times the sum of ``own`` (or 0) and the decoded messages, added in the order given, fp32."""
    before = before_sum(scale)
    if own is None:
        total = torch.zeros(row.numel, dtype=torch.float32, device=device)
    else:
        total = own[row.elements].to(torch.float32) * before
    for message in messages:
        total = total + decode_row(message, row, form) * before
    return scaled(total, scale / before)


def scaled(value: Tensor, scale: float) -> Tensor:
    """Return ``value · scale`` with the scale rounded to fp32 first."""
    return value * torch.full_like(value[:1], scale)


def write(values: Tensor, row: Row, y: Tensor, add: bool, scale: float) -> None:
    """Set the row's elements of ``y`` to ``values · scale``, or add that."""
    out, values = y[row.elements], scaled(values, scale)
    out.copy_(out.to(torch.float32) + values if add else values)


def checksum(message: Tensor) -> int:
    """See :func:`thinwire.kernels.checksum`."""
    total = torch.zeros((), dtype=torch.int64, device=message.device)
    at = 0
    for part in message.split(4 * CHECKED):  # or the integers would take many times the memory of the message
        words = part.clone().view(torch.int32).to(torch.int64) & 0xFFFFFFFF
        total += (words * (2 * torch.arange(at, at + words.numel(), dtype=torch.int64, device=words.device) + 1)).sum()
        at += words.numel()
    return int(total) % (1 << 64)


def raw_encode(x: Tensor, table: Table, message: Tensor) -> None:
    """See :func:`thinwire.kernels.raw_encode`."""
    for values, payload in _views(x, table, message):
        payload.copy_(values)


def raw_decode(message: Tensor, table: Table, y: Tensor, *, add: bool = False, scale: float = 1.0) -> None:
    """See :func:`thinwire.kernels.raw_decode`."""
    wide = torch.promote_types(y.dtype, torch.float32)
    for values, payload in _views(y, table, message):
        if add:
            values.copy_(values.to(wide) + payload.to(wide) * scale)
        elif scale == 1.0:
            values.copy_(payload)
        else:
            torch.mul(payload, scale, out=values)


def raw_sum(
    messages: Sequence[Tensor], own: Tensor, table: Table, y: Tensor, *, scale: float, out_message: Tensor | None = None
) -> None:
    """See :func:`thinwire.kernels.raw_sum`."""
    wide = torch.promote_types(own.dtype, torch.float32)
    payloads = [[payload for _, payload in _views(y, table, message)] for message in messages]
    before = before_sum(scale)
    for i, row in enumerate(table.segments):
        total = own[row.elements].to(wide, copy=True).mul_(before)
        for received in payloads:
            total.add_(received[i].to(wide) * before)
        y[row.elements].copy_(total.mul_(scale / before))
    if out_message is not None:
        raw_encode(y, table, out_message)


def rows_add(x: Tensor, other: Tensor, table: Table, out: Tensor, *, alpha: float = 1.0) -> None:
    """See :func:`thinwire.kernels.rows_add`."""
    wide = torch.promote_types(torch.promote_types(x.dtype, other.dtype), torch.float32)
    for row in table.segments:
        # Rounded twice: with alpha=, an addition of PyTorch's may be fused with the product.
        out[row.elements] = x[row.elements].to(wide) + other[row.elements].to(wide) * alpha


def rows_scale(x: Tensor, table: Table, out: Tensor, *, by: float = 1.0, over: float = 1.0) -> None:
    """See :func:`thinwire.kernels.rows_scale`."""
    for values, to in ((x[row.elements], out[row.elements]) for row in table.segments):
        if by != 1.0:
            torch.mul(values.to(torch.float32), by, out=to)
        elif over != 1.0:
            torch.div(values, over, out=to)
        else:
            to.copy_(values)


def _views(values: Tensor, table: Table, message: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    for row in table.segments:
        payload = message[row.payload : row.payload + row.numel * values.element_size()]
        yield values[row.elements], payload.view(values.dtype)
