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


class MovingAverage(NamedTuple):
    """An exponential moving average, ``after = beta · before + (1 − beta) · value``; both tensors may be the same."""

    before: Tensor
    after: Tensor
    beta: float


class AdamGradient(NamedTuple):
    """A layer's gradient, which :func:`adam_normalize` replaces. All tensors have one shape, dtype and device."""

    gradient: Tensor
    square: MovingAverage
    """The average of the gradient's square."""
    momentum: MovingAverage | None
    """The average of the gradient, if it takes the gradient's place."""
    eps: float
    factor: float


class AdamStep(NamedTuple):
    """A layer's step, which :func:`adam_apply` takes. All tensors have one shape, dtype and device."""

    weights: Tensor
    update: Tensor
    momentum: MovingAverage | None
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
        where = _addresses(gradient, *square[:2], *(momentum[:2] if momentum else (None, None)))
        if where is None:
            _normalize(layer)
        else:
            moments = *where[1:3], *_shares(square), *where[3:], *_shares(momentum)
            arguments += (where[0], gradient.numel(), *moments, eps, factor)
    if arguments:
        native.core().adam_normalize(*arguments)


def adam_apply(layers: Sequence[AdamStep]) -> None:
    """Step: ``weights = kept · weights − size · update``; with ``momentum``, the moving average of the updates takes
    the place of ``update``."""
    arguments: list[float] = []
    changed = []
    for layer in layers:
        weights, update, momentum, kept, size = layer
        where = _addresses(weights, update, *(momentum[:2] if momentum else (None, None)))
        if where is None:
            _apply(layer)
        else:
            arguments += (*where[:2], weights.numel(), *where[2:], *_shares(momentum), kept, size)
            changed.append(weights)
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


def _addresses(first: Tensor, *others: Tensor | None) -> list[int] | None:
    """Return the addresses of tensors, 0 for None, if the core takes them all: their elements lie in one order in
    memory."""
    if not native.computes(first) or not native.is_dense(first):
        return None
    if any(t is not None and t.shape != first.shape for t in others):
        return None
    numel, strides = first.numel(), None if first.is_contiguous() else first.stride()
    try:
        return [
            native.address("each", t, torch.float32, numel, strides) if t is not None else 0 for t in (first, *others)
        ]
    except (TypeError, ValueError):
        return None


def _shares(moving: MovingAverage | None) -> tuple[float, float]:
    return (moving.beta, 1 - moving.beta) if moving else (0.0, 0.0)
