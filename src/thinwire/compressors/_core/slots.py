"""Slots: state of a compressor, kept for each of its layers by the handle."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True)
class Slot:
    """Named state of a compressor, kept for each of its layers.

    The handle owns it, saves it in checkpoints by parameter name, and reshards it. Nothing else keeps state.
    """

    name: str
    dtype: torch.dtype = torch.float32
    shape: Callable[[Sequence[int]], Sequence[int]] | None = field(default=None, compare=False)
    """Shape of the slot, as a function of the layer's. None: one value for each element of the layer."""
    initial: Callable[[Sequence[int], str], Tensor] | None = field(default=None, compare=False)
    """Initial value, as a function of the layer's shape and name, the same on every rank. None: zeros."""
    shared: bool = False
    """Whether all ranks have the same value."""
    learned: bool = False
    """Whether `Learned.learn` writes it, at a few steps, not encoding. It is initial until something is learned."""
    scratch: bool = False
    """Whether it is used only during a step, and never saved."""
    optional: bool = False
    """Whether the compressor does without it where no state is kept, as in process groups."""
    columns: bool = False
    """Whether it is a matrix, such as a low-rank factor, whose columns remain valid when their number changes."""
    bits: int = field(default=32, compare=False)
    """Bits of each value between steps: 8 for residuals that are packed, if all layers of a bucket ask for it."""

    def shape_for(self, layer: Sequence[int]) -> tuple[int, ...]:
        return tuple(layer if self.shape is None else self.shape(layer))

    def first(self, layer: Sequence[int], name: str) -> Tensor:
        """Return the slot's value before the first step, flat."""
        if self.initial is not None:
            return self.initial(layer, name).to(self.dtype).reshape(-1)
        return torch.zeros(math.prod(self.shape_for(layer)), dtype=self.dtype, device="cpu")


class LayerState(NamedTuple):
    """The slots of one layer, except those with one value for each element."""

    now: Mapping[str, Tensor]
    next: Mapping[str, Tensor]


@dataclass(frozen=True)
class State:
    """The slots of the layers of one flat tensor in one step.

    A compressor reads ``now`` and writes all elements of its segments in ``next``, which replaces ``now`` only if the
    whole step is finite. Gradients are multiplied by ``loss_scale``; slots are not. Slots with one value for each
    element are tensors like the flat one, of which a residual's ``next`` may be ``now``; ``layers`` has the others by
    the name of the layer.
    """

    now: Mapping[str, Tensor]
    next: Mapping[str, Tensor]
    loss_scale: float = 1.0
    layers: Mapping[str, LayerState] = field(default_factory=dict)
    learning_rates: Mapping[str, float] = field(default_factory=dict)
    """Learning rate of each layer; see `FollowsOptimizer`."""
    learning_rate: float = 1.0
    """Highest learning rate of the optimizer's groups, which residuals may be weighted by; see `ef`."""

    @staticmethod
    def fresh(
        slots: Sequence[Slot],
        numel: int,
        loss_scale: float = 1.0,
        layers: Mapping[str, Sequence[int]] | None = None,
        *,
        device: torch.device | None = None,
    ) -> State:
        """Return the initial state for a flat tensor of ``numel`` elements whose ``layers`` have these shapes."""
        now, after = (
            {slot.name: torch.zeros(numel, dtype=slot.dtype, device=device) for slot in slots if slot.shape is None}
            for _ in range(2)
        )
        shaped = [slot for slot in slots if slot.shape is not None]
        per_layer = {}
        for name, shape in (layers or {}).items() if shaped else ():
            values = {slot.name: slot.first(shape, name).to(device).view(slot.shape_for(shape)) for slot in shaped}
            copies = {slot.name: values[slot.name] if slot.learned else values[slot.name].clone() for slot in shaped}
            per_layer[name] = LayerState(values, copies)
        return State(now, after, loss_scale, per_layer)

    def swapped(self) -> State:
        layers = {
            name: LayerState(layer.next, layer.now) for name, layer in self.layers.items()
        }  # what is learned is the same tensor on both sides
        return State(self.next, self.now, self.loss_scale, layers, self.learning_rates, self.learning_rate)


def layer_slots(state: State | None, layer: str) -> LayerState:
    """Return the slots of a layer. Raises ``ValueError`` if there is no state."""
    if state is None:
        raise ValueError(f"the slots of {layer} are missing: pass state=")
    return state.layers[layer]
