"""Error feedback: what a step could not send is added to the next one (thesis, Algorithm 2.1)."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.compressors._core.bucketed import Bucketed
from thinwire.compressors._core.calls import CodecCall, SumCall
from thinwire.compressors._core.coded import Coded, CodedWrapper
from thinwire.compressors._core.compressor import Compressor
from thinwire.compressors._core.slots import Slot, State
from thinwire.compressors._core.summed import Subtract, Summed, SumShape
from thinwire.compressors._core.wrapper import Wrapper
from thinwire.kernels import Residual

RESIDUAL = Slot("residual")


def ef(inner: Compressor) -> Compressor:
    """``inner`` with error feedback: ``p = g + e; c = Q(p); e = p − Q⁻¹(c)``, in fp32, one value an element.

    With a coded compressor there is a residual on both sides. A rank's residual holds for the chunks of other owners;
    for its own chunks, whose exact values it adds, the same tensor holds the error of the mean that it encodes again.
    What all ranks gather is encoded once, and has the first kind only.

    With a summed compressor the residual is the input minus this rank's own contribution to the result (PowerSGD,
    Algorithm 2), so how its gradient differs from the mean is not kept.

    A compressor that errs by more than its input (`Traits.contracts`: TernGrad, QSGD with few steps in large buckets)
    must not have error feedback: its residual would grow without bound. `thinwire.compress` warns of that.

    Raises:
        TypeError: ``inner`` has error feedback already, or is neither coded nor summed.
    """
    if isinstance(inner, Wrapper):
        raise TypeError(f"{inner} has error feedback already, or momentum correction")
    if isinstance(inner, Coded):
        return EfCoded(inner)
    if isinstance(inner, Summed):
        # A contribution that is scaled up to be unbiased would make the residual diverge.
        return EfSummed(replace(inner, scaled=False) if hasattr(inner, "scaled") else inner)
    raise TypeError(f"{inner} is neither coded nor summed")


@dataclass(frozen=True)
class EfCoded(CodedWrapper):
    """Error feedback around a coded compressor; see `ef`."""

    spec_name: ClassVar[str] = "ef"

    def around(self, inner: Compressor) -> Compressor:
        return ef(inner)

    @property
    def slots(self) -> tuple[Slot, ...]:
        return (*self.inner.slots, RESIDUAL)

    def encode(self, x: Tensor, message: Tensor, call: CodecCall) -> None:
        e = _residual(call.state)
        if isinstance(self.inner, Bucketed):
            self.inner.encode(x, message, call, e)  # the same in one pass
            return
        p = e.next
        kernels.rows_add(x, e.now, call.table, p, alpha=call.loss_scale)
        self.inner.encode(p, message, call)
        subtract_sent(self.inner, message, p, call)

    def reduce(self, messages: Sequence[Tensor], own: Tensor, out_message: Tensor, y: Tensor, call: CodecCall) -> None:
        e = _residual(call.state)
        if isinstance(self.inner, Bucketed) and self.traits.plain_sum:
            self.inner.reduce(messages, own, out_message, y, call, e)  # the same in one pass
            return
        p = e.next
        self.inner.add_up(messages, own, p, call)
        kernels.rows_add(p, e.now, call.table, p, alpha=call.loss_scale)
        self.inner.encode(p, out_message, call)
        self.inner.decode(out_message, y, call._replace(scale=1.0))
        subtract_sent(self.inner, out_message, p, call)


@dataclass(frozen=True)
class EfSummed(Wrapper, Summed):
    """Error feedback around a summed compressor; see `ef`."""

    spec_name: ClassVar[str] = "ef"

    inner: Summed

    def around(self, inner: Compressor) -> Compressor:
        return ef(inner)

    @property
    def slots(self) -> tuple[Slot, ...]:
        return (*self.inner.slots, RESIDUAL)

    def sums(self, shape: Sequence[int], dtype: torch.dtype) -> tuple[SumShape, ...]:
        return self.inner.sums(shape, dtype)

    def rounds(self, x: Tensor, y: Tensor, call: SumCall) -> Generator[None, None, Subtract]:
        e, p, loss_scale = _residual(call.state)
        layers = [piece.elements for piece, _ in call.parts[0]]
        for at in layers:
            torch.add(x[at], e[at], alpha=loss_scale, out=p[at])
        subtract = yield from self.inner.rounds(p, y, call)
        subtract(p)
        for at in layers if loss_scale != 1.0 else ():
            p[at].div_(loss_scale)
        return subtract


def subtract_sent(inner: Coded, message: Tensor, p: Tensor, call: CodecCall) -> None:
    """Subtract from ``p`` what ``message`` decodes to, ``e = p − Q⁻¹(c)``, and divide it by the loss scale."""
    inner.decode(message, p, call._replace(scale=-1.0), add=True)
    if call.loss_scale != 1.0:
        kernels.rows_scale(p, call.table, p, over=call.loss_scale)


def _residual(state: State | None) -> Residual:
    """Return the present and the next residual.

    Raises:
        ValueError: there is no state.
    """
    if state is None:
        raise ValueError("error feedback needs its residual: pass state=")
    return Residual(state.now[RESIDUAL.name], state.next[RESIDUAL.name], state.loss_scale)
