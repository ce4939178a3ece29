"""Selection of the largest values, and packing of their indices.

The torch operations in each function specify its result.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from thinwire.kernels import native
from thinwire.kernels.format import align
from thinwire.kernels.rng import splitmix64

INFINITY = 0x7F800000
NAN_KEY = INFINITY + 1
BINS = 2048
BLOCK = 65536
"""Number of elements whose indices in a list share a count, and take 16 bits each."""

_SAMPLE = 16384
"""Largest number of elements from which the threshold is estimated."""

_SMALL = 8192
"""Number of elements below which the threshold is not estimated."""

MAX_NUMEL = 2**31 - 1
"""Largest number of elements of a segment, whose indices are int32."""


class Sample(NamedTuple):
    """Elements ``offset + j · stride``, j < num, of which the ``rank``-th largest gives a threshold; rank 0: none."""

    offset: int
    stride: int
    num: int
    rank: int


NO_SAMPLE = Sample(0, 1, 0, 0)


def _span(name: str, tensor: Tensor, start: int, numel: int) -> tuple[int, int, int, int]:
    """Return a segment as the native core takes it. Raise an error unless it is one."""
    if not isinstance(tensor, Tensor) or tensor.dtype not in native.CODES:
        raise TypeError(f"{name} must be a float32, bfloat16 or float16 tensor: convert it first")
    address = native.flat(name, tensor, tensor)
    if not 0 <= numel <= MAX_NUMEL:
        raise ValueError(f"numel must be 0 to 2**31 - 1, not {numel}: select from parts")
    if start < 0 or start + numel > tensor.numel():
        raise ValueError(f"elements {start} to {start + numel} are not all in {name}, which has {tensor.numel()}")
    return address, native.CODES[tensor.dtype], start, numel


def _indices(indices: Tensor, like: Tensor) -> tuple[int, int]:
    if not isinstance(indices, Tensor) or indices.dtype != torch.int32:
        raise TypeError("indices must be an int32 tensor")
    return native.flat("indices", indices, like), indices.numel()


def magnitudes(x: Tensor) -> Tensor:
    """Return integers (int32) ordered as |x|; infinity above all numbers, and NaN above that."""
    return (x.to(torch.float32).contiguous().view(torch.int32) & 0x7FFFFFFF).clamp(max=NAN_KEY)


def draw_sample(numel: int, k: int, key: int, deviations: float, one_in: int = 8) -> Sample:
    """Return which elements to sample, and the rank in the sample of a threshold that about k elements reach.

    One element in ``one_in`` is sampled, up to 16384 of them. The stride is odd, so that it visits all columns of a
    matrix whose rows are a power of two long; the rank lies some standard deviations beyond the expected one.
    """
    if numel < _SMALL or not 0 < k < numel:
        return NO_SAMPLE
    count = min(_SAMPLE, numel // one_in)
    stride = (numel // count - 1) | 1
    offset = splitmix64(key) % (numel - (count - 1) * stride)
    expected = k * count / numel
    rank = math.ceil(expected + deviations * (math.sqrt(expected) + 1))
    return Sample(offset, stride, count, rank) if rank < count else NO_SAMPLE


def select_topk(
    x: Tensor, start: int, numel: int, k: int, *, sampled: bool = False, key: int = 0
) -> tuple[Tensor, Tensor, bool]:
    """Return the k largest |x| of ``x[start : start + numel]``; of equal ones those with the lower index.

    Returns their indices relative to ``start`` (int32, ascending), their values (fp32), and whether all of the segment
    is finite. NaN counts as larger than infinity. The result does not depend on the algorithm; ``sampled``
    saves finding a new threshold where the sampled one (``key`` says from which elements) was too high, and gives only
    what reaches that: fewer than k then, never more.

    Shapes: ``x`` (elements,) fp32, bf16 or fp16, contiguous. Raises ``TypeError`` for a wrong dtype and ``ValueError``
    unless the segment lies in ``x``, has fewer than 2^31 elements, and 0 <= k <= numel.
    """
    span = _span("x", x, start, numel)
    if not 0 <= k <= numel:
        raise ValueError(f"k must be 0 to {numel}, not {k}")
    # Where the threshold only saves work, an eighth of the sample suffices: a nearer one saves less than it costs.
    sample = draw_sample(numel, k, key, 1.0) if sampled else draw_sample(numel, k, key, 4.0, one_in=64)
    if native.computes(x):
        indices, values, _, finite = _pick(span, k, 1, sample, partial=False, sampled=sampled)
        return indices, values, finite
    x = x[start : start + numel]
    keys = magnitudes(x)
    chosen = keys.sort(descending=True, stable=True).indices[:k].sort().values
    if sampled and sample.rank:
        last = sample.offset + (sample.num - 1) * sample.stride
        some = keys[sample.offset : last + 1 : sample.stride].sort(descending=True).values
        reach = keys >= some[sample.rank - 1]
        if int(reach.sum()) < k:
            chosen = reach.nonzero().view(-1)
    return chosen.to(torch.int32), x[chosen].to(torch.float32), bool((keys < INFINITY).all())


def select_threshold(
    x: Tensor, start: int, numel: int, threshold: float, capacity: int
) -> tuple[Tensor, Tensor, bool, int]:
    """Return all |x| > threshold of a segment, as :func:`select_topk` does; if more than ``capacity``, its largest.

    The fourth result says how many were left out. NaN is above every threshold.

    Errors are those of :func:`select_topk`; ``ValueError`` also for a threshold or a capacity below 0.
    """
    span = _span("x", x, start, numel)
    if not threshold >= 0:
        raise ValueError(f"threshold must be at least 0, not {threshold}")
    if capacity < 0:
        raise ValueError(f"capacity must not be negative, got {capacity}")
    limit = magnitudes(torch.tensor([threshold], dtype=torch.float32, device=x.device))
    if native.computes(x):
        room = min(capacity, numel)
        indices, values, count, finite = _pick(span, room, int(limit) + 1, NO_SAMPLE, partial=True, sampled=False)
        return indices, values, finite, max(0, count - room)
    x = x[start : start + numel]
    keys = magnitudes(x)
    chosen = (keys > limit).nonzero().view(-1)
    count = chosen.numel()
    if count > capacity:
        chosen = keys.sort(descending=True, stable=True).indices[:capacity].sort().values
    overflow = max(0, count - capacity)
    return chosen.to(torch.int32), x[chosen].to(torch.float32), bool((keys < INFINITY).all()), overflow


def _pick(
    span: tuple[int, int, int, int], k: int, least: int, sample: Sample, *, partial: bool, sampled: bool
) -> tuple[Tensor, Tensor, int, bool]:
    """Return the native core's choice: indices, values, how many reached the threshold, and whether all is finite."""
    indices, values = torch.empty(k, dtype=torch.int32, device="cpu"), torch.empty(k, dtype=torch.float32, device="cpu")
    to = native.address("indices", indices, torch.int32, k), native.address("values", values, torch.float32, k)
    count, total, finite = native.core().pick(*span, k, least, partial, sampled, *sample, *to)
    return (indices, values, total, finite) if count == k else (indices[:count], values[:count], total, finite)


def abs_histogram(x: Tensor, start: int, numel: int) -> Tensor:
    """Count the values of a segment by ``bits32(|x|) >> 20``: int32 (2048,); eight bins an octave.

    Errors are those of :func:`select_topk`.
    """
    span = _span("x", x, start, numel)
    if native.computes(x):
        counts = torch.empty(BINS, dtype=torch.int32, device="cpu")
        native.core().abs_histogram(*span, native.address("counts", counts, torch.int32, BINS))
        return counts
    bits = x[start : start + numel].to(torch.float32).contiguous().view(torch.int32) & 0x7FFFFFFF
    return torch.bincount((bits >> 20).to(torch.int64), minlength=BINS).to(torch.int32)


def _index_bytes(numel: int, k: int) -> tuple[int, bool]:
    """Return the bytes of packed indices, and whether they are a bitmap."""
    if not 0 <= k <= numel <= MAX_NUMEL:
        raise ValueError(f"k must be 0 to numel, and that below 2**31, not {k} of {numel}")
    bitmap, offsets = align(-(-numel // 8)), align(4 * -(-numel // BLOCK) + 2 * k)
    return min(bitmap, offsets), bitmap <= offsets


def index_bytes(numel: int, k: int) -> int:
    """Return the bytes of up to ``k`` packed indices below ``numel``: a multiple of 64.

    A bitmap (bit i % 8 of byte i // 8), or where that is longer a list: u32 counts of the blocks of 65536 elements,
    then the u16 offsets inside them, in order.
    """
    return _index_bytes(numel, k)[0]


def pack_indices(indices: Tensor, numel: int, k: int, message: Tensor, at: int) -> None:
    """Write up to k ``indices`` (int32, ascending, below ``numel``) at byte ``at``: :func:`index_bytes` of them.

    Raises ``TypeError`` for a wrong dtype and ``ValueError`` for other indices or a message that is too short.
    """
    num_bytes, bitmap = _index_bytes(numel, k)
    to, given = native.message("message", message, at + num_bytes, message), _indices(indices, message)
    if at < 0 or indices.numel() > k:
        raise ValueError(f"{indices.numel()} indices at byte {at}: at most k={k}, and no byte before the first")
    if native.computes(indices):
        good = native.core().pack_indices(*given, numel, k, bitmap, to + at)
    else:
        good = not indices.numel() or bool((indices[0] >= 0) & (indices[-1] < numel) & (indices.diff() > 0).all())
        if good:
            payload = _packed(indices.to(torch.int64), numel, bitmap)
            message[at : at + payload.numel()] = payload
            message[at + payload.numel() : at + num_bytes] = 0
    if not good:
        raise ValueError(f"indices must ascend, between 0 and {numel - 1}")


def _packed(where: Tensor, numel: int, bitmap: bool) -> Tensor:
    """Return the bytes of indices (int64), without the zeros behind them."""
    if bitmap:
        marks = torch.zeros(8 * -(-numel // 8), dtype=torch.uint8, device=where.device)
        marks[where] = 1
        weights = 1 << torch.arange(8, dtype=torch.uint8, device=where.device)
        return (marks.view(-1, 8) * weights).sum(dim=1, dtype=torch.uint8)
    counts = torch.bincount(where // BLOCK, minlength=-(-numel // BLOCK)).to(torch.int32)
    offsets = (where % BLOCK).to(torch.int32).view(-1, 1).view(torch.uint8)[:, :2].reshape(-1)
    return torch.cat((counts.view(torch.uint8), offsets))


def unpack_indices(message: Tensor, at: int, numel: int, k: int) -> Tensor:
    """Return the indices that :func:`pack_indices` wrote at byte ``at``: int32, ascending, at most k, below ``numel``.

    Every content of the bytes gives such indices. Raises as :func:`pack_indices` does.
    """
    num_bytes, bitmap = _index_bytes(numel, k)
    packed = native.message("message", message, at + num_bytes, message)
    if at < 0:
        raise ValueError(f"at must not be negative, got {at}")
    if native.computes(message):
        indices = torch.empty(k, dtype=torch.int32, device="cpu")
        to = native.address("indices", indices, torch.int32, k)
        count = native.core().unpack_indices(packed + at, numel, k, bitmap, to)
        return indices if count == k else indices[:count]
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


def sparse_add(y: Tensor, start: int, numel: int, indices: Tensor, values: Tensor, scale: float = 1.0) -> None:
    """Add ``value · scale`` to ``y[start + i]`` for distinct ``indices`` (int32) and their ``values`` (fp32).

    ``y`` (elements,) fp32, bf16 or fp16, contiguous; arithmetic in fp32. Raises ``TypeError`` for a wrong dtype, and
    ``ValueError`` before anything is written unless all indices are between 0 and numel − 1.
    """
    if not isinstance(values, Tensor) or values.dtype != torch.float32:
        raise TypeError("values must be a float32 tensor")
    if values.numel() != indices.numel():
        raise ValueError(f"{values.numel()} values do not fit {indices.numel()} indices")
    if (y_part := _scatter(y, start, numel, indices, native.flat("values", values, y), scale)) is not None:
        where = indices.to(torch.int64)
        y_part[where] = (y_part[where].to(torch.float32) + values * torch.full_like(values[:1], scale)).to(y.dtype)


def sparse_zero(y: Tensor, start: int, numel: int, indices: Tensor) -> None:
    """Set ``y[start + i] = 0`` for all ``indices`` (int32). Errors are those of :func:`sparse_add`."""
    if (y_part := _scatter(y, start, numel, indices, 0, 1.0)) is not None:
        y_part[indices.to(torch.int64)] = 0


def _scatter(y: Tensor, start: int, numel: int, indices: Tensor, values: int, scale: float) -> Tensor | None:
    """Add the values, or set zeros without an address of any, in the native core.

    Returns the segment if it is not on the CPU and that is still to be done.
    """
    span, (where, count) = _span("y", y, start, numel), _indices(indices, y)
    if natively := native.computes(y):
        inside = native.core().sparse_scatter(*span, where, values, count, scale)
    else:
        inside = not count or bool(((indices >= 0) & (indices < numel)).all())
    if not inside:
        raise ValueError(f"indices must be between 0 and {numel - 1}")
    return None if natively else y[start : start + numel]
