"""Segments of layers in a message, the keys of random draws, and the arguments of one call of a compressor."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from thinwire.compressors._core.slots import LayerState, State, layer_slots
from thinwire.kernels import Table, derive_key, site_id


class Key(NamedTuple):
    """The key of the random draws of a message. Draws depend only on it, on the layer and on the element's index."""

    own: int
    """Key of this rank, step and stage, with which ranks draw differently."""
    shared: int
    """Key of this step and stage, with which all ranks draw the same."""

    @staticmethod
    def derive(*parts: int) -> Key:
        key = derive_key(*parts)
        return Key(key, key)


class Piece(NamedTuple):
    """A run of consecutive elements of one layer."""

    name: str
    """Name of the layer's parameter."""
    start: int
    """First element in the flat tensor."""
    numel: int
    index0: int
    """Index of the first element in its layer. Draws depend on it, so that cutting a layer changes no bit."""
    payload: int
    """First byte of the payload in the message."""
    layer_shape: tuple[int, ...] = ()
    """Shape of the whole layer; empty if unknown."""

    @property
    def elements(self) -> slice:
        """Place of the piece in the flat tensor."""
        return slice(self.start, self.start + self.numel)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of a piece that is a whole layer; that of a vector if the layer's shape is unknown."""
        return self.layer_shape or (self.numel,)

    @property
    def site(self) -> str:
        """Name of draws for the piece as a whole: no two pieces of a layer share it."""
        return f"{self.name} from {self.index0}" if self.index0 else self.name


class Part(NamedTuple):
    """A layer's place in a sum."""

    piece: Piece
    where: slice
    """Elements of the layer in the tensor that is summed."""


@dataclass(frozen=True, eq=False)
class Parts:
    """The parts of the layers that one compressor has in a sum, end to end. Equal to itself alone, for caches."""

    parts: tuple[Part, ...]

    @staticmethod
    def build(sizes: Iterable[tuple[Piece, int]], start: int = 0) -> Parts:
        """Return the parts of layers with ``sizes`` elements in the sum, from element ``start`` on."""
        parts = []
        for piece, numel in sizes:
            parts.append(Part(piece, slice(start, start + numel)))
            start += numel
        return Parts(tuple(parts))

    def __iter__(self) -> Iterator[Part]:
        return iter(self.parts)

    def __len__(self) -> int:
        return len(self.parts)

    def __getitem__(self, number: int) -> Part:
        return self.parts[number]

    @cached_property
    def table(self) -> Table:
        return _table([part.piece for part in self.parts])

    @property
    def where(self) -> slice:
        """Elements of all parts in the tensor that is summed."""
        return slice(self.parts[0].where.start, self.parts[-1].where.stop)


@dataclass(frozen=True)
class Segments:
    """The pieces of layers that one compressor has in a message, for one kernel call."""

    pieces: tuple[Piece, ...]
    table: Table

    @staticmethod
    def build(pieces: Sequence[Piece]) -> Segments:
        return Segments(tuple(pieces), _table(pieces))

    def __len__(self) -> int:
        return len(self.pieces)


def _table(pieces: Sequence[Piece]) -> Table:
    rows = [(p.start, p.numel, p.index0, p.payload, site_id(p.name)) for p in pieces]
    return Table(torch.tensor(rows, dtype=torch.int64, device="cpu").reshape(len(rows), 5))


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
        return self.segments.table

    @property
    def loss_scale(self) -> float:
        """Loss scale: the factor that gradients have and slots do not."""
        return 1.0 if self.state is None else self.state.loss_scale


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
        return layer_slots(self.state, layer)
