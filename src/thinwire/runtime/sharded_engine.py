"""What a `ShardedWire` does with each flat buffer of weights or gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from thinwire.collectives import Algorithm, Layer, ScatterReduceAllGather, Transport, ring_bytes
from thinwire.compressors import Coded, Raw, Slot, not_finite
from thinwire.kernels import derive_key
from thinwire.plan import Plan, Site, at_site
from thinwire.runtime.channel import Channel
from thinwire.runtime.exchange import Contents, Kind
from thinwire.runtime.executor import AsyncReadback
from thinwire.runtime.poison import PoisonMonitor
from thinwire.runtime.settings import WireSettings
from thinwire.runtime.sharded_slots import residual_bytes
from thinwire.runtime.stats import ShardedStats, TrafficStats
from thinwire.runtime.units import Future, GradientReduction, LayerGroup, ReplicaMean, ShardChannel, Unit, WeightGather


class ShardedEngine:
    """Plan, units, slots and counters of a `ShardedWire`."""

    def __init__(
        self,
        plan: Plan,
        units: Sequence[Unit],
        settings: WireSettings,
        *,
        master: bool,
        record: Mapping[str, str],
        replicas: Transport | None,
    ) -> None:
        self.plan = plan
        self.units = tuple(units)
        self.seed, self.start, self.master = settings.seed, settings.start, master
        self.stats = ShardedStats()
        self.step = -1
        self.gathers = self.reductions = 0
        """Totals over all units since training began, including before it was resumed."""
        self._finite, self._nonfinite_flags = True, AsyncReadback()
        self._poison = PoisonMonitor()
        self._ended = True
        self._touched: list[LayerGroup] = []
        self._dropped: set[str] = set()
        self._contents: dict[object, Contents] = {}
        transports = list({id(unit.transport): unit.transport for unit in units}.values())
        self._channels = {id(t): _connect(t, settings.algorithm, self.seed, record) for t in transports}
        star = ScatterReduceAllGather()
        self.across = _connect(replicas, star, self.seed, record) if replicas is not None else None
        self.weights: list[LayerGroup] = []
        self.gradients: list[LayerGroup] = []
        for index, unit in enumerate(self.units):
            unit.index = index
            self.weights.append(LayerGroup("weights", unit.layers, unit.transport))
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
        self._dropped.clear()
        self._finite = self._ended = True
        for unit in self.units:
            unit.kept.clear()
        self.take(plan)
        for channel in self.all_channels:
            channel.seed = seed

    @property
    def channels(self) -> list[ShardChannel]:
        """One channel for each set of ranks that units are sharded over."""
        return list(self._channels.values())

    @property
    def all_channels(self) -> list[ShardChannel]:
        """The channels of shards, and the one that takes sums across replicas."""
        return [*self.channels, *([self.across] if self.across else [])]

    def members(self) -> Iterable[LayerGroup]:
        yield from self.weights
        yield from self.gradients

    def members_of(self, name: str) -> LayerGroup | None:
        """Return the group that the layer ``name`` of the plan belongs to, or None."""
        return next((members for members in self.members() if name in members.placement.by_name), None)

    @property
    def slot_bytes(self) -> int:
        """Memory that slots take, and copies of weights."""
        return sum(m.slots.num_bytes + (m.replica.num_bytes if m.replica else 0) for m in self.members())

    @property
    def foreseen_bytes(self) -> int:
        """The same, by formula."""
        plans = ((m.placement, {name: self.plan[name] for name in m.placement.by_name}) for m in self.members())
        slots = sum(residual_bytes(placement, compressors) for placement, compressors in plans)
        return slots + sum(4 * m.placement.numel for m in self.weights if m.changing(self.plan))

    def value(self, layer: str, slot: Slot, shape: Sequence[int]) -> Tensor:
        """A copy of a slot, flat."""
        members = self.members_of(layer)
        return (slot.first(shape, layer) if members is None else members.slots.value(layer, slot)).reshape(-1)

    def sent_bytes(self, site: Site) -> int:
        """Bytes that this rank sends when all weights are gathered once, or all gradients reduced once, as fp32."""
        kind: Kind = "all_gather" if site == "weights" else "reduce_scatter"
        total = 0
        for unit, members in zip(self.units, self.weights if site == "weights" else self.gradients, strict=True):
            if members.names:
                contents = self._contents_of(unit, members, self.plan, compressed=True)
                total += self._channels[id(unit.transport)].sent_bytes(kind, contents, torch.float32)
        return total

    def gather(self, unit: Unit, flat: Tensor, *, keep: Callable[[Tensor], object] | None = None) -> Future[Tensor]:
        """Start filling ``flat``, which holds this rank's part of the weights, with all ranks' as they arrive.

        This rank's own part, too, becomes what it sent of it. ``keep`` is called with that part, where only what was
        sent is kept of the weights.
        """
        members, rank = self.weights[unit.index], unit.transport.rank
        draw = self.passes
        replica = members.replica if draw >= self.start else None
        whole = replica is not None and not replica.filled
        if replica is not None:
            replica.filled = True
        compressed = draw >= self.start and not whole
        contents = self._contents_of(unit, members, self._plans[unit.index], compressed=compressed)
        since = draw - self.start
        quantised = compressed and not self.master
        self.gathers += 1
        self.stats.gathers += 1
        self.stats.dense_bytes += (unit.transport.world_size - 1) * members.placement.part_numel * flat.itemsize
        gather = WeightGather(
            kind="all_gather",
            dtype=flat.dtype,
            contents=contents,
            scale=1.0,
            draw=draw,
            kept=unit.kept if quantised else None,
            flat=flat,
            members=members,
            rank=rank,
            since=since if compressed else None,
            keep=keep if quantised else None,
            replica=replica,
            whole=whole,
        )
        return self._channels[id(unit.transport)].submit(gather)

    def reduce(self, unit: Unit, flat: Tensor, out: Tensor, *, scale: float, loss_scale: float = 1.0) -> Future[Tensor]:
        """Start setting ``out`` to this rank's part of ``scale`` times the sum of all ranks' ``flat``.

        ``loss_scale`` is how many times larger than the gradients its values are.
        """
        again = unit.last_step == self.step
        unit.last_step = self.step
        members = self.gradients[unit.index]
        draw = self.passes
        unit.compressed = compressed = draw >= self.start
        if self._plans[unit.index] is not self.plan:
            # From here on: what was gathered for this backward pass was gathered with the plan before.
            self._plans[unit.index] = self.plan
            unit.kept.clear()
            members.follow(self.plan)
            self.weights[unit.index].follow(self.plan)
        contents = self._contents_of(unit, members, self.plan, compressed=compressed)
        keeps = compressed and members.slots.keeps_residuals
        # The second use of a module in a step takes up the residual of the first.
        again &= any(members is other for other in self._touched)
        if keeps and not again:
            self._touched.append(members)
        since = draw - self.start
        reduction = GradientReduction(
            kind="reduce_scatter",
            dtype=flat.dtype,
            contents=contents,
            scale=scale,
            draw=derive_key(unit.reductions, unit.first_rank),
            out=out,
            flat=flat,
            members=members,
            loss_scale=loss_scale,
            again=again,
            since=since if compressed else None,
            note=self._note if keeps else None,
        )
        if keeps:
            self._poison.note_gradients(flat)
        unit.reductions += 1
        self.reductions += 1
        self.stats.reductions += 1
        self.stats.dense_bytes += (unit.transport.world_size - 1) * members.placement.part_numel * flat.itemsize
        return self._channels[id(unit.transport)].submit(reduction)

    def reduce_across(self, unit: Unit, part: Tensor, loss_scale: float) -> Future[Tensor]:
        """Start replacing this rank's part of the gradients by its mean over all replicas."""
        assert self.across is not None
        members = self.gradients[unit.index]
        # As the reduction that it completes; FSDP2 leaves out those among shards of one rank.
        compressed = unit.compressed if unit.transport.world_size > 1 else self.step >= self.start
        compressors = [self.plan[at_site("across", name)] if compressed else Raw() for name in members.names]
        key = ("across", unit.index, members.names, tuple(compressors))
        if key not in self._contents:
            layers = []
            for name, compressor in zip(members.names, compressors, strict=True):
                at = at_site("gradients", name)
                layer, start = members.placement.by_name[at], members.placement.starts[at]
                assert isinstance(compressor, Coded)
                shape = (layer.padded_numel,)
                layers.append(Layer(at_site("across", name), start, shape, compressor))
            self._contents[key] = Contents(key, tuple(layers))
        flat = part.view(-1)
        mean = ReplicaMean(
            kind="all_reduce",
            dtype=flat.dtype,
            contents=self._contents[key],
            draw=derive_key(unit.across, unit.transport.rank),
            flat=flat,
            loss_scale=loss_scale,
        )
        unit.across += 1
        self.stats.dense_bytes += ring_bytes(flat.nbytes, self.across.world.size)
        return self.across.submit(mean)

    @property
    def passes(self) -> int:
        """Number of completed backward passes: gathers between two of them see the same weights."""
        return self.step + self._ended

    @property
    def begins_step(self) -> bool:
        """Whether the next reduction is the first one of a backward pass. All ranks find the same."""
        return self._ended

    def begin_step(self) -> None:
        """Between the last reduction of a backward pass and the first one of the next."""
        self.settle()
        self.step += 1
        self.stats.steps += 1
        self._ended = False
        for unit in self.units:
            unit.before = unit.reductions, unit.across

    def end_pass(self) -> None:
        """No backward pass runs: what is reduced from now on belongs to the next step."""
        self._ended = True

    def drop(self, layers: Iterable[str]) -> None:
        """Keep what residuals have sent in the last pass of layers whose gradients nobody applies."""
        layers = set(layers)
        self._dropped.update(at_site("gradients", layer) for layer in layers)
        for unit, members in zip(self.units, self.gradients, strict=True):
            if layers.issuperset(members.names):
                # A process that has not used it yet, as after a resume, reduces nothing, and draws nothing for it.
                unit.reductions, unit.across = unit.before

    def follow_trained(self, unit: Unit, trained: Sequence[str]) -> LayerGroup:
        """The members of a unit's next reduction, in which these layers are, in this order."""
        if tuple(trained) != self.gradients[unit.index].names:
            self.gradients[unit.index] = self._gradients_of(unit, trained, self.gradients[unit.index])
        return self.gradients[unit.index]

    def _gradients_of(self, unit: Unit, trained: Sequence[str], before: LayerGroup | None = None) -> LayerGroup:
        """The members of reductions of these layers; they take over the residuals of ``before``."""
        layers = [layer for layer in unit.layers if layer.name in trained]
        members = LayerGroup("gradients", layers, unit.transport)
        members.follow(self.plan)
        if before is None:
            return members
        for name, compressor in members.compressors(self.plan).items():
            for slot in compressor.slots:
                if before.slots.has(name, slot):
                    members.slots.load(name, slot, before.slots.value(name, slot))
        return members

    def _contents_of(self, unit: Unit, members: LayerGroup, plan: Plan, *, compressed: bool) -> Contents:
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
            self._nonfinite_flags.note(not_finite(out))

    def settle(self) -> None:
        """Let residuals take what the last pass left: nothing, if some rank met NaN or Inf in it."""
        if not self._touched:
            self._dropped.clear()
            return
        for channel in self.all_channels:
            channel.alone(lambda: None)
        for value in self._nonfinite_flags.read():
            self._finite &= bool(torch.isfinite(value))
        nonfinite = self._is_on_any_rank(not self._finite)
        if not nonfinite:
            for members in self._touched:
                members.slots.commit(without=self._dropped)
        else:
            self.stats.nonfinite_steps += 1
        self._touched.clear()
        self._dropped.clear()
        self._finite = True
        self._poison.end_step(finite=not nonfinite)
        if self._poison.suspected and not self._is_on_any_rank(not self._poison.take_finite_gradients()):
            for members in self.members():
                members.slots.reset()
            self.stats.state_resets += 1
            self._poison.warn(self.step + 1)

    def on_any_rank(self, conditions: Tensor) -> Tensor:
        """Whether each is so on any rank: among the shards first and then among replicas. A collective call."""
        for channel in self.all_channels:
            conditions = channel.alone(partial(channel.transport.all_gather, conditions)).any(0)
        return conditions

    def _is_on_any_rank(self, condition: bool) -> bool:
        return bool(self.on_any_rank(torch.tensor([condition], dtype=torch.bool, device="cpu")))


def _connect(transport: Transport, algorithm: Algorithm, seed: int, record: Mapping[str, str]) -> ShardChannel:
    return Channel.connect(transport, TrafficStats(), algorithm=algorithm, seed=seed, record=record)
