"""Where compressors keep state: allocated by DDP bucket, named by parameter, checkpointed and resharded."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from thinwire.collectives import Layer, Layout, owned_parts
from thinwire.compressors import Coded, Compressor, State


@dataclass
class _Place:
    """The slots of one flat tensor."""

    layers: tuple[Layer, ...]
    now: dict[str, Tensor] = field(default_factory=dict)
    next: dict[str, Tensor] = field(default_factory=dict)


class Slots:
    """The slots of all layers of one rank.

    They lie in tensors aligned with the flat gradients of a DDP bucket: one kernel call serves all its layers. When DDP
    forms other buckets, values follow their parameter. A step's new values count only once it is committed.
    """

    def __init__(self) -> None:
        self._places: dict[Hashable, _Place] = {}
        self._place_of: dict[str, Hashable] = {}
        self._kept: dict[tuple[str, str], Tensor] = {}
        self._touched: set[Hashable] = set()

    @property
    def num_bytes(self) -> int:
        """Memory held."""
        tensors = [t for place in self._places.values() for t in (*place.now.values(), *place.next.values())]
        return sum(t.numel() * t.element_size() for t in (*tensors, *self._kept.values()))

    def state(self, key: Hashable, layout: Layout, loss_scale: float, device: torch.device) -> State | None:
        """The slots of the flat tensor ``key`` for one step; None if its layers need none."""
        if not layout.slots:
            return None
        place = self._places.get(key)
        if place is None or any(self._place_of.get(layer.name) != key for layer in place.layers):
            place = self._gather(key, layout, device)
        self._touched.add(key)
        return State(place.now, place.next, loss_scale)

    def commit(self) -> None:
        """Make the values written since the last commit the present ones."""
        for key in self._touched:
            place = self._places[key]
            place.now, place.next = place.next, place.now
        self._touched.clear()

    def discard(self) -> None:
        """Forget the values written since the last commit."""
        self._touched.clear()

    def value(self, name: str, slot: str, numel: int) -> Tensor:
        """A copy of a layer's slot, flat; zeros if it was never used."""
        key = self._place_of.get(name)
        if key is not None:
            place = self._places[key]
            layer = next(layer for layer in place.layers if layer.name == name)
            return place.now[slot][layer.start : layer.start + layer.numel].clone()
        kept = self._kept.get((name, slot))
        return torch.zeros(numel) if kept is None else kept.clone()

    def replace(self, values: Mapping[tuple[str, str], Tensor]) -> None:
        """Drop everything and start from ``values``: (parameter name, slot name) to flat tensor."""
        self._places.clear()
        self._place_of.clear()
        self._touched.clear()
        self._kept = dict(values)

    def release(self, keys: Iterable[Hashable]) -> None:
        """Give back the tensors of flat tensors that are not used any more; values not moved elsewhere are kept."""
        for key in keys:
            place = self._places.pop(key, None)
            for layer in place.layers if place else ():
                if self._place_of.get(layer.name) == key:
                    del self._place_of[layer.name]
                    self._keep(place, layer)

    def _keep(self, place: _Place | None, layer: Layer) -> None:
        for slot, flat in place.now.items() if place else ():
            self._kept[layer.name, slot] = flat[layer.start : layer.start + layer.numel].clone()

    def _gather(self, key: Hashable, layout: Layout, device: torch.device) -> _Place:
        layers = tuple(layer for layer in layout.layers if layer.compressor.slots)
        place = self._places.get(key) or _Place(layers)
        for slot in layout.slots:
            if slot.name not in place.now:
                place.now[slot.name] = torch.zeros(layout.numel, dtype=slot.dtype, device=device)
                place.next[slot.name] = torch.zeros(layout.numel, dtype=slot.dtype, device=device)
        for layer in layers:
            if self._place_of.get(layer.name) == key:
                continue
            for slot in layer.compressor.slots:
                value = self.value(layer.name, slot.name, layer.numel)
                place.now[slot.name][layer.start : layer.start + layer.numel] = value
                self._kept.pop((layer.name, slot.name), None)
            self._place_of[layer.name] = key
        self._places[key] = place
        return place


def reshard(saved: Mapping[int, Tensor], compressor: Compressor, name: str, rank: int, world_size: int) -> Tensor:
    """A rank's residual of one layer in a world of another size, such that the mean error is kept.

    ``saved`` holds the residuals of all ranks of the old world. In mean units the old world was owed
    ``(1/n) Σ δ_i + e``, with the owner's e where it stands in the owner's tensor; every rank of the new one gets that
    as its δ, and an owner its share ``1/n'`` of it as e.
    """
    old_size = len(saved)
    owed = torch.stack([saved[r] for r in range(old_size)]).mean(0)
    if not isinstance(compressor, Coded):
        return owed
    for owner, begin, end in owned_parts(name, compressor, owed.numel(), old_size):
        owed[begin:end] += saved[owner][begin:end] * (1 - 1 / old_size)
    mine = owed.clone()
    for owner, begin, end in owned_parts(name, compressor, owed.numel(), world_size):
        if owner == rank:
            mine[begin:end] /= world_size
    return mine
