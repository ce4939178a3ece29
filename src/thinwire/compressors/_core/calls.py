"""Arguments of one call of a compressor, other than the values."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from thinwire.compressors._core.segments import Key, Parts, Piece, Segments
from thinwire.compressors._core.slots import LayerState, State
from thinwire.kernels import Table


class CodecCall(NamedTuple):
    """Arguments of one call of a compressor, other than the values."""

    segments: Segments
    """Pieces of layers, and the places of their payloads in the message."""
    key: Key = Key(0, 0)
    """Key of random draws."""
    state: State | None = None
    """Slots of the layers; None if the compressor has none."""
    scale: float = 1.0
    """Factor of decoded values, or of a sum."""

    @property
    def pieces(self) -> tuple[Piece, ...]:
        return self.segments.pieces

    @property
    def table(self) -> Table:
        """Table of the segments, for kernels."""
        return self.segments.table

    @property
    def loss_scale(self) -> float:
        """Loss scale: the factor that gradients have and slots do not."""
        return 1.0 if self.state is None else self.state.loss_scale

    def slot(self, layer: str, name: str) -> Tensor:
        """Return the present value of a slot of a layer."""
        if self.state is None:
            raise ValueError(f"{name} of {layer} is kept in a slot: pass state=")
        return self.state.layers[layer].now[name]


class SumCall(NamedTuple):
    """Arguments of one call of a summed compressor, other than the values. Parts and buffers are listed by round."""

    parts: tuple[Parts, ...]
    """Layers, and the places of their parts in the buffer of each round."""
    buffers: tuple[Tensor, ...]
    """Buffers in which the parts of all ranks are added, in place."""
    key: Key = Key(0, 0)
    state: State | None = None
    scale: float = 1.0
    """Factor of this rank's parts with which their sum over ranks is the mean."""

    def slots(self, layer: str) -> LayerState:
        """Return the slots of a layer."""
        if self.state is None:
            raise ValueError(f"the slots of {layer} are missing: pass state=")
        return self.state.layers[layer]
