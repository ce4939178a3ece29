"""Summed compressors: a native all-reduce adds what ranks send."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from thinwire.compressors._core.calls import SumCall
from thinwire.compressors._core.checks import check_dtype
from thinwire.compressors._core.compressor import Compressor, Unsuited
from thinwire.compressors._core.mixins import first_state
from thinwire.compressors._core.packed import Packed, message_bytes
from thinwire.compressors._core.segments import Key, Parts, Piece, Segments
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
        """Bytes of the part in a message."""
        return self.numel * self.dtype.itemsize if self.packed is None else message_bytes(self.packed, self.numel)


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
        except Unsuited:
            return math.prod(shape) * dtype.itemsize
        if not isinstance(fitted, Summed):
            return fitted.wire_bytes(shape, dtype)
        return sum(s.num_bytes for s in fitted.sums(shape, dtype))

    def roundtrip(self, x: Tensor, key: int = 0) -> Tensor:
        check_dtype(x.dtype, self)
        y = x.detach().to(torch.float32, copy=True)
        try:
            fitted = self.fit(x.shape)
        except Unsuited:
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
