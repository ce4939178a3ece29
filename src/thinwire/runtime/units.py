"""Parameters that FSDP2 moves together, and what ranks keep of them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from thinwire.collectives import Layer, Transport
from thinwire.compressors import (
    RESIDUAL,
    Coded,
    Delta,
    Learned,
    Raw,
    State,
    find_mixin,
    is_informative,
    learns_at,
    message_coder,
    rounded_for,
)
from thinwire.plan import Plan, Site, at_site
from thinwire.runtime.channel import Contents
from thinwire.runtime.placement import Placement, ShardedLayer
from thinwire.runtime.slots import Slots


class Replica:
    """The weights ŵ that have arrived, the same on all ranks: ``ŵ ← ŵ + Q(w − ŵ)`` at every gather (SDP4Bit, Jia et
    al. 2024).

    What Q loses is part of the next change, so errors do not add up. The first gather sends w whole. Values that are
    not finite become zero, so that weights that are mended later arrive again within a few gathers.
    """

    def __init__(self, placement: Placement, names: Collection[str], rank: int, device: torch.device) -> None:
        """``names`` are the layers whose changes are sent; others keep zeros here, and are sent as they are."""
        self._placement, self.names = placement, tuple(names)
        self._values = torch.zeros(placement.numel, dtype=torch.float32, device=device)
        self._runs = [slice(at, at + numel) for name in names for _, at, numel in placement.spans(name)]
        """Elements of these layers."""
        begin, end = rank * placement.part_numel, (rank + 1) * placement.part_numel
        self._mine = [run for run in self._runs if begin <= run.start < end]
        self.filled = False
        """Whether the first gather has begun."""

    @property
    def num_bytes(self) -> int:
        """Bytes of memory in use."""
        return self._values.nbytes

    def subtract(self, flat: Tensor) -> None:
        """Replace this rank's part of ``flat``, the weights, by how they differ from what has arrived of them."""
        for run in self._mine:
            flat[run].sub_(self._values[run])

    def add(self, flat: Tensor, *, whole: bool) -> None:
        """Add the changes in ``flat``, or take the weights in it if they are ``whole``, and leave the weights there."""
        for run in self._runs:
            held = self._values[run]
            if whole:
                held.copy_(flat[run])
            else:
                held.add_(flat[run])
                flat[run].copy_(held)
            held.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)

    def value(self, name: str) -> Tensor:
        """Return a copy of a layer, in its shape."""
        return self._placement.whole(self._values, name).clone()

    def load(self, name: str, value: Tensor) -> None:
        """Set a layer."""
        self._placement.write(self._values, name, value.to(self._values.device))


class LayerGroup:
    """The layers of a unit that take part in one kind of collective, with the compressors of its present plan."""

    def __init__(self, site: Site, unit: Unit, names: Collection[str], plan: Plan) -> None:
        self.site: Site = site
        layers = [layer for layer in unit.layers if layer.name in names]
        self.names = tuple(layer.name for layer in layers)
        self.rank, self._index = unit.transport.rank, unit.index
        placed = [replace(layer, name=at_site(site, layer.name)) for layer in layers]
        # Replicas have the same shard.
        only = self.rank if site == "across" else None
        self.placement = Placement(placed, layers[0].num_ranks if layers else 1, only=only)
        self._device = unit.transport.device
        self.replica: Replica | None = None
        """Replica of the layers whose changes are sent; None if there are none."""
        self.learned_at = -1
        """Step in which slots were last learned, counted from the first compressed one."""
        self._learned: set[str] = set()
        """Layers whose learned slots have been learned."""
        self.raw = self.make_contents({})
        self.follow(plan)

    def follow(self, plan: Plan) -> None:
        """Use the compressors of another plan, or other slots, from now on."""
        self.plan, self.compressors = plan, self.get_compressors(plan)
        self.coded = self.make_contents(self.compressors)
        self.having = {name: compressor for name, compressor in self.compressors.items() if compressor.slots}
        """Layers whose compressors have slots."""
        self.keeps_residuals = any(RESIDUAL in compressor.slots for compressor in self.compressors.values())
        self._learns_at = {name: steps for name, c in self.compressors.items() if (steps := learns_at(c))}
        self._learned.clear()
        changing = self.changing(plan)
        if changing != (self.replica.names if self.replica is not None else ()):
            self.replica = Replica(self.placement, changing, self.rank, self._device) if changing else None

    def changing(self, plan: Plan) -> tuple[str, ...]:
        """Return the layers whose changes are sent."""
        return tuple(name for name in self.placement.by_name if isinstance(plan[name], Delta))

    def get_compressors(self, plan: Plan) -> dict[str, Coded]:
        """Return the compressor of each layer by its name in the plan, which `sharded_plan` has checked."""
        compressors = {}
        for name in self.placement.by_name:
            compressor = message_coder(plan[name])
            assert isinstance(compressor, Coded)
            # A policy may have chosen fewer bits than the rules.
            compressors[name] = rounded_for("weights", compressor) if self.site == "weights" else compressor
        return compressors

    def make_contents(self, compressors: Mapping[str, Coded]) -> Contents:
        """Return what a buffer holds with these compressors; without any, values as they are."""
        key = (self.site, self._index, self.names, tuple(compressors.values()))
        placement, chosen = self.placement, compressors or dict.fromkeys(self.placement.by_name, Raw())
        if self.site != "across":
            return Contents(key, (), placement.shards(chosen), placement.part_numel)
        layers = (
            Layer(name, placement.starts[name], (numel,), chosen[name])
            for name, layer in placement.by_name.items()
            if (numel := layer.chunk_numel(self.rank))
        )
        return Contents(key, tuple(layers))

    def learning(self, step: int, slots: Slots) -> list[str]:
        """Return the layers that learn in ``step``: in their compressor's steps, and from the first on until they have
        learned. Learned slots differ between ranks: each rank learns them from what it sends, and sends them."""
        found = []
        for name, steps in self._learns_at.items():
            if step < min(steps):
                continue
            shape = self.placement.by_name[name].shape
            if name not in self._learned and slots.moved(name, self.compressors[name], shape, learned=True):
                self._learned.add(name)
            if name not in self._learned or (step in steps and step != self.learned_at):
                found.append(name)
        if any(step in self._learns_at[name] for name in found):
            self.learned_at = step  # not where layers learn late, which differ between ranks
        return found

    def learn(self, x: Tensor, learning: Sequence[str], state: State) -> None:
        """Learn slots of layers from what this rank sends: all parts of gradients, its own part of weights."""
        for name in learning:
            own = self.site == "weights"
            values = self.placement.shard(x, name, self.rank) if own else self.placement.whole(x, name)
            values = values.reshape(-1).float() / state.loss_scale
            if not is_informative(values):
                continue
            slots, learned = state.layers[name].now, find_mixin(self.compressors[name], Learned)
            assert learned is not None
            for slot, value in learned.learn(values, slots).items():
                slots[slot].copy_(value.view_as(slots[slot]))
            self._learned.add(name)


@dataclass
class Unit:
    """Parameters that are gathered together, and their gradients reduced together: those of one FSDP module."""

    name: str
    layers: tuple[ShardedLayer, ...]
    transport: Transport
    """Transport among the ranks that the unit is sharded over."""
    trained: tuple[str, ...]
    """Names of the layers that get gradients."""
    index: int = 0
    first_rank: int = 0
    """First of the ranks that the unit is sharded over: replicas of it draw by themselves."""
    reductions: int = 0
    """Number of reductions so far, on which the draws of gradients depend."""
    across: int = 0
    """Number of sums over replicas so far."""
    before: tuple[int, int] = (0, 0)
    """Values of ``reductions`` and ``across`` before the pass that runs."""
    last_step: int = -1
    """Step of the unit's last reduction."""
    compressed: bool = False
    """Whether the last reduction was compressed: ``start`` is over."""
    kept: dict[int, Tensor] = field(default_factory=dict)
    """Last messages of this rank's weights, where only what was sent is kept of them."""
