"""Buckets of gradients under DistributedDataParallel: the exchange, and the engine that makes it."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch
from torch import Tensor

from thinwire.collectives import Algorithm, DeviceTransport, FailureDetector, Layer, Layout, Transport, ring_bytes
from thinwire.compressors import (
    RESIDUAL,
    Coded,
    ColdStart,
    Compressor,
    Feedback,
    FollowsOptimizer,
    LayerState,
    Learned,
    Raw,
    State,
    StepEnd,
    Summed,
    find_mixin,
    is_informative,
    unwrap,
)
from thinwire.kernels import derive_key
from thinwire.plan import Plan, Site, Speeds, declined, sent_bytes
from thinwire.policies import Policy, Sync
from thinwire.runtime import checkpoint
from thinwire.runtime.adapt import Adapter
from thinwire.runtime.bucket import BucketLayers, Substitute, UnsentResiduals, simulate
from thinwire.runtime.channel import Channel, Contents, Exchange, Route
from thinwire.runtime.consistency import agree, check_parity, fail_together, resync
from thinwire.runtime.engine import Engine, WireSettings, agreed_facts
from thinwire.runtime.executor import Alone, AsyncReadback, StreamExecutor, ThreadExecutor, followed_by, together
from thinwire.runtime.placement import Placement, ShardedLayer
from thinwire.runtime.probe import measure_speeds, settle
from thinwire.runtime.slots import Owners, is_packed, mean_weights, moved_residual, slot_bytes
from thinwire.runtime.stats import Stats, StatsRecorder
from thinwire.runtime.step_plan import StepPlan
from thinwire.runtime.table import LayerRow, layer_rows, layer_table

_T = TypeVar("_T")
_STALE_STEPS = 16


@dataclass
class _SeenBucket:
    """A bucket that was seen before."""

    layers: BucketLayers
    dtype: torch.dtype
    contents: Contents
    having: Mapping[str, Compressor]
    """Layers whose compressors have slots."""
    placement: Placement
    last_step: int
    route: Route | None = None


@dataclass(kw_only=True)
class Bucket(Exchange):
    """Replaces the gradients of a bucket by their mean over all ranks."""

    engine: BucketEngine
    flat: Tensor
    layers: BucketLayers
    loss_scale: float
    made: Substitute | None
    """Substitute that turned the gradients into what is sent in their place, if any."""
    turns: int = 1
    _state: State | None = field(default=None, init=False)
    _exact: Tensor | None = field(default=None, init=False)

    @property
    def result(self) -> Tensor:
        return self.flat

    def begin(self) -> None:
        engine = self.engine
        engine.begin()
        if engine.times_syncs:
            engine.recorder.bucket_begins(self.flat.device)
        self.contents = engine.place(self.flat, self.layers)
        # Ranks share what is learned by native collectives.
        self.alone = bool(engine.learning(self.layers))

    def start(self, route: Route) -> tuple[Tensor, State]:
        engine, flat = self.engine, self.flat
        state = self._state = engine.open(self.contents.key, route, flat, self.loss_scale)
        engine.learn(flat, route.layout, engine.learning(self.layers), state)
        if engine.measure and engine.step % engine.measure == 0:
            self._exact = flat.to(torch.float32, copy=True)
        return flat, state

    def finish(self, x: Tensor, route: Route) -> None:
        engine = self.engine
        engine.close_slots(self.contents.key)
        if self._exact is not None:
            # The exact mean takes an all-reduce in fp32.
            engine.transport.all_reduce(self._exact.div_(engine.world_size), lane=1)
            engine.recorder.measure(self._exact, x, engine.step)
        engine.note_mean(x)
        engine.note_limits(route, self._state)
        self._state = None  # its memory is free before the next bucket's is taken
        engine.stats.encoded += route.layout.num_coded
        engine.stats.buckets += 1
        if engine.times_syncs:
            engine.recorder.bucket_ends(x.device)
        engine.raise_parity_error()
        if self.failed is None:
            engine.undo(x, self.layers, self.loss_scale, self.made)

    def fail(self) -> None:
        # Peers know of the failure, or will: no rank commits this step.
        self.engine.failed = True


class BucketEngine(Engine):
    """Reduces the buckets of DistributedDataParallel, and the fragments of local updates."""

    def __init__(
        self,
        plan: Plan,
        shapes: Mapping[str, Sequence[int]],
        transport: Transport,
        settings: WireSettings = WireSettings(),
        *,
        simulated: bool = False,
        measure: int = 0,
        optimizer: torch.optim.Optimizer | None = None,
        dtypes: Mapping[str, torch.dtype] | None = None,
        bucket_bytes: float = math.inf,
    ) -> None:
        """``bucket_bytes``: size from which on a part of a larger bucket is exchanged by itself."""
        self.transport, self._bucket_bytes = transport, bucket_bytes
        self._dtypes = dict(dtypes or {})
        self._optimizer = optimizer
        # Raises here, rather than in the first step, if a schedule or a compressor lacks something.
        plan.at_step(0, self._present_rate()).for_world(transport.world_size, shapes)
        # Between devices communication has a stream of its own, and no threads.
        self.device = transport.device if isinstance(transport, DeviceTransport) else None
        adapt = settings.adapt
        self.times_syncs = self.device is None or (adapt is not None and adapt.needs_syncs)
        """Whether the communication of a step is timed, for which the host waits for that of the step before."""
        if adapt is not None and adapt.needs_syncs and simulated:
            raise ValueError(
                f"{adapt} goes by how long communication takes, and simulate=True has none: leave out objective=time"
            )
        # Between devices no hierarchy takes float16: without nodes none is considered.
        halves = self.device is not None and torch.float16 in self._dtypes.values()
        nodes_too = adapt is not None and bool(adapt.considers) and not halves
        algorithm, world = settle(settings.algorithm, transport, nodes_too=nodes_too)
        self.executor = ThreadExecutor("thinwire") if self.device is None else StreamExecutor(self.device)
        self.channel = Channel(transport, self.executor, Stats(), algorithm=algorithm, world=world, seed=settings.seed)
        rank, world_size = transport.rank, transport.world_size
        super().__init__(plan, shapes, [self.channel], start=settings.start, rank=rank, world_size=world_size)
        self.simulated, self.measure = simulated, measure
        self.learning_rate: float | None = None
        """Learning rate of the optimizer in the present step, for compressors that follow it."""
        self.learning_rates: Mapping[str, float] = {}
        """Learning rates in the present step of the layers that follow the optimizer."""
        self.changes: Mapping[str, float] = {}
        """The change that the optimizer's last step made to each layer that follows it: ``‖x^k − x^{k−1}‖²``."""
        self.substitute: Substitute | None = None
        """Substitute that turns gradients into what the optimizer has sent in their place, if any."""
        self.native: Callable[[Tensor], torch.futures.Future[Tensor]] | None = None
        """Function that replaces a tensor by its mean, in steps without compression or with simulated compression. If
        it is None, the former go through the channel as well, and the latter stay on their rank."""
        self._loss_scale = 1.0
        self._extra_bytes = 0
        """Bytes that the last step sent in addition to its buckets: the lengths of momenta (`QuantizedAdam`)."""
        self._step_plan = StepPlan(world_size, self.shapes, self.slots)
        self._buckets: dict[Hashable, _SeenBucket] = {}
        self._parity_error: Exception | None = None
        self._limits = AsyncReadback()
        self.recorder = StatsRecorder(self.stats)
        self.reset_stats()
        self.unsent: UnsentResiduals | None = None
        """Residuals of layers from which a policy has taken error feedback."""
        self.speeds: Speeds | None = None
        """Speeds measured for ``skip_if_slower`` or for a policy; None if none were measured."""
        agree(self.record(self.step) | {"adapt": str(adapt)}, transport)
        if not simulated and world_size > 1:
            self._measure_speeds(adapt, skip_if_slower=settings.skip_if_slower)
        if adapt is not None:
            options = {"algorithm": algorithm, "world": world, "start": self.start, "speeds": self.speeds}
            self.adapter = Adapter(adapt, self.plan, self.shapes, transport, **options)

    def _measure_speeds(self, adapt: Policy | None, *, skip_if_slower: bool) -> None:
        """Measure codecs and links if ``skip_if_slower`` or the policy needs it; decline layers that get no faster."""
        reference = {name: c for name, c in self.plan.layers.items() if not isinstance(c, Raw)}
        timed = set(adapt.to_time(reference)) if adapt is not None else set()
        if skip_if_slower:
            timed |= set(reference.values())
        elif not timed:
            return
        self.speeds = measure_speeds(timed, self.transport, self.algorithm, self.channel.world)
        if skip_if_slower:
            self.plan = declined(self.plan, self.speeds)
        self.reset_stats()

    def _present_rate(self) -> float | None:
        """Return the highest learning rate of the optimizer's groups, which a schedule may follow."""
        if self._optimizer is None:
            return None
        return max(float(group["lr"]) for group in self._optimizer.param_groups)

    @property
    def detector(self) -> FailureDetector | None:
        """Detector of the rank that caused a failure, if the transport has one."""
        return self.transport.detector

    @property
    def dense(self) -> bool:
        """Whether the present step is uncompressed: before ``start``, with every layer raw, or after `Wire.detach`.

        Gradients then go through a native all-reduce, as without a Wire.
        """
        return not self.attached or self.step < self.start or self.plan.all_raw

    @property
    def syncs(self) -> Sequence[Sync]:
        """Communication of each plan's last steps, bucket by bucket, where the policy asks for it."""
        return self.adapter.syncs if self.adapter else ()

    def table(self, declined: Mapping[str, str], loaded: Collection[str]) -> str:
        title = "Wire of one rank, which sends nothing" if self.world_size == 1 else f"Wire of {self.world_size} ranks"
        shapes, dtypes = self.shapes, self._dtypes
        return layer_table(
            title,
            self.plan,
            shapes,
            declined,
            loaded,
            lambda name, c: sent_bytes(c, shapes[name], self.world_size, dtypes.get(name, torch.float32)),
            than="fp32" if set(dtypes.values()) <= {torch.float32} else "uncompressed",
        )

    def plan_rows(self) -> list[LayerRow]:
        """Return the layers in the order in which they are sent, with their compressors and those that the rules name.

        Errors are those of the last decision; only rank 0, which decides, has them.
        """
        buckets = [[layer.name for layer in route.layout.layers] for route in self.present_routes()]
        last = self.adapter.decisions[-1] if self.adapter and self.adapter.decisions else None
        errors = (last.errors, last.reference_errors) if last else ({}, {})
        return layer_rows(self.plan.layers, self.asked.layers, self.shapes, buckets, self.world_size, *errors)

    @property
    def planned_bytes(self) -> int:
        # A layer takes as much in any bucket.
        layers = self.plan.layers.items()
        return sum(slot_bytes(Placement([ShardedLayer(name, self.shapes[name])]), {name: c}) for name, c in layers)

    @property
    def planned_exchange_bytes(self) -> int:
        if self.simulated or self.world_size == 1 or self.plan.all_raw:
            return 0
        form, sizes, sums = self.plan.at_step(0, self._present_rate()).for_world(self.world_size, self.shapes), [0], 0
        for dtype in set(self._dtypes.values()) or {torch.float32}:
            layers = ((name, shape) for name, shape in self.shapes.items() if self._dtypes.get(name, dtype) == dtype)
            for part in _cut(tuple(layers), self._bucket_bytes / dtype.itemsize):
                layout = self.channel.layout("all_reduce", Contents((), _placed(part, form)), dtype)
                packed = is_packed(RESIDUAL, (layer.compressor for layer in layout.layers))
                sizes.append(layout.message_bytes(self.rank) + 4 * layout.numel * packed)
                sums += layout.sum_bytes(self.rank)
        # At most two buckets are under way, in which residuals of 8 bits are open. Sums have memory of their own.
        return sums + sum(sorted(sizes)[-2:])

    def sent_bytes(self, site: Site) -> int:
        if site != "gradients":
            raise ValueError(f"DistributedDataParallel sends gradients, and no {site}")
        return self._extra_bytes + sum(route.sent_bytes for route in self.routes_at(self.step))

    # Methods for a backward pass, which attachments call.

    def begin_step(self, learning_rates: Mapping[str, float] | None = None) -> None:
        """Count a new backward pass. Attachments call this before its first bucket.

        ``learning_rates`` are those of the layers that follow the optimizer; see `on_optimizer_step`.
        """
        # After an error, buckets of that pass may still be under way: they must not write over this one's gradients.
        self.executor.wait_idle()
        clock = self.adapter.clock if self.adapter is not None else None
        if clock is not None:
            clock.end()
        self.recorder.clipping.warn()
        self.learning_rate = self._present_rate()
        self.learning_rates = learning_rates or {}
        self.step += 1
        sync = self._end_sync()
        if self.adapter is not None:
            self._adapt(self.adapter, sync)
        if clock is not None:
            clock.begin(compressed=not self.dense)

    def _adapt(self, adapter: Adapter, sync: Sync | None) -> None:
        if sync is not None and adapter.policy.needs_syncs:
            adapter.note_sync(sync)
        plan = adapter.begin_step(self.step, self.plan, self.learning_rate)
        if plan is not self.plan or adapter.algorithm != self.algorithm:
            self.executor.call(lambda: self.change(plan, adapter.algorithm))

    def on_optimizer_step(self, changes: Mapping[str, float]) -> None:
        """Note how the optimizer changed each layer that follows it: ``‖x^k − x^{k−1}‖²``, the same on all ranks."""
        self.changes = dict(changes)

    def on_partial_use(self, shares: Mapping[str, Tensor]) -> None:
        """Note that only a share (0 to 1) of a layer's last mean was applied, as after clipping; its residual keeps the
        rest."""
        self.used = dict(shares)

    def drop(self, layers: Iterable[str]) -> None:
        """Leave residuals of ``layers`` as they were before the last pass, because its gradients are not applied."""
        self.on_partial_use(dict.fromkeys(layers, torch.zeros((), dtype=torch.float32, device="cpu")))

    def reduce(self, flat: Tensor, layers: BucketLayers, *, loss_scale: float = 1.0) -> torch.futures.Future[Tensor]:
        """Start replacing ``flat``, the gradients of ``layers`` end to end, by their mean over all ranks.

        ``loss_scale`` is how many times larger than the gradients its values are (a `GradScaler`'s scale). The future's
        result is ``flat`` itself; errors reach the caller through it. A rank that fails alone takes part in the
        exchange all the same, and tells the other ranks where messages can.
        """
        dense, waits = self.dense, self._waits
        if not (dense or waits) and len(parts := _cut(layers, self._bucket_bytes / flat.itemsize)) > 1:
            pieces = flat.split([sum(math.prod(shape) for _, shape in part) for part in parts])
            each = [self.reduce(*part, loss_scale=loss_scale) for part in zip(pieces, parts, strict=True)]
            return together(each, flat)
        simulated = self.simulated and not (dense or waits)
        made: Substitute | None = None
        failed: Exception | None = None
        try:
            if not waits:
                made = self._make(flat, layers, loss_scale)
            if simulated:
                self._simulate(flat, layers, loss_scale)
        except Exception as error:  # noqa: BLE001 - the future raises it
            failed = error

        def finish(mean: Tensor) -> Tensor:
            if failed is not None:
                raise failed
            if simulated:
                self._note_simulated(mean, layers)
            self.undo(mean, layers, loss_scale, made)
            return mean

        if self.native is not None and (dense or waits or simulated):
            if not simulated:
                self._count_dense(flat.nbytes)
            future = followed_by(self.native(flat), finish, flat.device)
        elif self.world_size == 1 or self.simulated:
            here: torch.futures.Future[Tensor] = torch.futures.Future(devices=[flat.device] if flat.is_cuda else None)
            here.set_result(flat)
            future = followed_by(here, finish, flat.device)
        else:
            bucket = Bucket(
                kind="all_reduce",
                dtype=flat.dtype,
                number=self.step,
                failed=failed,
                engine=self,
                flat=flat,
                layers=layers,
                loss_scale=loss_scale,
                made=made,
            )
            future = self.channel.submit(bucket)
        return self.adapter.clock.arriving(future) if self.adapter and self.adapter.clock else future

    @property
    def _waits(self) -> bool:
        """Whether the present step is uncompressed because the substitute of gradients waits."""
        return self.substitute is not None and self.substitute.waits and not self.dense

    def _make(self, flat: Tensor, layers: BucketLayers, loss_scale: float) -> Substitute | None:
        """Replace gradients by what is sent in their place; return the substitute that has to be undone, if any."""
        made = self.substitute
        if made is not None and self.dense and not made.when_dense:
            made = None
        if made is not None:
            made.make(flat, layers, loss_scale)
        if self.adapter and self.adapter.clock:
            self.adapter.clock.ready(flat, layers)
        if self.adapter is not None and self.attached:
            self.adapter.observe(flat, layers, self.step, loss_scale)
        if self.unsent:
            # A policy has taken error feedback from some layers: their residuals go with the gradients.
            self.unsent.send(flat, layers, loss_scale)
        return made

    def undo(self, mean: Tensor, layers: BucketLayers, loss_scale: float, made: Substitute | None) -> None:
        """Replace a mean that has arrived by the gradients that it stands for."""
        if self.unsent:
            self.unsent.note_mean(mean)
        if made is not None:
            made.undo(mean, layers, loss_scale)

    def _simulate(self, flat: Tensor, layers: BucketLayers, loss_scale: float) -> None:
        """Replace ``flat`` by what would arrive of it, and count the bytes that would have been sent."""
        self.begin()
        contents = self.place(flat, layers)
        known = self._buckets[contents.key]
        route = known.route = known.route or self._simulated_route(contents, flat.dtype)
        state = self.open(contents.key, route, flat, loss_scale)
        self.learn(flat, route.layout, self.learning(layers), state)
        options = {"seed": self.seed, "step": self.step, "rank": self.rank, "num_ranks": self.world_size}
        simulate(flat, route.layout, state=state, **options)
        self.close_slots(contents.key)
        clipped, rounded = route.clipped(state)
        self.recorder.limits(0, 0, int(clipped), rounded)
        self.recorder.bucket(ring_bytes(flat.nbytes, self.world_size), route.sent_bytes)

    def _note_simulated(self, mean: Tensor, layers: BucketLayers) -> None:
        """Note whether a simulated step's mean is finite: if not, no slot changes in it. Slots that depend on the mean
        follow it: before, a rank saw only its own gradient."""
        self.note_mean(mean)
        start = 0
        for name, shape in layers:
            numel = math.prod(shape)
            if (layer := self.slots.layer(name)) is not None:
                state = State({}, {}, self._loss_scale, {name: layer}, self.learning_rates)
                if (cold := find_mixin(self.plan[name], ColdStart)) is not None:
                    cold.follow(mean[start : start + numel], name, state)
            start += numel

    def _count_dense(self, num_bytes: int) -> None:
        """Count gradients of ``num_bytes`` that go through a native all-reduce."""
        self._count_step()
        moved = ring_bytes(num_bytes, self.world_size)
        self.recorder.bucket(moved, moved)

    def count_extra(self, num_bytes: int) -> None:
        """Count ``num_bytes`` that a native all-reduce has moved in addition to the gradients of a backward pass."""
        self._extra_bytes = ring_bytes(num_bytes, self.world_size)
        self.recorder.add_extra(self._extra_bytes)

    def check_parity(self, names: Sequence[str], sums: Tensor | None) -> None:
        """Compare the checksums of all ranks' parameters (`thinwire.runtime.consistency.checksums`), in the
        background; this step's gradients raise a difference. A rank without ``sums`` is not compared.

        In a step whose gradients do not go through the executor, uncompressed or simulated, nothing else would stop the
        optimizer: the comparison is awaited, and a difference raised, here.
        """
        step = self.step

        def check() -> None:
            try:
                check_parity(names, sums, self.transport, step)
            except Exception as error:  # noqa: BLE001 - raised by the bucket that follows
                self._parity_error = error
            self.stats.parity_checks += 1

        checked = self.executor.submit(Alone(check))
        if self.dense or self._waits or self.simulated:
            checked.wait()
            self.raise_parity_error()

    def raise_parity_error(self) -> None:
        """Raise the error that `check_parity` met, if it met one."""
        error, self._parity_error = self._parity_error, None
        if error is not None:
            raise error

    def resync(self, parameters: Mapping[str, Tensor]) -> None:
        """Copy rank 0's parameters to all ranks, between steps. All ranks must call it."""
        self.executor.call(lambda: resync(parameters, self.transport))
        self.stats.resyncs += 1

    def discard_step(self) -> None:
        self.lost = False
        self.executor.wait_idle()
        self._means.read()
        self.slots.discard()
        if self.unsent:
            self.unsent.keep()

    def succeed(self, former: BucketEngine) -> None:
        """Take over the residuals of ``former``, an engine of the same plan among other ranks, which may be broken.

        Other slots, such as factors that all ranks share, are reset on all of them.
        """
        former.executor.wait_idle()
        former.settle()
        residuals = {}
        for name, compressor in self.plan.layers.items():
            if RESIDUAL in compressor.slots:
                value = former.slots.value(name, RESIDUAL, self.shapes[name])
                old, new = (former.rank, former.shares), (self.rank, self.shares)
                residuals[name, RESIDUAL.name] = moved_residual(value, compressor, name, old, new)
        self.slots.replace(residuals)

    # Checkpoints, between two steps.

    def read(self, state: Mapping[str, Tensor]) -> checkpoint.CheckedState:
        algorithm = self.adapter.saved_algorithm(state) if self.adapter is not None else self.algorithm
        shares = self.shares_with(algorithm)

        def get_owners(name: str, compressor: Compressor, old_shares: Sequence[int]) -> Owners:
            def weights(rank: int, of: Sequence[int]) -> Tensor:
                like = torch.empty(math.prod(self.shapes[name]), dtype=torch.float64, device="cpu")
                return mean_weights(name, compressor, like, rank, of)

            return Owners(lambda rank: weights(rank, old_shares), lambda: weights(self.rank, shares), self.world_size)

        loaded = checkpoint.read(state, self.plan, self.shapes, self.rank, shares, get_owners)

        def adopt() -> None:
            self.alone(lambda: self._adopt(loaded, algorithm))
            if self.adapter is not None:
                self.adapter.load(state, self.plan, self._present_rate())

        # In a simulation every rank updates its slots by its own gradients.
        return checkpoint.CheckedState(loaded.record(), {} if self.simulated else loaded.shared(), adopt)

    def _adopt(self, loaded: checkpoint.LoadedState, algorithm: Algorithm) -> None:
        self._take_over(loaded)
        self.channel.algorithm = algorithm
        self.channel.forget(self._buckets)
        self._buckets.clear()
        self._step_plan.forget()
        self.unsent = None
        agree(self.record(loaded.step), self.transport)

    def alone(self, job: Callable[[], _T]) -> _T:
        return self.executor.call(job)

    def whole_world(self) -> Transport:
        return self.transport

    def record(self, step: int) -> dict[str, str]:
        """Return the facts that must be equal on all ranks, in the order in which a difference is best reported."""
        facts = {
            "algorithm": f"{self.algorithm} on nodes {self.channel.world.nodes}",
            "seed": str(self.seed),
            "start": str(self.start),
            "simulated": str(self.simulated),
            "measure": str(self.measure),
            "step": str(step),
        }
        return agreed_facts(self.plan, facts, self.device)

    @property
    def shares(self) -> tuple[int, ...]:
        """Share of every layer that each rank owns, in proportion; zeros where all is gathered."""
        return self.shares_with(self.algorithm)

    def shares_with(self, algorithm: Algorithm) -> tuple[int, ...]:
        """Return the `shares` of another algorithm."""
        return (0,) * self.world_size if algorithm.gathers else algorithm.shares(self.channel.world)

    def _end_sync(self) -> Sync | None:
        """Return the sizes and seconds of the last step's communication, or None if it was not compressed."""
        if self.unsent:
            self.unsent.end_step()
        seconds = self.recorder.sync_seconds()
        sizes = tuple(route.sent_bytes for route in self.present_routes())
        return Sync(sizes, seconds) if seconds and sizes else None

    def present_routes(self) -> list[Route]:
        """Return the routes of the last step, in the order in which buckets leave."""
        return self.routes_at(max((known.last_step for known in self._buckets.values()), default=-1))

    def routes_at(self, step: int) -> list[Route]:
        """Return the routes of the buckets whose last step was ``step``."""
        return [known.route for known in self._buckets.values() if known.route and known.last_step == step]

    def change(self, plan: Plan, algorithm: Algorithm) -> None:
        """Take another plan, or another collective algorithm, between two steps, on every rank.

        A layer keeps its residual. If its new compressor has none, the residual is sent with its next gradient.
        """
        self.settle()
        if algorithm != self.algorithm:
            self._release(set(self._buckets))
        old_shares, self.channel.algorithm = self.shares, algorithm
        for name, compressor in plan.layers.items():
            if (old := self.plan[name]) != compressor or self.shares != old_shares:
                if isinstance(old, Feedback) and RESIDUAL not in compressor.slots:
                    owners = (0,) * self.world_size if self.simulated else old_shares
                    unsent = self.slots.unsent(name, self.shapes[name], old, self.rank, owners)
                    self.unsent = self.unsent or UnsentResiduals()
                    self.unsent.add(name, unsent.mul_(old.in_gradients(self.learning_rate)))
                alike = type(unwrap(old)) is type(unwrap(compressor))
                if isinstance(old, Summed) and RESIDUAL in old.slots and not alike:
                    self.slots.average_residual(name, self.transport)
                self.slots.hand_over(name, self.shapes[name], old, compressor, self.rank, old_shares, self.shares)
                if isinstance(old, Feedback) and isinstance(compressor, Feedback) and old.units != compressor.units:
                    before, after = (one.in_gradients(self.learning_rate) for one in (old, compressor))
                    self.slots.scale_residual(name, before / after)
        self.plan = plan
        self.stats.plan_changes += 1
        agree({"step": str(self.step), "plan": plan.hash, "algorithm": str(algorithm)}, self.transport)

    def note_mean(self, flat: Tensor) -> None:
        if self.plan.has_slots:
            super().note_mean(flat)

    def note_limits(self, route: Route, state: State | None) -> None:
        """Count the values that the last messages and sums could not hold."""
        counts = *route.limits(self.rank), *route.clipped(state)
        if tensors := [count for count in counts if isinstance(count, Tensor)]:
            # Stacked on the device: a number sent from the host would make it wait.
            on_device = (c if isinstance(c, Tensor) else torch.full_like(tensors[0], c) for c in counts)
            self._limits.note(torch.stack([count.to(torch.int64) for count in on_device]))
        else:
            self.recorder.limits(*map(int, counts))

    def open(self, key: Hashable, route: Route, flat: Tensor, loss_scale: float) -> State:
        """Open the slots of a bucket for this step, whose gradients are multiplied by ``loss_scale``; return them."""
        known = self._buckets[key]
        known.route = route
        self._loss_scale = loss_scale
        self._poison.note_gradients(flat)
        state = State({}, {}, loss_scale)
        if known.having:
            state = self.slots.state(key, known.placement, known.having, loss_scale, flat.device)
        if not self.learning_rates and self.learning_rate is None:
            return state
        rate = 1.0 if self.learning_rate is None else self.learning_rate
        return replace(state, learning_rates=self.learning_rates, learning_rate=rate)

    def close_slots(self, key: Hashable) -> None:
        """Keep what this step has written to the slots of a bucket."""
        if self._buckets[key].having:
            self.slots.close(key, derive_key(self.seed, self.step, self.rank))

    def learning(self, layers: BucketLayers) -> tuple[str, ...]:
        """Return the layers that learn in this step what they are coded with."""
        if self._step_plan.steady is self.plan:
            return ()
        return self._step_plan.learning([name for name, _ in layers], self.step - self.start)

    def learn(self, flat: Tensor, layout: Layout, learning: Sequence[str], state: State) -> None:
        """Learn what all ranks code these layers with from this step on, by the first rank that has a gradient."""
        layers = [layer for layer in layout.layers if layer.name in learning]
        if not layers:
            return
        values = [flat[layer.start : layer.start + layer.numel].float() / state.loss_scale for layer in layers]
        teaching = torch.tensor([is_informative(v) for v in values], dtype=torch.uint8, device="cpu")
        by_rank = self.transport.all_gather(teaching).tolist()
        teachers = [next((r for r, all_of in enumerate(by_rank) if all_of[at]), None) for at in range(len(layers))]
        with fail_together([self.transport], "learning what gradients are coded with"):
            for layer, teacher, own in zip(layers, teachers, values, strict=True):
                learned, slots = find_mixin(layer.compressor, Learned), state.layers[layer.name].now
                if teacher == self.rank and learned is not None:
                    for name, value in learned.learn(own, slots).items():
                        slots[name].copy_(value.view_as(slots[name]))
        for layer, teacher in zip(layers, teachers, strict=True):
            for slot in (slot for slot in layer.compressor.slots if slot.learned and teacher is not None):
                held = state.layers[layer.name].now[slot.name]
                held.copy_(self.transport.all_gather(held.cpu())[teacher])

    def reset_stats(self) -> None:
        if self.attached:
            self.executor.call(self._reset_stats)
        else:
            self._reset_stats()

    def _reset_stats(self) -> None:
        self._limits.read()
        super().reset_stats()
        self.recorder.stats = self.stats

    def present_stats(self) -> Stats:
        self._count_limits()
        return super().present_stats()

    def _count_limits(self) -> None:
        for counts in self._limits.read():
            self.recorder.limits(*counts.tolist())

    def _count_step(self) -> bool:
        return self.recorder.step(self.step, compressed=not (self.step < self.start or self.plan.all_raw))

    def begin(self) -> None:
        """Begin a step with its first bucket."""
        if not self._count_step():
            return
        self.settle()
        if self._reset_if_poisoned(self.step, self._on_all_ranks):
            self._step_plan.forget()
            self._release(set(self._buckets))  # their keys will mean other compressors
        if self._step_plan.steady is not self.plan:
            self._step_plan.follow(self.plan, self.step - self.start, self.learning_rate)
        # DDP rebuilds its buckets once or twice; the messages of the old ones are freed.
        self._release({key for key, known in self._buckets.items() if known.last_step < self.step - _STALE_STEPS})

    def _on_all_ranks(self, condition: bool) -> bool:
        return bool(self.transport.all_gather(torch.tensor([condition], dtype=torch.bool, device="cpu")).all())

    def settle(self) -> None:
        self.recorder.end_measure()
        self._count_limits()
        noted, finite = bool(self._means), self._means.read_finite()
        if noted and not self.failed:
            self._poison.end_step(finite=finite)
        finite, self.failed = finite and not self.failed, False
        if finite and self.slots.touched:
            self._end_compressors()
        self._commit(finite=finite)
        self._follow_optimizer()

    def _follow_optimizer(self) -> None:
        together: dict[Compressor, list[tuple[LayerState, float]]] = {}
        for name, change in self.changes.items():
            if (layer := self.slots.layer(name)) is not None and math.isfinite(change):
                together.setdefault(self.plan[name], []).append((layer, change))
        self.changes = {}
        for compressor, changes in together.items():
            if (following := find_mixin(compressor, FollowsOptimizer)) is not None:
                following.on_optimizer_step(changes)

    def _end_compressors(self) -> None:
        """Let compressors decide what their layers decide together."""
        together: dict[Compressor, list[LayerState]] = {}
        for name, layer_state in self.slots.touched_layers():
            # The plan's compressor counts: a layer's form in this step may differ from the others'.
            compressor = self.plan[name]
            if find_mixin(compressor, StepEnd) is not None:
                together.setdefault(compressor, []).append(layer_state)
        for compressor, layers in together.items():
            if (deciding := find_mixin(compressor, StepEnd)) is not None:
                deciding.end_step(layers, self._loss_scale)

    def place(self, flat: Tensor, layers: BucketLayers) -> Contents:
        """Return the layers of a bucket of this step, each with its compressor."""
        # A schedule gives the plan several forms, each with messages of its own.
        key = (layers, flat.dtype, self._step_plan.number)
        known = self._buckets.get(key)
        if known is None:
            self._free_earlier_buckets(layers, flat.dtype)
            contents = Contents(key, self._split_layers(flat, layers))
            having = {layer.name: layer.compressor for layer in contents.layers if layer.compressor.slots}
            placement = Placement([ShardedLayer(name, shape) for name, shape in layers])
            known = self._buckets[key] = _SeenBucket(layers, flat.dtype, contents, having, placement, self.step)
        known.last_step = self.step
        return known.contents

    def _free_earlier_buckets(self, layers: BucketLayers, dtype: torch.dtype) -> None:
        """Free earlier buckets of the same layers, which DDP has rebuilt: both together would take twice the memory."""
        names = {name for name, _ in layers}

        def replaced(old: _SeenBucket) -> bool:
            if old.last_step == self.step or (old.layers, old.dtype) == (layers, dtype):
                return False
            return not names.isdisjoint(name for name, _ in old.layers)

        self._release({key for key, old in self._buckets.items() if replaced(old)})

    def _release(self, keys: Set[Hashable]) -> None:
        self.channel.forget(keys)
        for key in keys:
            del self._buckets[key]

    def _simulated_route(self, contents: Contents, dtype: torch.dtype) -> Route:
        sent_bytes = self.channel.sent_bytes("all_reduce", contents, dtype) if self.world_size > 1 else 0
        return Route(Layout.build(contents.layers, 1, dtype), sent_bytes)

    def _split_layers(self, flat: Tensor, layers: BucketLayers) -> tuple[Layer, ...]:
        for name, shape in layers:
            if name not in self.plan.layers:
                # The layer was frozen when compress() was called, and is trained now.
                extended, self.shapes[name] = self.plan.extended(name, shape), shape
                self.plan = extended if self.substitute is None else extended.with_feedback()
                self._step_plan.add(name, self.plan, self.step - self.start, self.learning_rate)
        placed = _placed(layers, self._step_plan)
        if (numel := sum(layer.numel for layer in placed)) != flat.numel():
            raise ValueError(f"a bucket of {flat.numel()} elements came with layers of {numel}")
        return placed


def _placed(layers: BucketLayers, plan: Plan | StepPlan) -> tuple[Layer, ...]:
    """Return the layers of a bucket, end to end, with their compressors."""
    placed, start = [], 0
    for name, shape in layers:
        compressor = plan[name]
        if not isinstance(compressor, Coded | Summed):
            raise TypeError(f"{name} has {compressor}, which is neither coded nor summed")
        placed.append(Layer(name, start, shape, compressor))
        start += placed[-1].numel
    return tuple(placed)


def _cut(layers: BucketLayers, least_numel: float) -> list[BucketLayers]:
    """Return ``layers`` in parts that end where they have ``least_numel`` elements, as DDP forms its later buckets."""
    parts, numel = list[BucketLayers](), math.inf
    for layer in layers:
        if numel >= least_numel:
            parts.append(())
            numel = 0
        parts[-1] += (layer,)
        numel += math.prod(layer[1])
    return parts
