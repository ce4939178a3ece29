"""Norms and sketches with the same bits on every machine.

Products and sums are separate operations in an order that depends only on the number of elements, not on threads,
vector width or a BLAS. The native core and PyTorch's operations agree bit for bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.kernels import native

_SQUARE_LANES = 1 << 16
"""Elements that are summed side by side: so many fp64 values, twice, fit into the cache of a core."""


def square_sum(x: Tensor) -> Tensor:
    """Return ``‖x‖²`` in fp64, a scalar on the device of ``x``."""
    flat = x.reshape(-1)
    count = power_of_two(min(flat.numel(), _SQUARE_LANES))
    if flat.dtype is torch.float32 and native.computes(flat):
        total = native.core().square_sum(flat.data_ptr(), flat.numel(), count)
        return torch.tensor(total, dtype=torch.float64)
    lanes = torch.zeros(count, dtype=torch.float64, device=x.device)
    wide = torch.empty_like(lanes)
    for run in flat.split(count):
        square = wide[: run.numel()].copy_(run)
        lanes[: run.numel()].add_(square.mul_(square))
    while count > 1:
        count //= 2
        lanes[:count] += lanes[count : 2 * count]
    return lanes[0]


def signed_sums(vector: Tensor, runs: Tensor, order: Tensor, signs: Tensor, size: int) -> Tensor:
    """Return ``size`` sums of the elements of a flat ``vector``, each with a sign, in fp64: a count sketch.

    Args:
        vector: fp32, bf16 or fp16. It is added up in as many lanes as ``order`` has, in fp32.
        runs: int64 on the CPU, [runs, 2]: of every run of so many elements a sign and the lane of its first element;
            the next elements are in the next lanes, and after the last comes the first one.
        order: int64, the lanes as they are halved until ``size`` are left; a power of two, as ``size`` is.
        signs: fp32, of each lane.
    """
    lanes = len(order)
    if vector.dtype is torch.float32 and vector.is_contiguous() and native.computes(vector):
        out = torch.empty(min(size, lanes), dtype=torch.float64)
        tables = runs.data_ptr(), order.data_ptr(), signs.data_ptr()
        native.core().sketch(vector.data_ptr(), vector.numel(), lanes, len(out), *tables, out.data_ptr())
        return out
    sums = torch.zeros(lanes, dtype=torch.float32, device=vector.device)
    for number, (sign, shift) in enumerate(runs.tolist()):
        run = vector[number * lanes : (number + 1) * lanes]
        first = min(run.numel(), lanes - shift)
        sums[shift : shift + first].add_(run[:first], alpha=sign)
        sums[: run.numel() - first].add_(run[first:], alpha=sign)
    mixed = sums.mul_(signs)[order]
    while lanes > size:
        lanes //= 2
        mixed = mixed[:lanes] + mixed[lanes : 2 * lanes]
    return mixed.double()


def power_of_two(number: int) -> int:
    """Return the smallest power of two that is at least ``number``."""
    return 1 << max(0, number - 1).bit_length()
