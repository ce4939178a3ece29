"""Momenta that are sent in place of gradients under `QuantizedAdam`: each rank's gradient makes its own."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from thinwire.compressors import Coded, Raw, Wrapper, ef
from thinwire.integrations.norm_sketch import mean_norms, norm_sketches
from thinwire.integrations.optimizer_pairing import check_holds_all
from thinwire.kernels import AdamStep, adam_apply, site_id, square_sums
from thinwire.optim import QuantizedAdam
from thinwire.plan import Plan
from thinwire.runtime import Wire
from thinwire.runtime.bucket import BucketLayers, Substitute, in_order_of

_ROUNDING = 1e-4
"""Relative difference below which lengths are the same: a loss scale or a sum in fp16 changes them by less."""


@dataclass(frozen=True)
class _HandedOver:
    """A layer's gradient as the training loop got it."""

    shortened: Tensor
    """Factor by which the gradient was multiplied, a scalar."""
    length: Tensor
    """Norm of the gradient as it was handed over, in unscaled units."""


@dataclass
class _Sketched:
    """The compressed layers of a bucket in this backward pass, from which lengths of mean gradients are estimated."""

    names: tuple[str, ...]
    numels: tuple[int, ...]
    sent: Tensor
    """Sketches of this rank's gradients."""
    received: Tensor
    """Sketches of the gradients that have arrived."""
    squares: Tensor
    """Squared lengths of the gradients that have arrived."""


class _Part(NamedTuple):
    """A layer in a bucket."""

    name: str
    gradient: Tensor
    """The layer's gradient, in the order of the bucket."""
    ordered: Tensor
    """The layer's gradient, in the order of the parameter's indices, which ``momentum`` has."""
    momentum: Tensor | None
    beta: float


class Momentum(Substitute):
    """Turns a bucket of gradients into momenta before it is sent, and back when it has arrived.

    The gradient ``h = (m' − β1·m) / (1 − β1)`` that makes the received momentum m' contains the quantization error of
    m', enlarged ``1 / (1 − β1)`` times, so that its norm is far from that of the true mean. The training loop gets
    ``γ·h``, which is as long as the mean (`norm_sketches`), and the optimizer ``c·h`` for the ``c·γ·h`` that clipping
    made of it. Error feedback then counts ``c`` of what it sent as arrived, and keeps the rest.
    """

    def __init__(self, optimizer: QuantizedAdam, parameters: Mapping[str, Tensor]) -> None:
        """Create it with the ``parameters`` of the model, by name.

        Raises:
            ValueError: the optimizer lacks some of those that are trained.
        """
        check_holds_all(optimizer, parameters)
        self._optimizer = optimizer
        self._parameters = dict(parameters)
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        self._beta = {n: optimizer.beta1(p) for n, p in parameters.items() if id(p) in held}
        self._sketched: dict[BucketLayers, _Sketched] = {}
        self._handed_over: dict[str, _HandedOver] = {}
        self._wire: Callable[[], Wire | None] = lambda: None

    def attach(self, wire: Wire) -> None:
        """Follow the optimizer's steps as long as ``wire`` is attached."""
        self._wire = weakref.ref(wire)
        lengthened: list[_Change] = []
        before = self._optimizer.register_step_pre_hook(lambda *_: lengthened.extend(self.lengthen()))
        after = self._optimizer.register_step_post_hook(lambda *_: _undo(lengthened))
        # Gradients that no step has taken are lengthened for good.
        for call in (self.lengthen, before.remove, after.remove):
            wire.at_detach(call)

    @property
    def waits(self) -> bool:
        return not self._optimizer.frozen  # the warm-up

    def _sketch(self, flat: Tensor, layers: BucketLayers) -> None:
        """Sketch this rank's gradients of a bucket, which `make` will replace."""
        wire = self._wire()
        if wire is None or wire.world_size == 1 or not (compressed := _compressed(self._parts(flat, layers), wire)):
            return
        names = tuple(part.name for part in compressed)
        numels = tuple(part.gradient.numel() for part in compressed)
        nothing = torch.empty(0, dtype=torch.float32, device="cpu")
        self._sketched[layers] = _Sketched(names, numels, _sketches(compressed, wire.step), nothing, nothing)

    def sketches(self) -> Tensor | None:
        """Return the sketches of all buckets of this backward pass, whose mean over the ranks `set_lengths` takes; None
        if there are none."""
        return torch.cat([one.sent for one in self._sketched.values()]) if self._sketched else None

    def make(self, flat: Tensor, layers: BucketLayers, loss_scale: float) -> None:
        """Compute ``g ← β1·m + (1 − β1)·g`` in place, in the gradients' units."""
        self._sketch(flat, layers)
        # The kernel of weights' steps, w ← kept·w − size·u, is called once for all layers of the bucket.
        steps = []
        for part in self._parts(flat, layers):
            if part.momentum is None:
                part.gradient.mul_(1 - part.beta)
            else:
                kept = 1 - part.beta
                steps.append(AdamStep(part.ordered, part.momentum, None, kept, -part.beta * loss_scale))
        adam_apply(steps)

    def undo(self, mean: Tensor, layers: BucketLayers, loss_scale: float) -> None:
        """Compute ``g ← (g − β1·m) / (1 − β1)`` in place, the gradient that makes the momentum which has arrived."""
        parts = self._parts(mean, layers)
        adam_apply([AdamStep(g, m, None, 1.0, beta * loss_scale) for _, _, g, m, beta in parts if m is not None])
        for part in parts:
            # Only the small difference is divided: 1 / (1 − β1) times the momentum may be too much for fp16.
            part.gradient.div_(1 - part.beta)
        wire, sketched = self._wire(), self._sketched.get(layers)
        if wire is not None and sketched is not None:
            compressed = _compressed(parts, wire)
            sketched.received = _sketches(compressed, wire.step)
            sketched.squares = square_sums([part.gradient for part in compressed])

    @torch.no_grad()
    def set_lengths(self, mean_sketches: Tensor, loss_scale: float) -> None:
        """Compute ``g ← γ·g`` for compressed layers, once all that has arrived is in the parameters' ``grad``, so that
        gradients are as long as the mean of all ranks' gradients. Layers that are not compressed have a γ of 1."""
        sketched = list(self._sketched.values())
        self.forget_sketches()
        names = [name for one in sketched for name in one.names]
        numels = tuple(numel for one in sketched for numel in one.numels)
        squares = torch.cat([one.squares for one in sketched])
        lengths = mean_norms(mean_sketches, torch.cat([one.received for one in sketched]), numels, squares)
        factors = lengths / squares.sqrt()
        factors = torch.where(torch.isfinite(factors) & (factors > 0), factors, 1.0)
        lengths = factors * squares.sqrt() / loss_scale
        for name, factor, length in zip(names, factors, lengths, strict=True):
            if (gradient := self._parameters[name].grad) is not None:
                gradient.mul_(factor)
            self._handed_over[name] = _HandedOver(factor, length)

    def forget_sketches(self) -> None:
        """Forget the sketches of a backward pass, before the next one."""
        self._sketched = {}

    def check_taken(self) -> None:
        """Raise ``RuntimeError`` if the optimizer has not taken the last gradients: its step tells how much of them
        clipping has left, which residuals depend on. Gradients that were dropped or are not finite do not count."""
        waiting = [
            name
            for name, handed in self._handed_over.items()
            if self._parameters[name].grad is not None and bool(torch.isfinite(handed.length))
        ]
        if waiting:
            raise RuntimeError(
                f"QuantizedAdam has not taken the gradients of the last backward pass ({waiting[0]}): save the state "
                "after optimizer.step(), or drop them first with optimizer.zero_grad()"
            )

    @torch.no_grad()
    def lengthen(self) -> list[_Change]:
        """Divide every gradient that was handed over by its γ, whatever the loop has made of it, and tell the Wire.

        This is called before the optimizer's step or, if there is none, before gradients are added to or computed
        again. Returns the changes, for `_undo`.
        """
        changes: list[_Change] = []
        handed_over, self._handed_over = self._handed_over, {}
        gradients = {name: g for name in handed_over if (g := self._parameters[name].grad) is not None}
        shares = {name: torch.zeros_like(handed.length) for name, handed in handed_over.items()}
        if gradients:
            lengths = torch.stack([handed_over[name].length for name in gradients])
            present = torch.where(lengths > 0, square_sums(list(gradients.values())).sqrt() / lengths, 1.0)
            # A longer one is in other units or has had something added to it, and all that arrived is in it.
            present = torch.where(present > 1 - _ROUNDING, 1.0, present)
            shares |= dict(zip(gradients, present.unbind(), strict=True))
        for name, gradient in gradients.items():
            shortened = handed_over[name].shortened
            gradient.div_(shortened)
            changes.append((gradient, shortened))
        wire = self._wire()
        if wire is not None and wire.attached and shares:
            wire.engine.on_partial_use(shares)
        return changes

    def _parts(self, flat: Tensor, layers: BucketLayers) -> list[_Part]:
        pieces = flat.detach().split([math.prod(shape) for _, shape in layers])
        parts = []
        for (name, _), gradient in zip(layers, pieces, strict=True):
            parameter = self._parameters[name]
            momentum, ordered = self._optimizer.momentum(parameter), in_order_of(parameter, gradient)
            parts.append(_Part(name, gradient, ordered, momentum, self._beta[name]))
        return parts


def _compressed(parts: Sequence[_Part], wire: Wire) -> list[_Part]:
    return [part for part in parts if not isinstance(wire.plan.layers.get(part.name), Raw | None)]


def _sketches(parts: Sequence[_Part], step: int) -> Tensor:
    return norm_sketches([part.gradient for part in parts], [(step, site_id(part.name)) for part in parts])


_Change = tuple[Tensor, Tensor]
"""A gradient, and the tensor by which it was divided."""


@torch.no_grad()
def _undo(changes: list[_Change]) -> None:
    for gradient, divisor in changes:
        gradient.mul_(divisor)
    changes.clear()


def with_feedback(plan: Plan, site: str = "") -> Plan:
    """Return the plan with error feedback around all that is coded, for layers whose name begins with ``site``."""
    fed = {
        name: ef(c) if name.startswith(site) and isinstance(c, Coded) and not isinstance(c, Raw | Wrapper) else c
        for name, c in plan.layers.items()
    }
    return replace(plan, layers=fed)
