"""Norms of integers with the same bits on every machine."""

from __future__ import annotations

import torch
from torch import Tensor

_RUN = 1 << 18
_SHORT = 1 << 16
"""Fewer elements are added up in one call, in int64."""
_EXACT = 1 << 10
"""So many squares of int8 values add up to less than 2^24, which fp32 holds exactly."""


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
        if run.numel() < _SHORT:
            wide = run.to(torch.int32)
            total += wide.mul_(wide).sum()
            continue
        square = run.to(torch.float32)
        square.mul_(square)
        whole = run.numel() // _EXACT * _EXACT
        total += square[:whole].view(-1, _EXACT).sum(1).sum(dtype=torch.float64)
        total += square[whole:].sum(dtype=torch.float64)
    return total
