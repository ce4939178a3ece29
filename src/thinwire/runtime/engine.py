"""What a `Wire` does with each bucket of gradients."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from thinwire.collectives import (
    Algorithm,
    CollectiveCall,
    DeviceTransport,
    Layer,
    Layout,
    Transport,
    TransportError,
    World,
    ring_bytes,
)
from thinwire.compressors import (
    RESIDUAL,
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
from thinwire.runtime.channel import BucketLayers, Channel, Contents, Route
from thinwire.runtime.consistency import agree, check_parity, failing_together, library_version, machine_record
from thinwire.runtime.executor import AsyncReadback, Job, Then
from thinwire.runtime.poison import PoisonMonitor
from thinwire.runtime.simulation import simulate
from thinwire.runtime.slots import Slots, moved_residual
from thinwire.runtime.stats import Stats, StatsRecorder, TrafficStats
from thinwire.runtime.step_plan import StepPlan
from thinwire.runtime.unsent import UnsentResiduals

_STALE_STEPS = 16

RouteKey = tuple[BucketLayers, torch.dtype, int]
"""Layers and dtype of a bucket, and the number of the plan's variant, where it has a schedule."""


class BucketEngine:
    """Reduces DDP's buckets through a `Channel`; owns their plan, routes, slots and statistics."""

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
        """The change that the optimizer's last step made to each layer that follows it: ``‖x^k − x^{k−1}‖²``."""
        self.used: Mapping[str, Tensor] = {}
        """The share (0 to 1) of the last step's result that was used of a layer."""
        self._loss_scale = 1.0
        self.recorder = StatsRecorder(self.transport)
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

    def check_parity(self, names: Sequence[str], sums: Tensor | None, step: int) -> Job:
        """A job of the executor: compare all ranks' checksums; a difference is raised by the bucket that follows."""
        yield Then.ALONE
        try:
            check_parity(names, sums, self.transport, step)
        except Exception as error:  # noqa: BLE001 - raised by the bucket that follows
            self._parity_error = error
        self.stats.parity_checks += 1
        return torch.empty(0, dtype=torch.float32, device="cpu")

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
        self._forget_routes()
        self._step_plan.forget()
        self.unsent = None
        self.slots.replace(loaded.slots)
        agree(self.record(loaded.step), self.transport)

    def reduce(
        self, flat: Tensor, layers: BucketLayers, step: int, loss_scale: float, failed: Exception | None = None
    ) -> Job:
        """A job of the executor: replace ``flat`` by its mean over all ranks, and return it; or tell the other ranks
        that this one has ``failed``, and raise it."""
        try:
            if self.world_size > 1:
                yield from self._communicate(flat, layers, step, loss_scale, failed)
        except TransportError:
            raise
        except Exception:
            # Peers have the same news, or will: nobody commits this step.
            self._failed = True
            raise
        if failed is not None:
            raise failed
        self.raise_parity_error()
        return flat

    def simulate(self, flat: Tensor, layers: BucketLayers, step: int, loss_scale: float) -> None:
        """Replace ``flat`` by what would arrive of it, and count the bytes that would have been sent."""
        self._begin(step)
        key = (layers, flat.dtype, self._step_plan.number)
        route = self._route(flat, key, step)
        state = self._state(key, route, loss_scale, flat.device)
        names = [name for name, _ in layers]
        self._learn(flat, route.layout, self._step_plan.learning(names, step - self.start), state)
        self._poison.note_gradients(flat)
        options = {"seed": self.seed, "step": step, "rank": self.rank, "num_ranks": self.world_size}
        simulate(flat, route.layout, state=state, **options)
        self._close_slots(key, step)
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

    def _communicate(
        self, flat: Tensor, layers: BucketLayers, step: int, loss_scale: float, failed: Exception | None
    ) -> Iterator[Then]:
        self._begin(step)
        self.recorder.bucket_begins()
        key = (layers, flat.dtype, self._step_plan.number)
        names = [name for name, _ in layers]
        if key not in self.routes or self._step_plan.learning(names, step - self.start):
            # Ranks agree on a new route, or share what is learned, by native collectives: those have one order.
            yield Then.ALONE
        route = self._route(flat, key, step)
        state = self._state(key, route, loss_scale, flat.device)
        self._learn(flat, route.layout, self._step_plan.learning(names, step - self.start), state)
        self._poison.note_gradients(flat)
        exact = flat.to(torch.float32, copy=True) if self.measure and step % self.measure == 0 else None
        call = CollectiveCall(self.channel.seed, step, state=state, clock=self.stats)
        yield from self.channel.exchange(route, flat, call, failed=failed)
        self._close_slots(key, step)
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

    def _state(self, key: RouteKey, route: Route, loss_scale: float, device: torch.device) -> State:
        self._loss_scale = loss_scale
        state = self.slots.state(key, route.layout, loss_scale, device)
        if not self.learning_rates and self.learning_rate is None:
            return state
        rate = 1.0 if self.learning_rate is None else self.learning_rate
        return replace(state, learning_rates=self.learning_rates, learning_rate=rate)

    def _close_slots(self, key: RouteKey, step: int) -> None:
        self.slots.close(key, derive_key(self.seed, step, self.rank))

    def _learn(self, flat: Tensor, layout: Layout, learning: Sequence[str], state: State) -> None:
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
        self._release(stale)

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

    def _route(self, flat: Tensor, key: RouteKey, step: int) -> Route:
        route = self.routes.get(key)
        if route is None:
            self._let_go_of_buckets_before(key, step)
            route = self.routes[key] = self._new_route(flat, key[0], step)
        self._last_steps[key] = step
        return route

    def _let_go_of_buckets_before(self, key: RouteKey, step: int) -> None:
        """Free what earlier buckets of the same layers hold: DDP has rebuilt them. Two at a time would be twice the
        memory."""
        layers, dtype, _ = key
        names = {name for name, _ in layers}
        self._release(
            [
                old
                for old, last in self._last_steps.items()
                if last < step and old[:2] != (layers, dtype) and not names.isdisjoint(name for name, _ in old[0])
            ]
        )

    def _release(self, keys: Sequence[RouteKey]) -> None:
        self.slots.release(keys)
        for key in keys:
            del self.routes[key], self._last_steps[key]

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
    counts = [
        c if isinstance(c, Tensor) else torch.full((), c, dtype=torch.int64, device=device) for c in (first, second)
    ]
    return torch.stack(counts)
