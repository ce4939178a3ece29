"""Where compressors keep state: allocated by DDP bucket, named by parameter, checkpointed and resharded."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from thinwire.collectives import Layer, Layout, owned_parts
from thinwire.compressors import RESIDUAL, Coded, Compressor, LayerState, Slot, State, bare


@dataclass
class _Place:
    """The slots of one flat tensor: those of one value an element end to end, the others layer by layer."""

    layers: tuple[Layer, ...]
    now: dict[str, Tensor] = field(default_factory=dict)
    next: dict[str, Tensor] = field(default_factory=dict)
    shaped: dict[str, LayerState] = field(default_factory=dict)


class Slots:
    """The slots of all layers of one rank.

    Those of one value an element lie in tensors aligned with the flat gradients of a DDP bucket: one kernel call serves
    all its layers. When DDP forms other buckets, values follow their parameter. A step's new values count only once it
    is committed.
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
        shaped = [of for place in self._places.values() for of in place.shaped.values()]
        tensors += [t for of in shaped for t in {id(t): t for t in (*of.now.values(), *of.next.values())}.values()]
        return sum(t.numel() * t.element_size() for t in (*tensors, *self._kept.values()))

    def state(self, key: Hashable, layout: Layout, loss_scale: float, device: torch.device) -> State | None:
        """The slots of the flat tensor ``key`` for one step; None if its layers need none."""
        if not layout.slots:
            return None
        place = self._places.get(key)
        if place is None or any(self._place_of.get(layer.name) != key for layer in place.layers):
            place = self._gather(key, layout, device)
        self._touched.add(key)
        return State(place.now, place.next, loss_scale, place.shaped)

    def touched_layers(self) -> list[tuple[Layer, LayerState]]:
        """The layers with slots of their own shape that the present step has gone over."""
        places = [self._places[key] for key in self._touched]
        return [(layer, p.shaped[layer.name]) for p in places for layer in p.layers if layer.name in p.shaped]

    def layer(self, name: str) -> LayerState | None:
        """The slots of a layer that have a shape of their own, once its first step has come."""
        key = self._place_of.get(name)
        return None if key is None else self._places[key].shaped.get(name)

    def commit(self) -> None:
        """Make the values written since the last commit the present ones."""
        for key in self._touched:
            place = self._places[key]
            place.now, place.next = place.next, place.now
            place.shaped = {name: LayerState(of.next, of.now) for name, of in place.shaped.items()}
        self._touched.clear()

    def discard(self) -> None:
        """Forget the values written since the last commit."""
        self._touched.clear()

    def value(self, layer: str, slot: Slot, shape: Sequence[int]) -> Tensor:
        """A copy of a slot of a layer of this shape, flat; its first value if it was never used."""
        key = self._place_of.get(layer)
        if key is not None and (held := self._held(self._places[key], layer, slot.name)) is not None:
            return held.clone()
        kept = self._kept.get((layer, slot.name))
        first = slot.first(shape, layer)
        if kept is None:
            return first
        if kept.numel() == first.numel():
            return kept.clone()
        return _columns_kept(first, kept, slot.shape_of(shape)) if slot.columns else first

    def moved(self, layer: str, compressor: Compressor, shape: Sequence[int]) -> bool:
        """Whether any slot of a layer has another value than its first."""
        slots = [slot for slot in compressor.slots if not slot.scratch]
        return any(not torch.equal(self.value(layer, slot, shape).cpu(), slot.first(shape, layer)) for slot in slots)

    def hand_over(
        self,
        layer: str,
        shape: Sequence[int],
        old: Compressor,
        new: Compressor,
        rank: int,
        old_shares: Sequence[int],
        shares: Sequence[int],
    ) -> None:
        """Between two steps, keep a layer's slots for another compressor, or for other owners.

        What is owed is the same afterwards, whoever owns which elements now: ``(1/n) Σ δ_i + e``, and a rank holds e
        for what it owns and its δ elsewhere. Slots of compressors of other kinds start anew.
        """
        alike = type(bare(old)) is type(bare(new))
        asked = {slot.name for slot in new.slots}
        kept = {}
        for slot in old.slots:
            if slot.scratch or not (slot.name in asked and (alike or slot.name == RESIDUAL.name)):
                continue
            value = self.value(layer, slot, shape)
            if slot.name == RESIDUAL.name:
                value *= _weights(layer, old, value, rank, old_shares) / _weights(layer, new, value, rank, shares)
            kept[layer, slot.name] = value
        for name in [name for name in self._kept if name[0] == layer]:
            del self._kept[name]
        self._place_of.pop(layer, None)
        self._kept |= kept

    @staticmethod
    def _held(place: _Place, name: str, slot: str) -> Tensor | None:
        of = place.shaped.get(name)
        if of is not None and slot in of.now:
            return of.now[slot].reshape(-1)
        layer = next(layer for layer in place.layers if layer.name == name)
        flat = place.now.get(slot)
        return None if flat is None else flat[layer.start : layer.start + layer.numel]

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
            if place is None:
                continue
            for layer in place.layers:
                if self._place_of.get(layer.name) == key:
                    del self._place_of[layer.name]
                    self._keep(place, layer)

    def _keep(self, place: _Place, layer: Layer) -> None:
        for slot in layer.compressor.slots:
            held = self._held(place, layer.name, slot.name)
            if held is not None and not slot.scratch:
                self._kept[layer.name, slot.name] = held.clone()

    def _gather(self, key: Hashable, layout: Layout, device: torch.device) -> _Place:
        layers = tuple(layer for layer in layout.layers if layer.compressor.slots)
        place = self._places.get(key) or _Place(layers)
        for slot in layout.slots:
            if slot.shape is None and slot.name not in place.now:
                place.now[slot.name] = torch.zeros(layout.numel, dtype=slot.dtype, device=device)
                place.next[slot.name] = torch.zeros(layout.numel, dtype=slot.dtype, device=device)
        for layer in layers:
            if self._place_of.get(layer.name) == key:
                continue
            values = {slot: self.value(layer.name, slot, layer.shape).to(device) for slot in layer.compressor.slots}
            shaped = {s.name: v.view(s.shape_of(layer.shape)) for s, v in values.items() if s.shape is not None}
            if shaped:
                steady = {s.name for s in values if s.learned or s.scratch}
                place.shaped[layer.name] = LayerState(
                    shaped, {name: v if name in steady else v.clone() for name, v in shaped.items()}
                )
            for slot, value in values.items():
                if slot.shape is None:
                    place.now[slot.name][layer.start : layer.start + layer.numel] = value
                self._kept.pop((layer.name, slot.name), None)
            self._place_of[layer.name] = key
        self._places[key] = place
        return place


def _weights(name: str, compressor: Compressor, like: Tensor, rank: int, shares: Sequence[int]) -> Tensor:
    """How much of each element of this rank's residual the mean is owed: all of what it owns, 1/n of all else."""
    weights = torch.full_like(like, 1 / len(shares))
    if isinstance(compressor, Coded) and not compressor.gathered and any(shares):
        for owner, begin, end in owned_parts(name, compressor, like.numel(), shares):
            if owner == rank:
                weights[begin:end] = 1.0
    return weights


def _columns_kept(first: Tensor, kept: Tensor, shape: Sequence[int]) -> Tensor:
    """``first`` with the columns that a matrix of as many rows had before."""
    rows = shape[0]
    if not rows or kept.numel() % rows:
        return first
    found, before = first.view(rows, -1).clone(), kept.view(rows, -1)
    columns = min(found.shape[1], before.shape[1])
    found[:, :columns] = before[:, :columns]
    return found.reshape(-1)


def reshard(
    saved: Mapping[int, Tensor],
    slot: Slot,
    compressor: Compressor,
    name: str,
    rank: int,
    old_shares: Sequence[int],
    shares: Sequence[int],
) -> Tensor:
    """A rank's slot of one layer in a world of another size or with other owners; the mean of what is owed is kept.

    ``saved`` holds the slots of all ranks of the old world. What all ranks share is theirs again. Of a residual,
    in mean units, the old world was owed ``(1/n) Σ δ_i + e``, with the owner's e where it stands in the owner's tensor;
    every rank of the new one gets that as its δ, and an owner its share ``1/n'`` of it as e. What is gathered has no
    owner.
    """
    old_size = len(saved)
    if slot.shared:
        return saved[0].clone()
    owed = torch.stack([saved[r].double() for r in range(old_size)]).mean(0).to(saved[0].dtype)
    if slot.shape is not None or not isinstance(compressor, Coded) or compressor.gathered:
        return owed
    if any(old_shares):
        for owner, begin, end in owned_parts(name, compressor, owed.numel(), old_shares):
            owed[begin:end] += saved[owner][begin:end] * (1 - 1 / old_size)
    mine = owed.clone()
    if any(shares):
        for owner, begin, end in owned_parts(name, compressor, owed.numel(), shares):
            if owner == rank:
                mine[begin:end] /= len(shares)
    return mine
