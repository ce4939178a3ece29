"""The state of compressors under DistributedDataParallel: slots by parameter, allocated by bucket."""

from __future__ import annotations

import math
import mmap
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from thinwire.collectives import Layer, Layout, Transport, owned_parts
from thinwire.compressors import RESIDUAL, Coded, Compressor, LayerState, Slot, State, not_finite, unwrap
from thinwire.runtime.bucket import BucketLayers, bucket_parts
from thinwire.runtime.executor import AsyncReadback
from thinwire.runtime.flat_slots import FlatSlot, flat_slot, is_packed, opened, packed_bytes


@dataclass
class _BucketSlots:
    """The slots of one flat tensor: slots with a value for each element are flat, too, the others are kept by layer."""

    layers: tuple[Layer, ...]
    flat: dict[str, FlatSlot] = field(default_factory=dict)
    shaped: dict[str, LayerState] = field(default_factory=dict)


class Slots:
    """The slots of all layers of one rank.

    Slots with one value for each element are tensors aligned with the flat gradients of a DDP bucket, so that one
    kernel call serves all its layers. When DDP rebuilds its buckets, values follow their parameter. The new values of a
    step take effect when it is committed.
    """

    def __init__(self) -> None:
        self._places: dict[Hashable, _BucketSlots] = {}
        self._place_of: dict[str, Hashable] = {}
        self._kept: dict[tuple[str, str], Tensor] = {}
        self._touched: set[Hashable] = set()

    @property
    def num_bytes(self) -> int:
        """Bytes of memory in use."""
        flat = sum(slot.num_bytes for place in self._places.values() for slot in place.flat.values())
        states = [state for place in self._places.values() for state in place.shaped.values()]
        tensors = [
            t for state in states for t in {id(t): t for t in (*state.now.values(), *state.next.values())}.values()
        ]
        return flat + sum(t.numel() * t.element_size() for t in (*tensors, *self._kept.values()))

    def state(self, key: Hashable, layout: Layout, loss_scale: float, device: torch.device) -> State:
        """Return the slots of the flat tensor ``key`` for one step. `close` ends their use."""
        if not layout.slots:
            return State({}, {}, loss_scale)
        place = self._places.get(key)
        if place is None or any(self._place_of.get(layer.name) != key for layer in place.layers):
            place = self._gather(key, layout, device)
        self._touched.add(key)
        return State(*opened(place.flat), loss_scale, place.shaped)

    def close(self, key: Hashable, draws: int) -> None:
        """Keep what a step has written to the slots of the flat tensor ``key``, until it is committed or discarded.

        ``draws`` is the key of the random draws with which residuals are packed.
        """
        if key in self._touched:
            for slot in self._places[key].flat.values():
                slot.close(draws)

    def touched_layers(self) -> list[tuple[Layer, LayerState]]:
        """Return the layers of the present step that have slots with a shape of their own."""
        places = [self._places[key] for key in self._touched]
        return [(layer, p.shaped[layer.name]) for p in places for layer in p.layers if layer.name in p.shaped]

    def layer(self, name: str) -> LayerState | None:
        """Return the slots of a layer that have a shape of their own, or None before its first step."""
        key = self._place_of.get(name)
        return None if key is None else self._places[key].shaped.get(name)

    def keep_rest(self, used: Mapping[str, Tensor]) -> None:
        """Correct the residuals, momenta and velocities of layers of whose last message only a share was used.

        With the residual ``e`` before and ``e'`` after a step, the message has delivered ``e − e'``. If a share c of it
        was used, the residual is ``c·e' + (1 − c)·e``. ``used`` maps layer names to scalar tensors c.
        """
        for name, share in used.items():
            key = self._place_of.get(name)
            if key is None or key not in self._touched or (share.device.type == "cpu" and float(share) == 1.0):
                continue
            place = self._places[key]
            layer = next(layer for layer in place.layers if layer.name == name)
            at = slice(layer.start, layer.start + layer.numel)
            for slot in (place.flat[slot.name] for slot in layer.compressor.slots if slot.shape is None):
                before, after = slot.read(), slot.read(after=True)
                torch.lerp(before[at], after[at], share.to(before), out=after[at])
                slot.write(after, after=True)

    def commit(self) -> None:
        """Make the values that were written since the last commit the present ones."""
        for key in self._touched:
            place = self._places[key]
            for slot in place.flat.values():
                slot.swap()
            place.shaped = {name: LayerState(state.next, state.now) for name, state in place.shaped.items()}
        self._touched.clear()

    def discard(self) -> None:
        """Discard the values that were written since the last commit."""
        self._touched.clear()

    def value(self, layer: str, slot: Slot, shape: Sequence[int]) -> Tensor:
        """Return a flat copy of a slot of a layer of this shape, or its initial value if it was never used."""
        present = self._present(layer, slot, shape)
        if present is not None and present.numel() == math.prod(slot.shape_of(shape)):
            return present.clone()
        first = slot.first(shape, layer)
        return first if present is None or not slot.columns else _columns_kept(first, present, slot.shape_of(shape))

    def _present(self, layer: str, slot: Slot, shape: Sequence[int]) -> Tensor | None:
        """Return the flat values of a slot where they lie, or None if it was never used."""
        key = self._place_of.get(layer)
        held = None if key is None else self._held(self._places[key], layer, slot.name)
        return self._kept.get((layer, slot.name)) if held is None else held

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
                value *= _weights(layer, old, value, rank, old_shares) / _weights(layer, new, value, rank, shares)
            kept[layer, slot.name] = value
        for name in [name for name in self._kept if name[0] == layer]:
            del self._kept[name]
        self._place_of.pop(layer, None)
        self._kept |= kept

    def unsent(
        self, layer: str, shape: Sequence[int], compressor: Compressor, rank: int, shares: Sequence[int]
    ) -> Tensor:
        """Return what a rank must add to its gradient so that the mean makes up for a layer's residuals.

        It is the residual δ of elements that others own, and ``n·e`` of those that the rank owns: in the mean of n
        ranks both together are ``(1/n) Σ δ_i + e``. A flat tensor.
        """
        value = self.value(layer, RESIDUAL, shape)
        return value * (_weights(layer, compressor, value, rank, shares) * len(shares))

    def average_residual(self, layer: str, transport: Transport) -> None:
        """Set a layer's residual to the mean of all ranks' residuals, between two steps, on every rank.

        The sum over ranks is preserved. What summed compressors never send, because it cancels in that sum, may have
        grown without bound (see `thinwire.compressors.PowerSGD`).
        """
        held = self._kept.get((layer, RESIDUAL.name))
        if (key := self._place_of.get(layer)) is not None:
            held = self._held(self._places[key], layer, RESIDUAL.name)
        if held is not None:
            mean = held / transport.world_size
            transport.all_reduce(mean)
            self._kept[layer, RESIDUAL.name] = mean
            self._place_of.pop(layer, None)

    def _copy(self, layer: Layer, slot: Slot, out: Tensor) -> None:
        """Copy a slot of a layer to ``out``, without another copy of it in between."""
        present = self._present(layer.name, slot, layer.shape)
        if present is not None and present.numel() == out.numel():
            out.copy_(present)
        elif present is not None or slot.initial is not None:
            out.copy_(self.value(layer.name, slot, layer.shape))
        else:
            out.zero_()

    @staticmethod
    def _held(place: _BucketSlots, name: str, slot: str) -> Tensor | None:
        state = place.shaped.get(name)
        if state is not None and slot in state.now:
            return state.now[slot].reshape(-1)
        layer = next(layer for layer in place.layers if layer.name == name)
        flat = place.flat.get(slot)
        return None if flat is None else flat.read()[layer.start : layer.start + layer.numel]

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
            whole = {name: slot.read() for name, slot in place.flat.items()}
            for layer in place.layers:
                for slot in layer.compressor.slots:
                    first = slot.first(layer.shape, layer.name)
                    if slot.shape is None:
                        whole[slot.name][layer.start : layer.start + layer.numel] = first.to(whole[slot.name])
                    elif not slot.learned:
                        now = place.shaped[layer.name].now[slot.name]
                        now.copy_(first.view(now.shape))
            for name, values in whole.items():
                place.flat[name].write(values)
        # Values kept for layers that no bucket has now are rare enough to lose learned ones, too.
        self._kept.clear()

    def release(self, keys: Iterable[Hashable]) -> None:
        """Free the slots of flat tensors that are no longer used; values that have not moved are kept."""
        for key in keys:
            place = self._places.pop(key, None)
            if place is None:
                continue
            for slot in place.flat.values():
                slot.forget_next()
            for layer in place.layers:
                if self._place_of.get(layer.name) == key:
                    del self._place_of[layer.name]
                    self._keep(place, layer)

    def _keep(self, place: _BucketSlots, layer: Layer) -> None:
        for slot in layer.compressor.slots:
            held = self._held(place, layer.name, slot.name)
            if held is not None and not slot.scratch:
                self._kept[layer.name, slot.name] = _parked(held)

    def _gather(self, key: Hashable, layout: Layout, device: torch.device) -> _BucketSlots:
        layers = tuple(layer for layer in layout.layers if layer.compressor.slots)
        place = self._places.get(key) or _BucketSlots(layers)
        compressors = [layer.compressor for layer in layers]
        pieces = [(layer.name, layer.start, layer.numel) for layer in layers]
        whole = {name: slot.read() for name, slot in place.flat.items()}
        for slot in layout.slots:
            if slot.shape is None:
                place.flat[slot.name] = flat_slot(slot, compressors, layout.numel, pieces, device)
                whole.setdefault(slot.name, place.flat[slot.name].read())
        for layer in layers:
            if self._place_of.get(layer.name) == key:
                continue
            slots = layer.compressor.slots
            shaped = {
                s.name: self.value(layer.name, s, layer.shape).to(device).view(s.shape_of(layer.shape))
                for s in slots
                if s.shape is not None
            }
            if shaped:
                steady = {s.name for s in slots if s.learned or s.scratch}
                place.shaped[layer.name] = LayerState(
                    shaped, {name: v if name in steady else v.clone() for name, v in shaped.items()}
                )
            for slot in slots:
                if slot.shape is None:
                    self._copy(layer, slot, whole[slot.name][layer.start : layer.start + layer.numel])
                self._kept.pop((layer.name, slot.name), None)
            self._place_of[layer.name] = key
        for name, values in whole.items():
            place.flat[name].write(values)
        self._places[key] = place
        return place


def _parked(values: Tensor) -> Tensor:
    """Return a copy of a flat tensor that gives its memory back to the system when it is freed.

    The allocator keeps freed memory for later: that of a whole model's state, once more, until the process ends.
    """
    if values.device.type != "cpu" or values.nbytes < 1 << 20:
        return values.clone()
    return torch.frombuffer(mmap.mmap(-1, values.nbytes, flags=mmap.MAP_PRIVATE), dtype=values.dtype).copy_(values)


def slot_bytes(compressors: Mapping[str, Compressor], shapes: Mapping[str, Sequence[int]]) -> int:
    """Return the bytes of the slots of layers with these compressors and shapes: present values and the next ones."""
    total = 0
    for name, compressor in compressors.items():
        for slot in compressor.slots:
            numel = math.prod(slot.shape_of(shapes[name]))
            copies = 1 if slot.shape is not None and (slot.learned or slot.scratch) else 2
            packed = slot.shape is None and is_packed(slot, [compressor])
            total += copies * (packed_bytes(numel) if packed else numel * slot.dtype.itemsize)
    return total


def _weights(name: str, compressor: Compressor, like: Tensor, rank: int, shares: Sequence[int]) -> Tensor:
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
    owned = _weights(name, compressor, value, old_rank, old_shares) == 1
    part = torch.where(owned, value.new_ones(()), 1 / len(shares))
    return value * (part / _weights(name, compressor, value, rank, shares))


def _columns_kept(first: Tensor, kept: Tensor, shape: Sequence[int]) -> Tensor:
    """Return ``first`` with the columns of a saved matrix that has the same number of rows."""
    rows = shape[0]
    if not rows or kept.numel() % rows:
        return first
    columns_now, before = first.view(rows, -1).clone(), kept.view(rows, -1)
    columns = min(columns_now.shape[1], before.shape[1])
    columns_now[:, :columns] = before[:, :columns]
    return columns_now.reshape(-1)


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


class UnsentResiduals:
    """Residuals of layers that keep none from now on: each goes with its layer's gradients until a step is taken.

    A step is not taken if one of its means is not finite: `torch.amp.GradScaler` skips the optimizer's step then.
    """

    def __init__(self) -> None:
        self._waiting: dict[str, Tensor] = {}
        self._sent: dict[str, Tensor] = {}
        self._num_buckets = 0
        # On a device the host reads these when the next step begins: by then they have long been computed.
        self._means = AsyncReadback()

    def __bool__(self) -> bool:
        """Whether any residual waits, or is under way in a step of which it is not known whether it is taken."""
        return bool(self._waiting or self._sent)

    def add(self, layer: str, residual: Tensor) -> None:
        """Send ``residual`` (flat, in the units of gradients) from the next step on."""
        before = self._waiting.get(layer)
        self._waiting[layer] = residual if before is None else before + residual

    def send(self, flat: Tensor, layers: BucketLayers, loss_scale: float) -> None:
        """Add residuals still to be sent to a bucket's gradients, which are multiplied by ``loss_scale``."""
        self._num_buckets += 1
        for name, values in bucket_parts(flat, layers):
            if (residual := self._waiting.get(name)) is not None:
                # In this order: another thread, which has the mean of a bucket, asks for the truth value meanwhile.
                self._sent[name] = residual
                del self._waiting[name]
                values.add_(residual.to(values.device).view_as(values), alpha=loss_scale)

    def note_mean(self, mean: Tensor) -> None:
        """Note whether the mean of a bucket of this step is finite."""
        self._means.note(not_finite(mean))

    def end_step(self) -> None:
        """End a step, between two of them: forget what it sent if it was taken; send it again if not."""
        means = self._means.read()
        if len(means) < self._num_buckets or not all(bool(torch.isfinite(mean)) for mean in means):
            self.keep()
        self._sent.clear()
        self._num_buckets = 0

    def keep(self) -> None:
        """Send again what the last step sent, since its means are not used."""
        for layer, residual in self._sent.items():
            self.add(layer, residual)
        self._sent.clear()
