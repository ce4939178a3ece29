"""Norms and sketches with the same bits on every machine.

Products and sums are separate operations in an order that depends only on the number of elements, not on threads,
vector width or a BLAS. The native core and PyTorch's operations agree bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from thinwire.kernels import native

_SQUARE_LANES = 1 << 16
"""Number of elements that are summed side by side, in few operations for many elements: 8 bytes each, twice."""


class SignedSum(NamedTuple):
    """Lanes and signs with which :func:`signed_sums` adds up the elements of a vector."""

    runs: Tensor
    """Sign of every run of as many elements as there are lanes, and the lane of its first element: the next ones are in
    the next lanes, and after the last one follows the first. (runs, 2), int64, on the CPU."""
    order: Tensor
    """Order (int64) in which the lanes are halved until ``size`` are left: a power of two, as ``size`` is."""
    signs: Tensor
    """Sign of each lane, fp32."""
    size: int


def square_sums(vectors: Sequence[Tensor]) -> Tensor:
    """Return ``‖x‖²`` of tensors of any shape on one device: [tensors], fp64."""
    flat = [x.reshape(-1) for x in vectors]
    if not flat or not _computed_natively(flat):
        none = torch.zeros(0, dtype=torch.float64, device="cpu")
        return torch.stack([_square_sum(x) for x in flat]) if flat else none
    out = torch.empty(len(flat), dtype=torch.float64, device="cpu")
    arguments: list[int] = []
    to = native.address("out", out, torch.float64, len(flat))
    for i, x in enumerate(flat):
        numel = x.numel()
        given = native.address("each vector", x, torch.float32, numel)
        arguments += (given, numel, power_of_two(min(numel, _SQUARE_LANES)), to + 8 * i)
    native.core().square_sums(*arguments)
    return out


def signed_sums(vectors: Sequence[Tensor], ways: Sequence[SignedSum]) -> Tensor:
    """Return the sums of the elements of flat vectors, each element with a sign: count sketches, end to end, fp64.

    Each vector is added up in fp32, in its own way; its sketch has ``size`` values.
    """
    if not vectors or not _computed_natively(vectors):
        sums = [_signed_sum(vector, way) for vector, way in zip(vectors, ways, strict=True)]
        return torch.cat(sums) if sums else torch.zeros(0, dtype=torch.float64, device="cpu")
    out = torch.empty(sum(way.size for way in ways), dtype=torch.float64, device="cpu")
    arguments: list[int] = []
    to = native.address("out", out, torch.float64, out.numel())
    for vector, way in zip(vectors, ways, strict=True):
        numel, lanes = vector.numel(), len(way.order)
        if lanes * len(way.runs) < numel:
            raise ValueError(f"{len(way.runs)} runs of {lanes} elements are fewer than a vector's {numel}")
        given = native.address("each vector", vector, torch.float32, numel)
        runs = native.address("runs", way.runs, torch.int64, 2 * len(way.runs))
        order = native.address("order", way.order, torch.int64, lanes)
        signs = native.address("signs", way.signs, torch.float32, lanes)
        arguments += (given, numel, lanes, way.size, runs, order, signs, to)
        to += 8 * way.size
    native.core().sketches(*arguments)
    return out


def power_of_two(number: int) -> int:
    """Return the smallest power of two that is at least ``number``."""
    return 1 << max(0, number - 1).bit_length()


def _computed_natively(vectors: Sequence[Tensor]) -> bool:
    return all(x.dtype is torch.float32 and x.is_contiguous() for x in vectors) and native.computes(vectors[0])


def _square_sum(flat: Tensor) -> Tensor:
    count = power_of_two(min(flat.numel(), _SQUARE_LANES))
    lanes = torch.zeros(count, dtype=torch.float64, device=flat.device)
    wide = torch.empty_like(lanes)
    for run in flat.split(count):
        square = wide[: run.numel()].copy_(run)
        lanes[: run.numel()].add_(square.mul_(square))
    while count > 1:
        count //= 2
        lanes[:count] += lanes[count : 2 * count]
    return lanes[0]


def _signed_sum(vector: Tensor, way: SignedSum) -> Tensor:
    lanes = len(way.order)
    sums = torch.zeros(lanes, dtype=torch.float32, device=vector.device)
    for number, (sign, shift) in enumerate(way.runs.tolist()):
        run = vector[number * lanes : (number + 1) * lanes]
        first = min(run.numel(), lanes - shift)
        sums[shift : shift + first].add_(run[:first], alpha=sign)
        sums[: run.numel() - first].add_(run[first:], alpha=sign)
    mixed = sums.mul_(way.signs)[way.order]
    while lanes > way.size:
        lanes //= 2
        mixed = mixed[:lanes] + mixed[lanes : 2 * lanes]
    return mixed.double()
