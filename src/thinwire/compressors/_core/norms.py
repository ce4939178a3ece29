"""Norms with the same bits on every machine."""

from __future__ import annotations

import torch
from torch import Tensor

_LANES = 1 << 16
"""Elements that are summed side by side: so many fp64 values, twice, fit into the cache of a core."""
_RUN = 1 << 18
_EXACT = 1 << 10
"""So many squares of int8 values add up to less than 2^24, which fp32 holds exactly."""


def square_sum(x: Tensor) -> Tensor:
    """``‖x‖²`` in fp64, a scalar on the device of ``x``.

    Products and sums are separate operations in an order that depends only on the number of elements, not on threads,
    vector width or a BLAS.
    """
    flat = x.reshape(-1)
    count = 1 << max(0, min(flat.numel(), _LANES) - 1).bit_length()
    lanes = torch.zeros(count, dtype=torch.float64, device=x.device)
    wide = torch.empty_like(lanes)
    for run in flat.split(count):
        square = wide[: run.numel()].copy_(run)
        lanes[: run.numel()].add_(square.mul_(square))
    while count > 1:
        count //= 2
        lanes[:count] += lanes[count : 2 * count]
    return lanes[0]


def integer_square_sum(q: Tensor) -> Tensor:
    """``‖q‖²`` of a flat int8 or int32 tensor, exact but for its last roundings to fp64: a scalar."""
    if q.dtype == torch.int8:
        return _int8_square_sum(q)
    high, cross, low = torch.zeros(3, dtype=torch.int64, device=q.device)
    for run in q.split(_RUN):
        wide = run.to(torch.int64)
        top, bottom = wide >> 16, wide & 0xFFFF
        high += (top * top).sum()
        cross += (top * bottom).sum()
        low += (bottom * bottom).sum()
    return high.double() * 2.0**32 + cross.double() * 2.0**17 + low.double()


def _int8_square_sum(q: Tensor) -> Tensor:
    total = torch.zeros((), dtype=torch.float64, device=q.device)
    for run in q.split(_RUN):
        if run.numel() < _LANES:
            wide = run.to(torch.int32)
            total += wide.mul_(wide).sum()
            continue
        square = run.to(torch.float32)
        square.mul_(square)
        whole = run.numel() // _EXACT * _EXACT
        total += square[:whole].view(-1, _EXACT).sum(1).sum(dtype=torch.float64)
        total += square[whole:].sum(dtype=torch.float64)
    return total
