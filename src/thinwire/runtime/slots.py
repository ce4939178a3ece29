"""The state of compressors: slots by parameter, allocated for the flat buffers in which parameters are sent."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from thinwire.collectives import Transport, owned_parts, returned_zeros
from thinwire.compressors import (
    RESIDUAL,
    CodecCall,
    Coded,
    Compressor,
    Key,
    LayerState,
    MaxAbs,
    Piece,
    Segments,
    Slot,
    State,
    unwrap,
)
from thinwire.runtime.placement import LayerSpan, Placement

_PACKED_BITS = 8
_PACKED = MaxAbs(bits=_PACKED_BITS, bucket=128, rounding="stochastic")
_EXACT = MaxAbs(bits=_PACKED_BITS, bucket=128, rounding="nearest")
"""Coder with the same levels: what was packed once is packed again without an error, as a resumed run needs it."""


class FlatSlot:
    """A slot's values in this step, and those that it leaves to the next one."""

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self.now = torch.zeros(numel, dtype=dtype, device=device)
        self.next = torch.zeros(numel, dtype=dtype, device=device)

    @property
    def num_bytes(self) -> int:
        """Bytes of memory in use between two steps."""
        return self.now.nbytes + self.next.nbytes

    def open(self) -> None:
        """Make ``now`` and ``next`` usable, until `close`."""

    def close(self, key: int) -> None:
        """Keep what was written to ``next``. ``key`` is that of random draws."""

    def swap(self) -> None:
        """Make the next values the present ones."""
        self.now, self.next = self.next, self.now

    def forget_next(self) -> None:
        """Free the memory of the next values, between two steps. The slot can only be read from then on."""
        self.next = self.now

    def read(self, *, after: bool = False) -> Tensor:
        """Return all present values, or with ``after`` the next ones. They may share memory with the slot."""
        return self.next if after else self.now

    def write(self, values: Tensor, *, after: bool = False) -> None:
        """Replace all present values, or with ``after`` the next ones."""
        held = self.read(after=after)
        if values is not held:
            held.copy_(values)


class PackedSlot(FlatSlot):
    """A slot that keeps values in 8 bits an element and a scale for 128 of them, rather than in 32 bits.

    Values are rounded at random, so that those that are much smaller than their neighbors are kept on average. Draws
    and scales are those of a piece, wherever it is in the tensor. Elements of no piece are zero. ``now`` and ``next``
    are one tensor, in memory from `open` to `close` only: the present values stay in 8 bits, too.
    """

    def __init__(self, numel: int, pieces: Iterable[LayerSpan], device: torch.device) -> None:
        placed, end = [], 0
        for name, start, count in pieces:
            placed.append(Piece(name, start, count, 0, end, (count,)))
            end += packed_bytes(count)
        self._segments = Segments.build(placed)
        self._numel, self._device = numel, device
        self._packed = [torch.zeros(end, dtype=torch.uint8, device=device) for _ in range(2)]
        self.write(self._zeros())
        self._packed[1].copy_(self._packed[0])
        self._is_zero = True
        self._forget_opened()

    @property
    def num_bytes(self) -> int:
        return sum(packed.nbytes for packed in self._packed)

    def open(self) -> None:
        # Under FSDP2 nothing writes what a rank owns itself: it stays zero.
        self.now = self.next = self._zeros()
        if not self._is_zero:
            self._decode(self.now)

    def close(self, key: int) -> None:
        if not self.next.numel():  # nothing was opened: a step before compression starts
            return
        self._pack(_PACKED, self.next, self._packed[1], key)
        self._forget_opened()

    def swap(self) -> None:
        self._packed.reverse()
        self._is_zero = False

    def forget_next(self) -> None:
        self._packed[1] = self._packed[0]

    def read(self, *, after: bool = False) -> Tensor:
        values = self._zeros()
        self._decode(values, after=after)
        return values

    def write(self, values: Tensor, *, after: bool = False) -> None:
        self._is_zero = False
        self._pack(_EXACT, values, self._packed[after], 0)

    def _forget_opened(self) -> None:
        self.now = self.next = torch.empty(0, dtype=torch.float32, device=self._device)

    def _decode(self, values: Tensor, *, after: bool = False) -> None:
        _PACKED.decode(self._packed[after], values, CodecCall(self._segments))

    def _pack(self, coder: Coded, values: Tensor, message: Tensor, key: int) -> None:
        coder.encode(values, message, CodecCall(self._segments, Key(key, key)))

    def _zeros(self) -> Tensor:
        return returned_zeros(self._numel, torch.float32, self._device)


def opened(slots: Mapping[str, FlatSlot]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Open slots for a step; return their present and their next values, by name."""
    for slot in slots.values():
        slot.open()
    return {name: slot.now for name, slot in slots.items()}, {name: slot.next for name, slot in slots.items()}


def packed_bytes(numel: int) -> int:
    """Return the bytes of a piece's values in 8 bits."""
    return _PACKED.payload_bytes(numel, torch.float32)


def is_packed(slot: Slot, compressors: Iterable[Compressor]) -> bool:
    """Whether all of these compressors that have ``slot`` keep it in 8 bits."""
    kept = [mine.bits for compressor in compressors for mine in compressor.slots if mine == slot]
    return bool(kept) and all(bits == _PACKED_BITS for bits in kept)


def flat_slot(
    slot: Slot, placement: Placement, compressors: Mapping[str, Compressor], device: torch.device
) -> FlatSlot:
    """Return a slot of zeros for a buffer in which the layers with these compressors have it."""
    if not is_packed(slot, compressors.values()):
        return FlatSlot(placement.numel, slot.dtype, device)
    return PackedSlot(placement.numel, [s for name in compressors for s in placement.spans(name)], device)


@dataclass
class _Place:
    """The slots of one buffer: those with a value for each element are like the buffer, the others are by layer."""

    placement: Placement
    compressors: Mapping[str, Compressor]
    """The layers that have slots."""
    flat: dict[str, FlatSlot] = field(default_factory=dict)
    shaped: dict[str, LayerState] = field(default_factory=dict)

    def states(self) -> Mapping[str, LayerState]:
        """Return the slots by layer. Shards that are layers of their own share those of their layer."""
        if self.placement.num_ranks == 1:
            return self.shaped
        layers = {name: self.placement.by_name[name] for name in self.shaped}
        parts = {layer.part_name(r): self.shaped[name] for name, layer in layers.items() for r in self.placement.ranks}
        return self.shaped | parts

    def held(self, layer: str, slot: str) -> Tensor | None:
        """Return the present values of a layer's slot, flat; None if there are none."""
        state = self.shaped.get(layer)
        if state is not None and slot in state.now:
            return state.now[slot].reshape(-1)
        flat = self.flat.get(slot)
        return None if flat is None else self.placement.whole(flat.read(), layer).reshape(-1)


class Slots:
    """The slots of all layers of one rank.

    Slots with one value for each element are tensors aligned with the buffers in which layers are sent, so that one
    kernel call serves all layers of a buffer. When a layer is sent in another buffer, as when DDP rebuilds its buckets,
    its values follow it. The new values of a step take effect when it is committed.
    """

    def __init__(self) -> None:
        self._places: dict[Hashable, _Place] = {}
        self._place_of: dict[str, Hashable] = {}
        self._kept: dict[tuple[str, str], Tensor] = {}
        self.touched: set[Hashable] = set()
        """Keys of the buffers whose slots the present step writes."""

    @property
    def num_bytes(self) -> int:
        """Bytes of memory in use."""
        places = list(self._places.values())
        states = [state for place in places for state in list(place.shaped.values())]
        tensors = [
            t for state in states for t in {id(t): t for t in (*state.now.values(), *state.next.values())}.values()
        ]
        flat = sum(slot.num_bytes for place in places for slot in list(place.flat.values()))
        return flat + sum(t.numel() * t.element_size() for t in (*tensors, *list(self._kept.values())))

    def state(
        self,
        key: Hashable,
        placement: Placement,
        compressors: Mapping[str, Compressor],
        loss_scale: float,
        device: torch.device,
    ) -> State:
        """Return the slots of the buffer ``key`` for one step. `close` ends their use.

        ``compressors`` are those that have any, by layer.
        """
        if any(self._place_of.get(name) != key for name in compressors):
            self._gather(key, placement, compressors, device)
        place = self._places[key]
        self.touched.add(key)
        return State(*opened(place.flat), loss_scale, place.states())

    def close(self, key: Hashable, draws: int) -> None:
        """Keep what a step has written to the slots of the buffer ``key``, until it is committed or discarded.

        ``draws`` is the key of the random draws with which residuals are packed.
        """
        place = self._places.get(key)
        if place is not None and key in self.touched:
            for slot in place.flat.values():
                slot.close(draws)

    def touched_layers(self) -> list[tuple[str, LayerState]]:
        """Return the layers of the present step that have slots with a shape of their own."""
        return [layer for key in self.touched for layer in self._places[key].shaped.items()]

    def layer(self, name: str) -> LayerState | None:
        """Return the slots of a layer that have a shape of their own, or None before its first step."""
        return None if (key := self._place_of.get(name)) is None else self._places[key].shaped.get(name)

    def keep_rest(self, used: Mapping[str, Tensor]) -> None:
        """Correct the residuals, momenta and velocities of layers of whose last message only a share was used.

        With the residual ``e`` before and ``e'`` after a step, the message has delivered ``e − e'``. If a share c of it
        was used, the residual is ``c·e' + (1 − c)·e``. ``used`` maps layer names to scalar tensors c.
        """
        shares = {name: c for name, c in used.items() if c.device.type != "cpu" or float(c) != 1.0}
        for place in [self._places[key] for key in self.touched] if shares else ():
            for slot_name, slot in place.flat.items():
                mine = [n for n, c in place.compressors.items() if n in shares and _has_flat_slot(c, slot_name)]
                if not mine:
                    continue
                before, after = slot.read(), slot.read(after=True)
                for name, rank in ((name, rank) for name in mine for rank in place.placement.ranks):
                    was, now = (place.placement.shard(values, name, rank) for values in (before, after))
                    torch.lerp(was, now, shares[name].to(was), out=now)
                slot.write(after, after=True)

    def commit(self, keys: Iterable[Hashable] | None = None) -> None:
        """Make the values that were written since the last commit the present ones; of the buffers ``keys`` alone, if
        they are given."""
        done = self.touched.copy() if keys is None else self.touched.intersection(keys)
        for place in [self._places[key] for key in done]:
            for slot in place.flat.values():
                slot.swap()
            place.shaped = {name: LayerState(state.next, state.now) for name, state in place.shaped.items()}
        self.touched -= done

    def discard(self) -> None:
        """Discard the values that were written since the last commit."""
        self.touched.clear()

    def value(self, layer: str, slot: Slot, shape: Sequence[int]) -> Tensor:
        """Return a flat copy of a slot of a layer of this shape, or its initial value if it was never used."""
        present = self._present(layer, slot.name)
        if present is not None and present.numel() == math.prod(slot.shape_for(shape)):
            return present.clone()
        first = slot.first(shape, layer)
        return first if present is None or not slot.columns else _columns_kept(first, present, slot.shape_for(shape))

    def _present(self, layer: str, slot: str) -> Tensor | None:
        """Return the flat values of a slot where they lie, or None if it was never used."""
        key = self._place_of.get(layer)
        held = None if key is None else self._places[key].held(layer, slot)
        return self._kept.get((layer, slot)) if held is None else held

    def moved(self, layer: str, compressor: Compressor, shape: Sequence[int], *, learned: bool = False) -> bool:
        """Whether any slot of a layer differs from its initial value; with ``learned``, any that is learned."""
        slots = [slot for slot in compressor.slots if (slot.learned if learned else not slot.scratch)]
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
                weights = mean_weights(layer, old, value, rank, old_shares)
                value *= weights / mean_weights(layer, new, value, rank, shares)
            kept[layer, slot.name] = value
        self.drop(layer)
        self._kept |= kept

    def scale_residual(self, layer: str, factor: float) -> None:
        """Multiply the residual of a layer that was handed over, whose units are others now."""
        if (kept := self._kept.get((layer, RESIDUAL.name))) is not None:
            kept *= factor

    def drop(self, layer: str) -> None:
        """Free the slots of a layer, between two steps."""
        for name in [name for name in self._kept if name[0] == layer]:
            del self._kept[name]
        self._leave(layer)

    def unsent(
        self, layer: str, shape: Sequence[int], compressor: Compressor, rank: int, shares: Sequence[int]
    ) -> Tensor:
        """Return what a rank must add to its gradient so that the mean makes up for a layer's residuals.

        It is the residual δ of elements that others own, and ``n·e`` of those that the rank owns: in the mean of n
        ranks both together are ``(1/n) Σ δ_i + e``. A flat tensor.
        """
        value = self.value(layer, RESIDUAL, shape)
        return value * (mean_weights(layer, compressor, value, rank, shares) * len(shares))

    def average_residual(self, layer: str, transport: Transport) -> None:
        """Set a layer's residual to the mean of all ranks' residuals, between two steps, on every rank.

        The sum over ranks is preserved. What summed compressors never send, because it cancels in that sum, may have
        grown without bound (see `thinwire.compressors.PowerSGD`).
        """
        held = self._present(layer, RESIDUAL.name)
        if held is not None:
            mean = held / transport.world_size
            transport.all_reduce(mean)
            self._leave(layer)
            self._kept[layer, RESIDUAL.name] = mean

    def replace(self, values: Mapping[tuple[str, str], Tensor]) -> None:
        """Replace all slots by ``values``, flat tensors by (parameter name, slot name)."""
        self._places.clear()
        self._place_of.clear()
        self.touched.clear()
        # A layer without a residual yet has one of zeros in a state, also where no buffer will ever have the layer.
        self._kept = {key: value for key, value in values.items() if key[1] != RESIDUAL.name or bool(value.any())}

    def reset(self) -> None:
        """Reset all slots but learned ones (levels), which do not depend on magnitudes."""
        self.touched.clear()
        for place in self._places.values():
            whole = {name: slot.read() for name, slot in place.flat.items()}
            for name, compressor in place.compressors.items():
                for slot in compressor.slots:
                    first = slot.first(place.placement.by_name[name].shape, name)
                    if slot.shape is None:
                        place.placement.write(whole[slot.name], name, first)
                    elif not slot.learned:
                        now = place.shaped[name].now[slot.name]
                        now.copy_(first.view(now.shape))
            for name, values in whole.items():
                place.flat[name].write(values)
        # Values kept for layers that no buffer has now are rare enough to lose learned ones, too.
        self._kept.clear()

    def _release(self, keys: Iterable[Hashable]) -> None:
        """Free the slots of buffers that are not used any more; the values of their layers are kept."""
        for key in keys:
            self.touched.discard(key)
            place = self._places.pop(key, None)
            if place is None:
                continue
            for slot in place.flat.values():
                slot.forget_next()
            for name, compressor in place.compressors.items():
                if self._place_of.get(name) != key:
                    continue
                del self._place_of[name]
                for slot in compressor.slots:
                    held = place.held(name, slot.name)
                    if held is not None and not slot.scratch:
                        self._kept[name, slot.name] = returned_zeros(held.numel(), held.dtype, held.device).copy_(held)

    def _leave(self, layer: str) -> None:
        """Take a layer out of its buffer, which is freed if no other layer of it has slots there."""
        key = self._place_of.pop(layer, None)
        if key is not None and key not in self._place_of.values():
            self._release([key])

    def _gather(
        self, key: Hashable, placement: Placement, compressors: Mapping[str, Compressor], device: torch.device
    ) -> None:
        """Allocate the slots of a buffer, and move the values of its layers there."""
        self._release({key} | {self._place_of[name] for name in compressors if name in self._place_of})
        place = self._places[key] = _Place(placement, compressors)
        shapes = {name: placement.by_name[name].shape for name in compressors}
        for slot in {s.name: s for c in compressors.values() for s in c.slots if s.shape is None}.values():
            having = {name: c for name, c in compressors.items() if _has_flat_slot(c, slot.name)}
            made = place.flat[slot.name] = flat_slot(slot, placement, having, device)
            if slot.initial is None and not any((name, slot.name) in self._kept for name in having):
                continue
            values = made.read()
            for name in having:
                kept = self._kept.pop((name, slot.name), None)
                if kept is not None or slot.initial is not None:
                    placement.write(values, name, slot.first(shapes[name], name) if kept is None else kept)
            made.write(values)
        for name, compressor in compressors.items():
            shaped, steady = {}, set[str]()
            for slot in (slot for slot in compressor.slots if slot.shape is not None):
                value = self.value(name, slot, shapes[name])
                shaped[slot.name] = value.to(device).view(slot.shape_for(shapes[name]))
                self._kept.pop((name, slot.name), None)
                if _is_steady(slot, placement):
                    steady.add(slot.name)
            if shaped:
                after = {slot: value if slot in steady else value.clone() for slot, value in shaped.items()}
                place.shaped[name] = LayerState(shaped, after)
            self._place_of[name] = key


def _has_flat_slot(compressor: Compressor, name: str) -> bool:
    return any(slot.name == name and slot.shape is None for slot in compressor.slots)


def _is_steady(slot: Slot, placement: Placement) -> bool:
    """Whether a slot with a shape of its own has one value, which is written in place."""
    return slot.learned or slot.scratch or placement.num_ranks > 1


def slot_bytes(placement: Placement, compressors: Mapping[str, Compressor]) -> int:
    """Return the bytes of the slots of a buffer's layers with these compressors: present values and the next ones."""
    total = 0
    for slot in {s.name: s for c in compressors.values() for s in c.slots if s.shape is None}.values():
        having = {name: c for name, c in compressors.items() if _has_flat_slot(c, slot.name)}
        if is_packed(slot, having.values()):
            total += 2 * sum(packed_bytes(numel) for name in having for _, _, numel in placement.spans(name))
        else:
            total += 2 * slot.dtype.itemsize * placement.numel
    for name, compressor in compressors.items():
        for slot in (slot for slot in compressor.slots if slot.shape is not None):
            numel = math.prod(slot.shape_for(placement.by_name[name].shape))
            total += (1 if _is_steady(slot, placement) else 2) * numel * slot.dtype.itemsize
    return total


def mean_weights(name: str, compressor: Compressor, like: Tensor, rank: int, shares: Sequence[int]) -> Tensor:
    """Return the weight of each element of this rank's residual in the mean: 1 where it is the owner, else 1/n."""
    weights = torch.full_like(like, 1 / len(shares))
    if isinstance(compressor, Coded) and not compressor.gathered and any(shares):
        for owner, begin, end in owned_parts(name, compressor, like.numel(), shares):
            if owner == rank:
                weights[begin:end] = 1.0
    return weights


def moved_residual(
    value: Tensor, compressor: Compressor, name: str, old: tuple[int, Sequence[int]], new: tuple[int, Sequence[int]]
) -> Tensor:
    """Return what a rank's residual of one layer becomes in another world, which other ranks have joined or left.

    ``old`` and ``new`` are this rank and all ranks' shares. What the rank has not delivered of its own δ stays, and so
    does the residual e of the means that it owned: where it no longer owns an element, ``n'·e`` joins its own.
    """
    (old_rank, old_shares), (rank, shares) = old, new
    owned = mean_weights(name, compressor, value, old_rank, old_shares) == 1
    part = torch.where(owned, value.new_ones(()), 1 / len(shares))
    return value * (part / mean_weights(name, compressor, value, rank, shares))


class Owners(NamedTuple):
    """The ranks that hold a layer's residual, in the world that saved it and in the present one."""

    before: Callable[[int], Tensor]
    """Function that returns the weight of each element of a rank's residual in the mean of the world that saved it."""
    mine: Callable[[], Tensor]
    """Function that returns the weight of each element of this rank's in the mean of the present world; 0 where this
    rank holds nothing."""
    holders: int
    """Number of ranks of the present world that hold an element: each holds as much of the mean."""
    in_chunks: bool = False
    """Whether each rank holds the chunk of its shard alone."""


def reshard(saved: Sequence[Tensor], slot: Slot, owners: Owners) -> Tensor:
    """Return a rank's slot of one layer for another world size or other owners; the mean residual is preserved.

    ``saved`` has the slots of all ranks that saved it, flat. Slots that ranks share are copied, and others with a shape
    of their own are averaged.
    """
    if slot.shared:
        return saved[0].clone()
    if slot.shape is not None:
        return torch.stack([value.double() for value in saved]).mean(0).to(saved[0].dtype)
    residual = torch.zeros_like(saved[0], dtype=torch.float64)
    for rank, value in enumerate(saved):
        residual += value.double() * owners.before(rank)
    mine = owners.mine()
    return torch.where(mine > 0, residual / (owners.holders * mine), 0.0).to(saved[0].dtype)


def _columns_kept(first: Tensor, kept: Tensor, shape: Sequence[int]) -> Tensor:
    """Return ``first`` with the columns of a saved matrix that has the same number of rows."""
    rows = shape[0]
    if not rows or kept.numel() % rows:
        return first
    columns_now, before = first.view(rows, -1).clone(), kept.view(rows, -1)
    columns = min(columns_now.shape[1], before.shape[1])
    columns_now[:, :columns] = before[:, :columns]
    return columns_now.reshape(-1)
