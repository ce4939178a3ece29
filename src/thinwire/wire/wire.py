"""The Wire: what ``thinwire.compress()`` returns, and what keeps it alive."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from thinwire.collectives import DeviceTransport, ScatterReduceAllGather, Topology, Transport
from thinwire.compressors import Raw
from thinwire.plan import Plan, PlanRecord, Policy, Speeds, Sync, declined
from thinwire.wire import checkpoint
from thinwire.wire.adapt import Adapter, Decision
from thinwire.wire.agree import agree
from thinwire.wire.clock import StepClock
from thinwire.wire.device_engine import DeviceEngine
from thinwire.wire.engine import Engine
from thinwire.wire.link import settle
from thinwire.wire.parity import resync
from thinwire.wire.route import BucketLayers
from thinwire.wire.speeds import measure_speeds
from thinwire.wire.stats import Stats
from thinwire.wire.stream import StreamWorker
from thinwire.wire.timeline import Timeline, rank_path
from thinwire.wire.worker import Worker


class Wire:
    """Compressed communication of one model: its plan, its state, its statistics.

    ``state_dict()`` holds tensors only and belongs into every checkpoint: random draws depend on the step, and error
    feedback owes what was not sent yet, so a run that resumes with it continues bit for bit.
    """

    def __init__(
        self,
        plan: Plan,
        shapes: Mapping[str, Sequence[int]],
        transport: Transport,
        *,
        seed: int = 0,
        start: int = 0,
        decline: bool = False,
        simulated: bool = False,
        measure: int = 0,
        optimizer: torch.optim.Optimizer | None = None,
        topology: Topology | None = None,
        adapt: Policy | None = None,
    ) -> None:
        if start < 0:
            raise ValueError(f"start must not be negative, not {start}: it is the number of steps that stay dense")
        if not 0 <= seed < 2**63:
            raise ValueError(f"seed must be between 0 and 2**63 - 1, not {seed}")
        self._optimizer = optimizer
        # Says now what it would lack then.
        plan.at(0, self._learning_rate()).among(transport.world_size, shapes)
        # Between devices the same is done on a stream beside backward's, without threads.
        self.device = transport.device if isinstance(transport, DeviceTransport) else None
        """The device on which gradients are compressed and sent; None if they go over the host."""
        nodes_too = adapt is not None and bool(adapt.considers)
        topology, world = settle(topology or ScatterReduceAllGather(), transport, nodes_too=nodes_too)
        make = Engine if self.device is None else DeviceEngine
        self._engine = make(
            plan,
            shapes,
            transport,
            topology=topology,
            world=world,
            seed=seed,
            start=start,
            simulated=simulated,
            measure=measure,
        )
        self._asked = plan
        self._step = -1
        self._attached = True
        self._speeds: Speeds | None = None
        agree(self._engine.record(self._step) | {"adapt": str(adapt)}, transport)
        if not simulated and self.world_size > 1:
            self._measure_speeds(adapt, decline=decline)
        self._adapter: Adapter | None = None
        if adapt is not None:
            options = {"topology": topology, "world": world, "start": start, "speeds": self._speeds}
            self._adapter = Adapter(adapt, self.plan, shapes, transport, **options)
        self._worker = Worker("thinwire") if self.device is None else StreamWorker(self.device)

    def _measure_speeds(self, adapt: Policy | None, *, decline: bool) -> None:
        """Find out how fast ranks and links are, where somebody asks; leave raw what would not pay."""
        engine = self._engine
        reference = {name: c for name, c in engine.plan.layers.items() if not isinstance(c, Raw)}
        timed = set(adapt.to_time(reference)) if adapt is not None else set()
        if decline:
            timed |= set(reference.values())
        elif not timed:
            return
        self._speeds = measure_speeds(timed, engine.transport, engine.topology, engine.world)
        if decline:
            engine.plan = declined(engine.plan, self._speeds)
        engine.reset_stats()

    @property
    def plan(self) -> Plan:
        """Which compressor each layer has."""
        return self._engine.plan

    @property
    def declined(self) -> dict[str, str]:
        """Layers that stay raw because compressing them would have been slower, and the compressor they would have."""
        asked, now = self._asked.layers, self._engine.plan.layers
        return {
            name: str(asked[name])
            for name, compressor in now.items()
            if isinstance(compressor, Raw) and not isinstance(asked.get(name, compressor), Raw)
        }

    @property
    def unsuited(self) -> dict[str, str]:
        """Layers that stay raw because their compressor cannot take layers of their shape, and why."""
        return dict(self._engine.plan.unsuited)

    @property
    def topology(self) -> Topology:
        """How coded messages meet."""
        return self._engine.topology

    @property
    def speeds(self) -> Speeds | None:
        """What declining measured, or what a policy asked for; None if nobody did."""
        return self._speeds

    @property
    def decisions(self) -> Sequence[Decision]:
        """What the policy has decided so far (``adapt=``)."""
        return tuple(self._adapter.decisions) if self._adapter else ()

    @property
    def syncs(self) -> Sequence[Sync]:
        """What the last steps' communication took, bucket by bucket, where the policy asks for it."""
        return tuple(self._adapter.syncs) if self._adapter else ()

    def plan_record(self) -> PlanRecord:
        """The present plan beside the rules', for ``wire.plan_record().write("plan.json")`` and `thinwire plan show`.

        Errors are those of the last decision; only rank 0, which decides, has them.
        """
        last = self.decisions[-1] if self.decisions else None
        return PlanRecord.of(
            self.plan.layers,
            self._asked.layers,
            self._engine.shapes,
            [[layer.name for layer in route.layout.layers] for route in self._engine.present_routes()],
            self.world_size,
            last.errors if last else {},
            last.reference_errors if last else {},
            self._step,
            str(self._adapter.policy) if self._adapter else "",
            last.note if last else "",
        )

    @property
    def step(self) -> int:
        """Index of the last backward pass that communicated; −1 before the first."""
        return self._step

    @property
    def seed(self) -> int:
        """Seed of the random draws."""
        return self._engine.seed

    @property
    def start(self) -> int:
        """Number of steps at the beginning that stay uncompressed."""
        return self._engine.start

    @property
    def simulated(self) -> bool:
        """Whether only the effect of compression is there, not its communication."""
        return self._engine.simulated

    @property
    def rank(self) -> int:
        return self._engine.transport.rank

    @property
    def world_size(self) -> int:
        return self._engine.transport.world_size

    @property
    def stats(self) -> Stats:
        """Totals so far, as a copy: what is under way is not in it."""
        return dataclasses.replace(
            self._engine.present_stats(),
            declined_layers=len(self.declined),
            unsuited_layers=len(self.unsuited),
            adapt_s=self._adapter.adapt_s if self._adapter else 0.0,
        )

    @contextmanager
    def timeline(self, path: str | os.PathLike[str], *, steps: int = 5) -> Iterator[Timeline]:
        """Record how communication overlaps with backward in the next ``steps`` steps, for ui.perfetto.dev.

        On leaving, every rank writes a file of its own (``trace.json`` becomes ``trace.rank3.json``);
        `thinwire.merge_timelines` joins them.

        Raises:
            RuntimeError: a recording is under way, or communication is only simulated, or on a device.
        """
        if self.device is not None:
            raise RuntimeError(
                "no timeline: a timeline times the host, and on a device the host does not communicate; torch.profiler "
                "shows the stages there as 'thinwire encode', 'wire', 'reduce' and 'decode'"
            )
        if self._engine.timeline is not None or self.simulated:
            raise RuntimeError("no timeline: one is being recorded, or communication is simulated (simulate=True)")
        timeline = self._engine.timeline = Timeline(lambda: self._engine.stats, self.rank, steps=steps)
        try:
            yield timeline
        finally:
            self._engine.timeline = None
            timeline.write(rank_path(path, self.rank))

    def reset_stats(self) -> None:
        """Start counting anew."""
        self._worker.call(self._engine.reset_stats)

    def wire_bytes_per_step(self) -> int:
        """Bytes that this rank sends in a compressed step, by the formula of the buckets that the last step had."""
        return sum(route.sent_bytes for route in self._engine.routes.values() if route.last_step == self._step)

    @property
    def dense(self) -> bool:
        """Whether the present step is uncompressed: it is before ``start``, or every layer is raw.

        The attachment then leaves gradients to a native all-reduce, as without a Wire, and calls `count_dense`.
        """
        return not self._attached or self._step < self.start or self._engine.plan.all_raw

    def begin_step(self, learning_rates: Mapping[str, float] | None = None) -> None:
        """Count a new backward pass. Attachments call this before its first bucket.

        ``learning_rates`` are those of the layers that follow the optimizer; `updated` says what it does to them.
        """
        # After an error, buckets of that pass may still be under way: they must not write over this one's gradients.
        self._worker.wait_idle()
        if self._clock is not None:
            self._clock.end()
        self._engine.tally.clipping.warn()
        self._engine.learning_rate = self._learning_rate()
        self._engine.learning_rates = learning_rates or {}
        self._step += 1
        sync = self._engine.end_step()
        if self._adapter is not None:
            self._adapt(self._adapter, sync)
        if self._clock is not None:
            self._clock.begin(compressed=not self.dense)

    @property
    def _clock(self) -> StepClock | None:
        # On a device the host learns nothing of when anything is done.
        return self._adapter.clock if self._adapter is not None and self.device is None else None

    def _adapt(self, adapter: Adapter, sync: Sync | None) -> None:
        if sync is not None and adapter.policy.wants_syncs:
            adapter.syncs.append(sync)
        plan = adapter.begin_step(self._step, self.plan, self._engine.learning_rate)
        if plan is not self.plan or adapter.topology != self.topology:
            self._worker.call(lambda: self._engine.change(plan, adapter.topology, self._step))

    def observe(self, flat: Tensor, layers: BucketLayers, *, loss_scale: float = 1.0) -> None:
        """Show a bucket's gradients to the policy, before they are reduced. Attachments call this for each bucket."""
        if self._clock is not None:
            self._clock.ready(flat, layers)
        if self._adapter is not None and self._attached:
            self._adapter.observe(flat, layers, self._step, loss_scale)

    def updated(self, changes: Mapping[str, float]) -> None:
        """Say what the optimizer did to the layers that follow it: ``‖x^k − x^{k−1}‖²``, the same on all ranks."""
        self._engine.changes = dict(changes)

    def _learning_rate(self) -> float | None:
        """The highest of the optimizer's groups, which a schedule may follow."""
        if self._optimizer is None:
            return None
        return max(float(group["lr"]) for group in self._optimizer.param_groups)

    def count_dense(self, num_bytes: int, future: torch.futures.Future[Tensor]) -> torch.futures.Future[Tensor]:
        """Count gradients of ``num_bytes`` that go through a native all-reduce; returns its future to pass on."""
        self._engine.count_dense(num_bytes, self._step)
        future = self._clock.arriving(future) if self._clock is not None else future
        return self._engine.timeline.dense(self._step, num_bytes, future) if self._engine.timeline else future

    def reduce(self, flat: Tensor, layers: BucketLayers, *, loss_scale: float = 1.0) -> torch.futures.Future[Tensor]:
        """Start replacing ``flat``, the gradients of ``layers`` end to end, by their mean over all ranks.

        ``loss_scale`` is how many times larger than the gradients its values are (a `GradScaler`'s scale). The future's
        result is ``flat`` itself; whatever goes wrong reaches the caller through it.
        """
        timeline = self._engine.timeline
        job = self._engine.reduce(flat, layers, self._step, loss_scale)
        if timeline:
            job = timeline.bucket(job, self._step, [name for name, _ in layers], flat.nbytes)
        future = self._worker.submit(job)
        return self._clock.arriving(future) if self._clock is not None else future

    def simulate(self, flat: Tensor, layers: BucketLayers, *, loss_scale: float = 1.0) -> None:
        """Replace ``flat`` by what would arrive of it, here and now, and count the bytes that would have been sent.

        The attachment then takes the mean by a native all-reduce and shows it to `note_result`.
        """
        self._engine.simulate(flat, layers, self._step, loss_scale)

    def note_result(self, flat: Tensor, layers: BucketLayers) -> None:
        """See whether a simulated step's mean is finite: if not, no slot moves in it. Scales follow it."""
        self._engine.note_result(flat)
        self._engine.follow(flat, layers)

    def check_parity(self, parameters: Mapping[str, Tensor], *, now: bool = False) -> None:
        """Compare all ranks' parameters, behind the training loop's back; this step's gradients raise a difference.

        In a dense or simulated step nothing else is under way in the worker: it is waited for, and raised here. So it
        is with ``now``: where gradients do not come to the worker, nothing else keeps the optimizer from going on.
        """
        checked = self._worker.submit(self._engine.check_parity(parameters, self._step))
        if now or self.dense or self.simulated:
            checked.wait()
            self._engine.raise_found()

    def resync(self, parameters: Mapping[str, Tensor]) -> None:
        """Give every rank rank 0's parameters, between steps. All ranks must call it."""
        self._worker.call(lambda: resync(parameters, self._engine.transport))
        self._engine.stats.resyncs += 1

    def state_dict(self) -> dict[str, Tensor]:
        """Step, seed, plan and this rank's slots, as tensors: loads with ``weights_only=True``.

        Keys of slots carry the rank, so the dictionaries of all ranks merge into one: save it with
        ``torch.distributed.checkpoint``, or one file for each rank.
        """
        state: dict[str, Tensor] = {}
        self._worker.call(lambda: state.update(self._engine.collect(self._step)))
        return state | self._adapter.state() if self._adapter else state

    def state_dict_of(self, world_size: int, saved: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """The shape of the merged states of a world of ``world_size`` ranks, to load its checkpoint into.

            state = {"wire": wire.state_dict_of(8)}  # it was written by 8 ranks; this is another number
            torch.distributed.checkpoint.load(state, checkpoint_id=folder)
            wire.load_state_dict(state["wire"])

        Where a policy changes plans (``adapt=``), slots have the shapes that the saved plan's compressors want: load
        ``"plan"`` alone first, ``{"wire": {"plan": wire.state_dict()["plan"]}}``, and pass it as ``saved``.
        """
        plan = self.plan if saved is None else checkpoint.plan_of(saved, self.plan)
        state = checkpoint.template(plan, self._engine.shapes, world_size)
        return state | self._adapter.state() if self._adapter else state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a `state_dict`, on every rank, between steps.

        With as many ranks as before, each needs what it saved itself. With another number, each needs the merged
        dictionaries of all former ranks; the mean of what error feedback owes is kept (`thinwire.wire.slots.reshard`).

        Raises:
            ValueError: the state is of another wire format or of a model with other layers, or ranks are missing in it.
            DisagreementError: ranks loaded different states.
        """
        topology = self._adapter.saved_topology(state) if self._adapter is not None else self.topology
        shares = self._engine.shares_of(topology)
        loaded = checkpoint.read(state, self._engine.plan, self._engine.shapes, self.rank, shares)
        self._step = loaded.step
        self._worker.call(lambda: self._engine.adopt(loaded, topology))
        if self._adapter is not None:
            self._adapter.load(state, self.plan, self._learning_rate())

    @property
    def attached(self) -> bool:
        """False once `detach` was called."""
        return self._attached

    def detach(self) -> None:
        """Stop compressing, between steps and on every rank: gradients go through a plain all-reduce from now on.

        PyTorch cannot unregister a communication hook: the one that is there passes gradients through. The model may be
        compressed again. What error feedback owes is dropped.
        """
        self._attached = False
        self._worker.close()
        self._engine.transport.close()
