"""What a `Wire` does with each bucket of gradients."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from thinwire.collectives import (
    Algorithm,
    CollectiveCall,
    DeviceTransport,
    Layer,
    Layout,
    SumRounds,
    Transport,
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
    State,
    StepEnd,
    Summed,
    find_mixin,
    not_finite,
    teaches,
    unwrap,
)
from thinwire.kernels import FORMAT_VERSION, derive_key
from thinwire.plan import Plan
from thinwire.policies import Sync
from thinwire.runtime import checkpoint
from thinwire.runtime.bucket import BucketLayers
from thinwire.runtime.channel import Channel
from thinwire.runtime.consistency import agree, check_parity, failing_together, library_version, machine_record
from thinwire.runtime.exchange import Contents, Exchange
from thinwire.runtime.executor import AsyncReadback
from thinwire.runtime.poison import PoisonMonitor
from thinwire.runtime.route import Route
from thinwire.runtime.slots import Slots, UnsentResiduals, moved_residual
from thinwire.runtime.stats import Stats, StatsRecorder
from thinwire.runtime.step_plan import StepPlan


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


@dataclass
class _Known:
    """A bucket that has come before."""

    layers: BucketLayers
    dtype: torch.dtype
    contents: Contents
    last_step: int
    route: Route | None = None


@dataclass(kw_only=True)
class Bucket(Exchange):
    """Replaces the gradients of a bucket by their mean over all ranks."""

    engine: BucketEngine
    flat: Tensor
    layers: BucketLayers
    step: int
    loss_scale: float
    turns: int = 1
    _state: State | None = field(default=None, init=False)
    _exact: Tensor | None = field(default=None, init=False)

    @property
    def result(self) -> Tensor:
        return self.flat

    def begin(self) -> None:
        engine = self.engine
        engine.begin(self.step)
        engine.recorder.bucket_begins()
        self.number, self.contents = self.step, engine.place(self.flat, self.layers, self.step)
        # Ranks share what is learned by native collectives.
        self.alone = bool(engine.learning(self.layers, self.step))

    def start(self, route: Route) -> tuple[Tensor, State]:
        engine, flat = self.engine, self.flat
        state = self._state = engine.open(self.contents.key, route, flat, self.loss_scale)
        engine.learn(flat, route.layout, engine.learning(self.layers, self.step), state)
        if engine.measure and self.step % engine.measure == 0:
            self._exact = flat.to(torch.float32, copy=True)
        return flat, state

    def finish(self, x: Tensor, route: Route) -> None:
        engine = self.engine
        engine.close(self.contents.key, self.step)
        if self._exact is not None:
            # Against the exact mean, which takes an all-reduce in fp32.
            engine.transport.all_reduce(self._exact.div_(engine.world_size), lane=1)
            engine.recorder.measure(self._exact, x, self.step)
        engine.note_result(x)
        engine.note_limits(route, self._state)
        engine.stats.encoded += route.layout.num_coded
        engine.stats.buckets += 1
        engine.recorder.bucket_ends()
        engine.raise_parity_error()

    def fail(self) -> None:
        # Peers have the same news, or will: nobody commits this step.
        self.engine.failed = True


class BucketEngine:
    """Reduces DDP's buckets through a `Channel`; owns their plan, routes, slots and statistics."""

    def __init__(
        self,
        plan: Plan,
        shapes: Mapping[str, Sequence[int]],
        channel: Channel[Stats],
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
        """The change that the optimizer's last step made to each layer that follows it: ``‖x^k − x^{k−1}‖²``."""
        self.used: Mapping[str, Tensor] = {}
        """The share (0 to 1) of the last step's result that was used of a layer."""
        self._loss_scale = 1.0
        self.recorder = StatsRecorder(channel)
        self.slots = Slots()
        self._poison = PoisonMonitor()
        self._step_plan = StepPlan(self.transport.world_size, self.shapes, self.slots)
        self._buckets: dict[Hashable, _Known] = {}
        self._parity_error: Exception | None = None
        # On a device the host reads these when the next step begins: by then they have long been computed.
        self._finite, self._limits, self._clippings = AsyncReadback(), AsyncReadback(), AsyncReadback()
        self.failed = False
        """Whether an exchange of the present step has failed, though not by its link."""
        self.unsent: UnsentResiduals | None = None
        """Residuals of layers from which a policy has taken error feedback."""

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
        device = self.transport.device if isinstance(self.transport, DeviceTransport) else None
        record |= machine_record(self.plan.layers.values(), device)
        return record | {f"layer {name}": str(compressor) for name, compressor in self.plan.layers.items()}

    @property
    def shares(self) -> tuple[int, ...]:
        """How much of every layer each rank owns, in proportion; nobody owns anything where all is gathered."""
        return self.shares_of(self.algorithm)

    def shares_of(self, algorithm: Algorithm) -> tuple[int, ...]:
        """The same by another algorithm."""
        return (0,) * self.world_size if algorithm.gathers else algorithm.shares(self.world)

    def check_parity(self, names: Sequence[str], sums: Tensor | None, step: int) -> None:
        """Between buckets: compare all ranks' checksums; a difference is raised by the bucket that follows."""
        try:
            check_parity(names, sums, self.transport, step)
        except Exception as error:  # noqa: BLE001 - raised by the bucket that follows
            self._parity_error = error
        self.stats.parity_checks += 1

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
        """Return the sizes and seconds of the last step's communication, or None if it was not compressed.

        It is called once, between two steps.
        """
        if self.unsent:
            self.unsent.end_step()
        seconds = self.recorder.sync_seconds()
        sizes = tuple(route.sent_bytes for route in self.present_routes())
        return Sync(sizes, seconds) if seconds and sizes else None

    def present_routes(self) -> list[Route]:
        """Those of the last step, in the order in which buckets leave."""
        return self.routes_of(max((known.last_step for known in self._buckets.values()), default=-1))

    def routes_of(self, step: int) -> list[Route]:
        """The routes of the buckets whose last step was ``step``."""
        return [known.route for known in self._buckets.values() if known.route and known.last_step == step]

    def change(self, plan: Plan, algorithm: Algorithm, step: int) -> None:
        """Between two steps, on every rank: take another plan, or another collective algorithm.

        A layer keeps its residual. If its new compressor has none, the residual is sent with its next gradient.
        """
        self._end()
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
        self.plan = plan
        self.stats.plan_changes += 1
        agree({"step": str(step), "plan": plan.hash, "algorithm": str(algorithm)}, self.transport)

    def discard_step(self) -> None:
        self._finite.read()
        self.slots.discard()
        if self.unsent:
            self.unsent.keep()

    def succeed(self, former: BucketEngine) -> None:
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
        self.channel.forget(self._buckets)
        self._buckets.clear()
        self._step_plan.forget()
        self.unsent = None
        self.slots.replace(loaded.slots)
        agree(self.record(loaded.step), self.transport)

    def simulate(self, flat: Tensor, layers: BucketLayers, step: int, loss_scale: float) -> None:
        """Replace ``flat`` by what would arrive of it, and count the bytes that would have been sent."""
        self.begin(step)
        contents = self.place(flat, layers, step)
        known = self._buckets[contents.key]
        route = known.route = known.route or self._simulated_route(contents, flat.dtype)
        state = self.open(contents.key, route, flat, loss_scale)
        self.learn(flat, route.layout, self.learning(layers, step), state)
        options = {"seed": self.seed, "step": step, "rank": self.rank, "num_ranks": self.world_size}
        simulate(flat, route.layout, state=state, **options)
        self.close(contents.key, step)
        self.recorder.clipped(*route.clipped(state))
        self.recorder.bucket(ring_bytes(flat.nbytes, self.world_size), route.sent_bytes)

    def note_result(self, flat: Tensor) -> None:
        """See whether a mean is finite: if one of a step's is not, no slot moves in it, on any rank."""
        if self.plan.has_slots:
            self._finite.note(not_finite(flat))

    def follow(self, mean: Tensor, layers: BucketLayers) -> None:
        """Update slots that depend on the mean gradient, after a simulated step, in which a rank saw only its own."""
        start = 0
        for name, shape in layers:
            numel = math.prod(shape)
            if (layer := self.slots.layer(name)) is not None:
                state = State({}, {}, self._loss_scale, {name: layer}, self.learning_rates)
                if (cold := find_mixin(self.plan[name], ColdStart)) is not None:
                    cold.follow(mean[start : start + numel], name, state)
            start += numel

    def note_limits(self, route: Route, state: State | None) -> None:
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

    def open(self, key: Hashable, route: Route, flat: Tensor, loss_scale: float) -> State:
        """Open the slots of a bucket for this step, whose gradients are ``loss_scale`` times as large as they are."""
        self._buckets[key].route = route
        self._loss_scale = loss_scale
        self._poison.note_gradients(flat)
        state = self.slots.state(key, route.layout, loss_scale, flat.device)
        if not self.learning_rates and self.learning_rate is None:
            return state
        rate = 1.0 if self.learning_rate is None else self.learning_rate
        return replace(state, learning_rates=self.learning_rates, learning_rate=rate)

    def close(self, key: Hashable, step: int) -> None:
        """Keep what this step has written to the slots of a bucket."""
        self.slots.close(key, derive_key(self.seed, step, self.rank))

    def learning(self, layers: BucketLayers, step: int) -> tuple[str, ...]:
        """The layers that learn in this step what they are coded with."""
        return self._step_plan.learning([name for name, _ in layers], step - self.start)

    def learn(self, flat: Tensor, layout: Layout, learning: Sequence[str], state: State) -> None:
        """Learn what all ranks code these layers with from this step on: from the first rank that has a gradient."""
        layers = [layer for layer in layout.layers if layer.name in learning]
        if not layers:
            return
        values = [flat[layer.start : layer.start + layer.numel].float() / state.loss_scale for layer in layers]
        teaching = torch.tensor([teaches(v) for v in values], dtype=torch.uint8, device="cpu")
        by_rank = self.transport.all_gather(teaching).tolist()
        teachers = [next((r for r, all_of in enumerate(by_rank) if all_of[at]), None) for at in range(len(layers))]
        with failing_together([self.transport], "learning what gradients are coded with"):
            for layer, teacher, own in zip(layers, teachers, values, strict=True):
                learned, slots = find_mixin(layer.compressor, Learned), state.layers[layer.name].now
                if teacher == self.rank and learned is not None:
                    for name, value in learned.learn(own, slots).items():
                        slots[name].copy_(value.view_as(slots[name]))
        for layer, teacher in zip(layers, teachers, strict=True):
            for slot in (slot for slot in layer.compressor.slots if slot.learned and teacher is not None):
                held = state.layers[layer.name].now[slot.name]
                held.copy_(self.transport.all_gather(held.cpu())[teacher])

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
        return self.recorder.present(self.channel.buffer_bytes, self.slots.num_bytes)

    def _count_limits(self) -> None:
        for saturated, overflowed in (counts.tolist() for counts in self._limits.read()):
            self.recorder.limits(saturated, overflowed)
        for clipped, rounded in (counts.tolist() for counts in self._clippings.read()):
            self.recorder.clipped(clipped, rounded)

    def _count_step(self, step: int) -> bool:
        return self.recorder.step(step, compressed=not (step < self.start or self.plan.all_raw))

    def begin(self, step: int) -> None:
        """Begin a step with its first bucket."""
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
        self._release({key for key, known in self._buckets.items() if known.last_step < step - _STALE_STEPS})

    def _end(self) -> None:
        """Let the slots take what the last step left for them: nothing, if some rank met NaN or Inf in it."""
        self.recorder.end_measure()
        self._count_limits()
        means = self._finite.read()
        finite = all(bool(torch.isfinite(value)) for value in means)
        if means and not self.failed:
            self._poison.end_step(finite=finite)
        if finite and not self.failed:
            self._end_compressors()
            self.slots.keep_rest(self.used)
            self.slots.commit()
        else:
            self.slots.discard()
            self.stats.nonfinite_steps += 1
        self.failed, self.used = False, {}
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
        for layer, layer_state in self.slots.touched_layers():
            # That of the plan: a layer's form in this step may differ from the others'.
            compressor = self.plan[layer.name]
            if find_mixin(compressor, StepEnd) is not None:
                together.setdefault(compressor, []).append(layer_state)
        for compressor, layers in together.items():
            if (deciding := find_mixin(compressor, StepEnd)) is not None:
                deciding.end_step(layers, self._loss_scale)

    def place(self, flat: Tensor, layers: BucketLayers, step: int) -> Contents:
        """The layers of a bucket of this step, each with its compressor."""
        # A schedule gives the plan several forms, each with messages of its own.
        key = (layers, flat.dtype, self._step_plan.number)
        known = self._buckets.get(key)
        if known is None:
            self._let_go_of_buckets_before(layers, flat.dtype, step)
            contents = Contents(key, self._layers_of(flat, layers, step))
            known = self._buckets[key] = _Known(layers, flat.dtype, contents, step)
        known.last_step = step
        return known.contents

    def _let_go_of_buckets_before(self, layers: BucketLayers, dtype: torch.dtype, step: int) -> None:
        """Free what earlier buckets of the same layers hold: DDP has rebuilt them. Two at a time would be twice the
        memory."""
        names = {name for name, _ in layers}

        def replaced(old: _Known) -> bool:
            if old.last_step == step or (old.layers, old.dtype) == (layers, dtype):
                return False
            return not names.isdisjoint(name for name, _ in old.layers)

        self._release({key for key, old in self._buckets.items() if replaced(old)})

    def _release(self, keys: Set[Hashable]) -> None:
        self.slots.release(keys)
        self.channel.forget(keys)
        for key in keys:
            del self._buckets[key]

    def _simulated_route(self, contents: Contents, dtype: torch.dtype) -> Route:
        sent_bytes = self.channel.sent_bytes("all_reduce", contents, dtype) if self.world_size > 1 else 0
        return Route(Layout.build(contents.layers, 1, dtype), sent_bytes)

    def _layers_of(self, flat: Tensor, layers: BucketLayers, step: int) -> tuple[Layer, ...]:
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
        return tuple(placed)


def _stacked(first: Count, second: Count, transport: Transport) -> Tensor:
    """Both counts as one tensor, on the device if there is one: a number sent from the host would make it wait."""
    device = transport.device if isinstance(transport, DeviceTransport) else torch.device("cpu")
    counts = [
        c if isinstance(c, Tensor) else torch.full((), c, dtype=torch.int64, device=device) for c in (first, second)
    ]
    return torch.stack(counts)
