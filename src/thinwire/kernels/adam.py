"""Adam's moments in one pass: a gradient normalised by the root of its second moment, and a step of the weights.

Both kernels have one rounding per operation, in the order of the formulas, so that the native core and PyTorch's
operations agree bit for bit and replicas on different machines do not part.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from thinwire.kernels import native


class Moving(NamedTuple):
    """An exponential moving average, ``after = beta · before + (1 − beta) · value``; both tensors may be the same."""

    before: Tensor
    after: Tensor
    beta: float


def adam_normalise(
    gradient: Tensor, square: Moving, momentum: Moving | None = None, *, eps: float, factor: float
) -> None:
    """Replace a gradient g by ``factor · g / (√v + eps)``, where v is ``square.after``, the moving average of g².

    With ``momentum``, the moving average of g is taken in the place of g. All tensors have the same shape, dtype and
    device.
    """
    tensors = [gradient, *square[:2], *(momentum[:2] if momentum else ())]
    if _computed_natively(tensors):
        moments = *_arguments(square), *_arguments(momentum)
        native.core().adam_normalise(gradient.data_ptr(), gradient.numel(), *moments, eps, factor)
        return
    added = torch.mul(gradient, 1 - square.beta).mul_(gradient)
    torch.mul(square.before, square.beta, out=square.after).add_(added)
    divisor = _root(square.after).add_(eps)
    if momentum is None:
        gradient.div_(divisor)
    else:
        added = torch.mul(gradient, 1 - momentum.beta, out=added)
        torch.mul(momentum.before, momentum.beta, out=momentum.after).add_(added)
        torch.div(momentum.after, divisor, out=gradient)
    gradient.mul_(factor)


def adam_apply(
    weights: Tensor, update: Tensor, momentum: Moving | None = None, *, kept: float, size: float = 1.0
) -> None:
    """Step: ``weights = kept · weights − size · update``; with ``momentum``, the moving average of the updates takes
    the place of ``update``. It is changed in place: its two tensors are one.

    All tensors have the same shape, dtype and device.
    """
    if _computed_natively([weights, update, *(momentum[:1] if momentum else ())]):
        addresses = weights.data_ptr(), update.data_ptr(), weights.numel()
        native.core().adam_apply(*addresses, *_arguments(momentum), kept, size)
        # As PyTorch's own operations do: a graph that still needs the weights before notices that they are gone.
        increment_version([weights])
        return
    if momentum is not None:
        momentum.after.mul_(momentum.beta).add_(update * (1 - momentum.beta))
        update = momentum.after
    weights.mul_(kept).sub_(update if size == 1.0 else update * size)


def _root(values: Tensor) -> Tensor:
    """The square root, rounded to nearest. MKL's, which PyTorch takes on a CPU, may be off by the last bit."""
    return values.double().sqrt().to(values.dtype) if values.is_cpu else values.sqrt()


def _computed_natively(tensors: list[Tensor]) -> bool:
    first = tensors[0]
    return native.computes(first) and all(
        t.dtype is torch.float32 and t.is_contiguous() and t.shape == first.shape and t.device == first.device
        for t in tensors
    )


def _arguments(moving: Moving | None) -> tuple[int, int, float, float]:
    if moving is None:
        return 0, 0, 0.0, 0.0
    return moving.before.data_ptr(), moving.after.data_ptr(), moving.beta, 1 - moving.beta
