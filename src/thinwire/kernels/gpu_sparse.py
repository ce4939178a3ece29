"""Sparse selection and packed indices in Triton.

A tile counts what it will keep, a scan of the counts says where it goes, and a second pass puts it there in order:
the result does not depend on which program runs first. What needs a result's size on the host waits for the device
once. Lists of indices, rarely long, are packed and unpacked in torch operations.
"""

# Triton is not installed everywhere, and its language has types of its own.
# pyright: reportMissingImports=false, reportIndexIssue=false, reportArgumentType=false, reportAssignmentType=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportAttributeAccessIssue=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from thinwire.kernels import reference_sparse
from thinwire.kernels.format import align
from thinwire.kernels.gpu_launch import TILE, on, options
from thinwire.kernels.reference_sparse import BINS, BLOCK, NAN_KEY, Sample, magnitudes

sparse_zero = reference_sparse.sparse_zero


@triton.jit
def keys_of(x, at, numel):
    """thinwire.kernels.reference_sparse.magnitudes; −1 beyond the end."""
    value = tl.load(x + at, mask=at < numel, other=0.0).to(tl.float32)
    key = tl.minimum(value.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0x7F800001)
    return value, tl.where(at < numel, key, -1)


@triton.jit(do_not_specialize=["numel"])
def count_keys(x, least, counts, numel, tiles, SIZE: tl.constexpr):
    """How many elements of each tile are above the key ``least``, how many equal to it, and how many not finite."""
    pid = tl.program_id(0).to(tl.int64)
    _value, key = keys_of(x, pid * SIZE + tl.arange(0, SIZE), numel)
    bound = tl.load(least)
    tl.store(counts + pid, tl.sum((key > bound).to(tl.int32)))
    tl.store(counts + tiles + pid, tl.sum((key == bound).to(tl.int32)))
    tl.store(counts + 2 * tiles + pid, tl.sum((key >= 0x7F800000).to(tl.int32)))


@triton.jit(do_not_specialize=["numel", "k"])
def put_keys(x, least, counts, ends, indices, values, numel, tiles, k, SIZE: tl.constexpr):
    """Index and value of what is above ``least``, and of the first equal to it, up to ``k`` in all."""
    pid = tl.program_id(0).to(tl.int64)
    at = pid * SIZE + tl.arange(0, SIZE)
    value, key = keys_of(x, at, numel)
    bound = tl.load(least)
    wanted = tl.maximum(k - tl.load(ends + tiles - 1), 0)  # of the equal ones
    above = tl.load(ends + pid) - tl.load(counts + pid)
    equal = tl.load(ends + tiles + pid) - tl.load(counts + tiles + pid)
    same = (key == bound).to(tl.int32)
    rank = equal + tl.cumsum(same, 0) - same
    kept = ((key > bound) | ((key == bound) & (rank < wanted))).to(tl.int32)
    to = above + tl.minimum(equal, wanted) + tl.cumsum(kept, 0) - kept
    mask = (kept > 0) & (to < k)
    tl.store(indices + to, at.to(tl.int32), mask=mask)
    tl.store(values + to, value, mask=mask)


def _counts(x: Tensor, least: Tensor) -> Tensor:
    """Of each tile: (3, tiles) int32; ``least`` is a key on the device (1,)."""
    tiles = -(-x.numel() // TILE)
    counts = torch.empty(3, tiles, dtype=torch.int32, device=x.device)
    with on(x):
        count_keys[(tiles,)](x, least, counts, x.numel(), tiles, SIZE=TILE, **options(8))
    return counts


def _put(x: Tensor, least: Tensor, k: int) -> tuple[Tensor, Tensor, bool, int]:
    """Indices and values of up to ``k`` elements whose keys reach ``least``, whether all of ``x`` is finite, and how
    many reach it."""
    indices = torch.empty(k, dtype=torch.int32, device=x.device)
    values = torch.empty(k, dtype=torch.float32, device=x.device)
    if not x.numel():
        return indices, values, True, 0
    counts = _counts(x, least)
    ends = counts.cumsum(1, dtype=torch.int32)
    tiles = counts.shape[1]
    if k:
        with on(x):
            put_keys[(tiles,)](x, least, counts, ends, indices, values, x.numel(), tiles, k, SIZE=TILE, **options(8))
    above, equal, odd = ends[:, -1].tolist()
    count = min(k, above + equal)
    return indices[:count], values[:count], odd == 0, above + equal


def _kth(keys: Tensor, k: int) -> Tensor:
    """The k-th largest key (1,); with k = 0 one above all."""
    if not k:
        return torch.full((1,), NAN_KEY + 1, dtype=torch.int32, device=keys.device)
    return keys.topk(k, sorted=False).values.amin(0, keepdim=True)


def select_topk(x: Tensor, k: int, sample: Sample, *, sampled: bool) -> tuple[Tensor, Tensor, bool]:
    """See :func:`thinwire.kernels.select_topk`; ``x`` is the segment."""
    keys = magnitudes(x)
    least = _kth(keys, k)
    if sampled and sample.rank:
        last = sample.offset + (sample.num - 1) * sample.stride
        some = keys[sample.offset : last + 1 : sample.stride]
        least = torch.maximum(least, _kth(some, sample.rank))
    return _put(x, least, k)[:3]


def select_threshold(x: Tensor, threshold: float, capacity: int) -> tuple[Tensor, Tensor, bool, int]:
    """See :func:`thinwire.kernels.select_threshold`; ``x`` is the segment."""
    room = min(capacity, x.numel())
    limit = int(magnitudes(torch.tensor([threshold], dtype=torch.float32, device="cpu")))
    least = torch.full((1,), limit + 1, dtype=torch.int32, device=x.device)
    indices, values, finite, total = _put(x, least, room)
    if total > room:
        indices, values, finite, _ = _put(x, _kth(magnitudes(x), room), room)
    return indices, values, finite, max(0, total - room)


@triton.jit(do_not_specialize=["numel"])
def count_bins(x, bins, numel, SIZE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    value = tl.load(x + at, mask=at < numel, other=0.0).to(tl.float32)
    counts = tl.histogram((value.to(tl.int32, bitcast=True) & 0x7FFFFFFF) >> 20, 2048)
    bin = tl.arange(0, 2048)
    beyond = tl.maximum((tl.program_id(0) + 1).to(tl.int64) * SIZE - numel, 0).to(tl.int32)
    counts = tl.where(bin == 0, counts - beyond, counts)  # what was read as 0 behind the end
    tl.atomic_add(bins + bin, counts, mask=counts != 0)


def abs_histogram(x: Tensor) -> Tensor:
    """See :func:`thinwire.kernels.abs_histogram`; ``x`` is the segment."""
    bins = torch.zeros(BINS, dtype=torch.int32, device=x.device)
    if x.numel():
        with on(x):
            count_bins[(-(-x.numel() // TILE),)](x, bins, x.numel(), SIZE=TILE, **options(8))
    return bins


@triton.jit(do_not_specialize=["count"])
def set_bits(indices, words, count, SIZE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    index = tl.load(indices + at, mask=at < count, other=0)
    tl.atomic_or(words + (index >> 5), 1 << (index & 31), mask=at < count)


def pack_indices(indices: Tensor, numel: int, k: int, message: Tensor, at: int, bitmap: bool) -> None:
    """See :func:`thinwire.kernels.pack_indices`."""
    count = indices.numel()
    if not bitmap:
        blocks = -(-numel // BLOCK)
        message[at : at + align(4 * blocks + 2 * k)] = 0
        bounds = torch.arange(1, blocks + 1, dtype=torch.int64, device=message.device) * BLOCK
        bounds = bounds.clamp(max=numel).to(torch.int32)
        ends = torch.searchsorted(indices, bounds, out_int32=True)
        message[at : at + 4 * blocks] = ends.diff(prepend=ends.new_zeros(1)).view(torch.uint8)
        offsets = (indices & (BLOCK - 1)).view(-1, 1).view(torch.uint8)[:, :2].reshape(-1)
        message[at + 4 * blocks : at + 4 * blocks + 2 * count] = offsets
        return
    span = message[at : at + align(-(-numel // 8))]
    if span.data_ptr() % 4:
        reference_sparse.pack_indices(indices, numel, k, message, at, bitmap)
        return
    span.zero_()
    if count:
        with on(message):
            set_bits[(-(-count // TILE),)](indices, span.view(torch.int32), count, SIZE=TILE, **options(8))


@triton.jit
def bits_of(marks, at, numel):
    """Bit ``at % 8`` of byte ``at // 8``; 0 beyond the end."""
    byte = tl.load(marks + (at >> 3), mask=at < numel, other=0).to(tl.int32)
    return (byte >> (at & 7).to(tl.int32)) & 1


@triton.jit(do_not_specialize=["numel"])
def count_bits(marks, counts, numel, SIZE: tl.constexpr):
    pid = tl.program_id(0).to(tl.int64)
    tl.store(counts + pid, tl.sum(bits_of(marks, pid * SIZE + tl.arange(0, SIZE), numel)))


@triton.jit(do_not_specialize=["numel", "k"])
def put_bits(marks, counts, ends, indices, numel, k, SIZE: tl.constexpr):
    """The indices of the bits that are set, up to ``k`` of them."""
    pid = tl.program_id(0).to(tl.int64)
    at = pid * SIZE + tl.arange(0, SIZE)
    bit = bits_of(marks, at, numel)
    to = tl.load(ends + pid) - tl.load(counts + pid) + tl.cumsum(bit, 0) - bit
    tl.store(indices + to, at.to(tl.int32), mask=(bit > 0) & (to < k))


def unpack_indices(message: Tensor, at: int, numel: int, k: int, bitmap: bool) -> Tensor:
    """See :func:`thinwire.kernels.unpack_indices`."""
    if not bitmap or not k:
        return reference_sparse.unpack_indices(message, at, numel, k, bitmap)
    tiles = -(-numel // TILE)
    counts = torch.empty(tiles, dtype=torch.int32, device=message.device)
    indices = torch.empty(k, dtype=torch.int32, device=message.device)
    marks = message[at:]
    with on(message):
        count_bits[(tiles,)](marks, counts, numel, SIZE=TILE, **options(8))
        ends = counts.cumsum(0, dtype=torch.int32)
        put_bits[(tiles,)](marks, counts, ends, indices, numel, k, SIZE=TILE, **options(8))
    return indices[: min(k, int(ends[-1]))]


@triton.jit(do_not_specialize=["count"])
def add_values(y, indices, values, count, scale, SIZE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    index = tl.load(indices + at, mask=at < count, other=0)
    value = tl.load(values + at, mask=at < count, other=0.0) * scale
    before = tl.load(y + index, mask=at < count, other=0.0).to(tl.float32)
    tl.store(y + index, (before + value).to(y.dtype.element_ty), mask=at < count)


def sparse_add(y: Tensor, indices: Tensor, values: Tensor, scale: float) -> None:
    """See :func:`thinwire.kernels.sparse_add`; ``y`` is the segment."""
    count = indices.numel()
    if count:
        with on(y):
            add_values[(-(-count // TILE),)](y, indices, values, count, scale, SIZE=TILE, **options(8))
