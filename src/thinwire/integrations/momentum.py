"""Momenta that are sent in place of gradients under `QuantizedAdam`: each rank's gradient makes its own."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from thinwire.compressors import Raw
from thinwire.integrations.optimizers import check_holds_all, held_by
from thinwire.kernels import (
    AdamStep,
    SignedSum,
    adam_apply,
    derive_key,
    power_of_two,
    signed_sums,
    site_id,
    square_sums,
)
from thinwire.optim import QuantizedAdam
from thinwire.runtime import Wire
from thinwire.runtime.bucket import BucketLayers, Substitute, view_layer

_ROUNDING = 1e-4
"""Relative difference below which lengths are the same: a loss scale or a sum in fp16 changes them by less."""
_LEAST, _MOST = 32, 256
"""Bounds of the number of values of a sketch."""
_LANES_PER_ROOT = 16
"""Number of lanes for each unit of the root of the number of elements: they fit a cache, and their runs are few."""


@dataclass(frozen=True)
class _LocalGradient:
    """A layer's gradient as the training loop got it."""

    shortened: Tensor
    """Factor by which the gradient was multiplied, a scalar."""
    length: Tensor
    """Norm of the gradient as it was handed over, in unscaled units."""


@dataclass
class _SketchedBucket:
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
        held = held_by(optimizer)
        self._beta = {n: float(held[p]["betas"][0]) for n, p in parameters.items() if p in held}
        self._sketched: dict[BucketLayers, _SketchedBucket] = {}
        self._handed_over: dict[str, _LocalGradient] = {}
        self._wire: Callable[[], Wire | None] = lambda: None

    def attach(self, wire: Wire) -> None:
        """Follow the optimizer's steps as long as ``wire`` is attached."""
        self._wire = weakref.ref(wire)
        wire.at_detach(self.lengthen)
        wire.at_detach(self._optimizer.register_divisors(self.take))

    @property
    def waits(self) -> bool:
        return not self._optimizer.frozen  # the warm-up

    def _sketch(self, parts: Sequence[_Part], layers: BucketLayers) -> None:
        """Sketch this rank's gradients of a bucket, which `make` will replace."""
        wire = self._wire()
        if wire is None or wire.world_size == 1 or not (compressed := _compressed(parts, wire)):
            return
        names = tuple(part.name for part in compressed)
        numels = tuple(part.gradient.numel() for part in compressed)
        nothing = torch.empty(0, dtype=torch.float32, device="cpu")
        self._sketched[layers] = _SketchedBucket(names, numels, _sketches(compressed), nothing, nothing)

    def sketches(self) -> Tensor | None:
        """Return the sketches of all buckets of this backward pass, whose mean over the ranks `set_lengths` takes; None
        if there are none."""
        return torch.cat([one.sent for one in self._sketched.values()]) if self._sketched else None

    def make(self, flat: Tensor, layers: BucketLayers, loss_scale: float) -> None:
        """Compute ``g ← β1·m + (1 − β1)·g`` in place, in the gradients' units."""
        parts = self._parts(flat, layers)
        self._sketch(parts, layers)
        # The kernel of weights' steps, w ← kept·w − size·u, is called once for all layers of the bucket.
        steps = []
        for part in parts:
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
        sketched = self._sketched.get(layers)
        if sketched is not None:
            # A layer that was frozen before has joined the plan since.
            compressed = [part for part in parts if part.name in sketched.names]
            sketched.received = _sketches(compressed)
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
            self._handed_over[name] = _LocalGradient(factor, length)

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
    def lengthen(self) -> None:
        """Divide the gradients that no step has taken by their γ, before others are added to them."""
        for parameter, factor in self.take().items():
            if parameter.grad is not None:
                parameter.grad.div_(factor)

    @torch.no_grad()
    def take(self) -> dict[Tensor, Tensor]:
        """Return γ of every gradient that was handed over, by parameter, whatever the loop has made of it, and tell the
        Wire how much of it is left."""
        handed_over, self._handed_over = self._handed_over, {}
        gradients = {name: g for name in handed_over if (g := self._parameters[name].grad) is not None}
        shares = {name: torch.zeros_like(handed.length) for name, handed in handed_over.items()}
        if gradients:
            lengths = torch.stack([handed_over[name].length for name in gradients])
            present = torch.where(lengths > 0, square_sums(list(gradients.values())).sqrt() / lengths, 1.0)
            # A longer one is in other units or has had something added to it, and all that arrived is in it.
            present = torch.where(present > 1 - _ROUNDING, 1.0, present)
            shares |= dict(zip(gradients, present.unbind(), strict=True))
        wire = self._wire()
        if wire is not None and wire.attached and shares:
            wire.engine.on_partial_use(shares)
        return {self._parameters[name]: handed.shortened for name, handed in handed_over.items()}

    def _parts(self, flat: Tensor, layers: BucketLayers) -> list[_Part]:
        pieces = flat.detach().split([math.prod(shape) for _, shape in layers])
        parts = []
        for (name, _), gradient in zip(layers, pieces, strict=True):
            parameter = self._parameters[name]
            momentum, ordered = self._optimizer.momentum(parameter), view_layer(parameter, gradient)
            parts.append(_Part(name, gradient, ordered, momentum, self._beta[name]))
        return parts


def _compressed(parts: Sequence[_Part], wire: Wire) -> list[_Part]:
    return [part for part in parts if not isinstance(wire.plan.layers.get(part.name), Raw | None)]


def _sketches(parts: Sequence[_Part]) -> Tensor:
    return norm_sketches([part.gradient for part in parts], [part.name for part in parts])


def sketch_size(numel: int) -> int:
    """Return the number of values of the sketch of a vector of ``numel`` elements. The relative error of its length is
    ``√(1/(2·size))``, 4 % to 12 %, and that of many layers together is smaller."""
    return min(_MOST, max(_LEAST, power_of_two(numel // 256)))


def norm_sketches(vectors: Sequence[Tensor], names: Sequence[str]) -> Tensor:
    """Return ``S·x`` of each vector, in fp64, end to end, with random S of signs: ``E‖S·x‖² = ‖x‖²`` (count sketches,
    Charikar et al. 2002).

    S depends on the vector's name and number of elements alone, so that the mean of ranks' sketches is the sketch of
    their mean, and its signs are drawn once. Every operation is element-wise, so that equal vectors have the same bits
    on every machine; means of fp32 values are exact in fp64, in whichever order a collective adds them.
    """
    return signed_sums(vectors, [_way(x.numel(), x.device, name) for x, name in zip(vectors, names, strict=True)])


def mean_norms(sketches: Tensor, received: Tensor, numels: tuple[int, ...], squares: Tensor) -> Tensor:
    """Return ``‖x‖`` of vectors of ``numels`` elements that have these ``sketches`` and of which disturbed copies
    arrived, (vectors,) in fp64.

    ``received`` are the sketches of those copies and ``squares``, (vectors,), their squared lengths. The error of a
    copy's sketch is known and estimates that of the vector's, the better the closer they are (a control variate): if
    the copy is exact, so is the norm.
    """
    nothing = sketches.new_zeros(1)
    ends = [torch.cat([values, nothing]) for values in (sketches, received, sketches + received)]
    own, other, both = _square_sums(torch.stack(ends)[:, _places(numels, sketches.device)])
    product = both - own - other
    likeness = torch.where(other > 0, product / (2 * other), 0.0).square().clamp(max=1.0)
    estimates = own + likeness * (squares - other)
    return torch.where(estimates > 0, estimates, own).sqrt()


def _square_sums(rows: Tensor) -> Tensor:
    """Return ``Σ x²`` over the last dimension, whose size is a power of two, added up in a fixed order."""
    squares = rows.square()
    while (half := squares.shape[-1] // 2) > 0:
        squares = squares[..., :half] + squares[..., half:]
    return squares[..., 0]


@lru_cache(maxsize=64)
def _places(numels: tuple[int, ...], device: torch.device) -> Tensor:
    """Return the indices of each vector's sketch, (vectors, values), padded with that of the zero at the end."""
    sizes = [sketch_size(numel) for numel in numels]
    places = torch.full((len(sizes), max(sizes)), sum(sizes), dtype=torch.int64, device="cpu")
    for row, begin, size in zip(places, accumulate(sizes, initial=0), sizes, strict=False):
        row[:size] = torch.arange(begin, begin + size, dtype=torch.int64, device="cpu")
    return places.to(device)


@lru_cache(maxsize=4096)
def _way(numel: int, device: torch.device, name: str) -> SignedSum:
    """Return the signed sum that makes a sketch. It is cached: a rank has the same layers in every step."""
    size = sketch_size(numel)
    lanes = max(size, power_of_two(min(numel, round(_LANES_PER_ROOT * math.sqrt(numel)))))
    draws = [derive_key(site_id(name), run) for run in range(-(-numel // lanes))]
    runs = [(1 if draw >> 32 & 1 else -1, draw % lanes) for draw in draws]
    return SignedSum(torch.tensor(runs, dtype=torch.int64, device="cpu").view(-1, 2), *_mix(lanes, device), size)


@lru_cache(maxsize=64)
def _mix(count: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return a fixed order of ``count`` lanes, and a sign for each."""
    draws = torch.Generator().manual_seed(count)
    order = torch.randperm(count, generator=draws, dtype=torch.int64, device="cpu")
    signs = torch.randint(0, 2, (count,), generator=draws, dtype=torch.int64, device="cpu") * 2 - 1
    return order.to(device), signs.float().to(device)
