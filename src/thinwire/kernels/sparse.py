"""Selection of the largest values, and packing of their indices."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from thinwire.kernels import native, reference_sparse
from thinwire.kernels.format import align
from thinwire.kernels.ops import DTYPES, _check_flat, _check_message
from thinwire.kernels.reference_sparse import BINS, BLOCK, Sample, magnitudes
from thinwire.kernels.rng import splitmix64

_SAMPLE = 16384
"""Largest number of elements from which the threshold is estimated."""

_SMALL = 8192
"""Number of elements below which the threshold is not estimated."""

NO_SAMPLE = Sample(0, 1, 0, 0)

MAX_NUMEL = 2**31 - 1
"""Largest number of elements of a segment, whose indices are int32."""


def _check_span(name: str, tensor: Tensor, start: int, numel: int) -> None:
    if not isinstance(tensor, Tensor) or tensor.dtype not in DTYPES:
        raise TypeError(f"{name} must be a float32, bfloat16 or float16 tensor: convert it first")
    _check_flat(name, tensor, tensor)
    if not 0 <= numel <= MAX_NUMEL:
        raise ValueError(f"numel must be 0 to 2**31 - 1, not {numel}: select from parts")
    if start < 0 or start + numel > tensor.numel():
        raise ValueError(f"elements {start} to {start + numel} are not all in {name}, which has {tensor.numel()}")


def _check_picks(indices: Tensor, like: Tensor, values: Tensor | None = None) -> None:
    if not isinstance(indices, Tensor) or indices.dtype != torch.int32:
        raise TypeError("indices must be an int32 tensor")
    _check_flat("indices", indices, like)
    if values is not None:
        if not isinstance(values, Tensor) or values.dtype != torch.float32:
            raise TypeError("values must be a float32 tensor")
        _check_flat("values", values, like)
        if values.numel() != indices.numel():
            raise ValueError(f"{values.numel()} values do not fit {indices.numel()} indices")


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
    _check_span("x", x, start, numel)
    if not 0 <= k <= numel:
        raise ValueError(f"k must be 0 to {numel}, not {k}")
    # Where the threshold only saves work, an eighth of the sample suffices: a nearer one saves less than it costs.
    sample = draw_sample(numel, k, key, 1.0) if sampled else draw_sample(numel, k, key, 4.0, one_in=64)
    if not native.computes(x):
        return reference_sparse.select_topk(x[start : start + numel], k, sample, sampled=sampled)
    indices, values, _, finite = _pick(x, start, numel, k, 1, sample, partial=False, sampled=sampled)
    return indices, values, finite


def _pick(
    x: Tensor, start: int, numel: int, k: int, least: int, sample: Sample, *, partial: bool, sampled: bool
) -> tuple[Tensor, Tensor, int, bool]:
    """Return the native core's choice: indices, values, how many reached the threshold, and whether all is finite."""
    indices, values = torch.empty(k, dtype=torch.int32, device="cpu"), torch.empty(k, dtype=torch.float32, device="cpu")
    span = *native.values("x", x, start + numel), start, numel
    to = native.address("indices", indices, torch.int32, k), native.address("values", values, torch.float32, k)
    count, total, finite = native.core().pick(*span, k, least, partial, sampled, *sample, *to)
    return (indices, values, total, finite) if count == k else (indices[:count], values[:count], total, finite)


def select_threshold(
    x: Tensor, start: int, numel: int, threshold: float, capacity: int
) -> tuple[Tensor, Tensor, bool, int]:
    """Return all |x| > threshold of a segment, as :func:`select_topk` does; if more than ``capacity``, its largest.

    The fourth result says how many were left out. NaN is above every threshold.

    Errors are those of :func:`select_topk`; ``ValueError`` also for a threshold or a capacity below 0.
    """
    _check_span("x", x, start, numel)
    if not threshold >= 0:
        raise ValueError(f"threshold must be at least 0, not {threshold}")
    if capacity < 0:
        raise ValueError(f"capacity must not be negative, got {capacity}")
    if not native.computes(x):
        return reference_sparse.select_threshold(x[start : start + numel], threshold, capacity)
    room, limit = min(capacity, numel), torch.tensor([threshold], dtype=torch.float32, device="cpu")
    least = int(magnitudes(limit)) + 1
    indices, values, total, finite = _pick(x, start, numel, room, least, NO_SAMPLE, partial=True, sampled=False)
    return indices, values, finite, max(0, total - room)


def abs_histogram(x: Tensor, start: int, numel: int) -> Tensor:
    """Count the values of a segment by ``bits32(|x|) >> 20``: int32 (2048,); eight bins an octave.

    Errors are those of :func:`select_topk`.
    """
    _check_span("x", x, start, numel)
    if not native.computes(x):
        return reference_sparse.abs_histogram(x[start : start + numel])
    counts = torch.empty(BINS, dtype=torch.int32, device="cpu")
    span = *native.values("x", x, start + numel), start, numel
    native.core().abs_histogram(*span, native.address("counts", counts, torch.int32, BINS))
    return counts


def packs_bitmap(numel: int, k: int) -> bool:
    return align(-(-numel // 8)) <= align(4 * -(-numel // BLOCK) + 2 * k)


def index_bytes(numel: int, k: int) -> int:
    """Return the bytes of up to ``k`` packed indices below ``numel``: a multiple of 64.

    A bitmap (bit i % 8 of byte i // 8), or where that is longer a list: u32 counts of the blocks of 65536 elements,
    then the u16 offsets inside them, in order.
    """
    if not 0 <= k <= numel <= MAX_NUMEL:
        raise ValueError(f"k must be 0 to numel, and that below 2**31, not {k} of {numel}")
    return min(align(-(-numel // 8)), align(4 * -(-numel // BLOCK) + 2 * k))


def pack_indices(indices: Tensor, numel: int, k: int, message: Tensor, at: int) -> None:
    """Write up to k ``indices`` (int32, ascending, below ``numel``) at byte ``at``: :func:`index_bytes` of them.

    Raises ``TypeError`` for a wrong dtype and ``ValueError`` for other indices or a message that is too short.
    """
    num_bytes = index_bytes(numel, k)
    _check_message("message", message, at + num_bytes, message)
    _check_picks(indices, message)
    if at < 0 or indices.numel() > k:
        raise ValueError(f"{indices.numel()} indices at byte {at}: at most k={k}, and no byte before the first")
    bitmap = packs_bitmap(numel, k)
    if native.computes(indices):
        given = native.address("indices", indices, torch.int32, indices.numel()), indices.numel()
        to = native.address("message", message, torch.uint8, at + num_bytes) + at
        good = native.core().pack_indices(*given, numel, k, bitmap, to)
    else:
        good = not indices.numel() or bool((indices[0] >= 0) & (indices[-1] < numel) & (indices.diff() > 0).all())
        if good:
            reference_sparse.pack_indices(indices, numel, k, message, at, bitmap)
    if not good:
        raise ValueError(f"indices must ascend, between 0 and {numel - 1}")


def unpack_indices(message: Tensor, at: int, numel: int, k: int) -> Tensor:
    """Return the indices that :func:`pack_indices` wrote at byte ``at``: int32, ascending, at most k, below ``numel``.

    Every content of the bytes gives such indices. Raises as :func:`pack_indices` does.
    """
    num_bytes = index_bytes(numel, k)
    _check_message("message", message, at + num_bytes, message)
    if at < 0:
        raise ValueError(f"at must not be negative, got {at}")
    bitmap = packs_bitmap(numel, k)
    if not native.computes(message):
        return reference_sparse.unpack_indices(message, at, numel, k, bitmap)
    indices = torch.empty(k, dtype=torch.int32, device="cpu")
    packed = native.address("message", message, torch.uint8, at + num_bytes) + at
    to = native.address("indices", indices, torch.int32, k)
    count = native.core().unpack_indices(packed, numel, k, bitmap, to)
    return indices if count == k else indices[:count]


def sparse_add(y: Tensor, start: int, numel: int, indices: Tensor, values: Tensor, scale: float = 1.0) -> None:
    """Add ``value · scale`` to ``y[start + i]`` for distinct ``indices`` (int32) and their ``values`` (fp32).

    ``y`` (elements,) fp32, bf16 or fp16, contiguous; arithmetic in fp32. Raises ``TypeError`` for a wrong dtype, and
    ``ValueError`` before anything is written unless all indices are between 0 and numel − 1.
    """
    _check_span("y", y, start, numel)
    _check_picks(indices, y, values)
    if not _scatter(y, start, numel, indices, values, scale):
        reference_sparse.sparse_add(y[start : start + numel], indices, values, scale)


def sparse_zero(y: Tensor, start: int, numel: int, indices: Tensor) -> None:
    """Set ``y[start + i] = 0`` for all ``indices`` (int32). Errors are those of :func:`sparse_add`."""
    _check_span("y", y, start, numel)
    _check_picks(indices, y)
    if not _scatter(y, start, numel, indices, None, 1.0):
        reference_sparse.sparse_zero(y[start : start + numel], indices)


def _scatter(y: Tensor, start: int, numel: int, indices: Tensor, values: Tensor | None, scale: float) -> bool:
    """Add the values, or zeroes, in the native core; False if only the check was done."""
    if native.computes(y):
        count = indices.numel()
        span = *native.values("y", y, start + numel), start, numel
        where = native.address("indices", indices, torch.int32, count)
        added = 0 if values is None else native.address("values", values, torch.float32, count)
        inside = native.core().sparse_scatter(*span, where, added, count, scale)
    else:
        inside = not indices.numel() or bool(((indices >= 0) & (indices < numel)).all())
    if not inside:
        raise ValueError(f"indices must be between 0 and {numel - 1}")
    return native.computes(y)
