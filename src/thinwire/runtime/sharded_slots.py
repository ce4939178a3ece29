"""The state of compressors under FSDP2: slots by parameter, allocated for a flat buffer of shards."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Mapping
from dataclasses import replace

import torch
from torch import Tensor

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
    teaches,
)
from thinwire.kernels import derive_key
from thinwire.runtime.flat_slots import FlatSlot, LayerSpan, flat_slot, is_packed, opened, packed_bytes
from thinwire.runtime.placement import Placement, ShardedLayer
from thinwire.runtime.slots import reshard


class ShardedSlots:
    """The slots of the layers of one flat buffer, on one rank.

    Residuals have a value for each element of all parts: what this rank has not yet sent of its own gradient. They are
    zero in the rank's own part, which it adds exactly. Learned slots differ between ranks: each rank learns them from
    what it sends, and sends them in every message.
    """

    def __init__(self, placement: Placement, rank: int, device: torch.device, *, sends_all: bool) -> None:
        """``sends_all``: whether this rank sends all parts (gradients), not only its own (weights)."""
        self.rank = rank
        self._placement, self._device, self._sends_all = placement, device, sends_all
        self._compressors: dict[str, Coded] = {}
        self._flat: dict[str, FlatSlot] = {}
        self._layers: dict[str, LayerState] = {}
        self._shaped: dict[tuple[str, Slot], Tensor] = {}
        self._learned: set[str] = set()
        """Layers whose learned slots have been learned."""
        self.learned_at = -1
        """Step in which slots were last learned, counted from the first compressed one."""
        self.learn_s = 0.0

    @property
    def num_bytes(self) -> int:
        """Bytes of memory in use."""
        shaped = sum(t.numel() * t.element_size() for t in self._shaped.values())
        return shaped + sum(slot.num_bytes for slot in self._flat.values())

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
        self._learned.clear()
        for name, slot in self._shaped:
            self._note_learned(name, slot)
        self._make()

    def _make(self) -> None:
        old = {name: slot.read() for name, slot in self._flat.items()}
        self._flat = {}
        for slot in {slot for c in self._compressors.values() for slot in c.slots if slot.shape is None}:
            pieces = _pieces(self._placement, self._compressors, slot)
            made = flat_slot(slot, list(pieces.values()), self._placement.numel, list(pieces), self._device)
            if slot.name in old:
                made.write(old[slot.name])
            self._flat[slot.name] = made
        layers: dict[str, dict[str, Tensor]] = {}
        for (name, slot), value in self._shaped.items():
            layers.setdefault(name, {})[slot.name] = value
        states = {name: LayerState(held, held) for name, held in layers.items()}
        for name in layers:
            # Shards that are layers of their own share the slots of their layer.
            placed = self._placement.by_name[name]
            states |= {placed.part_name(rank): states[name] for rank in range(placed.num_ranks)}
        self._layers = states

    def _note_learned(self, name: str, slot: Slot) -> None:
        value = self._shaped[name, slot]
        first = slot.first(self._placement.by_name[name].shape, name).view(value.shape)
        if slot.learned and not torch.equal(value.cpu(), first):
            self._learned.add(name)

    def state(self, x: Tensor, step: int, loss_scale: float, *, again: bool = False) -> State:
        """Return the slots for a message of ``x``, after learning those that are learned in ``step``.

        ``again``: whether this is another message of the same step, which finds the values that the first one wrote.
        `close` ends their use.
        """
        if again:
            self.commit()
        learning = {name: c for name, c in self._compressors.items() if self._learns(name, c, step)}
        if learning:
            started = time.perf_counter()
            self._learn(x, learning, loss_scale)
            if any(step in learns_at(compressor) for compressor in learning.values()):
                self.learned_at = step  # not where layers learn late, which differ between ranks
            self.learn_s += time.perf_counter() - started
        return State(*opened(self._flat), loss_scale, self._layers)

    def close(self, draws: int) -> None:
        """Keep what a message has written, until it is committed or discarded.

        ``draws`` is the key of the random draws with which residuals are packed.
        """
        for slot in self._flat.values():
            slot.close(derive_key(draws, self.rank))

    def _learns(self, name: str, compressor: Coded, step: int) -> bool:
        """Whether a layer learns in ``step``: in its compressor's steps, and from the first on until it has learned."""
        steps = learns_at(compressor)
        if not steps or step < min(steps):
            return False
        return name not in self._learned or (step in steps and step != self.learned_at)

    def _learn(self, x: Tensor, learning: Mapping[str, Coded], loss_scale: float) -> None:
        for name, compressor in learning.items():
            if self._sends_all:
                values = self._placement.whole(x, name)
            else:
                values = self._placement.shard(x, name, self.rank)
            values = values.reshape(-1).float() / loss_scale
            if not teaches(values):
                continue
            slots = self._layers[name].now
            learned = find_mixin(compressor, Learned)
            assert learned is not None
            for slot, value in learned.learn(values, slots).items():
                slots[slot].copy_(value.view_as(slots[slot]))
            self._learned.add(name)

    def commit(self, without: Collection[str] = ()) -> None:
        """Make the values that the last message wrote the present ones, but for those of the layers ``without``."""
        stay = [name for name in without if name in self._placement.by_name]
        for slot in self._flat.values():
            if stay:
                now, after = slot.read(), slot.read(after=True)
                for name in stay:
                    self._placement.write(after, name, self._placement.whole(now, name))
                slot.write(after, after=True)
            slot.swap()

    def reset(self) -> None:
        """Reset all slots but learned ones (levels), which do not depend on magnitudes."""
        for flat in self._flat.values():
            flat.write(torch.zeros_like(flat.read()))
        for (name, slot), value in self._shaped.items():
            if not slot.learned:
                value.copy_(slot.first(self._placement.by_name[name].shape, name).view(value.shape))

    def value(self, name: str, slot: Slot) -> Tensor:
        """Return a copy of a slot of a layer, in the shape of the slot or else of the layer."""
        if slot.shape is not None:
            return self._shaped[name, slot].clone()
        return self._placement.whole(self._flat[slot.name].read(), name)

    def has(self, name: str, slot: Slot) -> bool:
        """Whether a layer has this slot at present."""
        return name in self._compressors and slot in self._compressors[name].slots

    def load(self, name: str, slot: Slot, value: Tensor) -> None:
        """Set a slot of a layer."""
        if slot.shape is not None:
            self._shaped[name, slot].copy_(value.view_as(self._shaped[name, slot]))
            self._note_learned(name, slot)
        else:
            values = self._flat[slot.name].read()
            self._placement.write(values, name, value)
            self._flat[slot.name].write(values)


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


def own_chunk(layer: ShardedLayer, value: Tensor, rank: int, name: str) -> Tensor:
    """Return a rank's chunk, flat, of a residual that is zero in the rest of its layer.

    Raises:
        ValueError: it is not.
    """
    chunk = layer.cut(value.view(layer.shape), rank)
    if int(value.count_nonzero()) != int(chunk.count_nonzero()):
        raise ValueError(f"{name} in the state is of another shard: its mesh had the ranks in another order")
    return chunk


def reshard_mean(
    saved: Mapping[int, Tensor],
    slot: Slot,
    compressor: Compressor,
    name: str,
    layer: ShardedLayer,
    old_shards: int,
    shard: int,
    replica: tuple[int, int],
) -> Tensor:
    """Return the residual of a mean over replicas for another mesh, spread over the whole layer.

    ``saved`` has those of all ranks of a mesh of ``old_shards`` shards; ``shard`` is this rank's, and ``replica`` its
    index among the replicas and their number. The mean residual of every element is preserved, as by `reshard`.
    """
    before = replace(layer, num_ranks=old_shards)
    num_replicas = len(saved) // old_shards
    residual = torch.zeros(layer.shape, dtype=saved[0].dtype, device="cpu")
    for s in range(old_shards):
        values = {i: own_chunk(before, saved[i * old_shards + s], s, name) for i in range(num_replicas)}
        residual += before.spread(reshard(values, slot, compressor, name, 0, [1] * num_replicas, [0]), s)
    index, count = replica
    mine = reshard({0: layer.cut(residual, shard)}, slot, compressor, name, index, [0], [1] * count)
    return layer.spread(mine, shard).reshape(-1)


def residual_bytes(placement: Placement, compressors: Mapping[str, Compressor]) -> int:
    """Return the bytes of residuals on each rank if a layer has error feedback: two values for each element, fp32 or
    packed."""
    pieces = _pieces(placement, compressors, RESIDUAL)
    flat = 2 * 4 * placement.numel if pieces else 0
    if is_packed(RESIDUAL, compressors.values()):
        flat = 2 * sum(packed_bytes(count) for *_, count in pieces)
    shaped = (
        4 * math.prod(slot.shape_of(placement.by_name[name].shape))
        for name, compressor in compressors.items()
        for slot in compressor.slots
        if slot.shape is not None
    )
    return flat + sum(shaped)


def _pieces(placement: Placement, compressors: Mapping[str, Compressor], slot: Slot) -> dict[LayerSpan, Compressor]:
    """Return the shards of layers that have ``slot``, and their compressors."""
    shards = ((rank, placement.by_name[name]) for rank in range(placement.num_ranks) for name in compressors)
    return {
        (layer.part_name(rank), rank * placement.part_numel + placement.starts[layer.name], count): compressor
        for rank, layer in shards
        if slot in (compressor := compressors[layer.name]).slots and (count := layer.numel_of(rank))
    }
