"""Adam's moments in one pass: gradients normalized by the root of their second moment, and a step of the weights.

Both kernels have one rounding per operation, in the order of the formulas, so that the native core and PyTorch's
operations agree bit for bit and replicas on different machines do not part. They take many layers at once: between two
long passes over memory the caches hold nothing of what Python needs to start the next one.
"""

from __future__ import annotations

from collections.abc import Sequence
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


class AdamGradient(NamedTuple):
    """A layer's gradient, which :func:`adam_normalize` replaces. All tensors have one shape, dtype and device."""

    gradient: Tensor
    square: Moving
    """The average of the gradient's square."""
    momentum: Moving | None
    """The average of the gradient, if it takes the gradient's place."""
    eps: float
    factor: float


class AdamStep(NamedTuple):
    """A layer's step, which :func:`adam_apply` takes. All tensors have one shape, dtype and device."""

    weights: Tensor
    update: Tensor
    momentum: Moving | None
    """The average of the updates, if it takes the update's place. It is changed in place: its two tensors are one."""
    kept: float
    size: float


def adam_normalize(layers: Sequence[AdamGradient]) -> None:
    """Replace gradients g by ``factor · g / (√v + eps)``, where v is ``square.after``, the moving average of g².

    With ``momentum``, the moving average of g is taken in the place of g.
    """
    arguments: list[float] = []
    for layer in layers:
        gradient, square, momentum, eps, factor = layer
        if _computed_natively([gradient, *square[:2], *(momentum[:2] if momentum else ())]):
            moments = *_arguments(square, gradient), *_arguments(momentum, gradient)
            arguments += (_address("gradient", gradient, gradient), gradient.numel(), *moments, eps, factor)
        else:
            _normalize(layer)
    if arguments:
        native.core().adam_normalize(*arguments)


def adam_apply(layers: Sequence[AdamStep]) -> None:
    """Step: ``weights = kept · weights − size · update``; with ``momentum``, the moving average of the updates takes
    the place of ``update``."""
    arguments: list[float] = []
    changed = []
    for layer in layers:
        weights, update, momentum, kept, size = layer
        if _computed_natively([weights, update, *(momentum[:1] if momentum else ())]):
            both = _address("weights", weights, weights), _address("update", update, weights)
            arguments += (*both, weights.numel(), *_arguments(momentum, weights), kept, size)
            changed.append(weights)
        else:
            _apply(layer)
    if changed:
        native.core().adam_apply(*arguments)
        # As PyTorch's own operations do: a graph that still needs the weights before notices that they are gone.
        increment_version(changed)


def _normalize(layer: AdamGradient) -> None:
    gradient, square, momentum, eps, factor = layer
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


def _apply(layer: AdamStep) -> None:
    weights, update, momentum, kept, size = layer
    if momentum is not None:
        momentum.after.mul_(momentum.beta).add_(update * (1 - momentum.beta))
        update = momentum.after
    weights.mul_(kept).sub_(update if size == 1.0 else update * size)


def _root(values: Tensor) -> Tensor:
    """Return the square root, rounded to nearest. MKL's, which PyTorch takes on a CPU, may be off by the last bit."""
    return values.double().sqrt().to(values.dtype) if values.is_cpu else values.sqrt()


def _computed_natively(tensors: list[Tensor]) -> bool:
    """Whether the core takes these tensors: their elements lie in one order in memory."""
    first = tensors[0]
    contiguous = first.is_contiguous()
    if not native.computes(first) or not (contiguous or native.is_dense(first)):
        return False
    for t in tensors:
        alike = t.is_contiguous() if contiguous else t.stride() == first.stride()
        if t.dtype is not torch.float32 or not t.is_cpu or not alike or t.shape != first.shape:
            return False
    return True


def _arguments(moving: Moving | None, like: Tensor) -> tuple[int, int, float, float]:
    if moving is None:
        return 0, 0, 0.0, 0.0
    before, after, beta = moving
    return _address("before", before, like), _address("after", after, like), beta, 1 - beta


def _address(name: str, tensor: Tensor, like: Tensor) -> int:
    strides = None if like.is_contiguous() else like.stride()
    return native.address(name, tensor, torch.float32, like.numel(), strides)
