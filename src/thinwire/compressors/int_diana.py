"""IntDIANA: integers of the difference of a rank's gradient from its shift (Mishchenko et al. 2022, appendix A.2)."""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from thinwire.arguments import check_choice
from thinwire.compressors._core.compressor import Compressor, Traits
from thinwire.compressors._core.integers import fp32
from thinwire.compressors._core.segments import Part, SumCall
from thinwire.compressors._core.slots import Slot
from thinwire.compressors._core.summed import Subtract
from thinwire.compressors.intsgd import Exact, IntSGD
from thinwire.kernels import square_sums

_SHIFT, _MEAN = "shift", "mean_shift"


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
