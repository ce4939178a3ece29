"""What a compressor is handed: pieces of layers, the keys of its draws, and the state that the Wire keeps for it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from thinwire.kernels import Table, derive_key, site_id


class Key(NamedTuple):
    """Names the random draws of one message. They depend on it, on the layer's site and on the element's index only."""

    own: int
    """Of this rank, step and stage: no two ranks draw alike."""
    shared: int
    """Of this step and stage: all ranks draw alike."""

    @staticmethod
    def of(*parts: int) -> Key:
        """A key for one rank by itself."""
        key = derive_key(*parts)
        return Key(key, key)


class Piece(NamedTuple):
    """A run of consecutive elements of one layer."""

    name: str
    """Name of the layer's parameter."""
    start: int
    """Where it starts in the flat tensor, in elements."""
    numel: int
    index0: int
    """Index of its first element inside its layer: draws are keyed by it, so cutting changes no bit."""
    payload: int
    """Where its payload starts in the message, in bytes."""
    layer_shape: tuple[int, ...] = ()
    """Shape of the whole layer; empty if it does not matter."""

    @property
    def elements(self) -> slice:
        """Its place in the flat tensor."""
        return slice(self.start, self.start + self.numel)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the layer; that of a vector where none was given. Meaningful for a piece that is a whole layer."""
        return self.layer_shape or (self.numel,)


class Part(NamedTuple):
    """A layer's place in a sum."""

    piece: Piece
    where: slice
    """Its elements in the tensor that is summed."""


@dataclass(frozen=True)
class Segments:
    """The pieces of layers that one compressor handles in one message: one kernel call for all of them."""

    pieces: tuple[Piece, ...]
    table: Table

    @staticmethod
    def build(pieces: Sequence[Piece]) -> Segments:
        rows = [(p.start, p.numel, p.index0, p.payload, site_id(p.name)) for p in pieces]
        table = Table(torch.tensor(rows, dtype=torch.int64).reshape(len(rows), 5))
        return Segments(tuple(pieces), table)

    def __len__(self) -> int:
        return len(self.pieces)


@dataclass(frozen=True)
class Slot:
    """Named state that a compressor asks for, kept for each of its layers.

    The `Wire` owns it, checkpoints it by parameter name and reshards it; nothing else holds state.
    """

    name: str
    dtype: torch.dtype = torch.float32
    shape: Callable[[Sequence[int]], Sequence[int]] | None = field(default=None, compare=False)
    """Its shape from the layer's. None: one value for each element of the layer."""
    initial: Callable[[Sequence[int], str], Tensor] | None = field(default=None, compare=False)
    """Its first value, from the layer's shape and name, the same on every rank. None: zeros."""
    shared: bool = False
    """Whether all ranks hold the same value."""
    learned: bool = False
    """Written by `Coded.learn` at a few steps, not by every step's encoding."""
    scratch: bool = False
    """Of no use after the step: never saved."""
    columns: bool = False
    """A matrix whose columns keep their meaning when there are more or fewer of them: low rank factors."""

    def shape_of(self, layer: Sequence[int]) -> tuple[int, ...]:
        """Shape of the slot of a layer of this shape; that of the layer itself for a value an element."""
        return tuple(layer if self.shape is None else self.shape(layer))

    def first(self, layer: Sequence[int], name: str) -> Tensor:
        """Its value, flat, before the first step."""
        if self.initial is not None:
            return self.initial(layer, name).to(self.dtype).reshape(-1)
        return torch.zeros(math.prod(self.shape_of(layer)), dtype=self.dtype)


class LayerState(NamedTuple):
    """The slots of one layer that have a shape of their own."""

    now: Mapping[str, Tensor]
    next: Mapping[str, Tensor]


@dataclass(frozen=True)
class State:
    """The slots of the layers of one flat tensor in one step.

    A compressor reads ``now`` and writes all elements of its segments in ``next``, which replaces ``now`` only when the
    whole step turned out finite. Slots are in unscaled units; gradients are ``loss_scale`` times as large. Slots of one
    value an element are tensors aligned with the flat one; ``layers`` holds the others by the layer's name.
    """

    now: Mapping[str, Tensor]
    next: Mapping[str, Tensor]
    loss_scale: float = 1.0
    layers: Mapping[str, LayerState] = field(default_factory=dict)
    learning_rates: Mapping[str, float] = field(default_factory=dict)
    """By layer, for compressors that follow the optimizer."""

    @staticmethod
    def fresh(
        slots: Sequence[Slot],
        numel: int,
        loss_scale: float = 1.0,
        layers: Mapping[str, Sequence[int]] | None = None,
        *,
        device: torch.device | None = None,
    ) -> State:
        """The state of a first step of a flat tensor of ``numel`` elements whose ``layers`` have these shapes."""
        now, after = (
            {slot.name: torch.zeros(numel, dtype=slot.dtype, device=device) for slot in slots if slot.shape is None}
            for _ in range(2)
        )
        shaped = [slot for slot in slots if slot.shape is not None]
        per_layer = {}
        for name, shape in (layers or {}).items() if shaped else ():
            values = {slot.name: slot.first(shape, name).to(device).view(slot.shape_of(shape)) for slot in shaped}
            copies = {slot.name: values[slot.name] if slot.learned else values[slot.name].clone() for slot in shaped}
            per_layer[name] = LayerState(values, copies)
        return State(now, after, loss_scale, per_layer)

    def swapped(self) -> State:
        """The state of the step after this one."""
        layers = {
            name: LayerState(of.next, of.now) for name, of in self.layers.items()
        }  # what is learned is the same tensor on both sides
        return State(self.next, self.now, self.loss_scale, layers, self.learning_rates)
