"""What a sharded model's Wire does with each flat buffer of weights and of gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from thinwire.collectives import DeviceTransport, Layer, ScatterReduceAllGather, Topology, Transport, ring_bytes
from thinwire.compressors import Coded, Raw, Slot, not_finite
from thinwire.kernels import derive_key
from thinwire.plan import Plan, Site, at_site
from thinwire.wire.device_flat import DeviceFlatEngine
from thinwire.wire.flat import Contents, FlatEngine, Kind, Operation
from thinwire.wire.sharded_slots import residual_bytes
from thinwire.wire.sharded_stats import ShardedStats
from thinwire.wire.stream import Later
from thinwire.wire.units import Members, Unit

Future = torch.futures.Future
AnyEngine = FlatEngine | DeviceFlatEngine


class ShardedEngine:
    """Plan, units, slots and counters of a `ShardedWire`."""

    def __init__(
        self,
        plan: Plan,
        units: Sequence[Unit],
        *,
        topology: Topology,
        seed: int,
        start: int,
        master: bool,
        record: Mapping[str, str],
        replicas: Transport | None,
    ) -> None:
        self.plan = plan
        self.units = tuple(units)
        self.seed, self.start, self.master = seed, start, master
        self.stats = ShardedStats()
        self.step = -1
        self.gathers = self.reductions = 0
        """Of all units since training began, also before it was resumed."""
        self._finite, self._told = True, Later()
        self._marked = self._ended = self._asked = False
        self._touched: list[Members] = []
        self._contents: dict[object, Contents] = {}
        transports = list({id(unit.transport): unit.transport for unit in units}.values())
        self._engines = {id(t): _engine(t, topology, seed, record) for t in transports}
        star = ScatterReduceAllGather()
        self.across = _engine(replicas, star, seed, record) if replicas is not None else None
        self.weights: list[Members] = []
        self.gradients: list[Members] = []
        for index, unit in enumerate(self.units):
            unit.index = index
            self.weights.append(Members("weights", unit.layers, unit.transport))
            self.gradients.append(self._gradients_of(unit, unit.trained))
        self._plans: list[Plan] = []
        self.take(plan)

    def take(self, plan: Plan) -> None:
        """Between steps: every unit has this plan from now on."""
        self.plan = plan
        self._plans = [plan] * len(self.units)
        for members in self.members():
            members.follow(plan)

    def restart(self, plan: Plan, *, step: int, seed: int) -> None:
        """Between steps: go on from a checkpoint."""
        self.step, self.seed = step, seed
        self._touched.clear()
        self._finite = True
        self._ended = self._marked
        for unit in self.units:
            unit.kept.clear()
        self.take(plan)
        for engine in self.all_engines:
            engine.seed = seed

    @property
    def engines(self) -> list[AnyEngine]:
        """By whom shards are moved: one for each set of ranks that units are sharded over."""
        return list(self._engines.values())

    @property
    def all_engines(self) -> list[AnyEngine]:
        """These, and that which takes sums across replicas."""
        return [*self.engines, *([self.across] if self.across else [])]

    def members(self) -> Iterable[Members]:
        yield from self.weights
        yield from self.gradients

    def members_of(self, name: str) -> Members | None:
        """Those to which a layer of the plan belongs."""
        return next((members for members in self.members() if name in members.placement.by_name), None)

    @property
    def slot_bytes(self) -> int:
        """Memory that slots take."""
        return sum(members.slots.num_bytes for members in self.members())

    @property
    def foreseen_bytes(self) -> int:
        """The same, by formula."""
        plans = ((m.placement, {name: self.plan[name] for name in m.placement.by_name}) for m in self.members())
        return sum(residual_bytes(placement, compressors) for placement, compressors in plans)

    def value(self, layer: str, slot: Slot, shape: Sequence[int]) -> Tensor:
        """A copy of a slot, flat."""
        members = self.members_of(layer)
        return (slot.first(shape, layer) if members is None else members.slots.value(layer, slot)).reshape(-1)

    def sent_bytes(self, site: Site, dtype: torch.dtype) -> int:
        """Bytes that this rank sends when all weights are gathered once, or all gradients reduced once."""
        kind: Kind = "all_gather" if site == "weights" else "reduce_scatter"
        total = 0
        for unit, members in zip(self.units, self.weights if site == "weights" else self.gradients, strict=True):
            if members.names:
                contents = self._contents_of(unit, members, self.plan, compressed=True)
                total += self._engines[id(unit.transport)].sent_bytes(kind, contents, dtype)
        return total

    def gather(self, unit: Unit, flat: Tensor, *, keep: Callable[[Tensor], object] | None = None) -> Future[Tensor]:
        """Start filling ``flat``, which holds this rank's part of the weights, with all ranks' as they arrive.

        This rank's own part, too, becomes what it sent of it. ``keep`` is called with that part, where only what was
        sent is kept of the weights.
        """
        members, rank = self.weights[unit.index], unit.transport.rank
        draw = self._passes(unit)
        compressed = draw >= self.start
        contents = self._contents_of(unit, members, self._plans[unit.index], compressed=compressed)
        since = draw - self.start
        quantised = compressed and not self.master
        self.gathers += 1
        self.stats.gathers += 1
        self.stats.dense_bytes += (unit.transport.world_size - 1) * members.placement.part_numel * flat.itemsize
        operation = Operation(
            "all_gather",
            contents,
            flat.dtype,
            lambda: flat,
            draw=draw,
            state=(lambda x: members.slots.state(x, since, 1.0)) if compressed else None,
            kept=unit.kept if quantised else None,
            done=(lambda x: keep(members.placement.part(x, rank))) if quantised and keep is not None else None,
        )
        return self._engines[id(unit.transport)].submit(operation)

    def reduce(
        self,
        unit: Unit,
        flat: Tensor,
        out: Tensor,
        *,
        scale: float,
        loss_scale: float = 1.0,
    ) -> Future[Tensor]:
        """Start setting ``out`` to this rank's part of ``scale`` times the sum of all ranks' ``flat``.

        ``loss_scale`` is how many times larger than the gradients its values are.
        """
        again = unit.last_step == self.step
        unit.last_step = self.step
        members = self.gradients[unit.index]
        draw = self._passes(unit)
        compressed = draw >= self.start
        if self._plans[unit.index] is not self.plan:
            # From here on: what was gathered for this backward pass was gathered with the plan before.
            self._plans[unit.index] = self.plan
            unit.kept.clear()
            members.follow(self.plan)
            self.weights[unit.index].follow(self.plan)
        contents = self._contents_of(unit, members, self.plan, compressed=compressed)
        owes = compressed and members.slots.owes
        # A module that is used twice owes what its first use left, already in the second.
        again &= any(members is other for other in self._touched)
        if owes and not again:
            self._touched.append(members)
        since = draw - self.start
        operation = Operation(
            "reduce_scatter",
            contents,
            flat.dtype,
            lambda: flat,
            scale,
            out,
            done=(lambda _: self._note(out)) if owes else None,
            draw=derive_key(unit.reductions, unit.first_rank),
            state=(lambda x: members.slots.state(x, since, loss_scale, again=again)) if compressed else None,
        )
        unit.reductions += 1
        self.reductions += 1
        self.stats.reductions += 1
        self.stats.dense_bytes += (unit.transport.world_size - 1) * members.placement.part_numel * flat.itemsize
        return self._engines[id(unit.transport)].submit(operation)

    def reduce_across(self, unit: Unit, part: Tensor) -> Future[Tensor]:
        """Start replacing this rank's part of the gradients by its mean over all replicas."""
        assert self.across is not None
        members = self.gradients[unit.index]
        compressed = unit.across >= self.start
        key = ("across", unit.index, members.names, compressed)
        if key not in self._contents:
            layers = []
            for name in members.names:
                at = at_site("gradients", name)
                layer, start = members.placement.by_name[at], members.placement.starts[at]
                compressor = self.plan[at_site("across", name)] if compressed else Raw()
                assert isinstance(compressor, Coded)
                shape = (layer.padded_numel,)
                layers.append(Layer(at_site("across", name), start, shape, compressor))
            self._contents[key] = Contents(key, tuple(layers))
        flat = part.view(-1)
        scale = 1 / self.across.world.size
        draw = derive_key(unit.across, unit.transport.rank)
        unit.across += 1
        self.stats.dense_bytes += ring_bytes(flat.nbytes, self.across.world.size)
        operation = Operation("all_reduce", self._contents[key], flat.dtype, lambda: flat, scale, draw=draw)
        return self.across.submit(operation)

    def begins_step(self, unit: Unit) -> bool:
        """Whether a unit's next reduction is the first one of a backward pass. All ranks find the same."""
        return self.step < 0 or (self._ended if self._marked else unit.last_step == self.step)

    def begin_step(self) -> None:
        """Between the last reduction of a backward pass and the first one of the next."""
        self.settle()
        self.step += 1
        self.stats.steps += 1
        self._ended = False

    def mark(self, queue: Callable[[Callable[[], object]], bool]) -> None:
        """Ask to be told when the backward pass that runs has ended. Where nobody tells, a unit that is reduced once
        more begins the next one."""
        if not self._asked:
            self._asked = self._marked = queue(self._end_pass)

    def _end_pass(self) -> None:
        self._ended, self._asked = True, False

    def _passes(self, unit: Unit) -> int:
        """Backward passes that are over: weights are the same from one to the next, forward and backward."""
        if self._marked:
            return self.step + self._ended
        return unit.reductions

    def follow_trained(self, unit: Unit, trained: Sequence[str]) -> Members:
        """The members of a unit's next reduction, in which these layers are, in this order."""
        if tuple(trained) != self.gradients[unit.index].names:
            self.gradients[unit.index] = self._gradients_of(unit, trained, self.gradients[unit.index])
        return self.gradients[unit.index]

    def _gradients_of(self, unit: Unit, trained: Sequence[str], before: Members | None = None) -> Members:
        """The members of reductions of these layers; what ``before`` owed of them is theirs."""
        layers = [layer for layer in unit.layers if layer.name in set(trained)]
        members = Members("gradients", layers, unit.transport)
        members.follow(self.plan)
        for name, compressor in members.compressors(self.plan).items() if before is not None else ():
            for slot in compressor.slots:
                if before is not None and before.slots.has(name, slot):
                    members.slots.load(name, slot, before.slots.value(name, slot))
        return members

    def _contents_of(self, unit: Unit, members: Members, plan: Plan, *, compressed: bool) -> Contents:
        compressors: dict[str, Coded] = members.compressors(plan) if compressed else {}
        key = (members.site, unit.index, members.names, tuple(compressors.values()))
        if key not in self._contents:
            raw = dict.fromkeys(members.placement.by_name, Raw())
            shards = members.placement.shards(compressors or raw)
            self._contents[key] = Contents(key, (), shards, members.placement.part_numel)
        return self._contents[key]

    def _note(self, out: Tensor) -> None:
        if out.device.type == "cpu":
            self._finite &= math.isfinite(float(not_finite(out)))
        else:
            self._told.note(not_finite(out))

    def settle(self) -> None:
        """Let residuals take what the last pass left: nothing, if some rank met NaN or Inf in it."""
        if not self._touched:
            return
        for engine in self.all_engines:
            engine.alone(lambda: None)
        for value in self._told.read():
            self._finite &= bool(torch.isfinite(value))
        flags = [torch.tensor([not self._finite])]
        # Among the shards first and then among replicas: what one of them met, all know.
        for engine in self.all_engines:
            engine.alone(lambda engine=engine: flags.append(engine.transport.all_gather(flags[-1]).any().reshape(1)))
        if not bool(flags[-1]):
            for members in self._touched:
                members.slots.commit()
        else:
            self.stats.nonfinite_steps += 1
        self._touched.clear()
        self._finite = True


def _engine(transport: Transport, topology: Topology, seed: int, record: Mapping[str, str]) -> AnyEngine:
    if isinstance(transport, DeviceTransport):
        return DeviceFlatEngine(transport, topology=topology, seed=seed, record=record)
    return FlatEngine(transport, topology=topology, seed=seed, record=record)
