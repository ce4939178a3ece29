"""The Wire of a sharded model: weights are gathered, and gradients reduced, compressed (QSDP: thesis, chapter 5)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace

import torch
from torch import Tensor

from thinwire.collectives import ScatterReduceAllGather, Topology, Transport
from thinwire.compressors import Compressor, Raw, Slot
from thinwire.kernels import FORMAT_VERSION, cpu_level
from thinwire.plan import Evidence, Plan, Policy, at_site, balanced
from thinwire.wire import checkpoint
from thinwire.wire.adapt import Adapter, Decision
from thinwire.wire.agree import library_version
from thinwire.wire.sharded_engine import Future, ShardedEngine
from thinwire.wire.sharded_slots import reshard_owed
from thinwire.wire.sharded_speeds import declined_plan, slowest_speeds
from thinwire.wire.sharded_stats import ShardedStats
from thinwire.wire.stats import StageSeconds
from thinwire.wire.units import Members, Unit

_VERSIONS, _EXCHANGES = "versions", "exchanges"
_STAGES = [f.name for f in fields(StageSeconds)]


class ShardedWire:
    """Compressed communication of a sharded model: its plan, its state, its statistics.

    ``state_dict()`` holds tensors only and belongs into every checkpoint, beside the model's and the optimizer's:
    random draws depend on how often gradients were reduced, and error feedback owes what was not sent yet.
    """

    def __init__(
        self,
        plan: Plan,
        units: Sequence[Unit],
        *,
        rank: int,
        world_size: int,
        seed: int = 0,
        start: int = 0,
        master: bool = True,
        decline: bool = False,
        topology: Topology | None = None,
        adapt: Policy | None = None,
        replicas: Transport | None = None,
    ) -> None:
        """``rank`` of ``world_size``: whose of the model's checkpoints this one's is."""
        if start < 0:
            raise ValueError(f"start must not be negative, not {start}: it is the number of steps that stay raw")
        if not 0 <= seed < 2**63:
            raise ValueError(f"seed must be between 0 and 2**63 - 1, not {seed}")
        self._asked = plan
        self.rank, self.world_size = rank, world_size
        self._attached = True
        self._counted: dict[int, tuple[int, int, int, dict[str, float]]] = {}
        self._engine = ShardedEngine(
            plan,
            units,
            topology=topology or ScatterReduceAllGather(),
            seed=seed,
            start=start,
            master=master,
            record=_record(plan, units, {"seed": seed, "start": start, "master": master, "adapt": adapt}),
            replicas=replicas,
        )
        if decline:
            self._engine.take(declined_plan(self._engine))
        self._adapter = self._adapter_of(adapt) if adapt is not None else None
        self.reset_stats()

    def _adapter_of(self, policy: Policy) -> Adapter:
        engines, units = self._engine.engines, self._engine.units
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
            of = self._engine
            return balanced(evidence, max(1.0, of.gathers / max(1, of.reductions)))

        return Adapter(
            policy,
            plan,
            shapes,
            engines[0].transport,
            topology=engines[0].topology,
            world=engines[0].world,
            start=self.start,
            speeds=slowest_speeds(self._engine, policy.to_time(reference)),
            prepare=prepare,
        )

    @property
    def plan(self) -> Plan:
        """What each layer's weights and gradients are compressed with: ``weights/<name>``, ``gradients/<name>``."""
        return self._engine.plan

    @property
    def declined(self) -> dict[str, str]:
        """What stays raw because compressing it would have been slower, and the compressor it would have."""
        asked, now = self._asked.layers, self.plan.layers
        return {n: str(asked[n]) for n, c in now.items() if isinstance(c, Raw) and not isinstance(asked[n], Raw)}

    @property
    def unsuited(self) -> dict[str, str]:
        """What stays raw because its compressor cannot take layers of its shape, and why."""
        return dict(self.plan.unsuited)

    @property
    def decisions(self) -> Sequence[Decision]:
        """What the policy has decided so far (``adapt=``)."""
        return tuple(self._adapter.decisions) if self._adapter else ()

    @property
    def step(self) -> int:
        """Index of the last backward pass that reduced gradients; −1 before the first."""
        return self._engine.step

    @property
    def seed(self) -> int:
        """Seed of the random draws."""
        return self._engine.seed

    @property
    def start(self) -> int:
        """Number of steps at the beginning that stay raw."""
        return self._engine.start

    @property
    def master(self) -> bool:
        """Whether ranks keep their shards as the optimizer left them, beside what they sent of them."""
        return self._engine.master

    @property
    def attached(self) -> bool:
        """False once `detach` was called."""
        return self._attached

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
        for flat in engine.all_engines:
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
        for flat in self._engine.all_engines:
            now = flat.present_stats()
            stages = {stage: getattr(now, stage) for stage in _STAGES}
            self._counted[id(flat)] = (
                now.payload_sent_bytes,
                now.payload_received_bytes,
                now.payload_shared_bytes,
                stages,
            )

    def gather_bytes(self, dtype: torch.dtype = torch.float32) -> int:
        """Bytes that this rank sends when all weights are gathered once as ``dtype``, by formula, with headers."""
        return self._engine.sent_bytes("weights", dtype)

    def reduce_bytes(self, dtype: torch.dtype = torch.float32) -> int:
        """Bytes that this rank sends when all gradients are reduced once as ``dtype``, by formula, with headers."""
        return self._engine.sent_bytes("gradients", dtype)

    # What attachments call.

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
        if self._engine.begins_step(unit):
            self._begin_step()
        members = self._engine.follow_trained(unit, trained)
        if self._adapter is not None and self._adapter.watches(self.step):
            self._observe(self._adapter, members, flat, loss_scale, weights() if weights is not None else {})
        return self._engine.reduce(unit, flat, out, scale=scale, loss_scale=loss_scale)

    def mark(self, queue: Callable[[Callable[[], object]], bool]) -> None:
        """In a backward pass, after its first reduction: ask to be told of its end, by ``queue``, which says whether
        it will."""
        self._engine.mark(queue)

    @property
    def minds_scale(self) -> bool:
        """Whether the scale of the loss matters to anything here."""
        return self._adapter is not None or self.plan.has_slots

    def reduce_across(self, unit: Unit, part: Tensor) -> Future[Tensor]:
        """Start replacing this rank's part of the gradients by its mean over all replicas."""
        return self._engine.reduce_across(unit, part)

    def note(self, *, local_gathers: int = 0, overlapped: int = 0) -> None:
        """Count what the attachment did itself."""
        self._engine.stats.local_gathers += local_gathers
        self._engine.stats.overlapped += overlapped

    def _begin_step(self) -> None:
        """Before the first reduction of a backward pass, on every rank alike."""
        self._engine.begin_step()
        if self._adapter is None:
            return
        plans: list[Plan] = []
        adapter, step = self._adapter, self.step
        self._engine.engines[0].alone(lambda: plans.append(adapter.begin_step(step, self.plan, None)))
        if plans[0].layers != self.plan.layers:
            # Each unit takes it over with its next reduction: its weights stay the same in one step.
            self._engine.plan = plans[0]
            self._engine.stats.plan_changes += 1

    def _observe(
        self, adapter: Adapter, members: Members, flat: Tensor, loss_scale: float, weights: Mapping[str, Tensor]
    ) -> None:
        gradients = {name: members.placement.whole(flat, name) for name in members.placement.by_name}
        shards = {at_site("weights", name): weights[name] for name in weights}
        for found, scale in ((gradients, loss_scale), (shards, 1.0)):
            chosen = {n: v for n, v in found.items() if n in adapter.reference and v.numel()}
            if chosen:
                together = torch.cat([value.detach().reshape(-1).float() for value in chosen.values()])
                layers = tuple((name, tuple(value.shape)) for name, value in chosen.items())
                adapter.observe(together, layers, self.step, scale)

    # Checkpoints.

    @property
    def _shares(self) -> list[int]:
        """What tells whether a state is of ranks that own the same: over how many each is sharded, for every rank."""
        return [self._engine.units[0].transport.world_size] * self.world_size

    @property
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        return {
            at_site(site, layer.name): layer.shape
            for unit in self._engine.units
            for layer in unit.layers
            for site in ("weights", "gradients", "across")
        }

    def state_dict(self) -> dict[str, Tensor]:
        """Step, seed, plan and this rank's slots, as tensors, between steps; every rank must call it.

        Keys of slots carry the rank, so the dictionaries of all ranks merge into one: save it with
        ``torch.distributed.checkpoint``, or one file for each rank.
        """
        engine = self._engine
        engine.settle()
        options = {"step": engine.step, "seed": engine.seed, "rank": self.rank}
        state = checkpoint.write(engine, engine.plan, self._shapes, **options, shares=self._shares)
        rows = [
            [unit.reductions, weights.slots.learned_at, gradients.slots.learned_at, unit.across]
            for unit, weights, gradients in zip(engine.units, engine.weights, engine.gradients, strict=True)
        ]
        state[_VERSIONS] = torch.tensor(rows)
        state[_EXCHANGES] = torch.tensor([engine.gathers, engine.reductions])
        return state | self._adapter.state() if self._adapter else state

    def state_dict_of(self, world_size: int) -> dict[str, Tensor]:
        """The shape of the merged states of a world of ``world_size`` ranks, to load its checkpoint into."""
        state = checkpoint.template(self.plan, self._shapes, world_size)
        state[_VERSIONS] = torch.zeros(len(self._engine.units), 4, dtype=torch.int64)
        state[_EXCHANGES] = torch.zeros(2, dtype=torch.int64)
        return state | self._adapter.state() if self._adapter else state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a `state_dict`, on every rank, between steps.

        With as many ranks as before, each needs what it saved itself. With another number, each needs the merged
        dictionaries of all former ranks; the mean of what error feedback owes is kept.

        Raises:
            ValueError: the state is of another wire format or of a model with other layers, or ranks are missing in it.
            DisagreementError: ranks loaded different states.
        """
        engine, versions = self._engine, state.get(_VERSIONS)
        known = isinstance(versions, Tensor) and tuple(versions.shape) == (len(engine.units), 4)
        if versions is None or not known or _EXCHANGES not in state:
            raise ValueError(
                "this is not the state of a Wire of this model: shard its modules as they were when it was saved"
            )

        def resharded(saved: Mapping[int, Tensor], slot: Slot, compressor: Compressor, name: str, *_: object) -> Tensor:
            members = engine.members_of(name)
            return (
                saved[0] if members is None else reshard_owed(saved, slot, name, members.slots.rank, members.placement)
            )

        counts = checkpoint.integers(state, _EXCHANGES, 2)
        integers = checkpoint.integers(state, _VERSIONS, 4 * len(engine.units))
        loaded = checkpoint.read(state, self.plan, self._shapes, self.rank, self._shares, resharded)
        engine.restart(loaded.plan, step=loaded.step, seed=loaded.seed)
        engine.gathers, engine.reductions = counts
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
        for flat in engine.all_engines:
            flat.agree({"step": str(loaded.step), "plan": loaded.plan.hash, "seed": str(loaded.seed)})
        if self._adapter is not None:
            alike = int(state["shares"].numel()) == self.world_size
            self._adapter.load(state if alike else {}, self.plan, None)

    def detach(self) -> None:
        """Stop compressing, between steps and on every rank: PyTorch's own collectives do the work from now on."""
        self._attached = False
        for flat in self._engine.all_engines:
            flat.close()
            flat.transport.close()


def _record(plan: Plan, units: Sequence[Unit], options: Mapping[str, object]) -> dict[str, str]:
    """What all ranks must have in common, in the order in which a difference is best told."""
    record = {"thinwire version": library_version(), "wire format": str(FORMAT_VERSION)}
    record |= {name: str(value) for name, value in options.items()}
    if not all(compressor.exact_bits for compressor in plan.layers.values()):
        record |= {"CPU level": cpu_level(), "threads": str(torch.get_num_threads())}
    for unit in units:
        layers = (f"{layer.name} {layer.shape} along {layer.dim}" for layer in unit.layers)
        record[f"module {unit.name or '(root)'}"] = ", ".join(layers)
    return record | {f"layer {name}": str(compressor) for name, compressor in plan.layers.items()}
