"""The engine for FSDP2: exchanges of weights and gradients of a sharded model, and of means over replicas."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from thinwire.collectives import Algorithm, Layer, ScatterReduceAllGather, Transport
from thinwire.compressors import Coded, Compressor, Delta, Raw, Slot, coder_of, not_finite
from thinwire.kernels import FORMAT_VERSION, derive_key
from thinwire.plan import Plan, Site, Speeds, at_site, declined
from thinwire.plan.sites import SITES
from thinwire.policies import Evidence, Policy
from thinwire.policies.budget import balanced
from thinwire.runtime import checkpoint
from thinwire.runtime.adapt import Adapter
from thinwire.runtime.channel import Channel
from thinwire.runtime.consistency import library_version, machine_record
from thinwire.runtime.engine import Engine
from thinwire.runtime.exchange import Contents, Kind
from thinwire.runtime.executor import AsyncReadback
from thinwire.runtime.poison import PoisonMonitor
from thinwire.runtime.probe import measure_speeds
from thinwire.runtime.settings import WireSettings
from thinwire.runtime.sharded_slots import own_chunk, reshard_mean, reshard_residual, residual_bytes
from thinwire.runtime.stats import Stats
from thinwire.runtime.table import layer_table
from thinwire.runtime.units import Future, GradientReduction, LayerGroup, ReplicaMean, ShardChannel, Unit, WeightGather

_VERSIONS, _EXCHANGES, _CHECKSUMS = "versions", "exchanges", "counts/checksums"
_FILLED, _ARRIVED, _ARRIVED_CHECKSUMS = "arrived/units", "arrived", "arrived/checksums"


class ShardedEngine(Engine):
    """Gathers and reduces the weights and gradients of a sharded model."""

    def __init__(
        self,
        plan: Plan,
        units: Sequence[Unit],
        settings: WireSettings,
        *,
        rank: int,
        world_size: int,
        make_world: Callable[[], Transport],
        master: bool = True,
        replicas: Transport | None = None,
    ) -> None:
        """``make_world`` connects all ranks: it is called on every rank when states are first gathered or loaded."""
        self.units = tuple(units)
        self.master = master
        """Whether ranks keep their shards as the optimizer left them, in addition to what they sent of them."""
        self._make_world = make_world
        self._world: Transport | None = None
        self._waiting: tuple[Callable[[], bool], Plan] | None = None
        self.gathers = self.reductions = 0
        """Totals over all units since training began, including before it was resumed."""
        self._finite, self._nonfinite_flags = True, AsyncReadback()
        self._poison = PoisonMonitor()
        self._ended = True
        self._touched: list[LayerGroup] = []
        self._dropped: set[str] = set()
        self._contents: dict[object, Contents] = {}
        record = _record(plan, units, settings, master=master)
        transports = list({id(unit.transport): unit.transport for unit in units}.values())
        self._channels = {id(t): _connect(t, settings.algorithm, settings.seed, record) for t in transports}
        star = ScatterReduceAllGather()
        self.across = _connect(replicas, star, settings.seed, record) if replicas is not None else None
        """Channel that takes means over replicas."""
        channels = [*self._channels.values(), *([self.across] if self.across else [])]
        shapes = {at_site(site, layer.name): layer.shape for unit in units for layer in unit.layers for site in SITES}
        super().__init__(plan, shapes, channels, start=settings.start, rank=rank, world_size=world_size)
        self.weights: list[LayerGroup] = []
        self.gradients: list[LayerGroup] = []
        self.means: list[LayerGroup] = []
        """Groups for means of gradients over replicas; without layers where there are none."""
        for index, unit in enumerate(self.units):
            unit.index = index
            self.weights.append(LayerGroup("weights", unit.layers, unit.transport))
            self.gradients.append(self._group_of("gradients", unit, unit.trained))
            self.means.append(self._group_of("across", unit, unit.trained if self.across else ()))
        self._plans: list[Plan] = []
        self.take(plan)
        if settings.skip_if_slower:
            self.take(self._declined())
        if settings.adapt is not None:
            self.adapter = self._adapter_of(settings.adapt)
        self.reset_stats()

    def _adapter_of(self, policy: Policy) -> Adapter:
        if len(self._channels) > 1:
            raise ValueError("adapt= needs all modules to be sharded over the same ranks")
        if policy.wants_syncs:
            raise ValueError(f"{policy} asks for the time of DDP buckets, which a sharded model has none of")
        plan = Plan({name: c for name, c in self.plan.layers.items() if not name.startswith("across/")})
        reference = {name: c for name, c in plan.layers.items() if not isinstance(c, Raw)}
        shapes = {
            at_site(site, layer.name): layer.shape_of(0) if site == "weights" else layer.shape
            for unit in self.units
            for layer in unit.layers
            for site in ("weights", "gradients")
        }

        def prepare(evidence: Evidence) -> Evidence:
            return balanced(evidence, max(1.0, self.gathers / max(1, self.reductions)))

        channel = self.channels[0]
        return Adapter(
            policy,
            plan,
            shapes,
            channel.transport,
            algorithm=channel.algorithm,
            world=channel.world,
            start=self.start,
            speeds=self._slowest_speeds(policy.to_time(reference), channel),
            prepare=prepare,
        )

    def table(self, declined: Mapping[str, str], loaded: Collection[str]) -> str:
        shapes, crossings = self.shapes, {}
        for unit in self.units:
            shards = unit.transport.world_size
            replicas = self.across.transport.world_size if self.across is not None else 1
            once = {"weights": (shards - 1) / shards, "gradients": (shards - 1) / shards}
            once["across"] = 2 * (replicas - 1) / replicas / shards
            crossings |= {at_site(site, layer.name): once[site] for layer in unit.layers for site in SITES}

        def sent(name: str, compressor: Compressor) -> float:
            return crossings[name] * compressor.wire_bytes(shapes[name], torch.float32)

        title = f"Wire of {self.world_size} ranks"
        return layer_table(title, self.plan, shapes, declined, loaded, sent, unit="bytes each time")

    def take(self, plan: Plan) -> None:
        """Give every unit this plan from now on, between steps."""
        self.plan = plan
        self._plans = [plan] * len(self.units)
        for members in self.members():
            members.follow(plan)

    def restart(self, plan: Plan, *, step: int, seed: int) -> None:
        """Continue from a checkpoint, between steps."""
        self.step = step
        self._touched.clear()
        self._dropped.clear()
        self._finite = self._ended = True
        for unit in self.units:
            unit.kept.clear()
        self.take(plan)
        for channel in self.channels:
            channel.seed = seed

    def members(self) -> Iterable[LayerGroup]:
        yield from self.weights
        yield from self.gradients
        yield from self.means

    def members_of(self, name: str) -> LayerGroup | None:
        """Return the group that the layer ``name`` of the plan belongs to, or None."""
        return next((members for members in self.members() if name in members.placement.by_name), None)

    @property
    def slot_bytes(self) -> int:
        return sum(m.slots.num_bytes + (m.replica.num_bytes if m.replica else 0) for m in self.members())

    @property
    def foreseen_bytes(self) -> int:
        plans = ((m.placement, {name: self.plan[name] for name in m.placement.by_name}) for m in self.members())
        slots = sum(residual_bytes(placement, compressors) for placement, compressors in plans)
        return slots + sum(4 * m.placement.numel for m in self.weights if m.changing(self.plan))

    def value(self, layer: str, slot: Slot, shape: Sequence[int]) -> Tensor:
        """Return a flat copy of a slot."""
        members = self.members_of(layer)
        if members is None:
            return slot.first(shape, layer).reshape(-1)
        value = members.slots.value(layer, slot)
        if members.site == "across":
            value = members.sharded[layer].spread(value, self._shard_of(layer))
        return value.reshape(-1)

    def _shard_of(self, layer: str) -> int:
        """Return this rank's index among the shards of a layer."""
        return next(
            unit.transport.rank
            for unit, members in zip(self.units, self.means, strict=True)
            if layer in members.placement.by_name
        )

    def sent_bytes(self, site: Site) -> int:
        kinds: dict[Site, Kind] = {"weights": "all_gather", "gradients": "reduce_scatter", "across": "all_reduce"}
        groups = {"weights": self.weights, "gradients": self.gradients, "across": self.means}[site]
        total = 0
        for unit, members in zip(self.units, groups, strict=True):
            channel = self.across if site == "across" else self._channels[id(unit.transport)]
            if members.names and channel is not None:
                contents = self._contents_of(unit, members, self.plan, compressed=True)
                total += channel.sent_bytes(kinds[site], contents, torch.float32)
        return total

    def reset_stats(self) -> None:
        super().reset_stats()
        for members in self.members():
            members.slots.learn_s = 0.0

    def present_stats(self) -> Stats:
        return replace(super().present_stats(), learn_s=sum(members.slots.learn_s for members in self.members()))

    def note(self, *, local_gathers: int = 0, overlapped: int = 0) -> None:
        """Count what the attachment did itself."""
        self.stats.local_gathers += local_gathers
        self.stats.overlapped += overlapped

    @property
    def needs_loss_scale(self) -> bool:
        """Whether the plan or a policy needs the scale of the loss."""
        return self.adapter is not None or self.plan.needs_loss_scale

    def keep_gradients_raw(self, until: Callable[[], bool]) -> None:
        """Send gradients in full precision up to the step before which ``until`` is true, on every rank at once."""
        later = self.plan
        sites = at_site("gradients", ""), at_site("across", "")
        raw = {name: Raw() if name.startswith(sites) else c for name, c in later.layers.items()}
        self._waiting = (until, later)
        self.take(replace(later, layers=raw))

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
        quantized = compressed and not self.master
        self.gathers += 1
        self.stats.gathers += 1
        gather = WeightGather(
            kind="all_gather",
            dtype=flat.dtype,
            contents=contents,
            scale=1.0,
            draw=draw,
            kept=unit.kept if quantized else None,
            flat=flat,
            members=members,
            rank=rank,
            since=since if compressed else None,
            keep=keep if quantized else None,
            replica=replica,
            whole=whole,
        )
        return self._channels[id(unit.transport)].submit(gather)

    def reduce(
        self,
        unit: Unit,
        flat: Tensor,
        out: Tensor,
        trained: Sequence[str],
        *,
        scale: float,
        loss_scale: float = 1.0,
        weights: Callable[[], Mapping[str, Tensor]] | None = None,
    ) -> Future[Tensor]:
        """Start setting ``out`` to this rank's part of ``scale`` times the sum of all ranks' ``flat``.

        ``trained``: the layers that are in it, in order. ``loss_scale`` is how many times larger than the gradients its
        values are. ``weights`` gives this rank's shards of the weights, for a policy to look at.
        """
        if self.begins_step:
            self._begin_step()
        members = self._follow_trained(unit, trained)
        if self.adapter is not None and self.adapter.watches(self.step):
            self._observe(self.adapter, members, flat, loss_scale, weights() if weights is not None else {})
        again = unit.last_step == self.step
        unit.last_step = self.step
        draw = self.passes
        unit.compressed = compressed = draw >= self.start
        if self._plans[unit.index] is not self.plan:
            # The plan changes here, not earlier: weights of this backward pass were gathered with the plan before.
            self._plans[unit.index] = self.plan
            unit.kept.clear()
            members.follow(self.plan)
            self.weights[unit.index].follow(self.plan)
            self.means[unit.index].follow(self.plan)
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
        channel = self._channels[id(unit.transport)]
        if again and keeps:
            channel.executor.wait_idle()  # until the first use has written its residual
        return channel.submit(reduction)

    def reduce_across(
        self,
        unit: Unit,
        part: Tensor,
        trained: Sequence[str],
        *,
        loss_scale: float = 1.0,
        after: Future[Tensor] | None = None,
    ) -> Future[Tensor]:
        """Start replacing this rank's part of the gradients of the layers ``trained`` by its mean over all replicas.

        ``after``: the reduction among shards that fills it, if that may be under way.
        """
        assert self.across is not None
        self._follow_trained(unit, trained)
        members, compressed = self.means[unit.index], unit.compressed
        keeps = compressed and members.slots.keeps_residuals
        again = any(members is other for other in self._touched)
        if keeps and not again:
            self._touched.append(members)
        flat = part.view(-1)
        mean = ReplicaMean(
            kind="all_reduce",
            dtype=flat.dtype,
            contents=self._contents_of(unit, members, self.plan, compressed=compressed),
            draw=derive_key(unit.across, unit.transport.rank),
            flat=flat,
            members=members,
            loss_scale=loss_scale,
            again=again,
            since=self.passes - self.start if compressed else None,
            note=self._note if keeps else None,
            after=after,
        )
        unit.across += 1
        if again and keeps:
            self.across.executor.wait_idle()
        return self.across.submit(mean)

    @property
    def passes(self) -> int:
        """Number of completed backward passes: gathers between two of them see the same weights."""
        return self.step + self._ended

    @property
    def begins_step(self) -> bool:
        """Whether the next reduction is the first one of a backward pass. All ranks find the same."""
        return self._ended

    def _begin_step(self) -> None:
        """Begin a step between the last reduction of a backward pass and the first of the next, on every rank alike."""
        self.settle()
        self.step += 1
        self.stats.steps += 1
        self._ended = False
        for unit in self.units:
            unit.before = unit.reductions, unit.across
        if self._waiting is not None and self._waiting[0]():
            self.plan, self._waiting = self._waiting[1], None
        if (adapter := self.adapter) is None:
            return
        plan = self.channels[0].alone(lambda: adapter.begin_step(self.step, self.plan, None))
        if plan.layers != self.plan.layers:
            # Each unit takes it over with its next reduction: its weights stay the same in one step.
            self.plan = plan
            self.stats.plan_changes += 1

    def _observe(
        self, adapter: Adapter, members: LayerGroup, flat: Tensor, loss_scale: float, weights: Mapping[str, Tensor]
    ) -> None:
        gradients = {name: members.placement.whole(flat, name) for name in members.placement.by_name}
        shards = {at_site("weights", name): weights[name] for name in weights}
        for tensors, scale in ((gradients, loss_scale), (shards, 1.0)):
            chosen = {n: v for n, v in tensors.items() if n in adapter.reference and v.numel()}
            if chosen:
                together = torch.cat([value.detach().reshape(-1).float() for value in chosen.values()])
                layers = tuple((name, tuple(value.shape)) for name, value in chosen.items())
                adapter.observe(together, layers, self.step, scale)

    def end_pass(self) -> None:
        """End a backward pass: what is reduced from now on belongs to the next step."""
        self._ended = True

    def drop(self, layers: Iterable[str]) -> None:
        """Leave residuals of ``layers`` as they were before the last pass, because its gradients are not applied."""
        layers = set(layers)
        self._dropped.update(at_site(site, layer) for site in SITES for layer in layers)
        for unit, members in zip(self.units, self.gradients, strict=True):
            if layers.issuperset(members.names):
                # A process that has not used the unit yet, as after a resume, reduces and draws nothing for it.
                unit.reductions, unit.across = unit.before

    def _follow_trained(self, unit: Unit, trained: Sequence[str]) -> LayerGroup:
        """Return the members of a unit's next reduction, in which these layers are, in this order."""
        if tuple(trained) != self.gradients[unit.index].names:
            self.gradients[unit.index] = self._group_of("gradients", unit, trained, self.gradients[unit.index])
            if self.across is not None:
                self.means[unit.index] = self._group_of("across", unit, trained, self.means[unit.index])
        return self.gradients[unit.index]

    def _group_of(self, site: Site, unit: Unit, trained: Sequence[str], before: LayerGroup | None = None) -> LayerGroup:
        """Return the members of reductions of these layers; they take over the residuals of ``before``."""
        members = LayerGroup(site, [layer for layer in unit.layers if layer.name in trained], unit.transport)
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
            placement = members.placement
            chosen = compressors or dict.fromkeys(placement.by_name, Raw())
            if members.site == "across":
                layers = (
                    Layer(name, placement.starts[name], layer.shape, chosen[name])
                    for name, layer in placement.by_name.items()
                    if layer.numel_of(0)
                )
                self._contents[key] = Contents(key, tuple(layers))
            else:
                self._contents[key] = Contents(key, (), placement.shards(chosen), placement.part_numel)
        return self._contents[key]

    def _note(self, out: Tensor) -> None:
        if out.device.type == "cpu":
            if not math.isfinite(float(not_finite(out))):  # two threads may note at once
                self._finite = False
        else:
            self._nonfinite_flags.note(not_finite(out))

    def settle(self) -> None:
        """Commit what the last pass wrote to residuals, unless some rank met NaN or Inf in it."""
        if not self._touched:
            self._dropped.clear()
            return
        for channel in self.channels:
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

    def _is_on_any_rank(self, condition: bool) -> bool:
        return bool(self.on_any_rank(torch.tensor([condition], dtype=torch.bool, device="cpu")))

    # Checkpoints, between two steps.

    @property
    def _shares(self) -> list[int]:
        """Ownership that a state belongs to: for every rank, the number of ranks that layers are sharded over."""
        return [self.units[0].transport.world_size] * self.world_size

    def collect(self) -> dict[str, Tensor]:
        self.settle()
        options = {"step": self.step, "seed": self.seed, "rank": self.rank}
        state = checkpoint.write(self, self.plan, self.shapes, **options, shares=self._shares)
        rows = [
            [unit.reductions, weights.slots.learned_at, gradients.slots.learned_at, unit.across]
            for unit, weights, gradients in zip(self.units, self.weights, self.gradients, strict=True)
        ]
        counts = {
            _VERSIONS: torch.tensor(rows, dtype=torch.int64, device="cpu"),
            _EXCHANGES: torch.tensor([self.gathers, self.reductions], dtype=torch.int64, device="cpu"),
        }
        return state | checkpoint.sealed(counts, _CHECKSUMS) | self._arrived()

    def _arrived(self) -> dict[str, Tensor]:
        """Return the weights that have arrived, where only changes are sent: the same on all ranks."""
        replicas = [members.replica for members in self.weights]
        if not any(replica is not None for replica in replicas):
            return {}
        for channel in self.channels:
            channel.alone(lambda: None)  # what is under way still adds to them
        filled = [replica is not None and replica.filled for replica in replicas]
        entries = {_FILLED: torch.tensor(filled, dtype=torch.uint8, device="cpu")}
        for replica in filter(None, replicas):
            entries |= {f"{_ARRIVED}/{name}": replica.value(name).cpu() for name in replica.names}
        return checkpoint.sealed(entries, _ARRIVED_CHECKSUMS)

    def whole_world(self) -> Transport:
        if self._world is None:
            self._world = self._make_world()
        return self._world

    def template(self, plan: Plan, world_size: int) -> dict[str, Tensor]:
        state = checkpoint.template(plan, self.shapes, world_size)
        versions = torch.zeros(len(self.units), 4, dtype=torch.int64, device="cpu")
        counts = {_VERSIONS: versions, _EXCHANGES: torch.zeros(2, dtype=torch.int64, device="cpu")}
        changing = [name for members in self.weights for name in members.changing(plan)]
        entries = {
            f"{_ARRIVED}/{name}": torch.zeros(self.shapes[name], dtype=torch.float32, device="cpu") for name in changing
        }
        if changing:
            entries[_FILLED] = torch.zeros(len(self.units), dtype=torch.uint8, device="cpu")
            entries = checkpoint.sealed(entries, _ARRIVED_CHECKSUMS)
        return state | checkpoint.sealed(counts, _CHECKSUMS) | entries

    def _read_arrived(self, state: Mapping[str, Tensor], plan: Plan) -> tuple[dict[str, Tensor], Callable[[], None]]:
        """Check weights that had arrived where only changes are sent; return their entries, and what adopts them."""
        keys = {name: f"{_ARRIVED}/{name}" for members in self.weights for name in members.changing(plan)}
        if not keys:
            return {}, lambda: None
        for name in keys:
            if not isinstance(self.asked[name], Delta):
                raise ValueError(
                    f"{name} is sent as {plan[name]} in the state, and as {self.asked[name]} here: give compress() "
                    "the weights= that it was saved with, or start without this state"
                )
        checkpoint.check_sealed(state, [_FILLED, *keys.values()], _ARRIVED_CHECKSUMS)
        filled = checkpoint.integers(state, _FILLED, len(self.units))
        for name, key in keys.items():
            if tuple(state[key].shape) != self.shapes[name] or not bool(torch.isfinite(state[key]).all()):
                raise ValueError(f"{key} in the state is not finite or not of shape {self.shapes[name]}")

        def adopt() -> None:
            for members, was_filled in zip(self.weights, filled, strict=True):
                if members.replica is not None:
                    members.replica.filled = bool(was_filled)
                    for name in members.replica.names:
                        members.replica.load(name, state[keys[name]])

        return {key: state[key] for key in (_FILLED, *keys.values())}, adopt

    def read(self, state: Mapping[str, Tensor]) -> checkpoint.Checked:
        versions = state.get(_VERSIONS)
        known = isinstance(versions, Tensor) and tuple(versions.shape) == (len(self.units), 4)
        if versions is None or not known or _EXCHANGES not in state:
            raise ValueError(
                "this is not the state of a Wire of this model: shard its modules as they were when it was saved"
            )

        def resharded(saved: Mapping[int, Tensor], slot: Slot, compressor: Compressor, name: str, *_: object) -> Tensor:
            members = self.members_of(name)
            if members is None:
                return saved[0]
            if members.site == "across" and self.across is not None:
                replica = self.across.transport.rank, self.across.transport.world_size
                layer, shard = members.sharded[name], self._shard_of(name)
                old_shards = checkpoint.integers(state, "shares", None)[0]
                return reshard_mean(saved, slot, compressor, name, layer, old_shards, shard, replica)
            return reshard_residual(saved, slot, name, members.slots.rank, members.placement)

        counts = checkpoint.integers(state, _EXCHANGES, 2)
        integers = checkpoint.integers(state, _VERSIONS, 4 * len(self.units))
        loaded = checkpoint.read(state, self.plan, self.shapes, self.rank, self._shares, resharded)
        checkpoint.check_sealed(state, (_VERSIONS, _EXCHANGES), _CHECKSUMS)
        arrived, adopt_arrived = self._read_arrived(state, loaded.plan)
        alike = int(state["shares"].numel()) == self.world_size
        if self.adapter is not None and alike:
            self.adapter.saved_algorithm(state)

        chunks = {
            (name, slot_name): own_chunk(members.sharded[name], value, self._shard_of(name), name)
            for (name, slot_name), value in loaded.slots.items()
            if (members := self.members_of(name)) is not None and members.site == "across"
        }

        def adopt() -> None:
            self.restart(loaded.plan, step=loaded.step, seed=loaded.seed)
            self.gathers, self.reductions = counts
            adopt_arrived()
            rows = [integers[i : i + 4] for i in range(0, len(integers), 4)]
            for unit, row, *sites in zip(self.units, rows, self.weights, self.gradients, strict=True):
                unit.reductions, unit.last_step, unit.across = row[0], loaded.step, row[3]
                for members, learned_at in zip(sites, row[1:3], strict=True):
                    members.slots.learned_at = learned_at
            for (name, slot_name), value in loaded.slots.items():
                members = self.members_of(name)
                slot = next(slot for slot in self.plan[name].slots if slot.name == slot_name)
                if members is not None:
                    members.slots.load(name, slot, chunks.get((name, slot_name), value))
            if self.adapter is not None:
                self.adapter.load(state if alike else {}, self.plan, None)

        # What is learned here differs between ranks: each learns it from what it sends.
        shared = loaded.shared(learned=False) | {key: state[key] for key in (_VERSIONS, _EXCHANGES)} | arrived
        return checkpoint.Checked(loaded.record(), shared, adopt)

    def close(self) -> None:
        super().close()
        if self._world is not None:
            self._world.close()

    def _slowest_speeds(self, compressors: Collection[Compressor], links: ShardChannel) -> Speeds | None:
        """Return the speeds of a channel's links on the slowest rank; None if there is nothing to measure."""
        if links.transport.world_size == 1 or not compressors:
            return None
        speeds = links.alone(lambda: measure_speeds(compressors, links.transport, links.algorithm, links.world))
        ordered = sorted(speeds.codec_s, key=str)
        figures = torch.tensor(
            [*(speeds.codec_s[c] for c in ordered), 1 / speeds.bandwidth, speeds.latency_s],
            dtype=torch.float64,
            device="cpu",
        )
        # Replicas, and the groups of their shards, must come to the same decision.
        for other in self.channels:
            figures = other.alone(partial(other.transport.all_gather, figures)).amax(0)
        *codecs, per_byte, latency = figures.tolist()
        codec_s = dict(zip(ordered, codecs, strict=True))
        return replace(speeds, codec_s=codec_s, bandwidth=1 / per_byte, latency_s=latency)

    def _declined(self) -> Plan:
        """Return the plan without what gets no faster: sums across replicas are judged by the links between these."""
        layers = dict(self.plan.layers)
        for across, links in ((False, self.channels[0]), (True, self.across)):
            if links is None:
                continue
            mine = {name: c for name, c in layers.items() if name.startswith("across/") == across}
            coders = {name: coder_of(c) for name, c in mine.items()}
            speeds = self._slowest_speeds({c for c in coders.values() if not isinstance(c, Raw)}, links)
            if speeds is not None:
                # Raw values, for comparison, go by the same messages.
                fast = declined(Plan(coders), replace(speeds, native=0.0)).layers
                layers |= {name: Raw() if isinstance(fast[name], Raw) else c for name, c in mine.items()}
        return replace(self.plan, layers=layers)


def _record(plan: Plan, units: Sequence[Unit], settings: WireSettings, *, master: bool) -> dict[str, str]:
    """Return the facts that must be equal on all ranks, in the order in which a difference is best reported."""
    record = {"thinwire version": library_version(), "wire format": str(FORMAT_VERSION)}
    record |= {"seed": str(settings.seed), "start": str(settings.start)}
    record |= {"master": str(master), "adapt": str(settings.adapt)}
    record |= machine_record(plan.layers.values())
    for unit in units:
        layers = (f"{layer.name} {layer.shape} along {layer.dim}" for layer in unit.layers)
        record[f"module {unit.name or '(root)'}"] = ", ".join(layers)
    return record | {f"layer {name}": str(compressor) for name, compressor in plan.layers.items()}


def _connect(transport: Transport, algorithm: Algorithm, seed: int, record: Mapping[str, str]) -> ShardChannel:
    return Channel.connect(transport, Stats(), algorithm=algorithm, seed=seed, record=record)
