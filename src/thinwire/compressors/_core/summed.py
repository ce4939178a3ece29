"""Summed compressors: a native all-reduce adds what ranks send."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from thinwire.compressors._core.bucketed import Packed
from thinwire.compressors._core.compressor import Compressor, UnsuitedError, check_dtype
from thinwire.compressors._core.mixins import first_state
from thinwire.compressors._core.segments import Key, Parts, Piece, Segments, SumCall
from thinwire.compressors._core.slots import State

Reduction = Literal["sum", "max"]


class SumShape(NamedTuple):
    """Size, dtype and operation of a layer's part in one round."""

    numel: int
    dtype: torch.dtype
    op: Reduction = "sum"
    packed: Packed | None = None
    """Messages of few bits for integers, in the first round; None for a native all-reduce in ``dtype``."""

    @property
    def num_bytes(self) -> int:
        return self.numel * self.dtype.itemsize if self.packed is None else self.packed.message_bytes(self.numel)


Subtract = Callable[[Tensor], None]
"""Subtracts this rank's own contribution to the mean, times the number of ranks, from the layers of a flat tensor."""


@dataclass(frozen=True)
class Summed(Compressor):
    """A compressor whose parts a native all-reduce adds, so that all ranks receive the same sum. It needs `sums` and
    `rounds`."""

    @abstractmethod
    def sums(self, shape: Sequence[int], dtype: torch.dtype) -> tuple[SumShape, ...]:
        """Return the part that a layer of ``shape``, with gradients of ``dtype``, adds in each round."""

    @abstractmethod
    def rounds(self, x: Tensor, y: Tensor, call: SumCall) -> Generator[None, None, Subtract]:
        """Set the layers of ``y`` to the mean over all ranks of those of ``x``, as it is received.

        In every round, the generator writes its parts into ``call.buffers`` and yields; when it resumes, the buffer
        has the sum over all ranks. It returns a function that turns ``x`` into its residual (PowerSGD, Algorithm 2).

        Args:
            x: fp32, bf16 or fp16, flat.
            y: as ``x``; may be ``x`` itself.
            call: where the layers and their parts lie, the keys of random draws, and the state.
        """

    def wire_bytes(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> int:
        try:
            fitted = self.fit(shape)
        except UnsuitedError:
            return math.prod(shape) * dtype.itemsize
        if not isinstance(fitted, Summed):
            return fitted.wire_bytes(shape, dtype)
        return sum(s.num_bytes for s in fitted.sums(shape, dtype))

    def roundtrip(self, x: Tensor, key: int = 0) -> Tensor:
        check_dtype(x.dtype, self)
        y = x.detach().to(torch.float32, copy=True)
        try:
            fitted = self.fit(x.shape)
        except UnsuitedError:
            return y
        if not isinstance(fitted, Summed):
            return fitted.roundtrip(x, key)
        y = y.reshape(-1)
        piece = Piece("roundtrip", 0, y.numel(), 0, 0, tuple(x.shape))
        state = first_state(fitted, y, Segments.build([piece]))
        sum_alone(fitted, y, piece, x.dtype, key=Key.derive(key), state=state)
        return y.view(x.shape)


def sum_alone(
    compressor: Summed, x: Tensor, piece: Piece, dtype: torch.dtype, *, key: Key, state: State | None
) -> None:
    """Replace the layer in ``x`` by what a world of one rank receives of it, running all rounds."""
    sums = compressor.sums(piece.shape, dtype)
    buffers = tuple(torch.zeros(s.numel, dtype=s.dtype, device=x.device) for s in sums)
    parts = tuple(Parts.build([(piece, s.numel)]) for s in sums)
    for _ in compressor.rounds(x, x, SumCall(parts, buffers, key, state)):
        pass


@dataclass(frozen=True)
class Plain(Summed):
    """A compressor that divides all elements by the number of ranks and adds them in one dtype."""

    @abstractmethod
    def sum_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which gradients of ``dtype`` are added."""

    def sums(self, shape: Sequence[int], dtype: torch.dtype) -> tuple[SumShape, ...]:
        return (SumShape(math.prod(shape), self.sum_dtype(dtype)),)

    def rounds(self, x: Tensor, y: Tensor, call: SumCall) -> Generator[None, None, Subtract]:
        (parts,), (buffer,) = call.parts, call.buffers
        own = buffer[parts.where]
        if x.dtype is own.dtype:
            # One operation for all layers, many of which are small.
            torch.cat([x[piece.elements] for piece, _ in parts], out=own)
            own.mul_(call.scale)
        else:
            for piece, where in parts:
                torch.mul(x[piece.elements].float(), call.scale, out=buffer[where])
        yield
        for (piece, _), values in zip(parts, own.split([piece.numel for piece, _ in parts]), strict=True):
            y[piece.elements].copy_(values)

        def subtract(rest: Tensor) -> None:
            for piece, _ in parts:
                values = rest[piece.elements]
                values.sub_((values * call.scale).to(buffer.dtype).float(), alpha=1.0 / call.scale)

        return subtract
