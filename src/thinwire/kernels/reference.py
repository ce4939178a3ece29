"""The specification of the kernels, in torch operations: every other execution gives the same bytes.

Also the fallback where no native core is built and no Triton runs. Takes fp32, bf16 and fp16 tensors (fp64 in tests)
on any device; the arithmetic is fp32 throughout, one rounding per operation.

A payload of n elements holds, for each of its ceil(n / bucket) buckets, ``lo`` and then, for all of them, ``unit``
(fp32, little-endian), zeros up to a multiple of 64 bytes, the codes in groups of 128 (:func:`pack`), and zeros up to a
multiple of 64 bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.kernels.layout import GROUP, codes_at, minmax_bytes, num_buckets
from thinwire.kernels.rng import random16, row_key
from thinwire.kernels.table import Row, Table

TINY_RANGE = 2.0**-100
"""A bucket whose range is smaller is received as its minimum: the inverse of such a range could overflow."""

ONE = 1 << 16
"""Positions between two codes are in 16-bit fixed point."""


def numerator(bits: int) -> float:
    """What the range divides to give the factor from value to 16.16 code.

    It lies 2^-22 below (2^bits − 1) · 2^16, so that rounding can never reach the code 2^bits and no clip is needed.
    Exactly representable in fp32 after one rounding.
    """
    return torch.tensor(((1 << bits) - 1) * ONE * (1.0 - 2.0**-22), dtype=torch.float32).item()


def scales(x: Tensor, *, bits: int, bucket: int) -> tuple[Tensor, Tensor, Tensor]:
    """``lo``, ``unit`` and the factor ``inverse`` of every bucket of the flat fp32 tensor ``x`` (not empty).

    NaN in ``lo`` and ``unit`` where the bucket holds NaN or Inf or its range overflows; ``inverse`` is 0 there and
    where the range is below 2^-100, so that all codes are 0.
    """
    bucket = min(bucket, x.numel())
    padding = num_buckets(x.numel(), bucket) * bucket - x.numel()
    padded = torch.cat((x, x[-1:].expand(padding))).view(-1, bucket)
    low, high = torch.aminmax(padded, dim=1)
    low, high = low + 0.0, high + 0.0  # −0 becomes +0: which of the two aminmax picks is not defined
    span = high - low
    bad = ~torch.isfinite(span)
    flat = bad | (span < TINY_RANGE)
    divisor = torch.where(flat, 1.0, span)
    unit = divisor / torch.full_like(divisor, (1 << bits) - 1)  # by a tensor: a scalar may become a reciprocal
    inverse = torch.full_like(divisor, numerator(bits)) / divisor
    nan = torch.full_like(span, torch.nan)
    unit = torch.where(bad, nan, torch.where(flat, 0.0, unit))
    return torch.where(bad, nan, low), unit, torch.where(flat, 0.0, inverse)


def per_element(value: Tensor, numel: int, bucket: int) -> Tensor:
    """The value of each element's bucket: shape (numel,)."""
    return value.repeat_interleave(min(bucket, numel))[:numel]


def quantise(x: Tensor, low: Tensor, inverse: Tensor, *, bucket: int, draws: Tensor | None) -> Tensor:
    """Codes (uint8) of the flat fp32 tensor ``x``: position in 16.16 fixed point plus 16 random bits or ½, cut off."""
    low, inverse = (per_element(v, x.numel(), bucket) for v in (low, inverse))
    distance = torch.where(inverse == 0, 0.0, x - low)
    position = (distance * inverse).to(torch.int32)
    return ((position + (ONE // 2 if draws is None else draws)) >> 16).to(torch.uint8)


def planes(bits: int) -> list[tuple[int, int]]:
    """The planes that carry codes of ``bits`` bits, as (width, lowest bit): 4, 2, 1 wide, low bits first."""
    found, low = [], 0
    for width in (8, 4, 2, 1):
        if bits & width:
            found.append((width, low))
            low += width
    return found


def pack(codes: Tensor, bits: int) -> Tensor:
    """Codes (uint8) to bytes: per group of 128, each plane of width w takes 16·w bytes.

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
    """The inverse of :func:`pack`: ``numel`` codes (uint8)."""
    groups = packed.view(-1, 16 * bits)
    codes = packed.new_zeros(groups.shape[0], GROUP)
    at = 0
    for width, low in planes(bits):
        byte = groups[:, at : at + 16 * width]
        field = torch.cat([(byte >> (k * width)) & ((1 << width) - 1) for k in range(8 // width)], dim=1)
        codes |= field << low
        at += 16 * width
    return codes.view(-1)[:numel]


def encode_row(x: Tensor, row: Row, *, bits: int, bucket: int, key: int, nearest: bool) -> Tensor:
    """The payload (uint8) of one segment; ``x`` holds its elements in fp32."""
    low, unit, inverse = scales(x, bits=bits, bucket=bucket)
    draws = None if nearest else random16(row.index0, x.numel(), *row_key(key, row.site), x.device)
    codes = quantise(x, low, inverse, bucket=bucket, draws=draws)
    payload = torch.zeros(minmax_bytes(x.numel(), bits=bits, bucket=bucket), dtype=torch.uint8, device=x.device)
    meta = torch.cat((low, unit)).view(torch.uint8)
    packed = pack(codes, bits)
    at = codes_at(x.numel(), bucket)
    payload[: meta.numel()] = meta
    payload[at : at + packed.numel()] = packed
    return payload


def decode_row(message: Tensor, row: Row, *, bits: int, bucket: int) -> Tensor:
    """The values (fp32) of one segment: ``lo + code · unit``, rounded after each of the two operations."""
    count = num_buckets(row.numel, bucket)
    meta = message[row.payload : row.payload + 8 * count].clone().view(torch.float32)
    at = row.payload + codes_at(row.numel, bucket)
    packed = message[at : at + -(-row.numel // GROUP) * 16 * bits]
    codes = unpack(packed, row.numel, bits).to(torch.float32)
    low, unit = (per_element(v, row.numel, bucket) for v in (meta[:count], meta[count:]))
    return low + codes * unit


def minmax_encode(
    x: Tensor, table: Table, message: Tensor, *, bits: int, bucket: int, key: int, nearest: bool = False
) -> None:
    """See :func:`thinwire.kernels.minmax_encode`."""
    for row in table.segments:
        if row.numel:
            values = x[row.start : row.start + row.numel].to(torch.float32)
            payload = encode_row(values, row, bits=bits, bucket=bucket, key=key, nearest=nearest)
            message[row.payload : row.payload + payload.numel()] = payload


def minmax_decode(
    message: Tensor,
    table: Table,
    y: Tensor,
    *,
    bits: int,
    bucket: int,
    add: bool = False,
    scale: float = 1.0,
) -> None:
    """See :func:`thinwire.kernels.minmax_decode`."""
    for row in table.segments:
        if row.numel:
            out = y[row.start : row.start + row.numel]
            value = scaled(decode_row(message, row, bits=bits, bucket=bucket), scale)
            out.copy_(out.to(torch.float32) + value if add else value)


def minmax_sum(
    messages: Sequence[Tensor],
    own: Tensor | None,
    table: Table,
    y: Tensor,
    *,
    bits: int,
    bucket: int,
    scale: float = 1.0,
) -> None:
    """See :func:`thinwire.kernels.minmax_sum`."""
    for row in table.segments:
        if row.numel:
            total = sum_row(messages, own, row, y.device, bits=bits, bucket=bucket)
            y[row.start : row.start + row.numel] = scaled(total, scale).to(y.dtype)


def minmax_reduce(
    messages: Sequence[Tensor],
    own: Tensor,
    table: Table,
    out_message: Tensor,
    y: Tensor,
    *,
    bits: int,
    bucket: int,
    scale: float,
    key: int,
    nearest: bool = False,
) -> None:
    """See :func:`thinwire.kernels.minmax_reduce`."""
    for row in table.segments:
        if row.numel:
            mean = scaled(sum_row(messages, own, row, y.device, bits=bits, bucket=bucket), scale)
            payload = encode_row(mean, row, bits=bits, bucket=bucket, key=key, nearest=nearest)
            out_message[row.payload : row.payload + payload.numel()] = payload
            y[row.start : row.start + row.numel] = decode_row(out_message, row, bits=bits, bucket=bucket).to(y.dtype)


def sum_row(
    messages: Sequence[Tensor], own: Tensor | None, row: Row, device: torch.device, *, bits: int, bucket: int
) -> Tensor:
    """``own`` (or 0) plus the decoded messages in the order given, fp32."""
    if own is None:
        total = torch.zeros(row.numel, dtype=torch.float32, device=device)
    else:
        total = own[row.start : row.start + row.numel].to(torch.float32)
    for message in messages:
        total = total + decode_row(message, row, bits=bits, bucket=bucket)
    return total


def scaled(value: Tensor, scale: float) -> Tensor:
    """``value · scale`` with the scale rounded to fp32 first."""
    return value * torch.full_like(value[:1], scale)


def checksum(message: Tensor) -> int:
    """See :func:`thinwire.kernels.checksum`."""
    words = message.clone().view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    weights = 2 * torch.arange(words.numel(), device=words.device) + 1
    return int((words * weights).sum().item()) % (1 << 64)
