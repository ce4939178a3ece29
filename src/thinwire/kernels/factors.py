"""Products of matrices with narrow ones, of a few columns, in one pass over the matrices; and bases of narrow ones.

The native core adds in an order of its own, the same at every instruction-set level and for any number of threads;
PyTorch's linear algebra, which takes all other tensors, adds in its own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.kernels import native

MOST_NARROW_COLUMNS = 16
"""Number of columns beyond which a product is bound by its arithmetic, at which PyTorch is better."""

_LARGEST_EXPONENT = 100
"""Largest exponent of the powers of two that matrices are scaled by: fp32 represents them and their inverses."""


def narrow_product(m: Tensor, narrow: Tensor, *, normalized: bool = False) -> Tensor:
    """Return ``m @ narrow``, [count, rows, few], where ``narrow`` [count, columns, few] has few columns.

    Args:
        m: [count, rows, columns]; each matrix or its transpose is contiguous, wherever the next one begins.
        normalized: whether each narrow matrix is multiplied by a power of two first, so that its largest element is
            about 1. The columns of the product span the same space, and where ``narrow`` has elements of 1e19 it does
            not overflow.
    """
    by_columns = not _are_contiguous(m)
    wide = m.mT if by_columns else m
    if normalized and (by_columns or not _computed_natively(wide, narrow)):
        narrow = _scaled_to_one(narrow)
    if not _computed_natively(wide, narrow):
        # With the narrow one on the left, a CPU's BLAS reads m row by row and takes a fourth to a tenth of the time.
        return (narrow.mT.contiguous() @ m.mT).mT
    few, out = narrow.contiguous(), m.new_empty(*m.shape[:2], narrow.shape[-1])
    count, rows, columns = m.shape
    given = native.address("narrow", few, torch.float32, count * columns * few.shape[-1])
    to = native.address("out", out, torch.float32, count * rows * few.shape[-1])
    if by_columns:
        native.core().factor_columns(*_sizes(wide, few), given, to)
    else:
        native.core().factor_rows(*_sizes(wide, few), given, to, normalized)
    return out


def set_product(out: Tensor, left: Tensor, right: Tensor) -> None:
    """Set ``out`` [count, rows, columns] to ``left @ right.mT``, where both have few columns.

    A matrix whose ``right`` is not finite becomes NaN as a whole.
    """
    if out.dtype is not left.dtype:
        product = torch.empty(out.shape, dtype=left.dtype, device=out.device)
        set_product(product, left, right)
        out.copy_(product)
    elif _computed_natively(out, left, right):
        _multiply(out, left, right, scale=1.0, add=False)
    else:
        torch.matmul(left, (right + (right * 0.0).sum((-2, -1), keepdim=True)).mT, out=out)


def subtract_product(out: Tensor, left: Tensor, right: Tensor) -> None:
    """Subtract ``left @ right.mT`` from ``out`` [count, rows, columns], where both have few columns."""
    if _computed_natively(out, left, right):
        _multiply(out, left, right, scale=-1.0, add=True)
    else:
        out.baddbmm_(left, right.mT, alpha=-1.0)


def orthonormal_basis(narrow: Tensor) -> Tensor:
    """Return an orthonormal basis of the columns of each matrix of ``narrow``, [count, rows, few], few <= rows.

    Columns that are zero or equal have basis vectors, too. A matrix that is not finite becomes NaN as a whole.
    """
    few_columns = narrow.contiguous()
    if not _computed_natively(few_columns, few_columns):
        return torch.linalg.qr(narrow).Q
    out = torch.empty_like(few_columns)
    given = native.address("narrow", few_columns, torch.float32, out.numel())
    native.core().factor_basis(*out.shape, given, native.address("out", out, torch.float32, out.numel()))
    return out


def _scaled_to_one(m: Tensor) -> Tensor:
    """Return each matrix of ``m`` times a power of two, so that its largest element is about 1."""
    _, exponent = torch.frexp(m.abs().amax((-2, -1), keepdim=True))
    return torch.ldexp(m, -exponent.clamp(-_LARGEST_EXPONENT, _LARGEST_EXPONENT))


def _multiply(out: Tensor, left: Tensor, right: Tensor, *, scale: float, add: bool) -> None:
    left, right = left.contiguous(), right.contiguous()
    count, rows, columns = out.shape
    given = native.address("left", left, torch.float32, count * rows * left.shape[-1])
    others = native.address("right", right, torch.float32, count * columns * left.shape[-1])
    native.core().factor_product(*_sizes(out, left), given, others, scale, add)


def _sizes(m: Tensor, narrow: Tensor) -> tuple[int, int, int, int, int, int]:
    count, rows, columns = m.shape
    first = native.address("m", m, torch.float32, m.numel(), (m.stride(0), columns, 1))
    return first, count, m.stride(0), rows, columns, narrow.shape[-1]


def _computed_natively(m: Tensor, *narrow: Tensor) -> bool:
    if not native.computes(m) or not _are_contiguous(m):
        return False
    return all(t.dtype is torch.float32 for t in (m, *narrow)) and narrow[0].shape[-1] <= MOST_NARROW_COLUMNS


def _are_contiguous(m: Tensor) -> bool:
    return m.stride()[1:] == (m.shape[2], 1)
