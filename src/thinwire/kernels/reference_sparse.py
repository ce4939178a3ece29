"""The specification of sparse selection and of packed indices, in torch operations."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from thinwire.kernels.format import align

INFINITY = 0x7F800000
NAN_KEY = INFINITY + 1
BINS = 2048
BLOCK = 65536
"""Number of elements whose indices in a list share a count, and take 16 bits each."""


class Sample(NamedTuple):
    """Elements ``offset + j · stride``, j < num, of which the ``rank``-th largest gives a threshold; rank 0: none."""

    offset: int
    stride: int
    num: int
    rank: int


def magnitudes(x: Tensor) -> Tensor:
    """Return integers (int32) ordered as |x|; infinity above all numbers, and NaN above that."""
    return (x.to(torch.float32).contiguous().view(torch.int32) & 0x7FFFFFFF).clamp(max=NAN_KEY)


def select_topk(x: Tensor, k: int, sample: Sample, *, sampled: bool) -> tuple[Tensor, Tensor, bool]:
    """See :func:`thinwire.kernels.select_topk`; ``x`` is the segment."""
    keys = magnitudes(x)
    chosen = keys.sort(descending=True, stable=True).indices[:k].sort().values
    if sampled and sample.rank:
        last = sample.offset + (sample.num - 1) * sample.stride
        some = keys[sample.offset : last + 1 : sample.stride].sort(descending=True).values
        reach = keys >= some[sample.rank - 1]
        if int(reach.sum()) < k:
            chosen = reach.nonzero().view(-1)
    return chosen.to(torch.int32), x[chosen].to(torch.float32), bool((keys < INFINITY).all())


def select_threshold(x: Tensor, threshold: float, capacity: int) -> tuple[Tensor, Tensor, bool, int]:
    """See :func:`thinwire.kernels.select_threshold`; ``x`` is the segment."""
    keys = magnitudes(x)
    above = keys > magnitudes(torch.tensor([threshold], dtype=torch.float32, device=x.device))
    count = int(above.sum())
    chosen = above.nonzero().view(-1)
    if count > capacity:
        chosen = keys.sort(descending=True, stable=True).indices[:capacity].sort().values
    overflow = max(0, count - capacity)
    return chosen.to(torch.int32), x[chosen].to(torch.float32), bool((keys < INFINITY).all()), overflow


def abs_histogram(x: Tensor) -> Tensor:
    """See :func:`thinwire.kernels.abs_histogram`; ``x`` is the segment."""
    bits = x.to(torch.float32).contiguous().view(torch.int32) & 0x7FFFFFFF
    return torch.bincount((bits >> 20).to(torch.int64), minlength=BINS).to(torch.int32)


def pack_indices(indices: Tensor, numel: int, k: int, message: Tensor, at: int, bitmap: bool) -> None:
    """See :func:`thinwire.kernels.pack_indices`."""
    where = indices.to(torch.int64)
    if bitmap:
        marks = torch.zeros(8 * -(-numel // 8), dtype=torch.uint8, device=message.device)
        marks[where] = 1
        weights = 1 << torch.arange(8, dtype=torch.uint8, device=message.device)
        payload = (marks.view(-1, 8) * weights).sum(dim=1, dtype=torch.uint8)
        num_bytes = align(payload.numel())
    else:
        blocks = -(-numel // BLOCK)
        counts = torch.bincount(where // BLOCK, minlength=blocks).to(torch.int32)
        offsets = (where % BLOCK).to(torch.int32).view(-1, 1).view(torch.uint8)[:, :2].reshape(-1)
        payload = torch.cat((counts.view(torch.uint8), offsets))
        num_bytes = align(4 * blocks + 2 * k)
    message[at : at + payload.numel()] = payload
    message[at + payload.numel() : at + num_bytes] = 0


def unpack_indices(message: Tensor, at: int, numel: int, k: int, bitmap: bool) -> Tensor:
    """See :func:`thinwire.kernels.unpack_indices`."""
    if bitmap:
        payload = message[at : at + -(-numel // 8)]
        shifts = torch.arange(8, dtype=torch.uint8, device=message.device)
        marks = (payload[:, None] >> shifts) & 1
        return marks.view(-1)[:numel].nonzero().view(-1)[:k].to(torch.int32)
    blocks = -(-numel // BLOCK)
    counts = message[at : at + 4 * blocks].clone().view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    ends = counts.cumsum(0).clamp(max=k)
    total = int(ends[-1]) if blocks else 0
    pairs = message[at + 4 * blocks : at + 4 * blocks + 2 * total].view(-1, 2).to(torch.int64)
    starts = torch.arange(blocks, dtype=torch.int64, device=message.device) * BLOCK
    lengths = ends.diff(prepend=ends.new_zeros(1))
    indices = torch.repeat_interleave(starts, lengths) + pairs[:, 0] + 256 * pairs[:, 1]
    if total:  # what does not rise was not written by pack_indices
        before = torch.cat((indices.new_full((1,), -1), indices.cummax(0).values[:-1]))
        indices = indices[(indices > before) & (indices < numel)]
    return indices.to(torch.int32)


def sparse_add(y: Tensor, indices: Tensor, values: Tensor, scale: float) -> None:
    """See :func:`thinwire.kernels.sparse_add`; ``y`` is the segment."""
    where = indices.to(torch.int64)
    y[where] = (y[where].to(torch.float32) + values * torch.full_like(values[:1], scale)).to(y.dtype)


def sparse_zero(y: Tensor, indices: Tensor) -> None:
    """See :func:`thinwire.kernels.sparse_zero`; ``y`` is the segment."""
    y[indices.to(torch.int64)] = 0
