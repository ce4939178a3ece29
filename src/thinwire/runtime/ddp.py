"""DistributedDataParallel: the Wire that ``thinwire.compress()`` returns, and what it does with each bucket."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from thinwire.collectives import (
    Algorithm,
    CollectiveCall,
    DeviceTransport,
    FailureDetector,
    Layer,
    Layout,
    ScatterReduceAllGather,
    SumRounds,
    Transport,
    TransportError,
    World,
    ring_bytes,
    sum_buffers,
)
from thinwire.collectives.stages import WORKER
from thinwire.compressors import (
    RESIDUAL,
    CodecCall,
    Coded,
    ColdStart,
    Compressor,
    Count,
    Feedback,
    FollowsOptimizer,
    LayerState,
    Learned,
    Raw,
    RawSum,
    State,
    StepEnd,
    Summed,
    cold_start,
    find_mixin,
    learns_at,
    not_finite,
    unwrap,
)
from thinwire.kernels import FORMAT_VERSION, cpu_level
from thinwire.plan import Plan, PlanRecord, Speeds, declined, sent_bytes
from thinwire.plan.policies import Policy, Sync
from thinwire.runtime import checkpoint
from thinwire.runtime.adapt import Adapter, StepClock
from thinwire.runtime.channel import BucketLayers, Channel, Contents, Route
from thinwire.runtime.consistency import agree, check_parity, library_version, raise_together, resync
from thinwire.runtime.executor import AsyncReadback, Job, StreamExecutor, Then, ThreadExecutor
from thinwire.runtime.handle import Handle
from thinwire.runtime.owed import Owed
from thinwire.runtime.probe import measure_speeds, settle
from thinwire.runtime.state import PoisonMonitor, Slots, moved_residual
from thinwire.runtime.stats import Stats, StatsRecorder, TrafficStats
from thinwire.runtime.table import layer_table
from thinwire.runtime.timeline import Timeline, rank_path


class Wire(Handle["Engine"]):
    """Compressed communication of one model: its plan, its state, its statistics.

    ``state_dict()`` holds tensors only and belongs into every checkpoint: random draws depend on the step, and error
    feedback keeps a residual, so a run that resumes with it continues bit for bit.
    """

    def __init__(
        self,
        plan: Plan,
        shapes: Mapping[str, Sequence[int]],
        transport: Transport,
        *,
        seed: int = 0,
        start: int = 0,
        skip_if_slower: bool = False,
        simulated: bool = False,
        measure: int = 0,
        optimizer: torch.optim.Optimizer | None = None,
        algorithm: Algorithm | None = None,
        adapt: Policy | None = None,
    ) -> None:
        super().__init__(plan, seed=seed, start=start)
        self._optimizer = optimizer
        # Says now what it would lack then.
        plan.at_step(0, self._learning_rate()).for_world(transport.world_size, shapes)
        # Between devices the same is done on a stream beside backward's, without threads.
        self.device = transport.device if isinstance(transport, DeviceTransport) else None
        """The device on which gradients are compressed and sent; None if they go over the host."""
        nodes_too = adapt is not None and bool(adapt.considers)
        algorithm, world = settle(algorithm or ScatterReduceAllGather(), transport, nodes_too=nodes_too)
        self._executor = ThreadExecutor("thinwire") if self.device is None else StreamExecutor(self.device)
        channel = Channel(transport, self._executor, TrafficStats(), algorithm=algorithm, world=world, seed=seed)
        self._engine = Engine(plan, shapes, channel, start=start, simulated=simulated, measure=measure)
        self._release_when_dropped([self._executor], [transport])
        self._step = -1
        self._speeds: Speeds | None = None
        agree(self._engine.record(self._step) | {"adapt": str(adapt)}, transport)
        if not simulated and self.world_size > 1:
            self._measure_speeds(adapt, skip_if_slower=skip_if_slower)
        if adapt is not None:
            options = {"algorithm": algorithm, "world": world, "start": start, "speeds": self._speeds}
            self._adapter = Adapter(adapt, self.plan, shapes, transport, **options)

    def _measure_speeds(self, adapt: Policy | None, *, skip_if_slower: bool) -> None:
        """Find out how fast ranks and links are, where somebody asks; leave raw what would not pay."""
        engine = self._engine
        reference = {name: c for name, c in engine.plan.layers.items() if not isinstance(c, Raw)}
        timed = set(adapt.to_time(reference)) if adapt is not None else set()
        if skip_if_slower:
            timed |= set(reference.values())
        elif not timed:
            return
        self._speeds = measure_speeds(timed, engine.transport, engine.algorithm, engine.world)
        if skip_if_slower:
            engine.plan = declined(engine.plan, self._speeds)
        engine.reset_stats()

    def __repr__(self) -> str:
        """A table of the layers: spec, or the reason why raw, and bytes a step."""
        title = "Wire of one rank, which sends nothing" if self.world_size == 1 else f"Wire of {self.world_size} ranks"
        shapes = self._engine.shapes
        return layer_table(
            title, self.plan, shapes, self.declined, lambda name, c: sent_bytes(c, shapes[name], self.world_size)
        )

    @property
    def algorithm(self) -> Algorithm:
        """The collective algorithm of the coded messages."""
        return self._engine.algorithm

    @property
    def speeds(self) -> Speeds | None:
        """What declining measured, or what a policy asked for; None if nobody did."""
        return self._speeds

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
    def detector(self) -> FailureDetector | None:
        """What names the rank that caused a failure."""
        return self._engine.transport.detector

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
        if self._attached:
            self._executor.call(self._engine.reset_stats)
        else:
            self._engine.reset_stats()

    def wire_bytes_per_step(self) -> int:
        """Bytes that this rank sends in a compressed step, by the formula of the buckets that the last step had."""
        return sum(route.sent_bytes for route in self._engine.routes_of(self._step))

    @property
    def dense(self) -> bool:
        """Whether the present step is uncompressed: it is before ``start``, or every layer is raw.

        The attachment then leaves gradients to a native all-reduce, as without a Wire, and calls `count_dense`.
        """
        return not self._attached or self._step < self.start or self._engine.plan.all_raw

    def begin_step(self, learning_rates: Mapping[str, float] | None = None) -> None:
        """Count a new backward pass. Attachments call this before its first bucket.

        ``learning_rates`` are those of the layers that follow the optimizer; see `on_optimizer_step`.
        """
        # After an error, buckets of that pass may still be under way: they must not write over this one's gradients.
        self._executor.wait_idle()
        if self._clock is not None:
            self._clock.end()
        self._engine.recorder.clipping.warn()
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
        if plan is not self.plan or adapter.algorithm != self.algorithm:
            self._executor.call(lambda: self._engine.change(plan, adapter.algorithm, self._step))

    def observe(self, flat: Tensor, layers: BucketLayers, *, loss_scale: float = 1.0) -> None:
        """Show a bucket's gradients to the policy, before they are reduced. Attachments call this for each bucket."""
        if self._clock is not None:
            self._clock.ready(flat, layers)
        if self._adapter is not None and self._attached:
            self._adapter.observe(flat, layers, self._step, loss_scale)

    def add_owed(self, flat: Tensor, layers: BucketLayers, *, loss_scale: float = 1.0) -> bool:
        """Add to a bucket's gradients the residuals of layers that keep none from this step on.

        A policy has taken error feedback from them. Attachments call this for each bucket, before it is reduced. If it
        returns True, they call `note_owed` with the bucket's mean.
        """
        if not self._engine.owed:
            return False
        self._engine.owed.send(flat, layers, loss_scale)
        return True

    def note_owed(self, mean: Tensor) -> None:
        """See whether a bucket's mean is finite: if one of a step's is not, residuals that it took are sent again."""
        self._engine.owed.note_mean(mean)

    def on_optimizer_step(self, changes: Mapping[str, float]) -> None:
        """Say what the optimizer did to the layers that follow it: ``‖x^k − x^{k−1}‖²``, the same on all ranks."""
        self._engine.changes = dict(changes)

    def on_partial_use(self, shares: Mapping[str, Tensor]) -> None:
        """Say which share (0 to 1) of the last step's result of a layer was used: its residual keeps the rest."""
        self._engine.used = dict(shares)

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

    def count_beside(self, num_bytes: int) -> None:
        """Count ``num_bytes`` that a native all-reduce has moved beside the gradients of a bucket."""
        self._engine.recorder.beside(ring_bytes(num_bytes, self.world_size))

    def reduce(self, flat: Tensor, layers: BucketLayers, *, loss_scale: float = 1.0) -> torch.futures.Future[Tensor]:
        """Start replacing ``flat``, the gradients of ``layers`` end to end, by their mean over all ranks.

        ``loss_scale`` is how many times larger than the gradients its values are (a `GradScaler`'s scale). The future's
        result is ``flat`` itself; whatever goes wrong reaches the caller through it.
        """
        timeline = self._engine.timeline
        job = self._engine.channel.guarded(self._engine.reduce(flat, layers, self._step, loss_scale))
        if timeline:
            job = timeline.bucket(job, self._step, [name for name, _ in layers], flat.nbytes)
        future = self._executor.submit(job)
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
        checked = self._executor.submit(self._engine.check_parity(parameters, self._step))
        if now or self.dense or self.simulated:
            checked.wait()
            self._engine.raise_parity_error()

    def resync(self, parameters: Mapping[str, Tensor]) -> None:
        """Give every rank rank 0's parameters, between steps. All ranks must call it."""
        self._executor.call(lambda: resync(parameters, self._engine.transport))
        self._engine.stats.resyncs += 1

    def state_dict(self) -> dict[str, Tensor]:
        """Step, seed, plan and this rank's slots, as tensors: loads with ``weights_only=True``.

        For checkpoints to which every rank writes: ``torch.distributed.checkpoint``, where the keys of slots, which
        carry the rank, merge, or one file for each rank. Where one rank writes, save `gather_state_dict`.
        """
        state = self._executor.call(lambda: self._engine.collect(self._step))
        if self.moments is not None:
            state |= self.moments.state(self.rank)
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
        if self.moments is not None:
            state |= self.moments.template(world_size)
        return state | self._adapter.state() if self._adapter else state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a `gather_state_dict`, or from this rank's own `state_dict`. All ranks call it, between steps.

        A gathered state loads into a world of any size: with another number of ranks the mean residual is preserved
        (`thinwire.runtime.state.reshard`). A `state_dict` loads on the rank that saved it, in a world of the same size.

        Raises:
            ValueError: the state is of another wire format or of a model with other layers, or lacks the slots of some
                ranks.
            PeerFailedError: it is so on another rank.
            DisagreementError: ranks loaded different states.
        """
        algorithm, loaded, moments, error = self.algorithm, None, None, None
        try:
            if self._adapter is not None:
                algorithm = self._adapter.saved_algorithm(state)
            shares = self._engine.shares_of(algorithm)
            loaded = checkpoint.read(state, self._engine.plan, self._engine.shapes, self.rank, shares)
            moments = self.moments.read(state, self.rank, self.world_size) if self.moments is not None else None
        except Exception as invalid:  # noqa: BLE001 - raised on every rank below
            error = invalid
        self._executor.call(lambda: raise_together(error, self._engine.transport, "load_state_dict()"))
        assert loaded is not None
        self._executor.call(lambda: self._engine.adopt(loaded, algorithm))
        self._step = loaded.step
        if self.moments is not None and moments is not None:
            self.moments.load(moments)
        if self._adapter is not None:
            self._adapter.load(state, self.plan, self._learning_rate())

    def discard_step(self) -> None:
        """Leave residuals as they were before the last step, whose means are not used."""
        self._executor.wait_idle()
        self._engine.discard_step()

    def succeed(self, former: Wire) -> None:
        """Take over the residual of ``former``, a Wire of the same plan among other ranks, which may be broken.

        Other slots, such as factors that all ranks share, start anew on all of them.
        """
        former._executor.wait_idle()
        self._engine.succeed(former._engine)

    def _gather(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return self._executor.call(lambda: super(Wire, self)._gather(state))

    def _whole_world(self) -> Transport:
        return self._engine.transport

    def _close(self) -> None:
        self._executor.close()
        self._engine.transport.close()


class StepPlan:
    """The plan as it is in the present step. Slots stay with their layers; messages change their sizes."""

    def __init__(self, num_ranks: int, shapes: Mapping[str, Sequence[int]], slots: Slots) -> None:
        self._num_ranks, self._shapes, self._slots = num_ranks, shapes, slots
        self._known: dict[str, int] = {}
        self._begun: set[str] = set()
        self._present = Plan({})
        self._raw_is_summed = False
        self.number = 0
        """Which of the forms seen so far the present one is."""
        self.learns_at: set[int] = set()

    def forget(self) -> None:
        """Start anew: from another plan, with other slots."""
        self._known.clear()
        self._begun.clear()

    def follow(self, plan: Plan, step: int, learning_rate: float | None) -> None:
        """Take the form of ``step``, counted from the first compressed one."""
        present = self._form_of(plan, step, learning_rate)
        if present.layers == self._present.layers and self._known:
            return
        self._present = present
        self.number = self._known.setdefault(present.hash, len(self._known))
        coded = [c for c in present.layers.values() if isinstance(c, Coded)]
        self.learns_at = {at for compressor in coded for at in learns_at(compressor)}
        sums = any(isinstance(c, Summed) for c in present.layers.values())
        self._raw_is_summed = sums and all(isinstance(c, Raw) for c in coded)

    def add(self, name: str, plan: Plan, step: int, learning_rate: float | None) -> None:
        """Take in a layer that ``plan`` has only now; for the others its coming counts from the next step on."""
        late = self._form_of(plan, step, learning_rate)[name]
        self._present = replace(self._present, layers={**self._present.layers, name: late})

    def __getitem__(self, name: str) -> Compressor:
        """What a layer has in this step. Raw layers join the sums where there are no messages to ride in."""
        compressor = self._present[name]
        return RawSum() if isinstance(compressor, Raw) and self._raw_is_summed else compressor

    def _form_of(self, plan: Plan, step: int, learning_rate: float | None) -> Plan:
        for name, compressor in plan.layers.items():
            if name in self._begun or cold_start(compressor) is None:
                continue
            if self._slots.moved(name, compressor, self._shapes[name]):
                self._begun.add(name)
        return plan.at_step(step, learning_rate).for_world(self._num_ranks, self._shapes).with_cold_starts(self._begun)


def simulate(
    flat: Tensor, layout: Layout, *, seed: int, step: int, rank: int, num_ranks: int, state: State | None
) -> None:
    """Replace each layer of ``flat`` by what its receivers would decode, on any device.

    ``layout`` is that of a world of one: every layer is whole. The second coding, that of the mean by its owner, is
    left out, and error feedback works on the worker's side alone.
    """
    call = CollectiveCall(seed, step, scale=1.0, state=state)
    key = call.key(WORKER, rank)
    for chunk in (*layout.chunks, *layout.gathered):
        message = torch.zeros(chunk.message_bytes, dtype=torch.uint8, device=flat.device)
        for compressor, segments in chunk.groups:
            compressor.encode(flat, message, CodecCall(segments, key, state=state))
            compressor.decode(message, flat, CodecCall(segments))
    buffers = sum_buffers(layout, flat.device)
    running = SumRounds(flat, layout, buffers, call, rank=rank, num_ranks=num_ranks)
    running.start()
    for s, buffer in zip(layout.sums, buffers, strict=True):
        if s.op == "sum" and not s.dtype.is_floating_point:
            # As if all ranks had sent the same: integers are not divided by their number beforehand.
            buffer.mul_(num_ranks)
        running.go_on(s)


_STALE_STEPS = 16

RouteKey = tuple[BucketLayers, torch.dtype, int]
"""Layers and dtype of a bucket, and the number of the plan's variant, where it has a schedule."""


class Engine:
    """Plan, routes, slots and statistics of a Wire: the client of a `Channel` that reduces DDP's buckets."""

    def __init__(
        self,
        plan: Plan,
        shapes: Mapping[str, Sequence[int]],
        channel: Channel[TrafficStats],
        *,
        start: int,
        simulated: bool,
        measure: int = 0,
    ) -> None:
        self.plan = plan
        self.channel, self.transport = channel, channel.transport
        self.shapes = {name: tuple(shape) for name, shape in shapes.items()}
        self.start = start
        self.simulated = simulated
        self.measure = measure
        self.learning_rate: float | None = None
        """The optimizer's in the present step, for compressors that follow it."""
        self.learning_rates: Mapping[str, float] = {}
        """The same by layer."""
        self.changes: Mapping[str, float] = {}
        self.used: Mapping[str, Tensor] = {}
        """The change that the optimizer's last step made to each layer that follows it: ``‖x^k − x^{k−1}‖²``."""
        self._loss_scale = 1.0
        self.recorder = StatsRecorder(self.transport)
        self.timeline: Timeline | None = None
        self.slots = Slots()
        self._poison = PoisonMonitor()
        self._step_plan = StepPlan(self.transport.world_size, self.shapes, self.slots)
        self.routes: dict[RouteKey, Route] = {}
        self._last_steps: dict[RouteKey, int] = {}
        """The last step in which each route was used."""
        self._parity_error: Exception | None = None
        # On a device the host reads these when the next step begins: by then they have long been computed.
        self._finite, self._limits, self._clippings = AsyncReadback(), AsyncReadback(), AsyncReadback()
        self._failed = False
        self.owed = Owed()

    @property
    def seed(self) -> int:
        return self.channel.seed

    @property
    def algorithm(self) -> Algorithm:
        return self.channel.algorithm

    @property
    def world(self) -> World:
        return self.channel.world

    @property
    def stats(self) -> Stats:
        """Totals while they grow."""
        return self.recorder.stats

    @property
    def rank(self) -> int:
        return self.transport.rank

    @property
    def world_size(self) -> int:
        return self.transport.world_size

    def record(self, step: int) -> dict[str, str]:
        """What all ranks must have in common, in the order in which a difference is best reported."""
        record = {
            "thinwire version": library_version(),
            "wire format": str(FORMAT_VERSION),
            "algorithm": f"{self.algorithm} on nodes {self.world.nodes}",
            "seed": str(self.seed),
            "start": str(self.start),
            "simulated": str(self.simulated),
            "measure": str(self.measure),
            "step": str(step),
        }
        if not all(compressor.traits.exact_bits for compressor in self.plan.layers.values()):
            record |= self._machine()
        return record | {f"layer {name}": str(compressor) for name, compressor in self.plan.layers.items()}

    def _machine(self) -> dict[str, str]:
        """What must be alike where compressors do not give the same bits on any machine."""
        if isinstance(self.transport, DeviceTransport):
            device = self.transport.device
            return {"device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type}
        return {"CPU level": cpu_level(), "threads": str(torch.get_num_threads())}

    @property
    def shares(self) -> tuple[int, ...]:
        """How much of every layer each rank owns, in proportion; nobody owns anything where all is gathered."""
        return self.shares_of(self.algorithm)

    def shares_of(self, algorithm: Algorithm) -> tuple[int, ...]:
        """The same by another algorithm."""
        return (0,) * self.world_size if algorithm.gathers else algorithm.shares(self.world)

    def check_parity(self, parameters: Mapping[str, Tensor], step: int) -> Job:
        """A job of the executor: compare all ranks' parameters; a difference is raised by the bucket that follows."""
        yield Then.ALONE
        try:
            check_parity(parameters, self.transport, step)
        except Exception as error:  # noqa: BLE001 - raised by the bucket that follows
            self._parity_error = error
        self.stats.parity_checks += 1
        return torch.empty(0)

    def raise_parity_error(self) -> None:
        """Raise what `check_parity` found, if it found anything."""
        error, self._parity_error = self._parity_error, None
        if error is not None:
            raise error

    def collect(self, step: int) -> dict[str, Tensor]:
        self._end()
        return checkpoint.write(
            self.slots, self.plan, self.shapes, step=step, seed=self.seed, rank=self.rank, shares=self.shares
        )

    def end_step(self) -> Sync | None:
        """Between two steps: what the last one's communication took, if it was compressed; asked once."""
        self.owed.end_step()
        seconds = self.recorder.sync_seconds()
        sizes = tuple(route.sent_bytes for route in self.present_routes())
        return Sync(sizes, seconds) if seconds and sizes else None

    def present_routes(self) -> list[Route]:
        """Those of the last step, in the order in which buckets leave."""
        last = max(self._last_steps.values(), default=-1)
        return self.routes_of(last)

    def routes_of(self, step: int) -> list[Route]:
        """The routes of the buckets whose last step was ``step``."""
        return [route for key, route in self.routes.items() if self._last_steps[key] == step]

    def _forget_routes(self) -> None:
        self.routes.clear()
        self._last_steps.clear()

    def change(self, plan: Plan, algorithm: Algorithm, step: int) -> None:
        """Between two steps, on every rank: take another plan, or another collective algorithm.

        A layer keeps its residual. If its new compressor has none, the residual is sent with its next gradient.
        """
        self._end()
        if algorithm != self.algorithm:
            self.slots.release(list(self.routes))
            self._forget_routes()
        old_shares, self.channel.algorithm = self.shares, algorithm
        for name, compressor in plan.layers.items():
            if (old := self.plan[name]) != compressor or self.shares != old_shares:
                if isinstance(old, Feedback) and RESIDUAL not in compressor.slots:
                    owners = (0,) * self.world_size if self.simulated else old_shares
                    owed = self.slots.owed(name, self.shapes[name], old, self.rank, owners)
                    self.owed.add(name, owed.mul_(old.in_gradients(self.learning_rate)))
                alike = type(unwrap(old)) is type(unwrap(compressor))
                if isinstance(old, Summed) and RESIDUAL in old.slots and not alike:
                    self.slots.average_residual(name, self.transport)
                self.slots.hand_over(name, self.shapes[name], old, compressor, self.rank, old_shares, self.shares)
        self.plan = plan
        self.stats.plan_changes += 1
        agree({"step": str(step), "plan": plan.hash, "algorithm": str(algorithm)}, self.transport)

    def discard_step(self) -> None:
        self._finite.read()
        self.slots.discard()
        self.owed.keep()

    def succeed(self, former: Engine) -> None:
        former._end()
        residuals = {}
        for name, compressor in self.plan.layers.items():
            if RESIDUAL in compressor.slots:
                value = former.slots.value(name, RESIDUAL, self.shapes[name])
                old, new = (former.rank, former.shares), (self.rank, self.shares)
                residuals[name, RESIDUAL.name] = moved_residual(value, compressor, name, old, new)
        self.slots.replace(residuals)

    def adopt(self, loaded: checkpoint.Loaded, algorithm: Algorithm) -> None:
        self.plan, self.channel.seed, self.channel.algorithm = loaded.plan, loaded.seed, algorithm
        self._forget_routes()
        self._step_plan.forget()
        self.owed.clear()
        self.slots.replace(loaded.slots)
        agree(self.record(loaded.step), self.transport)

    def reduce(self, flat: Tensor, layers: BucketLayers, step: int, loss_scale: float) -> Job:
        """A job of the executor: replace ``flat`` by its mean over all ranks, and return it."""
        try:
            if self.world_size > 1:
                yield from self._communicate(flat, layers, step, loss_scale)
        except TransportError:
            raise
        except Exception:
            # Peers have the same news, or will: nobody commits this step.
            self._failed = True
            raise
        self.raise_parity_error()
        return flat

    def simulate(self, flat: Tensor, layers: BucketLayers, step: int, loss_scale: float) -> None:
        """Replace ``flat`` by what would arrive of it, and count the bytes that would have been sent."""
        self._begin(step)
        key = (layers, flat.dtype, self._step_plan.number)
        route = self._route(flat, key, step)
        state = self._state(key, route, loss_scale, flat.device)
        if state is not None:
            self._learn(flat, route.layout, step, state)
        self._poison.note_gradients(flat)
        options = {"seed": self.seed, "step": step, "rank": self.rank, "num_ranks": self.world_size}
        simulate(flat, route.layout, state=state, **options)
        self.recorder.clipped(*route.clipped(state))
        self.recorder.bucket(ring_bytes(flat.nbytes, self.world_size), route.sent_bytes)

    def note_result(self, flat: Tensor) -> None:
        """See whether a mean is finite: if one of a step's is not, no slot moves in it, on any rank."""
        if self.plan.has_slots:
            self._finite.note(not_finite(flat))

    def follow(self, mean: Tensor, layers: BucketLayers) -> None:
        """Give slots that follow the mean of all ranks a simulated step's: until now they had this rank's own."""
        start = 0
        for name, shape in layers:
            numel = math.prod(shape)
            if (of := self.slots.layer(name)) is not None:
                state = State({}, {}, self._loss_scale, {name: of}, self.learning_rates)
                if (cold := find_mixin(self.plan[name], ColdStart)) is not None:
                    cold.follow(mean[start : start + numel], name, state)
            start += numel

    def _communicate(self, flat: Tensor, layers: BucketLayers, step: int, loss_scale: float) -> Iterator[Then]:
        self._begin(step)
        self.recorder.bucket_begins()
        key = (layers, flat.dtype, self._step_plan.number)
        learning = step - self.start in self._step_plan.learns_at
        if key not in self.routes or learning:
            # Ranks agree on a new route, or share what is learned, by native collectives: those have one order.
            yield Then.ALONE
        route = self._route(flat, key, step)
        state = self._state(key, route, loss_scale, flat.device)
        if learning and state is not None:
            self._learn(flat, route.layout, step, state)
        self._poison.note_gradients(flat)
        exact = flat.to(torch.float32, copy=True) if self.measure and step % self.measure == 0 else None
        clock = self.timeline or self.stats
        yield from self.channel.exchange(route, flat, CollectiveCall(self.channel.seed, step, state=state, clock=clock))
        if exact is not None:
            # Against the exact mean, which takes an all-reduce in fp32.
            self.transport.all_reduce(exact.div_(self.world_size), lane=1)
            self.recorder.measure(exact, flat, step)
        self.note_result(flat)
        self._note_limits(route, state)
        self.stats.encoded += route.layout.num_coded
        self.recorder.bucket(ring_bytes(flat.nbytes, self.world_size))
        self.recorder.bucket_ends()

    def _note_limits(self, route: Route, state: State | None) -> None:
        """Count the values that the last messages and sums could not hold."""
        saturated, overflowed = route.limits(self.rank)
        if isinstance(saturated, Tensor) or isinstance(overflowed, Tensor):
            self._limits.note(_stacked(saturated, overflowed, self.transport))
        else:
            self.recorder.limits(int(saturated), int(overflowed))
        clipped, rounded = route.clipped(state)
        if isinstance(clipped, Tensor):
            self._clippings.note(_stacked(clipped, rounded, self.transport))
        else:
            self.recorder.clipped(clipped, rounded)

    def _state(self, key: RouteKey, route: Route, loss_scale: float, device: torch.device) -> State | None:
        self._loss_scale = loss_scale
        state = self.slots.state(key, route.layout, loss_scale, device)
        if state is None or (not self.learning_rates and self.learning_rate is None):
            return state
        rate = 1.0 if self.learning_rate is None else self.learning_rate
        return replace(state, learning_rates=self.learning_rates, learning_rate=rate)

    def _learn(self, flat: Tensor, layout: Layout, step: int, state: State) -> None:
        """Learn from rank 0's gradients what all ranks are to code with from this step on."""
        for layer in layout.layers:
            compressor = layer.compressor
            learned = find_mixin(compressor, Learned)
            if learned is None or step - self.start not in learned.learns_at:
                continue
            slots = state.layers[layer.name].now
            if self.rank == 0:
                values = flat[layer.start : layer.start + layer.numel].float() / state.loss_scale
                for name, value in learned.learn(values, slots).items():
                    slots[name].copy_(value.view_as(slots[name]))
            for slot in compressor.slots:
                if slot.learned:
                    self.transport.broadcast(slots[slot.name])

    def count_dense(self, num_bytes: int, step: int) -> None:
        """Count gradients of ``num_bytes`` that went by a native all-reduce."""
        self._count_step(step)
        moved = ring_bytes(num_bytes, self.world_size)
        self.recorder.bucket(moved, moved)

    def reset_stats(self) -> None:
        """Start counting anew."""
        for readback in (self._limits, self._clippings):
            readback.read()
        self.recorder.reset()

    def present_stats(self) -> Stats:
        """Totals, with what the transport has moved and the memory held now."""
        self._count_limits()
        held = sum(route.num_bytes for route in list(self.routes.values()))
        return self.recorder.present(held, self.slots.num_bytes)

    def _count_limits(self) -> None:
        for saturated, overflowed in (counts.tolist() for counts in self._limits.read()):
            self.recorder.limits(saturated, overflowed)
        for clipped, rounded in (counts.tolist() for counts in self._clippings.read()):
            self.recorder.clipped(clipped, rounded)

    def _count_step(self, step: int) -> bool:
        return self.recorder.step(step, compressed=not (step < self.start or self.plan.all_raw))

    def _begin(self, step: int) -> None:
        if not self._count_step(step):
            return
        self._end()
        if self._poison.suspected and self._poison.confirmed(self.transport):
            self.slots.reset()
            self._step_plan.forget()
            self.stats.state_resets += 1
            self._poison.warn(step)
        self._step_plan.follow(self.plan, step - self.start, self.learning_rate)
        # DDP rebuilds its buckets once or twice; the buffers of the old ones are given back.
        stale = [key for key, last in self._last_steps.items() if last < step - _STALE_STEPS]
        self.slots.release(stale)
        for key in stale:
            del self.routes[key], self._last_steps[key]

    def _end(self) -> None:
        """Let the slots take what the last step left for them: nothing, if some rank met NaN or Inf in it."""
        self.recorder.end_measure()
        self._count_limits()
        means = self._finite.read()
        finite = all(bool(torch.isfinite(value)) for value in means)
        if means and not self._failed:
            self._poison.end_step(finite=finite)
        if finite and not self._failed:
            self._end_compressors()
            self.slots.keep_rest(self.used)
            self.slots.commit()
        else:
            self.slots.discard()
            self.stats.nonfinite_steps += 1
        self._failed, self.used = False, {}
        self._follow_optimizer()

    def _follow_optimizer(self) -> None:
        together: dict[Compressor, list[tuple[LayerState, float]]] = {}
        for name, change in self.changes.items():
            if (of := self.slots.layer(name)) is not None and math.isfinite(change):
                together.setdefault(self.plan[name], []).append((of, change))
        self.changes = {}
        for compressor, changes in together.items():
            if (following := find_mixin(compressor, FollowsOptimizer)) is not None:
                following.on_optimizer_step(changes)

    def _end_compressors(self) -> None:
        """Let compressors decide what their layers decide together."""
        together: dict[Compressor, list[LayerState]] = {}
        for layer, of in self.slots.touched_layers():
            # That of the plan: a layer's form in this step may differ from the others'.
            compressor = self.plan[layer.name]
            if find_mixin(compressor, StepEnd) is not None:
                together.setdefault(compressor, []).append(of)
        for compressor, layers in together.items():
            if (deciding := find_mixin(compressor, StepEnd)) is not None:
                deciding.end_step(layers, self._loss_scale)

    def _route(self, flat: Tensor, key: RouteKey, step: int) -> Route:
        route = self.routes.get(key)
        if route is None:
            route = self.routes[key] = self._new_route(flat, key[0], step)
        self._last_steps[key] = step
        return route

    def _new_route(self, flat: Tensor, layers: BucketLayers, step: int) -> Route:
        layout = self.channel.layout("all_reduce", Contents(None, tuple(self._place(flat, layers, step))), flat.dtype)
        if self.simulated:
            sent_bytes = layout.sent_bytes(self.rank, self.transport) if self.world_size > 1 else 0
            return Route(Layout.build(layout.layers, 1, flat.dtype), sent_bytes)
        names = ", ".join(layer.name for layer in layout.layers)
        return self.channel.open("all_reduce", layout, {"layers of a bucket": names})

    def _place(self, flat: Tensor, layers: BucketLayers, step: int) -> list[Layer]:
        placed, start = [], 0
        for name, shape in layers:
            if name not in self.plan.layers:
                # Frozen when compress() was called, and trained now.
                self.plan, self.shapes[name] = self.plan.extended(name, shape), shape
                self._step_plan.add(name, self.plan, step - self.start, self.learning_rate)
            compressor = self._step_plan[name]
            if not isinstance(compressor, Coded | Summed):
                raise TypeError(f"{name} has {compressor}, which is neither coded nor summed")
            placed.append(Layer(name, start, shape, compressor))
            start += math.prod(shape)
        if start != flat.numel():
            raise ValueError(f"a bucket of {flat.numel()} elements came with layers of {start}")
        return placed


def _stacked(first: Count, second: Count, transport: Transport) -> Tensor:
    """Both counts as one tensor, on the device if there is one: a number sent from the host would make it wait."""
    device = transport.device if isinstance(transport, DeviceTransport) else torch.device("cpu")
    counts = [c if isinstance(c, Tensor) else torch.full((), c, device=device) for c in (first, second)]
    return torch.stack(counts)
