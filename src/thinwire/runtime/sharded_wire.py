"""The `ShardedWire` that ``thinwire.compress()`` returns for a model under FSDP2."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial

import torch
from torch import Tensor

from thinwire.collectives import Transport
from thinwire.compressors import Compressor, Delta, Raw, Slot, coder_of
from thinwire.kernels import FORMAT_VERSION
from thinwire.plan import Plan, Speeds, at_site, declined
from thinwire.plan.sites import SITES
from thinwire.policies import Evidence, Policy
from thinwire.policies.balance import balanced
from thinwire.runtime import checkpoint
from thinwire.runtime.adapt import Adapter
from thinwire.runtime.consistency import library_version, machine_record
from thinwire.runtime.handle import Handle
from thinwire.runtime.probe import measure_speeds
from thinwire.runtime.settings import WireSettings
from thinwire.runtime.sharded_engine import ShardedEngine
from thinwire.runtime.sharded_slots import reshard_residual
from thinwire.runtime.stats import ShardedStats, StageSeconds
from thinwire.runtime.table import layer_table
from thinwire.runtime.units import Future, LayerGroup, ShardChannel, Unit

_VERSIONS, _EXCHANGES, _CHECKSUMS = "versions", "exchanges", "counts/checksums"
_FILLED, _ARRIVED, _ARRIVED_CHECKSUMS = "arrived/units", "arrived", "arrived/checksums"
_STAGES = [f.name for f in fields(StageSeconds)]


class ShardedWire(Handle["ShardedEngine"]):
    """Compressed communication of a sharded model: its plan, its state, its statistics.

    ``state_dict()`` holds tensors only and belongs into every checkpoint, beside the model's and the optimizer's:
    random draws depend on how often gradients were reduced, and error feedback keeps a residual.
    """

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
        super().__init__(plan, rank=rank, world_size=world_size)
        self._make_world = make_world
        self._world: Transport | None = None
        self._waiting: tuple[Callable[[], bool], Plan] | None = None
        self._counted: dict[int, tuple[int, int, int, dict[str, float]]] = {}
        record = _record(plan, units, settings, master=master)
        self._engine = ShardedEngine(plan, units, settings, master=master, record=record, replicas=replicas)
        for channel in self._engine.all_channels:
            self._close_at_end(channel.close)
        if settings.skip_if_slower:
            self._engine.take(declined_plan(self._engine))
        self._adapter = self._adapter_of(settings.adapt) if settings.adapt is not None else None
        self.reset_stats()

    def _adapter_of(self, policy: Policy) -> Adapter:
        engines, units = self._engine.channels, self._engine.units
        if len(engines) > 1:
            raise ValueError("adapt= needs all modules to be sharded over the same ranks")
        if policy.wants_syncs:
            raise ValueError(f"{policy} asks for the time of DDP buckets, which a sharded model has none of")
        plan = Plan({name: c for name, c in self.plan.layers.items() if not name.startswith("across/")})
        reference = {name: c for name, c in plan.layers.items() if not isinstance(c, Raw)}
        shapes = {
            at_site(site, layer.name): layer.shape_of(0) if site == "weights" else layer.shape
            for unit in units
            for layer in unit.layers
            for site in ("weights", "gradients")
        }

        def prepare(evidence: Evidence) -> Evidence:
            engine = self._engine
            return balanced(evidence, max(1.0, engine.gathers / max(1, engine.reductions)))

        return Adapter(
            policy,
            plan,
            shapes,
            engines[0].transport,
            algorithm=engines[0].algorithm,
            world=engines[0].world,
            start=self.start,
            speeds=slowest_speeds(self._engine, policy.to_time(reference)),
            prepare=prepare,
        )

    def __repr__(self) -> str:
        """A table of the layers: spec, or the reason why raw, and the bytes of one gather or one reduction."""
        shapes, crossings = self._shapes, {}
        for unit in self._engine.units:
            shards = unit.transport.world_size
            replicas = self.world_size // shards
            once = {"weights": (shards - 1) / shards, "gradients": (shards - 1) / shards}
            once["across"] = 2 * (replicas - 1) / replicas / shards
            crossings |= {at_site(site, layer.name): once[site] for layer in unit.layers for site in SITES}

        def sent(name: str, compressor: Compressor) -> float:
            return crossings[name] * compressor.wire_bytes(shapes[name], torch.float32)

        title = f"ShardedWire of {self.world_size} ranks"
        loaded = self._raw_in_checkpoint()
        return layer_table(title, self.plan, shapes, self.declined, loaded, sent, unit="bytes each time")

    @property
    def step(self) -> int:
        """Index of the last backward pass that reduced gradients; −1 before the first."""
        return self._engine.step

    @property
    def master(self) -> bool:
        """Whether ranks keep their shards as the optimizer left them, beside what they sent of them."""
        return self._engine.master

    @property
    def memory(self) -> int:
        """Bytes that the compressors' state takes on this rank: known before training."""
        return self._engine.foreseen_bytes

    @property
    def stats(self) -> ShardedStats:
        """Totals so far, as a copy: what is under way is partly in it."""
        engine = self._engine
        total = replace(
            engine.stats,
            declined_layers=len(self.declined),
            learn_s=sum(members.slots.learn_s for members in engine.members()),
            adapt_s=self._adapter.adapt_s if self._adapter else 0.0,
            slot_bytes=engine.slot_bytes,
        )
        for flat in engine.all_channels:
            now = flat.present_stats()
            sent, received, shared, stages = self._counted[id(flat)]
            total.payload_sent_bytes += now.payload_sent_bytes - sent
            total.payload_received_bytes += now.payload_received_bytes - received
            total.payload_shared_bytes += now.payload_shared_bytes - shared
            total.buffer_bytes += now.buffer_bytes
            for stage in _STAGES:
                setattr(total, stage, getattr(total, stage) + getattr(now, stage) - stages[stage])
        return total

    def reset_stats(self) -> None:
        """Start counting anew."""
        self._engine.stats = ShardedStats()
        for members in self._engine.members():
            members.slots.learn_s = 0.0
        for flat in self._engine.all_channels:
            now = flat.present_stats()
            stages = {stage: getattr(now, stage) for stage in _STAGES}
            self._counted[id(flat)] = (
                now.payload_sent_bytes,
                now.payload_received_bytes,
                now.payload_shared_bytes,
                stages,
            )

    def gather_bytes(self) -> int:
        """Bytes that this rank sends when all weights are gathered once as fp32, by formula, with headers."""
        return self._engine.sent_bytes("weights")

    def reduce_bytes(self) -> int:
        """Bytes that this rank sends when all gradients are reduced once as fp32, by formula, with headers."""
        return self._engine.sent_bytes("gradients")

    # What attachments call.

    def keep_gradients_raw(self, until: Callable[[], bool]) -> None:
        """Send gradients in full precision up to the step before which ``until`` is true, on every rank at once."""
        later = self.plan
        raw = {name: Raw() if name.startswith(at_site("gradients", "")) else c for name, c in later.layers.items()}
        self._waiting = (until, later)
        self._engine.take(replace(later, layers=raw))

    def gather(self, unit: Unit, flat: Tensor, *, keep: Callable[[Tensor], object] | None = None) -> Future[Tensor]:
        """Start filling ``flat``, which holds this rank's part of the weights, with all ranks' as they arrive.

        This rank's own part, too, becomes what it sent of it. ``keep`` is called with that part where only what was
        sent is kept of the weights.
        """
        return self._engine.gather(unit, flat, keep=keep)

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
        members = self._engine.follow_trained(unit, trained)
        if self._adapter is not None and self._adapter.watches(self.step):
            self._observe(self._adapter, members, flat, loss_scale, weights() if weights is not None else {})
        return self._engine.reduce(unit, flat, out, scale=scale, loss_scale=loss_scale)

    def end_pass(self) -> None:
        """Say that no backward pass runs: what is reduced next begins a step."""
        self._engine.end_pass()

    def on_any_rank(self, conditions: Tensor) -> Tensor:
        """Whether each of these conditions holds on any rank: a collective call, between two others."""
        return self._engine.on_any_rank(conditions)

    def drop(self, layers: Collection[str]) -> None:
        """Note that the last pass left no gradients of these layers: residuals keep what it has sent of them."""
        self._engine.drop(layers)

    @property
    def begins_step(self) -> bool:
        """Whether the next reduction is the first one of a backward pass."""
        return self._engine.begins_step

    @property
    def needs_loss_scale(self) -> bool:
        """Whether the scale of the loss matters to anything here."""
        return self._adapter is not None or self.plan.needs_loss_scale

    def reduce_across(
        self, unit: Unit, part: Tensor, trained: Sequence[str], *, loss_scale: float = 1.0
    ) -> Future[Tensor]:
        """Start replacing this rank's part of the gradients of the layers ``trained`` by its mean over all replicas."""
        if self.begins_step:  # among shards of one rank nothing was reduced before
            self._begin_step()
        self._engine.follow_trained(unit, trained)
        return self._engine.reduce_across(unit, part, loss_scale)

    def note(self, *, local_gathers: int = 0, overlapped: int = 0) -> None:
        """Count what the attachment did itself."""
        self._engine.stats.local_gathers += local_gathers
        self._engine.stats.overlapped += overlapped

    def _begin_step(self) -> None:
        """Before the first reduction of a backward pass, on every rank alike."""
        self._engine.begin_step()
        if self._waiting is not None and self._waiting[0]():
            self._engine.plan, self._waiting = self._waiting[1], None
        if self._adapter is None:
            return
        adapter, step = self._adapter, self.step
        plan = self._engine.channels[0].alone(lambda: adapter.begin_step(step, self.plan, None))
        if plan.layers != self.plan.layers:
            # Each unit takes it over with its next reduction: its weights stay the same in one step.
            self._engine.plan = plan
            self._engine.stats.plan_changes += 1

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

    # Checkpoints.

    @property
    def _shares(self) -> list[int]:
        """Identifies the ownership that a state belongs to: over how many each is sharded, for every rank."""
        return [self._engine.units[0].transport.world_size] * self.world_size

    @property
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        return {
            at_site(site, layer.name): layer.shape
            for unit in self._engine.units
            for layer in unit.layers
            for site in ("weights", "gradients", "across")
        }

    def _collect(self) -> dict[str, Tensor]:
        engine = self._engine
        engine.settle()
        options = {"step": engine.step, "seed": engine.seed, "rank": self.rank}
        state = checkpoint.write(engine, engine.plan, self._shapes, **options, shares=self._shares)
        rows = [
            [unit.reductions, weights.slots.learned_at, gradients.slots.learned_at, unit.across]
            for unit, weights, gradients in zip(engine.units, engine.weights, engine.gradients, strict=True)
        ]
        counts = {
            _VERSIONS: torch.tensor(rows, dtype=torch.int64, device="cpu"),
            _EXCHANGES: torch.tensor([engine.gathers, engine.reductions], dtype=torch.int64, device="cpu"),
        }
        return state | checkpoint.sealed(counts, _CHECKSUMS) | self._arrived()

    def _arrived(self) -> dict[str, Tensor]:
        """The weights that have arrived, where only changes are sent: the same on all ranks."""
        replicas = [members.replica for members in self._engine.weights]
        if not any(replica is not None for replica in replicas):
            return {}
        for channel in self._engine.channels:
            channel.alone(lambda: None)  # what is under way still adds to them
        filled = [replica is not None and replica.filled for replica in replicas]
        entries = {_FILLED: torch.tensor(filled, dtype=torch.uint8, device="cpu")}
        for replica in filter(None, replicas):
            entries |= {f"{_ARRIVED}/{name}": replica.value(name).cpu() for name in replica.names}
        return checkpoint.sealed(entries, _ARRIVED_CHECKSUMS)

    def _whole_world(self) -> Transport:
        if self._world is None:
            self._world = self._make_world()
            self._close_at_end(self._world.close)
        return self._world

    def _template(self, plan: Plan, world_size: int) -> dict[str, Tensor]:
        state = checkpoint.template(plan, self._shapes, world_size)
        versions = torch.zeros(len(self._engine.units), 4, dtype=torch.int64, device="cpu")
        counts = {_VERSIONS: versions, _EXCHANGES: torch.zeros(2, dtype=torch.int64, device="cpu")}
        changing = [name for members in self._engine.weights for name in members.changing(plan)]
        entries = {
            f"{_ARRIVED}/{name}": torch.zeros(self._shapes[name], dtype=torch.float32, device="cpu")
            for name in changing
        }
        if changing:
            entries[_FILLED] = torch.zeros(len(self._engine.units), dtype=torch.uint8, device="cpu")
            entries = checkpoint.sealed(entries, _ARRIVED_CHECKSUMS)
        return state | checkpoint.sealed(counts, _CHECKSUMS) | entries

    def _read_arrived(self, state: Mapping[str, Tensor], plan: Plan) -> tuple[dict[str, Tensor], Callable[[], None]]:
        """Check the weights that had arrived where only changes are sent: their entries, and what takes them over."""
        keys = {name: f"{_ARRIVED}/{name}" for members in self._engine.weights for name in members.changing(plan)}
        if not keys:
            return {}, lambda: None
        for name in keys:
            if not isinstance(self._asked[name], Delta):
                raise ValueError(
                    f"{name} is sent as {plan[name]} in the state, and as {self._asked[name]} here: give compress() "
                    "the weights= that it was saved with, or start without this state"
                )
        checkpoint.check_sealed(state, [_FILLED, *keys.values()], _ARRIVED_CHECKSUMS)
        filled = checkpoint.integers(state, _FILLED, len(self._engine.units))
        for name, key in keys.items():
            if tuple(state[key].shape) != self._shapes[name] or not bool(torch.isfinite(state[key]).all()):
                raise ValueError(f"{key} in the state is not finite or not of shape {self._shapes[name]}")

        def adopt() -> None:
            for members, was_filled in zip(self._engine.weights, filled, strict=True):
                if members.replica is not None:
                    members.replica.filled = bool(was_filled)
                    for name in members.replica.names:
                        members.replica.load(name, state[keys[name]])

        return {key: state[key] for key in (_FILLED, *keys.values())}, adopt

    def _read(self, state: Mapping[str, Tensor]) -> checkpoint.Checked:
        engine, versions = self._engine, state.get(_VERSIONS)
        known = isinstance(versions, Tensor) and tuple(versions.shape) == (len(engine.units), 4)
        if versions is None or not known or _EXCHANGES not in state:
            raise ValueError(
                "this is not the state of a Wire of this model: shard its modules as they were when it was saved"
            )

        def resharded(saved: Mapping[int, Tensor], slot: Slot, compressor: Compressor, name: str, *_: object) -> Tensor:
            members = engine.members_of(name)
            if members is None:
                return saved[0]
            return reshard_residual(saved, slot, name, members.slots.rank, members.placement)

        counts = checkpoint.integers(state, _EXCHANGES, 2)
        integers = checkpoint.integers(state, _VERSIONS, 4 * len(engine.units))
        loaded = checkpoint.read(state, self.plan, self._shapes, self.rank, self._shares, resharded)
        checkpoint.check_sealed(state, (_VERSIONS, _EXCHANGES), _CHECKSUMS)
        arrived, adopt_arrived = self._read_arrived(state, loaded.plan)
        alike = int(state["shares"].numel()) == self.world_size
        if self._adapter is not None and alike:
            self._adapter.saved_algorithm(state)

        def adopt() -> None:
            engine.restart(loaded.plan, step=loaded.step, seed=loaded.seed)
            engine.gathers, engine.reductions = counts
            adopt_arrived()
            rows = [integers[i : i + 4] for i in range(0, len(integers), 4)]
            for unit, row, *sites in zip(engine.units, rows, engine.weights, engine.gradients, strict=True):
                unit.reductions, unit.last_step, unit.across = row[0], loaded.step, row[3]
                for members, learned_at in zip(sites, row[1:3], strict=True):
                    members.slots.learned_at = learned_at
            for (name, slot_name), value in loaded.slots.items():
                members = engine.members_of(name)
                slot = next(slot for slot in self.plan[name].slots if slot.name == slot_name)
                if members is not None:
                    members.slots.load(name, slot, value)
            if self._adapter is not None:
                self._adapter.load(state if alike else {}, self.plan, None)

        # What is learned here differs between ranks: each learns it from what it sends.
        shared = loaded.shared(learned=False) | {key: state[key] for key in (_VERSIONS, _EXCHANGES)} | arrived
        return checkpoint.Checked(loaded.record(), shared, adopt)


def _record(plan: Plan, units: Sequence[Unit], settings: WireSettings, *, master: bool) -> dict[str, str]:
    """What all ranks must have in common, in the order in which a difference is best reported."""
    record = {"thinwire version": library_version(), "wire format": str(FORMAT_VERSION)}
    record |= {"seed": str(settings.seed), "start": str(settings.start)}
    record |= {"master": str(master), "adapt": str(settings.adapt)}
    record |= machine_record(plan.layers.values())
    for unit in units:
        layers = (f"{layer.name} {layer.shape} along {layer.dim}" for layer in unit.layers)
        record[f"module {unit.name or '(root)'}"] = ", ".join(layers)
    return record | {f"layer {name}": str(compressor) for name, compressor in plan.layers.items()}


def slowest_speeds(
    engine: ShardedEngine, compressors: Collection[Compressor], channel: ShardChannel | None = None
) -> Speeds | None:
    """Of the links of ``channel`` (by default those among which the first unit is sharded), on the slowest rank; None
    if there is nothing to measure."""
    links = channel or engine.channels[0]
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
    for other in engine.all_channels:
        figures = other.alone(partial(other.transport.all_gather, figures)).amax(0)
    *codecs, per_byte, latency = figures.tolist()
    codec_s = dict(zip(ordered, codecs, strict=True))
    return replace(speeds, codec_s=codec_s, bandwidth=1 / per_byte, latency_s=latency)


def declined_plan(engine: ShardedEngine) -> Plan:
    """The engine's plan without what would not pay: sums across replicas are judged by the links between these."""
    layers = dict(engine.plan.layers)
    for across, links in ((False, None), (True, engine.across)):
        if across and links is None:
            continue
        mine = {name: c for name, c in layers.items() if name.startswith("across/") == across}
        coders = {name: coder_of(c) for name, c in mine.items()}
        speeds = slowest_speeds(engine, {c for c in coders.values() if not isinstance(c, Raw)}, links)
        if speeds is not None:
            # What it is weighed against goes by the same messages.
            fast = declined(Plan(coders), replace(speeds, native=0.0)).layers
            layers |= {name: Raw() if isinstance(fast[name], Raw) else c for name, c in mine.items()}
    return replace(engine.plan, layers=layers)
