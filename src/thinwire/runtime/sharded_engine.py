"""The engine for FSDP2: exchanges of weights and gradients of a sharded model, and of means over replicas."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain

import torch
from torch import Tensor

from thinwire.collectives import ScatterReduceAllGather, Transport, TransportError
from thinwire.compressors import Compressor, Delta, Raw, State, message_coder
from thinwire.kernels import derive_key
from thinwire.plan import Plan, Site, Speeds, at_site, declined
from thinwire.plan.sites import SITES
from thinwire.policies import Evidence, Policy
from thinwire.policies.budget import balanced
from thinwire.runtime import checkpoint
from thinwire.runtime.adapt import Adapter
from thinwire.runtime.channel import Channel, Exchange, Kind, Route
from thinwire.runtime.engine import Engine, WireSettings, agreed_facts
from thinwire.runtime.placement import ShardedLayer
from thinwire.runtime.probe import measure_speeds
from thinwire.runtime.slots import Owners, mean_weights, slot_bytes
from thinwire.runtime.stats import Stats
from thinwire.runtime.table import layer_table
from thinwire.runtime.units import LayerGroup, Replica, Unit

Future = torch.futures.Future
_VERSIONS, _EXCHANGES, _CHECKSUMS = "versions", "exchanges", "counts/checksums"
_FILLED, _ARRIVED, _ARRIVED_CHECKSUMS = "arrived/units", "arrived", "arrived/checksums"


@dataclass(kw_only=True)
class _Sharded(Exchange):
    """An exchange of a unit's layers, with the slots of their compressors."""

    engine: ShardedEngine
    flat: Tensor
    members: LayerGroup
    compressed: bool
    """Whether the present compressors encode the values, which are sent as they are otherwise."""
    since: int
    """Steps since the first compressed one."""
    loss_scale: float = 1.0
    again: bool = False
    """Whether the unit was reduced in this step before: its residuals are those that the first reduction left."""

    def start(self, route: Route) -> tuple[Tensor, State | None]:
        engine, members = self.engine, self.members
        if not self.compressed:
            return self.flat, None
        if not members.having:
            return self.flat, State({}, {}, self.loss_scale)
        if self.again:
            engine.slots.commit([self.contents.key])
        args = self.contents.key, members.placement, members.having, self.loss_scale, self.flat.device
        state = engine.slots.state(*args)
        if learning := members.learning(self.since, engine.slots):
            started = time.perf_counter()
            members.learn(self.flat, learning, state)
            engine.stats.learn_s += time.perf_counter() - started
        return self.flat, state

    def finish(self, x: Tensor, route: Route) -> None:
        if self.members.having:
            self.engine.slots.close(self.contents.key, derive_key(self.draw or 0, self.members.rank))

    def fail(self) -> None:
        self.engine.failed = True


@dataclass(kw_only=True)
class WeightGather(_Sharded):
    """An all-gather of a unit's weights."""

    keep: Callable[[Tensor], object] | None
    """Function that gets this rank's part as it was sent, which takes the place of its weights (``master=False``)."""
    replica: Replica | None
    """Replica to which the message is a change."""
    whole: bool
    """Whether weights are sent in place of their change."""

    def start(self, route: Route) -> tuple[Tensor, State | None]:
        if self.replica is not None and not self.whole:
            self.replica.subtract(self.flat)
        return super().start(route)

    def finish(self, x: Tensor, route: Route) -> None:
        super().finish(x, route)
        if self.replica is not None:
            self.replica.add(x, whole=self.whole)
        if self.keep is not None:
            self.keep(self.members.placement.part(x, self.members.rank))


@dataclass(kw_only=True)
class Reduction(_Sharded):
    """A reduce-scatter of a unit's gradients, or the mean of what that has left over the replicas of a shard."""

    keeps: bool
    """Whether residuals are kept, for which the result must be finite."""
    after: Future[Tensor] | None = None
    """Reduction among shards that fills ``flat``, where that is not over yet."""

    def begin(self) -> None:
        try:
            if self.after is not None:
                self.after.wait()
        except TransportError:
            raise
        except Exception as error:  # noqa: BLE001 - the replicas are told
            self.failed = error

    def finish(self, x: Tensor, route: Route) -> None:
        super().finish(x, route)
        if self.keeps:
            self.engine.note_mean(x if self.out is None else self.out)


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
        self._ended = True
        self._keeping: set[Hashable] = set()
        """Keys of the contents whose residuals this step has written."""
        facts = {name: str(getattr(settings, name)) for name in ("seed", "start", "adapt")} | {"master": str(master)}
        for unit in units:
            layers = (f"{layer.name} {layer.shape} along {layer.dim}" for layer in unit.layers)
            facts[f"module {unit.name or '(root)'}"] = ", ".join(layers)
        options = {"seed": settings.seed, "record": agreed_facts(plan, facts)}
        transports = {id(unit.transport): unit.transport for unit in units}
        self._channels = {
            key: Channel.connect(t, Stats(), algorithm=settings.algorithm, **options) for key, t in transports.items()
        }
        self.across: Channel[Stats] | None = None
        """Channel that takes means over replicas; None if there are none."""
        if replicas is not None:
            self.across = Channel.connect(replicas, Stats(), algorithm=ScatterReduceAllGather(), **options)
        channels = [*self._channels.values(), *([self.across] if self.across else [])]
        self._at: dict[str, tuple[Unit, ShardedLayer]] = {
            at_site(site, layer.name): (unit, layer) for unit in units for layer in unit.layers for site in SITES
        }
        shapes = {name: layer.shape for name, (_, layer) in self._at.items()}
        super().__init__(plan, shapes, channels, start=settings.start, rank=rank, world_size=world_size)
        for index, unit in enumerate(self.units):
            unit.index = index
        self.groups: dict[Site, list[LayerGroup]] = {
            "weights": [LayerGroup("weights", unit, [layer.name for layer in unit.layers], plan) for unit in units],
            "gradients": [LayerGroup("gradients", unit, unit.trained, plan) for unit in units],
            "across": [LayerGroup("across", unit, unit.trained if self.across else (), plan) for unit in units],
        }
        """Groups of each unit by site; those for means over replicas are without layers where there are none."""
        if settings.skip_if_slower:
            self.take(self._declined())
        if settings.adapt is not None:
            self.adapter = self._make_adapter(settings.adapt)
        self.reset_stats()

    def _make_adapter(self, policy: Policy) -> Adapter:
        if len(self._channels) > 1:
            raise ValueError("adapt= needs all modules to be sharded over the same ranks")
        if policy.needs_syncs:
            raise ValueError(f"{policy} asks for the time of DDP buckets, which a sharded model has none of")
        plan = Plan({name: c for name, c in self.plan.layers.items() if not name.startswith("across/")})
        reference = {name: c for name, c in plan.layers.items() if not isinstance(c, Raw)}
        shapes = {
            at_site(site, layer.name): layer.chunk_shape(0) if site == "weights" else layer.shape
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
        replicas = self.across.transport.world_size if self.across is not None else 1

        def sent(name: str, compressor: Compressor) -> float:
            shards = self._at[name][0].transport.world_size
            crossings = (shards - 1) / shards
            if name.startswith(at_site("across", "")):
                crossings = 2 * (replicas - 1) / replicas / shards
            return crossings * compressor.wire_bytes(self.shapes[name], torch.float32)

        title = f"Wire of {self.world_size} ranks"
        return layer_table(title, self.plan, self.shapes, declined, loaded, sent, unit="bytes each time")

    def take(self, plan: Plan) -> None:
        """Give every unit this plan from now on, between steps."""
        self.plan = plan
        for members in chain(*self.groups.values()):
            members.follow(plan)

    @property
    def slot_bytes(self) -> int:
        return super().slot_bytes + sum(
            members.replica.num_bytes for members in self.groups["weights"] if members.replica
        )

    @property
    def planned_bytes(self) -> int:
        groups = chain(*self.groups.values())
        slots = sum(slot_bytes(m.placement, {name: self.plan[name] for name in m.placement.by_name}) for m in groups)
        return slots + sum(4 * m.placement.numel for m in self.groups["weights"] if m.changing(self.plan))

    def sent_bytes(self, site: Site) -> int:
        kinds: dict[Site, Kind] = {"weights": "all_gather", "gradients": "reduce_scatter", "across": "all_reduce"}
        total = 0
        for unit, members in zip(self.units, self.groups[site], strict=True):
            channel = self.across if site == "across" else self._channels[id(unit.transport)]
            if members.names and channel is not None:
                contents = members.make_contents(members.get_compressors(self.plan))
                total += channel.sent_bytes(kinds[site], contents, torch.float32)
        return total

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
        members, draw = self.groups["weights"][unit.index], self.passes
        replica = members.replica if draw >= self.start else None
        whole = replica is not None and not replica.filled
        if replica is not None:
            replica.filled = True
        compressed = draw >= self.start and not whole
        quantized = compressed and not self.master
        self.gathers += 1
        self.stats.gathers += 1
        gather = WeightGather(
            kind="all_gather",
            dtype=flat.dtype,
            contents=members.coded if compressed else members.raw,
            scale=1.0,
            draw=draw,
            kept=unit.kept if quantized else None,
            engine=self,
            flat=flat,
            members=members,
            compressed=compressed,
            since=draw - self.start,
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
        unit.last_step = self.step
        unit.compressed = self.passes >= self.start
        if self.groups["weights"][unit.index].plan is not self.plan:
            # The plan changes here, not earlier: weights of this backward pass were gathered with the plan before.
            unit.kept.clear()
            for groups in self.groups.values():
                groups[unit.index].follow(self.plan)
        draw = derive_key(unit.reductions, unit.first_rank)
        unit.reductions += 1
        self.reductions += 1
        self.stats.reductions += 1
        channel = self._channels[id(unit.transport)]
        options = {"scale": scale, "out": out, "loss_scale": loss_scale}
        return self._reduce(channel, "reduce_scatter", unit, members, flat, draw=draw, **options)

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
        draw = derive_key(unit.across, unit.transport.rank)
        unit.across += 1
        members, options = self.groups["across"][unit.index], {"loss_scale": loss_scale, "after": after}
        return self._reduce(self.across, "all_reduce", unit, members, part.view(-1), draw=draw, **options)

    def _reduce(
        self,
        channel: Channel[Stats],
        kind: Kind,
        unit: Unit,
        members: LayerGroup,
        flat: Tensor,
        *,
        draw: int,
        loss_scale: float,
        scale: float | None = None,
        out: Tensor | None = None,
        after: Future[Tensor] | None = None,
    ) -> Future[Tensor]:
        contents = members.coded if unit.compressed else members.raw
        keeps = unit.compressed and members.keeps_residuals
        # The second use of a module in a step takes up the residual of the first.
        again = contents.key in self._keeping
        if again:
            channel.executor.wait_idle()  # until the first use has written its residual
        if keeps:
            self._keeping.add(contents.key)
            if kind == "reduce_scatter":
                self._poison.note_gradients(flat)
        reduction = Reduction(
            kind=kind,
            dtype=flat.dtype,
            contents=contents,
            scale=scale,
            draw=draw,
            out=out,
            engine=self,
            flat=flat,
            members=members,
            compressed=unit.compressed,
            since=self.passes - self.start,
            loss_scale=loss_scale,
            again=again,
            keeps=keeps,
            after=after,
        )
        return channel.submit(reduction)

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
            self.channels[0].alone(lambda: self._free_unused_slots(plan))
            # Each unit takes it over with its next reduction: its weights stay the same in one step.
            self.plan = plan
            self.stats.plan_changes += 1

    def _free_unused_slots(self, plan: Plan) -> None:
        """Free the slots of layers that have none in ``plan``, unless a residual waits in them."""
        for name, before in self.plan.layers.items():
            if before.slots and not plan[name].slots and not self.slots.moved(name, before, self.shapes[name]):
                self.slots.drop(name)

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

    def discard_step(self) -> None:
        self.drop([name for members in self.groups["gradients"] for name in members.names])

    def drop(self, layers: Iterable[str]) -> None:
        """Leave residuals of ``layers`` as they were before the last pass, because its gradients are not applied."""
        layers, nothing = set(layers), torch.zeros((), dtype=torch.float32, device="cpu")
        self.used |= {at_site(site, layer): nothing for site in SITES for layer in layers}
        for unit, members in zip(self.units, self.groups["gradients"], strict=True):
            if layers.issuperset(members.names):
                # A process that has not used the unit yet, as after a resume, reduces and draws nothing for it.
                unit.reductions, unit.across = unit.before

    def _follow_trained(self, unit: Unit, trained: Sequence[str]) -> LayerGroup:
        """Return the members of a unit's next reduction, in which these layers are, in this order."""
        if tuple(trained) != self.groups["gradients"][unit.index].names:
            self.groups["gradients"][unit.index] = LayerGroup("gradients", unit, trained, self.plan)
            if self.across is not None:
                self.groups["across"][unit.index] = LayerGroup("across", unit, trained, self.plan)
        return self.groups["gradients"][unit.index]

    def settle(self) -> None:
        if not self._keeping:
            self.used, self.failed = {}, False
            return
        for channel in self.channels:
            channel.alone(lambda: None)
        mine = torch.tensor([self.failed, not self._means.read_finite()], dtype=torch.bool, device="cpu")
        failed, nonfinite = self.on_any_rank(mine).tolist()
        self.failed, finite = False, not (failed or nonfinite)
        self._commit(finite=finite)
        self._keeping.clear()
        if failed:
            return
        self._poison.end_step(finite=finite)
        self._reset_if_poisoned(self.step + 1, self._on_all_ranks)

    def _on_all_ranks(self, condition: bool) -> bool:
        return not self.on_any_rank(torch.tensor([not condition], dtype=torch.bool, device="cpu"))

    # Checkpoints, between two steps.

    @property
    def shares(self) -> Sequence[int]:
        """Number of ranks over which layers are sharded, for every rank."""
        return [self.units[0].transport.world_size] * self.world_size

    def collect(self) -> dict[str, Tensor]:
        state = super().collect()
        rows = [
            [unit.reductions, weights.learned_at, gradients.learned_at, unit.across]
            for unit, weights, gradients in zip(
                self.units, self.groups["weights"], self.groups["gradients"], strict=True
            )
        ]
        counts = {
            _VERSIONS: torch.tensor(rows, dtype=torch.int64, device="cpu"),
            _EXCHANGES: torch.tensor([self.gathers, self.reductions], dtype=torch.int64, device="cpu"),
        }
        return state | checkpoint.sealed(counts, _CHECKSUMS) | self._arrived()

    def _arrived(self) -> dict[str, Tensor]:
        """Return the weights that have arrived, where only changes are sent: the same on all ranks."""
        replicas = [members.replica for members in self.groups["weights"]]
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
        state = super().template(plan, world_size)
        versions = torch.zeros(len(self.units), 4, dtype=torch.int64, device="cpu")
        counts = {_VERSIONS: versions, _EXCHANGES: torch.zeros(2, dtype=torch.int64, device="cpu")}
        changing = [name for members in self.groups["weights"] for name in members.changing(plan)]
        entries = {
            f"{_ARRIVED}/{name}": torch.zeros(self.shapes[name], dtype=torch.float32, device="cpu") for name in changing
        }
        if changing:
            entries[_FILLED] = torch.zeros(len(self.units), dtype=torch.uint8, device="cpu")
            entries = checkpoint.sealed(entries, _ARRIVED_CHECKSUMS)
        return state | checkpoint.sealed(counts, _CHECKSUMS) | entries

    def _read_arrived(self, state: Mapping[str, Tensor], plan: Plan) -> tuple[dict[str, Tensor], Callable[[], None]]:
        """Check weights that had arrived where only changes are sent; return their entries, and what adopts them."""
        keys = {name: f"{_ARRIVED}/{name}" for members in self.groups["weights"] for name in members.changing(plan)}
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
            for members, was_filled in zip(self.groups["weights"], filled, strict=True):
                if members.replica is not None:
                    members.replica.filled = bool(was_filled)
                    for name in members.replica.names:
                        members.replica.load(name, state[keys[name]])

        return {key: state[key] for key in (_FILLED, *keys.values())}, adopt

    def read(self, state: Mapping[str, Tensor]) -> checkpoint.CheckedState:
        versions = state.get(_VERSIONS)
        known = isinstance(versions, Tensor) and tuple(versions.shape) == (len(self.units), 4)
        if versions is None or not known or _EXCHANGES not in state:
            raise ValueError(
                "this is not the state of a Wire of this model: shard its modules as they were when it was saved"
            )

        counts = checkpoint.integers(state, _EXCHANGES, 2)
        integers = checkpoint.integers(state, _VERSIONS, 4 * len(self.units))
        loaded = checkpoint.read(state, self.plan, self.shapes, self.rank, self.shares, self._owners)
        checkpoint.check_sealed(state, (_VERSIONS, _EXCHANGES), _CHECKSUMS)
        arrived, adopt_arrived = self._read_arrived(state, loaded.plan)
        alike = int(state["shares"].numel()) == self.world_size
        if self.adapter is not None and alike:
            self.adapter.saved_algorithm(state)

        def adopt() -> None:
            for channel in self.channels:
                channel.alone(lambda: None)  # what is under way still uses the slots
            self._take_over(loaded)
            self._ended, self.failed = True, False
            self._keeping.clear()
            self._means.read()
            self.take(loaded.plan)
            self.gathers, self.reductions = counts
            adopt_arrived()
            rows = [integers[i : i + 4] for i in range(0, len(integers), 4)]
            for unit, row, *sites in zip(
                self.units, rows, self.groups["weights"], self.groups["gradients"], strict=True
            ):
                unit.kept.clear()
                unit.reductions, unit.last_step, unit.across = row[0], loaded.step, row[3]
                for members, learned_at in zip(sites, row[1:3], strict=True):
                    members.learned_at = learned_at
            if self.adapter is not None:
                self.adapter.load(state if alike else {}, self.plan, None)

        # What is learned here differs between ranks: each learns it from what it sends.
        shared = loaded.shared(learned=False) | {key: state[key] for key in (_VERSIONS, _EXCHANGES)} | arrived
        return checkpoint.CheckedState(loaded.record(), shared, adopt)

    def _owners(self, name: str, compressor: Compressor, old_shares: Sequence[int]) -> Owners:
        """Return the ranks that hold a layer's residual. A rank holds nothing of its own chunk of gradients, which it
        adds exactly, and nothing but its own chunk of means over replicas."""
        unit, layer = self._at[name]
        shards, shard = unit.transport.world_size, unit.transport.rank
        if self.across is None or not name.startswith(at_site("across", "")):
            everywhere = torch.tensor(1 / len(old_shares), dtype=torch.float64, device="cpu")

            def of_others() -> Tensor:
                mine = torch.full(layer.shape, 1 / shards, dtype=torch.float64, device="cpu")
                mine.narrow(layer.dim, sum(layer.rows[:shard]), layer.rows[shard]).zero_()
                return mine.reshape(-1)

            return Owners(lambda _: everywhere, of_others, shards - 1)

        def of_replica(cut: ShardedLayer, chunk: int, replica: int, num_replicas: int) -> Tensor:
            like = torch.zeros(cut.chunk_numel(chunk), dtype=torch.float64, device="cpu")
            weights = mean_weights(name, compressor, like, replica, [1] * num_replicas)
            return cut.spread(weights, chunk).reshape(-1)

        replicas, old = self.across.transport, old_shares[0]
        before = replace(layer, num_ranks=old)
        return Owners(
            lambda rank: of_replica(before, rank % old, rank // old, len(old_shares) // old),
            lambda: of_replica(layer, shard, replicas.rank, replicas.world_size),
            replicas.world_size,
            in_chunks=True,
        )

    def close(self) -> None:
        super().close()
        if self._world is not None:
            self._world.close()

    def _slowest_speeds(self, compressors: Collection[Compressor], links: Channel[Stats]) -> Speeds | None:
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
            coders = {name: message_coder(c) for name, c in mine.items()}
            speeds = self._slowest_speeds({c for c in coders.values() if not isinstance(c, Raw)}, links)
            if speeds is not None:
                # Raw values, for comparison, go by the same messages.
                fast = declined(Plan(coders), replace(speeds, native=0.0)).layers
                layers |= {name: Raw() if isinstance(fast[name], Raw) else c for name, c in mine.items()}
        return replace(self.plan, layers=layers)
