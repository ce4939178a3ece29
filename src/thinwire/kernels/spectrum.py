"""Spectra of blocks: their largest components, and the signal that a sum of components gives."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from thinwire.kernels import native
from thinwire.kernels.native import CODES
from thinwire.kernels.sparse import _check_picks, _check_span, select_topk

_LEAST_BLOCK, _MOST_BLOCK = 64, 16384
_FEWEST = 8
"""Blocks of which the native core transforms up to 16 together; fewer are faster one by one."""
_ROOTS: dict[int, Tensor] = {}
"""Roots of unity by the size of a block, one of the few powers of two that the core transforms."""


class Components(NamedTuple):
    """Components of a spectrum: ``indices`` (kept,) int32, ascending, and ``parts`` (kept, 2) fp32."""

    indices: Tensor
    parts: Tensor


def num_components(numel: int, block: int) -> int:
    """Return how many components the blocks of ``numel`` elements have, block // 2 + 1 each."""
    return -(-numel // block) * (block // 2 + 1)


def spectrum(x: Tensor, block: int) -> Tensor:
    """Return the components of flat values, completed with zeros, block by block: complex64, orthonormal."""
    padded = torch.nn.functional.pad(x.float(), (0, -x.numel() % block)).view(-1, block)
    return torch.fft.rfft(padded, norm="ortho").view(-1)


def signal(components: Tensor, numel: int, block: int) -> Tensor:
    """Return the inverse of :func:`spectrum`: fp32, flat."""
    blocks = components.view(-1, block // 2 + 1)
    return torch.fft.irfft(blocks, n=block, norm="ortho").view(-1)[:numel]


def spectrum_pick(
    x: Tensor, start: int, numel: int, block: int, k: int, *, key: int = 0, parts: Tensor | None = None
) -> tuple[Components, bool]:
    """Return the k components of largest magnitude of ``x[start : start + numel]``, and whether all are finite.

    Values are cut into blocks of ``block`` elements, the last completed with zeros, each transformed by an orthonormal
    real FFT. Of equal magnitudes the lower index is chosen. Implementations round transforms differently. ``key`` says
    which components are sampled where that saves time; it does not change the result. The components' parts are
    written into ``parts``, by default into a new tensor.

    Shapes: ``x`` (elements,) fp32, bf16 or fp16, contiguous; ``parts`` (k, 2) fp32, contiguous. Raises ``TypeError``
    for a wrong dtype and ``ValueError`` for elements that ``x`` lacks, a block below 2, k that is not 0 to the number
    of components, and other ``parts``.
    """
    _check_span("x", x, start, numel)
    _check_block(block)
    total = num_components(numel, block)
    if not 0 <= k <= total:
        raise ValueError(f"k must be 0 to {total}, not {k}")
    parts = torch.empty(k, 2, device=x.device) if parts is None else parts
    _check_parts(parts, k, x)
    if _transforms(x, numel, block):
        indices = torch.empty(k, dtype=torch.int32)
        where = indices.data_ptr(), parts.data_ptr()
        finite = native.core().spectrum_pick(*_span(x, start, numel, block), k, *where)
        return Components(indices, parts), finite
    components = torch.view_as_real(spectrum(x[start : start + numel], block))
    real, imaginary = components[:, 0], components[:, 1]
    # Summing the squares over axis 1 takes ten times as long.
    magnitude = torch.mul(real, real).addcmul_(imaginary, imaginary)
    indices, _, finite = select_topk(magnitude, 0, total, k, key=key)
    return Components(indices, torch.index_select(components, 0, indices, out=parts)), finite


def spectrum_sum(
    sent: Sequence[Components], y: Tensor, start: int, numel: int, block: int, *, add: bool = False, scale: float = 1.0
) -> None:
    """Set ``y[start : start + numel]`` to ``scale`` times the signal of the sum of components, or add that.

    Components are added before one inverse transform. The imaginary parts of the first and the last component of a
    block are ignored, as of real values.

    Errors are those of :func:`spectrum_pick`; ``ValueError`` also for indices that do not ascend within the
    components, before anything is written.
    """
    _check_span("y", y, start, numel)
    _check_block(block)
    total = num_components(numel, block)
    for indices, parts in sent:
        _check_picks(indices, y)
        _check_parts(parts, indices.numel(), y)
    if _transforms(y, numel, block):
        messages = [n for c in sent for n in (c.indices.data_ptr(), c.parts.data_ptr(), c.indices.numel())]
        good = native.core().spectrum_sum(*_span(y, start, numel, block), add, scale, *messages)
    else:
        ends = [c.indices for c in sent if c.indices.numel()]
        good = all(bool((i[0] >= 0) & (i[-1] < total) & (i.diff() > 0).all()) for i in ends)
    if not good:
        raise ValueError(f"indices must ascend, between 0 and {total - 1}")
    if _transforms(y, numel, block):
        return
    sums = torch.zeros(total, dtype=torch.complex64, device=y.device)
    for indices, parts in sent:
        sums.index_add_(0, indices, torch.view_as_complex(parts))
    received, out = signal(sums, numel, block).mul_(scale).to(y.dtype), y[start : start + numel]
    out.copy_(out + received if add else received)


def _check_parts(parts: Tensor, count: int, like: Tensor) -> None:
    if parts.shape != (count, 2) or not parts.is_contiguous():
        raise ValueError(f"parts must be ({count}, 2) and contiguous, not {tuple(parts.shape)}")
    if parts.dtype is not torch.float32 or parts.device != like.device:
        raise ValueError(f"parts must be float32 on {like.device}, not {parts.dtype} on {parts.device}")


def _check_block(block: int) -> None:
    if not isinstance(block, int) or block < 2:
        raise ValueError(f"block must be an int of at least 2, not {block!r}")


def _transforms(x: Tensor, numel: int, block: int) -> bool:
    """Whether the native core transforms such blocks: of a power of two, and several of them."""
    suits = _LEAST_BLOCK <= block <= _MOST_BLOCK and math.log2(block).is_integer()
    return suits and numel >= _FEWEST * block and native.computes(x)


def _span(x: Tensor, start: int, numel: int, block: int) -> tuple[int, int, int, int, int, int]:
    return x.data_ptr(), CODES[x.dtype], start, numel, block, _roots(block).data_ptr()


def _roots(block: int) -> Tensor:
    """Return exp(−2πi k / block) for k < block as pairs of fp32, which live as long as the process.

    The core gets their address: of threads that ask for a block at the same time, all must get the tensor that is kept.
    """
    if block not in _ROOTS:
        angle = torch.arange(block, dtype=torch.float64) * (-2 * math.pi / block)
        _ROOTS.setdefault(block, torch.stack((angle.cos(), angle.sin()), 1).float().contiguous())
    return _ROOTS[block]
