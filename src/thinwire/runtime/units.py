"""Parameters that FSDP2 moves together, and the collectives that move them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from thinwire.collectives import DeviceTransport, Transport, TransportError
from thinwire.compressors import Coded, Delta, State, coder_of, rounded_for
from thinwire.plan import Plan, Site, at_site
from thinwire.runtime.channel import Channel
from thinwire.runtime.exchange import Exchange
from thinwire.runtime.placement import Placement, ShardedLayer
from thinwire.runtime.route import Route
from thinwire.runtime.sharded_slots import ShardedSlots
from thinwire.runtime.stats import Stats


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
        self._runs = [list(self._runs_of(r)) for r in range(placement.num_ranks)]
        self._mine = self._runs[rank]
        self.filled = False
        """Whether the first gather has begun."""

    @property
    def num_bytes(self) -> int:
        """Bytes of memory in use."""
        return self._values.nbytes

    def _runs_of(self, rank: int) -> Iterator[slice]:
        """Yield the elements of a rank's part that belong to these layers."""
        for name in self.names:
            start = rank * self._placement.part_numel + self._placement.starts[name]
            yield slice(start, start + self._placement.by_name[name].numel_of(rank))

    def subtract(self, flat: Tensor) -> None:
        """Replace this rank's part of ``flat``, the weights, by how they differ from what has arrived of them."""
        for run in self._mine:
            flat[run].sub_(self._values[run])

    def add(self, flat: Tensor, *, whole: bool) -> None:
        """Add the changes in ``flat``, or take the weights in it if they are ``whole``, and leave the weights there."""
        for runs in self._runs:
            for run in runs:
                held = self._values[run]
                if whole:
                    held.copy_(flat[run])
                else:
                    held.add_(flat[run])
                    flat[run].copy_(held)
                held.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)

    def value(self, name: str) -> Tensor:
        """Return a copy of a layer, in its shape."""
        return self._placement.whole(self._values, name)

    def load(self, name: str, value: Tensor) -> None:
        """Set a layer."""
        self._placement.write(self._values, name, value.to(self._values.device))


class LayerGroup:
    """The layers of a unit that take part in one kind of collective, and their slots."""

    def __init__(self, site: Site, layers: Sequence[ShardedLayer], transport: Transport) -> None:
        self.site: Site = site
        self.names = tuple(layer.name for layer in layers)
        self.sharded = {at_site(site, layer.name): layer for layer in layers}
        """Layers as ranks share them out, by their names in the plan."""
        num_ranks = layers[0].num_ranks if layers else 1
        self.placement = Placement([replace(layer, name=at_site(site, layer.name)) for layer in layers], num_ranks)
        if site == "across":  # replicas have the same shard
            self.placement = self.placement.part_of(transport.rank)
        self._rank = transport.rank
        self._device = transport.device if isinstance(transport, DeviceTransport) else torch.device("cpu")
        self.slots = ShardedSlots(self.placement, transport.rank, self._device, sends_all=site != "weights")
        self.replica: Replica | None = None
        """Replica of the layers whose changes are sent; None if there are none."""

    def follow(self, plan: Plan) -> None:
        self.slots.follow(self.compressors(plan))
        changing = self.changing(plan)
        if changing != (self.replica.names if self.replica is not None else ()):
            self.replica = Replica(self.placement, changing, self._rank, self._device) if changing else None

    def changing(self, plan: Plan) -> tuple[str, ...]:
        """Return the layers whose changes are sent."""
        return tuple(name for name in self.placement.by_name if isinstance(plan[name], Delta))

    def compressors(self, plan: Plan) -> dict[str, Coded]:
        """Return the compressor of each layer by its name in the plan, which `sharded_plan` has checked."""
        compressors = {}
        for name in self.placement.by_name:
            compressor = coder_of(plan[name])
            assert isinstance(compressor, Coded)
            # A policy may have chosen fewer bits than the rules.
            compressors[name] = rounded_for("weights", compressor) if self.site == "weights" else compressor
        return compressors


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


Future = torch.futures.Future
ShardChannel = Channel[Stats]


@dataclass(kw_only=True)
class WeightGather(Exchange):
    """An all-gather of a unit's weights."""

    flat: Tensor
    members: LayerGroup
    rank: int
    since: int | None
    """Steps since the first compressed one; None before it."""
    keep: Callable[[Tensor], object] | None
    """Function that gets this rank's part as it was sent, which takes the place of its weights (``master=False``)."""
    replica: Replica | None
    """Replica to which the message is a change."""
    whole: bool
    """Whether weights are sent in place of their change."""

    def start(self, route: Route) -> tuple[Tensor, State | None]:
        if self.replica is not None and not self.whole:
            self.replica.subtract(self.flat)
        return self.flat, None if self.since is None else self.members.slots.state(self.flat, self.since, 1.0)

    def finish(self, x: Tensor, route: Route) -> None:
        self.members.slots.close(self.draw or 0)
        if self.replica is not None:
            self.replica.add(x, whole=self.whole)
        if self.keep is not None:
            self.keep(self.members.placement.part(x, self.rank))


@dataclass(kw_only=True)
class GradientReduction(Exchange):
    """A reduce-scatter of a unit's gradients."""

    flat: Tensor
    members: LayerGroup
    loss_scale: float
    again: bool
    """Whether the unit was reduced in this step before."""
    since: int | None
    """Steps since the first compressed one; None before it."""
    note: Callable[[Tensor], object] | None
    """Function that gets the result, to note whether it is finite."""

    def start(self, route: Route) -> tuple[Tensor, State | None]:
        if self.since is None:
            return self.flat, None
        return self.flat, self.members.slots.state(self.flat, self.since, self.loss_scale, again=self.again)

    def finish(self, x: Tensor, route: Route) -> None:
        self.members.slots.close(self.draw or 0)
        if self.note is not None and self.out is not None:
            self.note(self.out)


@dataclass(kw_only=True)
class ReplicaMean(Exchange):
    """An all-reduce, over the replicas of a shard, of its gradients."""

    flat: Tensor
    members: LayerGroup
    loss_scale: float
    again: bool
    since: int | None
    note: Callable[[Tensor], object] | None
    """Function that gets the result, to note whether it is finite."""
    after: Future[Tensor] | None
    """Reduction among shards that fills ``flat``, where that is not over yet."""

    def begin(self) -> None:
        try:
            if self.after is not None:
                self.after.wait()
        except TransportError:
            raise
        except Exception as error:  # noqa: BLE001 - the replicas are told
            self.failed = error

    def start(self, route: Route) -> tuple[Tensor, State | None]:
        if self.since is None:
            return self.flat, None
        return self.flat, self.members.slots.state(self.flat, self.since, self.loss_scale, again=self.again)

    def finish(self, x: Tensor, route: Route) -> None:
        self.members.slots.close(self.draw or 0)
        if self.note is not None:
            self.note(x)
