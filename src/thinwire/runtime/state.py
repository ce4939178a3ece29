"""The state of compressors: slots by parameter, allocated for a DDP bucket or for a flat buffer of shards."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from thinwire.collectives import Layer, Layout, Shard, Transport, owned_parts
from thinwire.compressors import (
    RESIDUAL,
    Coded,
    Compressor,
    LayerState,
    Learned,
    Slot,
    State,
    find_mixin,
    learns_at,
    not_finite,
    unwrap,
)
from thinwire.runtime.executor import AsyncReadback


@dataclass(frozen=True)
class ShardedLayer:
    """A layer that is cut along ``dim`` into one chunk of ``ceil(size / num_ranks)`` for each rank.

    The last chunks may be smaller or empty. A flat buffer has room for a full chunk in every rank's part.
    """

    name: str
    shape: tuple[int, ...]
    num_ranks: int
    dim: int = 0

    @cached_property
    def rows(self) -> tuple[int, ...]:
        """Size of each rank's chunk along ``dim``."""
        size = self.shape[self.dim]
        chunk = -(-size // self.num_ranks)
        return tuple(max(0, min(chunk, size - rank * chunk)) for rank in range(self.num_ranks))

    def shape_of(self, rank: int) -> tuple[int, ...]:
        """Shape of a rank's chunk."""
        return (*self.shape[: self.dim], self.rows[rank], *self.shape[self.dim + 1 :])

    def numel_of(self, rank: int) -> int:
        return math.prod(self.shape_of(rank))

    def shard(self, rank: int, start: int, compressor: Coded) -> Shard:
        """Return a rank's shard, which starts at ``start`` in its part.

        Random draws of different ranks do not overlap: a rank's begin at a multiple of the largest chunk, rounded up to
        the compressor's grain. A compressor without a grain treats the shard as a layer of its own.
        """
        numel, grain = self.numel_of(rank), compressor.grain
        if grain is None:
            return Shard(f"{self.name}, part {rank}", start, numel, 0, compressor)
        return Shard(self.name, start, numel, rank * (-(-self.padded_numel // grain) * grain), compressor)

    @property
    def padded_numel(self) -> int:
        """Number of elements in each rank's part: that of the largest chunk."""
        return self.numel_of(0)


class Placement:
    """The positions of layers' shards in a flat buffer that has a part for each rank."""

    def __init__(self, layers: Sequence[ShardedLayer], num_ranks: int) -> None:
        self.layers = tuple(layers)
        self.num_ranks = num_ranks
        self.starts: dict[str, int] = {}
        self.part_numel = 0
        for layer in layers:
            self.starts[layer.name] = self.part_numel
            self.part_numel += layer.padded_numel
        self.by_name = {layer.name: layer for layer in layers}

    @property
    def numel(self) -> int:
        """Number of elements of the whole buffer."""
        return self.part_numel * self.num_ranks

    @property
    def padded(self) -> bool:
        """Whether some elements of the buffer belong to no layer."""
        return self.numel > sum(math.prod(layer.shape) for layer in self.layers)

    def shards(self, compressors: Mapping[str, Coded]) -> tuple[tuple[Shard, ...], ...]:
        """Return the shards of each rank's part."""
        return tuple(
            tuple(
                layer.shard(rank, self.starts[layer.name], compressors[layer.name])
                for layer in self.layers
                if layer.numel_of(rank)
            )
            for rank in range(self.num_ranks)
        )

    def part(self, flat: Tensor, rank: int) -> Tensor:
        """Return a rank's part of a flat buffer."""
        return flat[rank * self.part_numel : (rank + 1) * self.part_numel]

    def shard(self, flat: Tensor, name: str, rank: int) -> Tensor:
        """Return a rank's shard of a layer in a flat buffer, in the shard's shape."""
        return self.local(self.part(flat, rank), name, rank)

    def local(self, part: Tensor, name: str, rank: int) -> Tensor:
        """Return a rank's shard of a layer in the rank's own part."""
        layer, start = self.by_name[name], self.starts[name]
        return part[start : start + layer.numel_of(rank)].view(layer.shape_of(rank))

    def whole(self, flat: Tensor, name: str) -> Tensor:
        """Return a copy of a layer in its own shape, joined from all parts."""
        shards = [self.shard(flat, name, rank) for rank in range(self.num_ranks)]
        return torch.cat(shards, self.by_name[name].dim)

    def write(self, flat: Tensor, name: str, value: Tensor) -> None:
        """Write a layer (in its own shape, or flat) to the buffer."""
        layer = self.by_name[name]
        parts = value.view(layer.shape).split(list(layer.rows), layer.dim)
        for rank, part in enumerate(parts):
            self.shard(flat, name, rank).copy_(part)


@dataclass
class _Place:
    """The slots of one flat tensor: slots with a value for each element are flat, too, the others are kept by layer."""

    layers: tuple[Layer, ...]
    now: dict[str, Tensor] = field(default_factory=dict)
    next: dict[str, Tensor] = field(default_factory=dict)
    shaped: dict[str, LayerState] = field(default_factory=dict)


class Slots:
    """The slots of all layers of one rank.

    Slots with one value for each element are tensors aligned with the flat gradients of a DDP bucket, so that one
    kernel call serves all its layers. When DDP rebuilds its buckets, values follow their parameter. The new values of a
    step take effect when it is committed.
    """

    def __init__(self) -> None:
        self._places: dict[Hashable, _Place] = {}
        self._place_of: dict[str, Hashable] = {}
        self._kept: dict[tuple[str, str], Tensor] = {}
        self._touched: set[Hashable] = set()

    @property
    def num_bytes(self) -> int:
        """Bytes of memory in use."""
        tensors = [t for place in self._places.values() for t in (*place.now.values(), *place.next.values())]
        states = [state for place in self._places.values() for state in place.shaped.values()]
        tensors += [
            t for state in states for t in {id(t): t for t in (*state.now.values(), *state.next.values())}.values()
        ]
        return sum(t.numel() * t.element_size() for t in (*tensors, *self._kept.values()))

    def state(self, key: Hashable, layout: Layout, loss_scale: float, device: torch.device) -> State | None:
        """Return the slots of the flat tensor ``key`` for one step, or None if its layers have none."""
        if not layout.slots:
            return None
        place = self._places.get(key)
        if place is None or any(self._place_of.get(layer.name) != key for layer in place.layers):
            place = self._gather(key, layout, device)
        self._touched.add(key)
        return State(place.now, place.next, loss_scale, place.shaped)

    def touched_layers(self) -> list[tuple[Layer, LayerState]]:
        """Return the layers of the present step that have slots with a shape of their own."""
        places = [self._places[key] for key in self._touched]
        return [(layer, p.shaped[layer.name]) for p in places for layer in p.layers if layer.name in p.shaped]

    def layer(self, name: str) -> LayerState | None:
        """Return the slots of a layer that have a shape of their own, or None before its first step."""
        key = self._place_of.get(name)
        return None if key is None else self._places[key].shaped.get(name)

    def keep_rest(self, used: Mapping[str, Tensor]) -> None:
        """Correct the residuals of layers of whose last message only a share was used.

        With the residual ``e`` before and ``e'`` after a step, the message has delivered ``e − e'``. If a share c of it
        was used, the residual is ``c·e' + (1 − c)·e``. ``used`` maps layer names to scalar tensors c.
        """
        for name, share in used.items():
            key = self._place_of.get(name)
            if key is None or key not in self._touched or (share.device.type == "cpu" and float(share) == 1.0):
                continue
            place = self._places[key]
            layer = next(layer for layer in place.layers if layer.name == name)
            if RESIDUAL in layer.compressor.slots:
                at = slice(layer.start, layer.start + layer.numel)
                before, after = place.now[RESIDUAL.name][at], place.next[RESIDUAL.name][at]
                torch.lerp(before, after, share.to(before), out=after)

    def commit(self) -> None:
        """Make the values that were written since the last commit the present ones."""
        for key in self._touched:
            place = self._places[key]
            place.now, place.next = place.next, place.now
            place.shaped = {name: LayerState(state.next, state.now) for name, state in place.shaped.items()}
        self._touched.clear()

    def discard(self) -> None:
        """Discard the values that were written since the last commit."""
        self._touched.clear()

    def value(self, layer: str, slot: Slot, shape: Sequence[int]) -> Tensor:
        """Return a flat copy of a slot of a layer of this shape, or its initial value if it was never used."""
        kept = self._kept.get((layer, slot.name))
        key = self._place_of.get(layer)
        if key is not None and (held := self._held(self._places[key], layer, slot.name)) is not None:
            kept = held
        first = slot.first(shape, layer)
        if kept is None:
            return first
        if kept.numel() == first.numel():
            return kept.clone()
        return _columns_kept(first, kept, slot.shape_of(shape)) if slot.columns else first

    def moved(self, layer: str, compressor: Compressor, shape: Sequence[int]) -> bool:
        """Whether any slot of a layer differs from its initial value."""
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
        """Move a layer's slots to another compressor or to other owners, between two steps.

        Preserves the mean residual ``(1/n) Σ δ_i + e`` across changes of ownership: a rank holds e of the elements that
        it owns, and its own δ of all others. Slots of compressors of another kind are reset.
        """
        alike = type(unwrap(old)) is type(unwrap(new))
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

    def owed(
        self, layer: str, shape: Sequence[int], compressor: Compressor, rank: int, shares: Sequence[int]
    ) -> Tensor:
        """Return what a rank must add to its gradient so that the mean makes up for a layer's residuals.

        It is the residual δ of elements that others own, and ``n·e`` of those that the rank owns: in the mean of n
        ranks both together are ``(1/n) Σ δ_i + e``. A flat tensor.
        """
        value = self.value(layer, RESIDUAL, shape)
        return value * (_weights(layer, compressor, value, rank, shares) * len(shares))

    def average_residual(self, layer: str, transport: Transport) -> None:
        """Between two steps, on every rank: set a layer's residual to the mean of all ranks' residuals.

        The sum over ranks is preserved. What summed compressors never send,
        because it cancels in that sum, may have grown without bound (see `thinwire.compressors.PowerSGD`).
        """
        held = self._kept.get((layer, RESIDUAL.name))
        if (key := self._place_of.get(layer)) is not None:
            held = self._held(self._places[key], layer, RESIDUAL.name)
        if held is not None:
            mean = held / transport.world_size
            transport.all_reduce(mean)
            held.copy_(mean)

    @staticmethod
    def _held(place: _Place, name: str, slot: str) -> Tensor | None:
        state = place.shaped.get(name)
        if state is not None and slot in state.now:
            return state.now[slot].reshape(-1)
        layer = next(layer for layer in place.layers if layer.name == name)
        flat = place.now.get(slot)
        return None if flat is None else flat[layer.start : layer.start + layer.numel]

    def replace(self, values: Mapping[tuple[str, str], Tensor]) -> None:
        """Replace all slots by ``values``, flat tensors by (parameter name, slot name)."""
        self._places.clear()
        self._place_of.clear()
        self._touched.clear()
        self._kept = dict(values)

    def reset(self) -> None:
        """Reset all slots but learned ones (levels), which do not depend on magnitudes."""
        self._touched.clear()
        for place in self._places.values():
            for layer in place.layers:
                for slot in layer.compressor.slots:
                    first = slot.first(layer.shape, layer.name)
                    if slot.shape is None:
                        place.now[slot.name][layer.start : layer.start + layer.numel] = first.to(place.now[slot.name])
                    elif not slot.learned:
                        now = place.shaped[layer.name].now[slot.name]
                        now.copy_(first.view(now.shape))
        # Values kept for layers that no bucket has now are rare enough to lose learned ones, too.
        self._kept.clear()

    def release(self, keys: Iterable[Hashable]) -> None:
        """Free the slots of flat tensors that are no longer used; values that have not moved are kept."""
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
    """Return the weight of each element of this rank's residual in the mean: 1 where it is the owner, else 1/n."""
    weights = torch.full_like(like, 1 / len(shares))
    if isinstance(compressor, Coded) and not compressor.gathered and any(shares):
        for owner, begin, end in owned_parts(name, compressor, like.numel(), shares):
            if owner == rank:
                weights[begin:end] = 1.0
    return weights


def moved_residual(
    value: Tensor,
    compressor: Compressor,
    name: str,
    old: tuple[int, Sequence[int]],
    new: tuple[int, Sequence[int]],
) -> Tensor:
    """Return what a rank's residual of one layer becomes in another world, where others have come or gone.

    ``old`` and ``new`` are this rank and all ranks' shares. What the rank has not delivered of its own δ stays, and so
    does the residual e of the means that it owned: where it owns an element no more, ``n'·e`` joins its own.
    """
    (old_rank, old_shares), (rank, shares) = old, new
    owned = _weights(name, compressor, value, old_rank, old_shares) == 1
    part = torch.where(owned, 1.0, 1 / len(shares)).to(value)
    return value * (part / _weights(name, compressor, value, rank, shares))


def _columns_kept(first: Tensor, kept: Tensor, shape: Sequence[int]) -> Tensor:
    """Return ``first`` with the columns of a saved matrix that has the same number of rows."""
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
    """Return a rank's slot of one layer for another world size or other owners; the mean residual is preserved.

    ``saved`` has the slots of all ranks of the old world. Shared slots are copied. The mean residual of the old world
    is ``(1/n) Σ δ_i + e``, where e is the residual of an element's owner. In the new world every rank gets it as its δ,
    and an owner gets ``1/n'`` of it as e. Gathered layers have no owner.
    """
    old_size = len(saved)
    if slot.shared:
        return saved[0].clone()
    mean_residual = torch.stack([saved[r].double() for r in range(old_size)]).mean(0).to(saved[0].dtype)
    if slot.shape is not None or not isinstance(compressor, Coded) or compressor.gathered:
        return mean_residual
    if any(old_shares):
        for owner, begin, end in owned_parts(name, compressor, mean_residual.numel(), old_shares):
            mean_residual[begin:end] += saved[owner][begin:end] * (1 - 1 / old_size)
    mine = mean_residual.clone()
    if any(shares):
        for owner, begin, end in owned_parts(name, compressor, mean_residual.numel(), shares):
            if owner == rank:
                mine[begin:end] /= len(shares)
    return mine


_LEAST_TO_LEARN = 2


class ShardedSlots:
    """The slots of the layers of one flat buffer, on one rank.

    Residuals have a value for each element of all parts: what this rank has not yet sent of its own gradient. They are
    zero in the rank's own part, which it adds exactly. Learned slots differ between ranks: each rank learns them from
    what it sends, and sends them in every message.
    """

    def __init__(self, placement: Placement, rank: int, device: torch.device, *, sends_all: bool) -> None:
        """``sends_all``: this rank sends all parts (gradients), not only its own (weights)."""
        self.rank = rank
        self._placement, self._device, self._sends_all = placement, device, sends_all
        self._compressors: dict[str, Coded] = {}
        self._state: State | None = None
        self._shaped: dict[tuple[str, Slot], Tensor] = {}
        self.learned_at = -1
        """The step in which slots were last learned, counted from the first compressed one."""
        self.learn_s = 0.0

    @property
    def num_bytes(self) -> int:
        """Bytes of memory in use."""
        tensors = [*self._shaped.values()]
        if self._state is not None:
            tensors += [*self._state.now.values(), *self._state.next.values()]
        return sum(t.numel() * t.element_size() for t in tensors)

    @property
    def keeps_residuals(self) -> bool:
        """Whether any layer has a residual."""
        return any(RESIDUAL in compressor.slots for compressor in self._compressors.values())

    def follow(self, compressors: Mapping[str, Coded]) -> None:
        """Use other compressors from now on. Residuals stay with their layers."""
        if compressors == self._compressors:
            return
        self._compressors = dict(compressors)
        asked = {(name, slot) for name, c in compressors.items() for slot in c.slots if slot.shape is not None}
        for name, slot in asked:
            shape = self._placement.by_name[name].shape
            held = self._shaped.get((name, slot))
            if held is None or held.shape != torch.Size(slot.shape_of(shape)):
                self._shaped[name, slot] = (
                    slot.first(shape, name).view(slot.shape_of(shape)).to(self._device, copy=True)
                )
        self._shaped = {key: value for key, value in self._shaped.items() if key in asked}
        self._make()

    def _make(self) -> None:
        flat = {slot for c in self._compressors.values() for slot in c.slots if slot.shape is None}
        if not flat and not self._shaped:
            self._state = None
            return
        old = self._state
        fresh = State.fresh(sorted(flat, key=lambda slot: slot.name), self._placement.numel, device=self._device)
        for name in fresh.now if old is not None else ():
            if old is not None and name in old.now:
                fresh.now[name].copy_(old.now[name])  # pyright: ignore[reportIndexIssue]
        layers: dict[str, dict[str, Tensor]] = {}
        for (name, slot), value in self._shaped.items():
            layers.setdefault(name, {})[slot.name] = value
        self._state = State(fresh.now, fresh.next, 1.0, {name: LayerState(held, held) for name, held in layers.items()})

    def state(self, x: Tensor, step: int, loss_scale: float, *, again: bool = False) -> State | None:
        """Return the slots for a message of ``x``, after learning those that are learned in ``step``.

        ``again``: this is another message of the same step, so the values that the first one wrote are present.
        """
        if self._state is None:
            return None
        if again:
            self.commit()
        if step != self.learned_at:
            learning = {name: c for name, c in self._compressors.items() if step in learns_at(c)}
            if learning:
                started = time.perf_counter()
                self._learn(x, learning, loss_scale)
                self.learned_at = step
                self.learn_s += time.perf_counter() - started
        return State(self._state.now, self._state.next, loss_scale, self._state.layers)

    def _learn(self, x: Tensor, learning: Mapping[str, Coded], loss_scale: float) -> None:
        assert self._state is not None
        for name, compressor in learning.items():
            if self._sends_all:
                values = self._placement.whole(x, name)
            else:
                values = self._placement.shard(x, name, self.rank)
            values = values.reshape(-1).float() / loss_scale
            if values.numel() < _LEAST_TO_LEARN:
                continue
            slots = self._state.layers[name].now
            learned = find_mixin(compressor, Learned)
            assert learned is not None
            for slot, value in learned.learn(values, slots).items():
                slots[slot].copy_(value.view_as(slots[slot]))

    def commit(self) -> None:
        """Make the values that the last step wrote the present ones."""
        if self._state is not None:
            self._state = self._state.swapped()

    def reset(self) -> None:
        """Reset all slots but learned ones (levels), which do not depend on magnitudes."""
        for flat in () if self._state is None else self._state.now.values():
            flat.zero_()
        for (name, slot), value in self._shaped.items():
            if not slot.learned:
                value.copy_(slot.first(self._placement.by_name[name].shape, name).view(value.shape))

    def value(self, name: str, slot: Slot) -> Tensor:
        """Return a copy of a slot of a layer, in the shape of the slot or else of the layer."""
        if slot.shape is not None:
            return self._shaped[name, slot].clone()
        assert self._state is not None
        return self._placement.whole(self._state.now[slot.name], name)

    def has(self, name: str, slot: Slot) -> bool:
        """Whether a layer has this slot at present."""
        return name in self._compressors and slot in self._compressors[name].slots

    def load(self, name: str, slot: Slot, value: Tensor) -> None:
        """Set a slot of a layer."""
        if slot.shape is not None:
            self._shaped[name, slot].copy_(value.view_as(self._shaped[name, slot]))
        else:
            assert self._state is not None
            self._placement.write(self._state.now[slot.name], name, value)


def reshard_residual(saved: Mapping[int, Tensor], slot: Slot, name: str, rank: int, placement: Placement) -> Tensor:
    """Return a rank's slot of one layer for another world size; the mean residual is preserved.

    The old world's mean residual of an element is ``(1/n) Σ δ_r``; in the new world all ranks but its owner hold it.
    """
    if slot.shape is not None:
        return saved[0].clone()
    layer = placement.by_name[name]
    mean_residual = (
        torch.stack([value.double() for value in saved.values()]).mean(0).to(saved[0].dtype).view(layer.shape)
    )
    others = layer.num_ranks - 1
    mine = mean_residual * (layer.num_ranks / others if others else 0.0)
    begin = sum(layer.rows[:rank])
    mine.narrow(layer.dim, begin, layer.rows[rank]).zero_()
    return mine.reshape(-1)


def residual_bytes(placement: Placement, compressors: Mapping[str, Compressor]) -> int:
    """Return the bytes of residuals on each rank: two fp32 values for each element if a layer has error feedback."""
    has_residuals = any(RESIDUAL in compressor.slots for compressor in compressors.values())
    flat = 2 * 4 * placement.numel if has_residuals else 0
    shaped = (
        4 * math.prod(slot.shape_of(placement.by_name[name].shape))
        for name, compressor in compressors.items()
        for slot in compressor.slots
        if slot.shape is not None
    )
    return flat + sum(shaped)


_SUSPECT_AFTER = 3


class PoisonMonitor:
    """Finds out when it is the state of compressors, and no gradient, that makes means non-finite.

    A gradient of 1e38 is finite, and so may be the residual or the factor that it leaves behind. Yet what later steps
    compute with it may overflow, in every one of them: steps that are not finite leave slots as they were. All ranks
    see the same means, so they count alike. After `_SUSPECT_AFTER` steps in a row without a finite mean they compare
    whether their own gradients were finite in them; each rank looks at its own only while it counts.
    """

    def __init__(self) -> None:
        self._nonfinite_steps = 0
        self._finite_gradients = True
        self._gradients = AsyncReadback()

    def note_gradients(self, flat: Tensor) -> None:
        """Look at this rank's own gradients, before anything is added to them, if the last mean was not finite."""
        if self._nonfinite_steps:
            self._gradients.note(not_finite(flat))

    def end_step(self, *, finite: bool, finite_gradients: bool = True) -> None:
        """Count a step whose means are known. ``finite_gradients``: what is known of them beside what was noted."""
        noted = [bool(torch.isfinite(value)) for value in self._gradients.read()]
        if finite:
            self._nonfinite_steps, self._finite_gradients = 0, True
            return
        self._nonfinite_steps += 1
        self._finite_gradients &= finite_gradients and all(noted)

    @property
    def suspected(self) -> bool:
        """Whether ranks should compare what they know: the same on all of them."""
        return self._nonfinite_steps >= _SUSPECT_AFTER

    def take_finite_gradients(self) -> bool:
        """Whether this rank's gradients were finite since it has looked at them. Counting starts anew."""
        mine, self._finite_gradients, self._nonfinite_steps = self._finite_gradients, True, 1
        return mine

    def confirmed(self, transport: Transport) -> bool:
        """Whether all ranks' gradients were finite: then it is the state. A collective call."""
        return bool(transport.all_gather(torch.tensor([self.take_finite_gradients()])).all())

    def warn(self, step: int) -> None:
        """Say that the state starts anew."""
        warnings.warn(
            f"before step {step}, {_SUSPECT_AFTER} means in a row were not finite although all ranks' gradients were: "
            "a large gradient has left residuals or factors with which sums overflow. They start anew on all ranks "
            "(wire.stats.state_resets counts it)",
            stacklevel=2,
        )
