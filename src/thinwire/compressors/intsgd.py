"""IntSGD, integers whose scale follows past gradients, and IntDIANA, those of differences (Mishchenko et al. 2022)."""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.arguments import check_choice, check_number
from thinwire.compressors._core.compressor import Compressor, Traits, not_finite
from thinwire.compressors._core.integers import Integers, fp32, integer_square_sum
from thinwire.compressors._core.mixins import ColdStart, FollowsOptimizer, Scheduled, StepEnd
from thinwire.compressors._core.segments import Part, SumCall
from thinwire.compressors._core.slots import LayerState, Slot, State, layer_slots
from thinwire.compressors._core.summed import Plain, Subtract, SumShape
from thinwire.kernels import square_sums

_UNSET = -1.0
_NORM, _ALL = "r", "r_all"
_SHIFT, _MEAN = "shift", "mean_shift"
_GROWTHS, _FALLS = 16, 7
"""Number of powers of 4 by which a gradient may be longer than expected, and shorter than a 32nd of that."""
_FALLEN = math.sqrt(0.5) / 32
"""Root mean square of α·g, which is √½ at most, below which nearly all of g is lost in rounding."""
_COUNTS = _GROWTHS + _FALLS + 1
"""Number of counters: one for each of those powers, and one for the ranks whose gradient is zero."""


@dataclass(frozen=True)
class IntSGD(Integers, ColdStart, FollowsOptimizer, Scheduled, StepEnd):
    """IntSGD (Mishchenko et al. 2022, Algorithm 1): ``g̃ = 1/(nα) · Σ Int(α·g_i)``.

    α comes from past steps, and all ranks compute it alike:
    ``r_k = β·r_{k−1} + (1−β)·‖g̃^{k−1}‖²`` and ``α_k = √d / √(2n·r_k + ε²)``: of the whole model (``block=global``,
    Proposition 2), or of each layer by itself, with its share ``d_l/d`` of ε² (``block=layer``, Proposition 4). The
    first step is exact: its sum is in fp32. ``rounding`` is random (unbiased) or determ (to the nearest integer).
    ``block=global, bits=32`` is what the authors' published code does.

    A few more integers count the ranks where a layer had NaN or Inf (it is received as NaN then), and those whose
    gradient is more than 4, 16, 64, ... times as long as its scale expects. Nearly all of it is clipped then, and the
    paper's r would take many steps to follow; here the next step's r is that of the longest gradient. Others count
    those whose gradient is less than a 32nd as long, so that nearly all of it is lost in rounding: where all are, the
    next step's r, too, is that of the longest gradient. Steps without a gradient count for neither, and a layer whose
    gradients were zero so far is exact, as in a first step.

    Scales are those of the gradients themselves, whatever the optimizer does with them, and in unscaled units.
    ``scale=params`` is the paper's own form, which takes them from the optimizer's steps, at its learning rates η:
    ``r_k = β·r_{k−1} + (1−β)·‖x^k − x^{k−1}‖²`` and ``α_k = η_k·√d / √(2n·r_k + η_k²·ε²)``. For plain SGD at a constant
    learning rate it is the same; it needs ``compress(optimizer=...)``, an SGD, and a copy of the parameters.

    Only where nothing is clipped is the result unbiased: `Stats.clipped` is the share. α does not depend on ``bits``,
    and integers are small: 4 bits hold nearly all that 8 do, and 2 bits clip those of magnitudes above 1.
    """

    spec_name: ClassVar[str] = "intsgd"
    widths: ClassVar[tuple[int, ...]] = (2, 4, 8, 32)

    block: Literal["layer", "global"] = "layer"
    beta: float = 0.9
    eps: float = 1e-8
    scale: Literal["gradient", "params"] = "gradient"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("block", self.block, ("layer", "global"))
        check_choice("scale", self.scale, ("gradient", "params"))
        check_number("beta", self.beta, low=0, below=1)
        check_number("eps", self.eps, above=0)

    @property
    def traits(self) -> Traits:
        # α·g has a root mean square of up to √½, where gradients are noise: 2 bits clip 16 % of such values.
        return super().traits._replace(unbiased=self.rounding == "random" and self.bits > 2)

    @property
    def slots(self) -> tuple[Slot, ...]:
        shared = [_NORM, _ALL] if self.block == "global" else [_NORM]
        return (
            *(Slot(name, torch.float64, shape=lambda layer: (1,), initial=_unset, shared=True) for name in shared),
            *super().slots,
        )

    @property
    def cold_start(self) -> Compressor:
        return Exact(self)

    def at_step(self, step: int, learning_rate: float | None) -> Compressor:
        if self.follows_optimizer and learning_rate is None:
            raise ValueError(f"{self} takes its scale from the optimizer's steps: pass compress(..., optimizer=...)")
        return self

    def follow(self, mean: Tensor, layer: str, state: State) -> None:
        self._follow(square_sums([mean]) / state.loss_scale**2, [layer], state)

    def _follow(
        self, norms: Tensor, layers: Sequence[str], state: State, bounds: tuple[Tensor, Tensor] | None = None
    ) -> None:
        """Set r of the next step; ``norms`` (layers,) fp64 are ``‖g̃‖²``, and ``bounds`` the least and the most that r
        may be."""
        before = torch.cat([state.layers[name].now[_NORM] for name in layers])
        after = before * self.beta + norms * (1.0 - self.beta)
        if self.follows_optimizer:
            # Plain SGD's first step is known beforehand, and at a rate of 0 nothing is.
            rates = self._rates(layers, state, norms)
            norms, after = torch.where(rates > 0.0, norms * rates**2, before), before
        after = torch.where(before < 0.0, torch.where(norms > 0.0, norms, before), after)
        if bounds is not None and not self.follows_optimizer:
            after = torch.minimum(torch.maximum(after, bounds[0]), bounds[1])
        after = torch.where(torch.isfinite(norms), after, before)
        for name, value in zip(layers, after, strict=True):
            for slot in (_NORM, _ALL) if self.block == "global" else (_NORM,):
                # The norm of this layer only, until `end_step` sets that of all.
                state.layers[name].next[slot].copy_(value)

    @property
    def follows_optimizer(self) -> bool:
        return self.scale == "params"

    def on_optimizer_step(self, changes: Sequence[tuple[LayerState, float]]) -> None:
        for layer, change in changes:
            norm = layer.now[_NORM]
            norm.copy_(torch.where(norm < 0.0, norm, norm * self.beta + change * (1.0 - self.beta)))
        if self.block == "global":
            _share([layer.now for layer, _ in changes])

    def end_step(self, layers: Sequence[LayerState], loss_scale: float) -> None:
        """Set the norm of every layer to that of all together."""
        if self.block == "global":
            _share([layer.next for layer in layers])

    def alphas(self, parts: Sequence[Part], state: State | None) -> Tensor:
        """Return α of each layer in unscaled units: fp64, (parts,)."""
        slot = _ALL if self.block == "global" else _NORM
        norms = torch.cat([layer_slots(state, p.name).now[slot] for p, _ in parts]).clamp(min=0.0)
        sizes = self.sizes(parts, norms.device)
        total = self.numel or sizes
        blocks = torch.ones_like(sizes) * total if self.block == "global" else sizes
        rates = (
            self._rates([p.name for p, _ in parts], state, norms) if self.follows_optimizer else torch.ones_like(norms)
        )
        safe = rates**2 * blocks / total * self.eps**2
        return rates * blocks.sqrt() / (norms * (2 * self.num_ranks) + safe).sqrt()

    @staticmethod
    def _rates(layers: Sequence[str], state: State | None, like: Tensor) -> Tensor:
        known = state.learning_rates if state is not None else {}
        given = torch.tensor([known.get(name, 1.0) for name in layers], dtype=torch.float64, device="cpu")
        return kernels.to_device(given, like.device)

    def _scales(self, parts: Sequence[Part], state: State | None) -> Tensor:
        """Return the factors of gradients before they are rounded."""
        assert state is not None
        return fp32(self.alphas(parts, state) / state.loss_scale)

    def _contribution(self, x: Tensor, parts: Sequence[Part], call: SumCall) -> Tensor:
        """Return the values that are rounded to integers, a flat tensor like ``x``."""
        return x

    def _send(self, parts: Sequence[Part], scales: Tensor, call: SumCall) -> None:
        """Use this rank's integers in the buffer, before they are summed. Does nothing here."""

    def _receive(self, y: Tensor, parts: Sequence[Part], scales: Tensor, finite: Tensor, call: SumCall) -> Tensor:
        """Set the layers of ``y`` to g̃ from the sums in the buffer. Returns ``‖g̃‖²`` of each, fp64 [parts]."""
        total = call.buffers[0]
        self.get(total, y, parts, scales, finite)
        norms = torch.stack([integer_square_sum(total[where][: piece.numel]) for piece, where in parts])
        return norms / (self._unscaled(scales, call) * self.num_ranks) ** 2

    @staticmethod
    def _unscaled(scales: Tensor, call: SumCall) -> Tensor:
        """Return α in unscaled units, as it was applied: fp64 [parts]."""
        return scales.double() * (1.0 if call.state is None else call.state.loss_scale)

    def _bounds(self, counts: Tensor, norms: Tensor, parts: Sequence[Part], alphas: Tensor) -> tuple[Tensor, Tensor]:
        """Return the least and the most that r may be by the ``counts`` [parts, _COUNTS] of ranks: fp64 [parts]."""
        known = self.sizes(parts, norms.device) / (2 * self.num_ranks * alphas**2)
        growths = (counts[:, :_GROWTHS] > 0).sum(1, dtype=torch.float64)
        falls = (counts[:, _GROWTHS:-1] == self.num_ranks).sum(1, dtype=torch.float64)
        grew, fell = growths > 0, (falls > 0) & (counts[:, -1] < self.num_ranks)
        # The longest gradient is then a quarter to all as long as noise may be.
        return torch.where(grew, known * 16.0**growths, 0.0), torch.where(fell, known / (64.0 * 16.0**falls), math.inf)

    def sums(self, shape: Sequence[int], dtype: torch.dtype) -> tuple[SumShape, ...]:
        numel = math.prod(shape)
        return (self.sum_shape(self.padded(numel + 1 + _COUNTS) if numel else 0),)

    def rounds(self, x: Tensor, y: Tensor, call: SumCall) -> Generator[None, None, Subtract]:
        parts, (buffer,), state = [part for part in call.parts[0] if part.piece.numel], call.buffers, call.state
        assert state is not None, "scales are kept in slots"
        scales = self._scales(parts, state) if parts else torch.zeros(0, dtype=torch.float32, device="cpu")
        x = self._contribution(x, parts, call)
        if parts:
            self.put(x, parts, scales, buffer, call)
            self._send(parts, scales, call)
        thresholds = torch.exp2(2.0 * torch.arange(1, _GROWTHS + 1, dtype=torch.float32, device=x.device))
        for at, (piece, where) in enumerate(parts):
            values, end = x[piece.elements], where.start + piece.numel
            buffer[end] = torch.isnan(not_finite(values))
            rms = torch.linalg.vector_norm(values, dtype=torch.float32) / math.sqrt(piece.numel)
            length = rms * scales[at]
            buffer[end + 1 : end + 1 + _GROWTHS] = length > thresholds
            buffer[end + 1 + _GROWTHS : end + _COUNTS] = length * thresholds[:_FALLS] <= 4 * _FALLEN
            buffer[end + _COUNTS] = rms == 0
        yield
        if parts:
            finite = torch.stack([buffer[where.start + piece.numel] for piece, where in parts]) == 0
            alphas = self._unscaled(scales, call)
            norms = self._receive(y, parts, scales, finite, call)
            counts = torch.stack([buffer[where.start + piece.numel + 1 :][:_COUNTS] for piece, where in parts])
            norms = torch.where(finite, norms, math.nan)
            self._follow(norms, [piece.name for piece, _ in parts], state, self._bounds(counts, norms, parts, alphas))
        return lambda rest: self.subtract(rest, parts, scales, call)


def _share(slots: Sequence[Mapping[str, Tensor]]) -> None:
    if slots and kernels.asynchronous(slots[0][_NORM]):
        # Without a look by the host: sorted, the order of the layers does not matter either.
        norms = torch.cat([layer[_NORM] for layer in slots])
        total = torch.where(norms < 0.0, 0.0, norms).sort().values.sum()
        for layer, norm in zip(slots, norms, strict=True):
            layer[_ALL].copy_(torch.where(norm < 0.0, layer[_ALL], total))
        return
    known = [(layer, norm) for layer in slots if (norm := float(layer[_NORM])) >= 0.0]
    # Rounded once, so that the order of the layers does not matter.
    total = math.fsum(norm for _, norm in known)
    for layer, _ in known:
        layer[_ALL].fill_(total)


def _unset(layer: Sequence[int], name: str) -> Tensor:
    return torch.tensor([_UNSET], dtype=torch.float32, device="cpu")


@dataclass(frozen=True)
class Exact(Plain):
    """The exact mean, in fp32, of layers without a known scale, which it sets. It has no spec."""

    spec_name: ClassVar[str] = "exact"

    until: IntSGD

    @property
    def traits(self) -> Traits:
        return Traits(unbiased=True, takes_every_layer=self.until.traits.takes_every_layer)

    @property
    def slots(self) -> tuple[Slot, ...]:
        return self.until.slots

    def sum_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return torch.float32

    def rounds(self, x: Tensor, y: Tensor, call: SumCall) -> Generator[None, None, Subtract]:
        subtract = yield from super().rounds(x, y, call)
        assert call.state is not None, "scales are kept in slots"
        for piece, where in call.parts[0]:
            self.until.follow(call.buffers[0][where], piece.name, call.state)
        return subtract


@dataclass(frozen=True)
class IntDIANA(IntSGD):
    """IntDIANA (algorithm 3), for ranks whose data differ: rank i keeps a shift ``h_i``, and all keep their mean h.

    ``q_i = Int(α·(g_i − h_i))``, ``h_i += q_i/α``, ``g̃ = h + 1/(nα) · Σ q_i``, and g̃ is the next h. α is IntSGD's, by
    default of the last g̃ alone (``beta=0``, proposition 3, which theorem 4 takes). Where ranks' data differ, their
    gradients do not vanish at the optimum although their mean does: IntSGD's α grows there, and its integers with it,
    until most of them are clipped. The differences ``g_i − h_i`` and 1/α vanish together.

    What is clipped stays in ``g_i − h_i``, so that later steps send it. Where gradients are those of mini-batches,
    their noise does not vanish, and differences of two of them are longer than either, so that more is clipped: take
    `IntSGD` there. The first step is exact, and a rank's gradient in it is its first shift. Shifts take 16 bytes an
    element. In a world of another size every rank starts from the mean shift.
    """

    spec_name: ClassVar[str] = "intdiana"

    bits: int = field(default=2, metadata={"shown": True})
    beta: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("scale", self.scale, ("gradient",))

    @property
    def traits(self) -> Traits:
        return super().traits._replace(contracts=False)

    @property
    def slots(self) -> tuple[Slot, ...]:
        return (Slot(_SHIFT, shape=tuple), Slot(_MEAN, shape=tuple, shared=True), *super().slots)

    @property
    def cold_start(self) -> Compressor:
        return ExactShifts(self)

    def _contribution(self, x: Tensor, parts: Sequence[Part], call: SumCall) -> Tensor:
        assert call.state is not None, "shifts are kept in slots"
        differences = x.to(torch.float32, copy=True)
        for piece, _ in parts:
            shift = call.slots(piece.name).now[_SHIFT].view(-1)
            differences[piece.elements].sub_(shift, alpha=call.state.loss_scale)
        return differences

    def _send(self, parts: Sequence[Part], scales: Tensor, call: SumCall) -> None:
        self._move(_SHIFT, 1.0 / self._unscaled(scales, call), parts, call)

    def _receive(self, y: Tensor, parts: Sequence[Part], scales: Tensor, finite: Tensor, call: SumCall) -> Tensor:
        assert call.state is not None, "shifts are kept in slots"
        self._move(_MEAN, 1.0 / (self._unscaled(scales, call) * self.num_ranks), parts, call)
        means = [call.slots(piece.name).next[_MEAN].view(-1) for piece, _ in parts]
        for (piece, _), mean, good in zip(parts, means, finite, strict=True):
            y[piece.elements] = torch.where(good, mean * call.state.loss_scale, math.nan)
        return square_sums(means)

    @staticmethod
    def _move(slot: str, factors: Tensor, parts: Sequence[Part], call: SumCall) -> None:
        for (piece, where), factor in zip(parts, fp32(factors), strict=True):
            slots, integers = call.slots(piece.name), call.buffers[0][where][: piece.numel]
            torch.add(slots.now[slot].view(-1), integers.float() * factor, out=slots.next[slot].view(-1))

    def subtract(self, rest: Tensor, parts: Sequence[Part], scales: Tensor, call: SumCall) -> None:
        assert call.state is not None, "shifts are kept in slots"
        for piece, _ in parts:
            sent = call.slots(piece.name).next[_SHIFT].view(-1)
            rest[piece.elements].sub_(sent, alpha=call.state.loss_scale)


@dataclass(frozen=True)
class ExactShifts(Exact):
    """The compressor `Exact`, which also sets each rank's shift to its own gradient, and their mean. It has no spec."""

    spec_name: ClassVar[str] = "exact_shifts"

    def rounds(self, x: Tensor, y: Tensor, call: SumCall) -> Generator[None, None, Subtract]:
        assert call.state is not None, "shifts are kept in slots"
        own = [x[piece.elements].to(torch.float32, copy=True) for piece, _ in call.parts[0]]
        subtract = yield from super().rounds(x, y, call)
        for (piece, where), gradient in zip(call.parts[0], own, strict=True):
            slots = call.slots(piece.name).next
            for slot, values in ((_SHIFT, gradient), (_MEAN, call.buffers[0][where])):
                torch.div(values.view_as(slots[slot]), call.state.loss_scale, out=slots[slot])
        return subtract
