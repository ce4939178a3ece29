"""What belongs to one call of a compressor, beside the values."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from thinwire.compressors._core.segments import Key, Parts, Piece, Segments
from thinwire.compressors._core.slots import LayerState, State
from thinwire.kernels import Table


class CodecCall(NamedTuple):
    """What belongs to one call of a compressor, beside the values."""

    segments: Segments
    """The pieces of layers, and where their payloads lie in the message."""
    key: Key = Key(0, 0)
    """The key of random draws."""
    state: State | None = None
    """The slots of the layers; None if the compressor has none."""
    scale: float = 1.0
    """A factor of what is decoded, or of a sum."""

    @property
    def pieces(self) -> tuple[Piece, ...]:
        return self.segments.pieces

    @property
    def table(self) -> Table:
        """The segments, for kernels."""
        return self.segments.table

    @property
    def loss_scale(self) -> float:
        """The factor of gradients, which slots do not have."""
        return 1.0 if self.state is None else self.state.loss_scale

    def slot(self, layer: str, name: str) -> Tensor:
        """Return the present value of a slot of a layer."""
        if self.state is None:
            raise ValueError(f"{name} of {layer} is kept in a slot: pass state=")
        return self.state.layers[layer].now[name]


class SumCall(NamedTuple):
    """What belongs to one call of a summed compressor, beside the values. Parts and buffers are listed by round."""

    parts: tuple[Parts, ...]
    """Layers, and where their parts lie in the buffer of a round."""
    buffers: tuple[Tensor, ...]
    """The parts of all ranks are added in these, in place."""
    key: Key = Key(0, 0)
    state: State | None = None
    scale: float = 1.0
    """A factor of this rank's parts, such that their sum over ranks is the mean."""

    def slots(self, layer: str) -> LayerState:
        """Return the slots of a layer."""
        if self.state is None:
            raise ValueError(f"the slots of {layer} are missing: pass state=")
        return self.state.layers[layer]
