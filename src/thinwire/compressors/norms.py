"""Norms that are the same bits on every machine."""

from __future__ import annotations

import torch
from torch import Tensor

_LANES = 1 << 16
"""Elements. Two lanes' worth of fp64 stay in a core's cache."""


def square_sum(x: Tensor) -> Tensor:
    """``‖x‖²`` in fp64, a scalar on the device of ``x``.

    Products and sums are separate element-wise operations in an order that depends on the number of elements alone: not
    on threads, vector width or a BLAS. Of integers it is exact as long as it stays below 2^53.
    """
    flat = x.reshape(-1)
    count = 1 << max(0, min(flat.numel(), _LANES) - 1).bit_length()
    lanes = torch.zeros(count, dtype=torch.float64, device=x.device)
    for run in flat.split(count):
        wide = run.to(torch.float64, copy=True)
        lanes[: run.numel()] += wide.mul_(wide)
    while count > 1:
        count //= 2
        lanes[:count] += lanes[count : 2 * count]
    return lanes[0]
