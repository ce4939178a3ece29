"""Inputs, tables and comparisons that the kernel tests share."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.kernels import Format, Table
from thinwire.kernels.format import ROUNDINGS

BUCKETS = (1, 3, 64, 100, 128, 192, 1000, 1024, 4096, 20_000, 2**40)
SIZES = (0, 1, 5, 63, 64, 65, 127, 128, 129, 1000, 2048, 2049, 5000)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def kinds(bits: int, bucket: int) -> list[Format]:
    """Every scheme, rounding and option that there is at this width."""
    made = [Format(bits, bucket, rounding=rounding) for rounding in ROUNDINGS]
    made += [Format(bits, bucket, "maxabs", midrise=True, clip=clip) for clip in (0.0, 0.9)]
    made.append(Format(bits, bucket, "maxabs", "nearest", midrise=True))
    if bits == 1:
        made += [Format(1, bucket, "sides"), Format(1, bucket, "sign")]
        return made
    for rounding in ("stochastic", "nearest"):
        made += [Format(bits, bucket, "maxabs", rounding, clip=clip) for clip in (0.0, 2.5)]
        made.append(Format(bits, bucket, "norm", rounding))
    made += [Format(bits, bucket, scheme, levels=1) for scheme in ("maxabs", "norm")]
    return made


def table(sizes: Iterable[int], form: Format, *, gap: int = 1) -> Table:
    """Segments of these sizes, each of its own layer and at another index in it, with gaps between all of them."""
    rows, start, payload = [], gap, 64 * gap
    for i, numel in enumerate(sizes):
        index0 = i * kernels.bucketed_grain(form.bucket) if form.bucket < 2**20 else 0
        rows.append((start, numel, index0, payload, kernels.site_id(f"layer{i}")))
        start += numel + gap
        payload += kernels.bucketed_bytes(numel, form) + 64 * gap
    return Table(torch.tensor(rows, dtype=torch.int64).view(-1, 5))


def one(numel: int, *, index0: int = 0, site: int = 7) -> Table:
    """A single segment that fills its tensor and its message."""
    return Table(torch.tensor([[0, numel, index0, 0, site]]))


def values(numel: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Values like a gradient's: normal, with scales that differ from place to place."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(numel, generator=generator)
    return (x * torch.exp(torch.randn(numel, generator=generator))).to(dtype)


def special(numel: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Ordinary values with runs of NaN, infinity, zeros of both signs, subnormals, constants and extremes between."""
    x = values(numel, seed, dtype)
    largest = torch.finfo(dtype).max
    runs = [torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 1e-42, 3.0, largest, -largest, 1e-31, torch.finfo(dtype).tiny]
    for i, value in enumerate(runs):
        at = (2 * i + 1) * numel // (2 * len(runs) + 1)
        x[at : at + (1 if i % 3 == 0 else 150)] = value
    return x


def message(spans: Table, form: Format, *, fill: int = 0xAB) -> Tensor:
    """A message as large as the table needs, and a little more, full of what must not be read."""
    return torch.full((spans.extent(form) + 64,), fill, dtype=torch.uint8)


def same(a: Tensor, b: Tensor) -> bool:
    """Whether all bits are equal, where a NaN equals any NaN."""
    integer = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}[a.element_size()]
    if not a.is_floating_point():
        return torch.equal(a, b)
    nan = torch.isnan(a)
    zeroed = [torch.where(nan, 0.0, v).view(integer) for v in (a, b)]
    return torch.equal(nan, torch.isnan(b)) and torch.equal(*zeroed)
