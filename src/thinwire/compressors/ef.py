"""Error feedback: what a step could not send is added to the next one (thesis, Algorithm 2.1)."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.arguments import check_choice, check_number
from thinwire.compressors._core.coded import Coded, CodedWrapper, OnePass
from thinwire.compressors._core.compressor import Compressor, Wrapper
from thinwire.compressors._core.rounding import rounded_for
from thinwire.compressors._core.segments import CodecCall, SumCall
from thinwire.compressors._core.slots import Slot, State
from thinwire.compressors._core.summed import Subtract, Summed, SumShape
from thinwire.kernels import Residual

RESIDUAL = Slot("residual")

Units = Literal["gradient", "update"]


def ef(inner: Compressor, units: Units = "gradient", decay: float = 1.0, bits: int = 32) -> Compressor:
    """Add error feedback to ``inner``: ``p = g + e; c = Q(p); e = p − Q⁻¹(c)``, in fp32, one value an element.

    With a coded compressor there is a residual on both sides. A rank's residual is for the chunks of other owners;
    for its own chunks, whose exact values it adds, the same tensor has the error of the mean that it encodes again.
    What all ranks gather is encoded once, and has the first kind only.

    With a summed compressor the residual is the input minus this rank's own contribution to the result (PowerSGD,
    Algorithm 2), so how its gradient differs from the mean is not kept.

    ``units=update`` keeps the residual in units of plain SGD's update, ``e = η·(p − Q⁻¹(c))`` and ``p = g + e/η`` at
    the learning rate η of the step (EF-SGD, Karimireddy et al. 2019, algorithm 2). What an early step failed to send
    then counts at the learning rate it was computed with, not at that of the step which sends it. It needs
    ``compress(optimizer=...)`` and a rate above 0; the highest of the optimizer's groups counts for all layers.

    ``decay`` below 1 forgets: the residual is multiplied by it after each step. In SparseLoCo (2508.15706) it is 0.95,
    because what a sparsifier has kept for long was computed with weights that are no longer there.

    ``bits=8`` keeps residuals in 8 bits between steps, with a scale for 128 of them and stochastic rounding, as LoCo
    does (2407.04480): 2.1 bytes an element in place of 8. Memory is saved where all layers of a DDP bucket, or of an
    FSDP module, that have error feedback have it so.

    A quantizer whose spec has no ``rounding=`` rounds to nearest: a step's error is sent later, so only its size
    counts, and rounding need not be unbiased.

    A compressor whose error exceeds its input (`Traits.contracts`: TernGrad, QSGD with few steps in large buckets)
    must not have error feedback: its residual would grow without bound. `thinwire.compress` warns of that.

    Raises:
        TypeError: ``inner`` has error feedback already, or is neither coded nor summed.
        ValueError: ``units`` is neither of the two, ``decay`` is not above 0 and at most 1, or ``bits`` is not 8 or 32.
    """
    check_choice("units", units, ("gradient", "update"))
    check_choice("bits of ef", bits, (8, 32))
    check_number("decay", decay, above=0, high=1)
    if isinstance(inner, Wrapper):
        raise TypeError(f"{inner} has error feedback already, or momentum correction")
    if isinstance(inner, Coded):
        return EfCoded(inner, units, decay, bits)
    if isinstance(inner, Summed):
        # A contribution that is scaled up to be unbiased would make the residual diverge.
        return EfSummed(replace(inner, scaled=False) if hasattr(inner, "scaled") else inner, units, decay, bits)
    raise TypeError(f"{inner} is neither coded nor summed")


@dataclass(frozen=True)
class Feedback(Wrapper):
    """The base of both kinds of error feedback."""

    spec_name: ClassVar[str] = "ef"

    units: Units = "gradient"
    decay: float = 1.0
    bits: int = 32

    def around(self, inner: Compressor) -> Compressor:
        return ef(inner, self.units, self.decay, self.bits)

    @property
    def slots(self) -> tuple[Slot, ...]:
        return (*self.inner.slots, replace(RESIDUAL, bits=self.bits))

    def check_rate(self, learning_rate: float | None) -> None:
        if self.units == "update" and learning_rate is None:
            raise ValueError(f"{self} weights residuals by the learning rate: pass optimizer= to thinwire.compress()")

    def residual(self, state: State | None) -> Residual:
        """Return the present and the next residual, and the factor from their units to those of the values.

        Raises:
            ValueError: there is no state, or a learning rate of 0.
        """
        if state is None:
            raise ValueError("error feedback needs its residual: pass state=")
        factor = state.loss_scale * self.in_gradients(state.learning_rate)
        return Residual(state.now[RESIDUAL.name], state.next[RESIDUAL.name], factor)

    def in_gradients(self, learning_rate: float | None) -> float:
        """Return the factor from the residual's units to the gradient's at this learning rate.

        Raises:
            ValueError: the residual has the update's units, and there is no learning rate above 0.
        """
        if self.units == "gradient":
            return 1.0
        if learning_rate is None or not learning_rate > 0.0:
            raise ValueError(f"{self} divides residuals by the learning rate, which is {learning_rate}")
        return 1.0 / learning_rate

    def __str__(self) -> str:
        units = "" if self.units == "gradient" else f", units={self.units}"
        decay = "" if self.decay == 1.0 else f", decay={self.decay}"
        bits = "" if self.bits == RESIDUAL.bits else f", bits={self.bits}"
        return f"ef({self.inner}{units}{decay}{bits})"


@dataclass(frozen=True)
class EfCoded(Feedback, CodedWrapper):
    """Error feedback around a coded compressor; see `ef`."""

    @property
    def coder(self) -> Coded:
        return rounded_for("feedback", self.inner)

    def encode(self, x: Tensor, message: Tensor, call: CodecCall) -> None:
        e = self.residual(call.state)
        coder = self.coder
        if isinstance(coder, OnePass):
            coder.encode(x, message, call, e)  # the same in one pass
        else:
            p = e.next
            kernels.rows_add(x, e.now, call.table, p, alpha=e.loss_scale)
            coder.encode(p, message, call)
            subtract_sent(coder, message, p, call, over=e.loss_scale)
        self._forget(e, call)

    def reduce(self, messages: Sequence[Tensor], own: Tensor, out_message: Tensor, y: Tensor, call: CodecCall) -> None:
        e = self.residual(call.state)
        coder = self.coder
        if isinstance(coder, OnePass) and self.traits.plain_sum:
            coder.reduce(messages, own, out_message, y, call, e)  # the same in one pass
        else:
            p = e.next
            total = torch.empty_like(p) if p is e.now else p
            coder.add_up(messages, own, total, call)
            kernels.rows_add(total, e.now, call.table, p, alpha=e.loss_scale)
            coder.encode(p, out_message, call)
            coder.decode(out_message, y, call._replace(scale=1.0))
            subtract_sent(coder, out_message, p, call, over=e.loss_scale)
        self._forget(e, call)

    def _forget(self, e: Residual, call: CodecCall) -> None:
        if self.decay != 1.0:
            kernels.rows_scale(e.next, call.table, e.next, by=self.decay)


@dataclass(frozen=True)
class EfSummed(Feedback, Summed):
    """Error feedback around a summed compressor; see `ef`."""

    inner: Summed

    def sums(self, shape: Sequence[int], dtype: torch.dtype) -> tuple[SumShape, ...]:
        return self.inner.sums(shape, dtype)

    def rounds(self, x: Tensor, y: Tensor, call: SumCall) -> Generator[None, None, Subtract]:
        e, p, factor = self.residual(call.state)
        table = call.parts[0].table
        kernels.rows_add(x, e, table, p, alpha=factor)
        subtract = yield from self.inner.rounds(p, y, call)
        subtract(p)
        if factor != self.decay:
            kernels.rows_scale(p, table, p, over=factor / self.decay)
        return subtract


def subtract_sent(inner: Coded, message: Tensor, p: Tensor, call: CodecCall, *, over: float) -> None:
    """Subtract from ``p`` what ``message`` decodes to, ``e = p − Q⁻¹(c)``, and divide it by ``over``."""
    inner.decode(message, p, call._replace(scale=-1.0), add=True)
    if over != 1.0:
        kernels.rows_scale(p, call.table, p, over=over)
