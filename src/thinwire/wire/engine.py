"""What a Wire does with each bucket. Runs in the worker, or (simulated) in the thread that runs backward."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from thinwire.collectives import (
    Layer,
    Layout,
    Topology,
    Transport,
    TransportError,
    World,
    complete,
    gather_buffers,
    ring_bytes,
    sum_buffers,
    summed_all_reduce,
)
from thinwire.compressors import Coded, Compressor, LayerState, State, Summed, not_finite
from thinwire.kernels import FORMAT_VERSION, cpu_level
from thinwire.plan import Plan, Sync
from thinwire.wire import checkpoint
from thinwire.wire.agree import agree, library_version
from thinwire.wire.forms import Forms
from thinwire.wire.parity import check_parity
from thinwire.wire.route import BucketLayers, Route, RouteKey
from thinwire.wire.simulate import simulate
from thinwire.wire.slots import Slots
from thinwire.wire.stats import Stats
from thinwire.wire.tally import Tally
from thinwire.wire.timeline import Timeline
from thinwire.wire.worker import Job, Then

_STALE_STEPS = 16


class Engine:
    """Plan, routes, slots and counters of a Wire."""

    def __init__(
        self,
        plan: Plan,
        shapes: Mapping[str, Sequence[int]],
        transport: Transport,
        *,
        topology: Topology,
        world: World,
        seed: int,
        start: int,
        simulated: bool,
        measure: int = 0,
    ) -> None:
        self.plan = plan
        self.topology, self.world = topology, world
        self.shapes = {name: tuple(shape) for name, shape in shapes.items()}
        self.transport = transport
        self.seed = seed
        self.start = start
        self.simulated = simulated
        self.measure = measure
        self.learning_rate: float | None = None
        """The optimizer's in the present step, for compressors that follow it."""
        self.learning_rates: Mapping[str, float] = {}
        """The same by layer."""
        self.changes: Mapping[str, float] = {}
        """What the optimizer's last step did to each layer that follows it: ``‖x^k − x^{k−1}‖²``."""
        self._loss_scale = 1.0
        self.tally = Tally(transport)
        self.timeline: Timeline | None = None
        self.slots = Slots()
        self._forms = Forms(transport.world_size, self.shapes, self.slots)
        self.routes: dict[RouteKey, Route] = {}
        self._broken: TransportError | None = None
        self._found: Exception | None = None
        self._step_is_finite = True

    @property
    def stats(self) -> Stats:
        """Totals while they grow."""
        return self.tally.stats

    @property
    def rank(self) -> int:
        return self.transport.rank

    @property
    def world_size(self) -> int:
        return self.transport.world_size

    def record(self, step: int) -> dict[str, str]:
        """What all ranks must have in common, in the order in which a difference is best told."""
        record = {
            "thinwire version": library_version(),
            "wire format": str(FORMAT_VERSION),
            "topology": f"{self.topology} on nodes {self.world.nodes}",
            "seed": str(self.seed),
            "start": str(self.start),
            "simulated": str(self.simulated),
            "measure": str(self.measure),
            "step": str(step),
        }
        if not all(compressor.exact_bits for compressor in self.plan.layers.values()):
            record |= self._machine()
        return record | {f"layer {name}": str(compressor) for name, compressor in self.plan.layers.items()}

    def _machine(self) -> dict[str, str]:
        """What must be alike where compressors do not give the same bits on any machine."""
        return {"CPU level": cpu_level(), "threads": str(torch.get_num_threads())}

    @property
    def shares(self) -> tuple[int, ...]:
        """How much of every layer each rank owns, in proportion; nobody owns anything where all is gathered."""
        return self.shares_of(self.topology)

    def shares_of(self, topology: Topology) -> tuple[int, ...]:
        """The same by another topology."""
        return (0,) * self.world_size if topology.gathers else topology.shares(self.world)

    def check_parity(self, parameters: Mapping[str, Tensor], step: int) -> Job:
        """A job of the worker: compare all ranks' parameters; a difference is raised by the bucket that follows."""
        yield Then.ALONE
        try:
            check_parity(parameters, self.transport, step)
        except Exception as error:  # noqa: BLE001 - raised by the bucket that follows
            self._found = error
        self.stats.parity_checks += 1
        return torch.empty(0)

    def raise_found(self) -> None:
        found, self._found = self._found, None
        if found is not None:
            raise found

    def collect(self, step: int) -> dict[str, Tensor]:
        self._end()
        return checkpoint.write(
            self.slots, self.plan, self.shapes, step=step, seed=self.seed, rank=self.rank, shares=self.shares
        )

    def end_step(self) -> Sync | None:
        """Between two steps: what the last one's communication took, if it was compressed; asked once."""
        seconds = self.tally.sync_seconds()
        sizes = tuple(route.sent_bytes for route in self.present_routes())
        return Sync(sizes, seconds) if seconds and sizes else None

    def present_routes(self) -> list[Route]:
        """Those of the last step, in the order in which buckets leave."""
        last = max((route.last_step for route in self.routes.values()), default=-1)
        return [route for route in self.routes.values() if route.last_step == last]

    def change(self, plan: Plan, topology: Topology, step: int) -> None:
        """Between two steps, on every rank: take another plan, or let messages meet in another way. What error feedback
        owes goes with its layer."""
        self._end()
        if topology != self.topology:
            self.slots.release(list(self.routes))
            self.routes.clear()
        old_shares, self.topology = self.shares, topology
        for name, compressor in plan.layers.items():
            if (old := self.plan[name]) != compressor or self.shares != old_shares:
                self.slots.hand_over(name, self.shapes[name], old, compressor, self.rank, old_shares, self.shares)
        self.plan = plan
        self.stats.plan_changes += 1
        agree({"step": str(step), "plan": plan.hash, "topology": str(topology)}, self.transport)

    def adopt(self, loaded: checkpoint.Loaded, topology: Topology) -> None:
        self.seed, self.plan, self.topology = loaded.seed, loaded.plan, topology
        self.routes.clear()
        self._forms.forget()
        self.slots.replace(loaded.slots)
        agree(self.record(loaded.step), self.transport)

    def reduce(self, flat: Tensor, layers: BucketLayers, step: int, loss_scale: float) -> Job:
        """A job of the worker: replace ``flat`` by its mean over all ranks, and return it."""
        if self._broken is not None:
            raise TransportError(f"the link broke earlier: {self._broken}")
        try:
            if self.world_size > 1:
                yield from self._communicate(flat, layers, step, loss_scale)
        except TransportError as error:
            self._broken = error
            raise
        except Exception:
            # Peers have the same news, or will: nobody commits this step.
            self._step_is_finite = False
            raise
        self.raise_found()
        return flat

    def simulate(self, flat: Tensor, layers: BucketLayers, step: int, loss_scale: float) -> None:
        """Replace ``flat`` by what would arrive of it, and count the bytes that would have been sent."""
        self._begin(step)
        key = (layers, flat.dtype, self._forms.number)
        route = self._route(flat, key, step)
        state = self._state(key, route, loss_scale, flat.device)
        if state is not None:
            self._learn(flat, route.layout, step, state)
        options = {"seed": self.seed, "step": step, "rank": self.rank, "num_ranks": self.world_size}
        simulate(flat, route.layout, state=state, **options)
        self.tally.clipped(*route.clipped(state))
        self.tally.bucket(ring_bytes(flat.nbytes, self.world_size), route.sent_bytes)

    def note_result(self, flat: Tensor) -> None:
        """See whether a mean is finite: if one of a step's is not, no slot moves in it, on any rank."""
        if self.plan.has_slots:
            self._step_is_finite &= math.isfinite(float(not_finite(flat)))

    def follow(self, mean: Tensor, layers: BucketLayers) -> None:
        """Give slots that follow the mean of all ranks a simulated step's: until now they had this rank's own."""
        start = 0
        for name, shape in layers:
            numel = math.prod(shape)
            if (of := self.slots.layer(name)) is not None:
                state = State({}, {}, self._loss_scale, {name: of}, self.learning_rates)
                self.plan[name].follow(mean[start : start + numel], name, state)
            start += numel

    def _communicate(self, flat: Tensor, layers: BucketLayers, step: int, loss_scale: float) -> Iterator[Then]:
        self._begin(step)
        self.tally.bucket_begins()
        key = (layers, flat.dtype, self._forms.number)
        learning = step - self.start in self._forms.learns_at
        if key not in self.routes or learning:
            # Ranks agree on a new route, or share what is learned, by native collectives: those have one order.
            yield Then.ALONE
        route = self._route(flat, key, step)
        state = self._state(key, route, loss_scale, flat.device)
        if learning and state is not None:
            self._learn(flat, route.layout, step, state)
        exact = flat.to(torch.float32, copy=True) if self.measure and step % self.measure == 0 else None
        options = {"seed": self.seed, "step": step, "state": state, "clock": self.timeline or self.stats}
        yield from self._exchange(flat, route, options)
        if exact is not None:
            # Against the exact mean, which takes an all-reduce in fp32.
            self.transport.all_reduce(exact.div_(self.world_size), lane=1)
            self.tally.measure(exact, flat, step)
        self.note_result(flat)
        self._note_limits(route, state)
        self.stats.encoded += route.layout.num_coded
        self.tally.bucket(ring_bytes(flat.nbytes, self.world_size))
        self.tally.bucket_ends()

    def _exchange(self, flat: Tensor, route: Route, options: Mapping[str, Any]) -> Iterator[Then]:
        """All collectives of a bucket."""
        with ExitStack() as stack:
            running = []
            for collective, buffers in route.exchanges:
                exchange = collective(flat, route.layout, self.transport, buffers, **options)
                # Closed early, by an error in another one, it tells its peers.
                running.append(stack.enter_context(closing(exchange)))
                next(exchange)
            if route.sums:
                sums = summed_all_reduce(flat, route.layout, self.transport, route.sums, **options)
                running.append(sums)
                next(sums)
            yield Then.LATER
            for exchange in running:
                complete(exchange)

    def _note_limits(self, route: Route, state: State | None) -> None:
        """Count what the last messages and sums could not hold."""
        self.tally.limits(*route.limits(self.rank))
        self.tally.clipped(*route.clipped(state))

    def _state(self, key: RouteKey, route: Route, loss_scale: float, device: torch.device) -> State | None:
        self._loss_scale = loss_scale
        state = self.slots.state(key, route.layout, loss_scale, device)
        return replace(state, learning_rates=self.learning_rates) if state and self.learning_rates else state

    def _learn(self, flat: Tensor, layout: Layout, step: int, state: State) -> None:
        """Learn from rank 0's gradients what all ranks are to code with from this step on."""
        for layer in layout.layers:
            compressor = layer.compressor
            if not isinstance(compressor, Coded) or step - self.start not in compressor.learns_at:
                continue
            slots = state.layers[layer.name].now
            if self.rank == 0:
                values = flat[layer.start : layer.start + layer.numel].float() / state.loss_scale
                for name, value in compressor.learn(values, slots).items():
                    slots[name].copy_(value.view_as(slots[name]))
            for slot in compressor.slots:
                if slot.learned:
                    self.transport.broadcast(slots[slot.name])

    def count_dense(self, num_bytes: int, step: int) -> None:
        """Count gradients of ``num_bytes`` that went by a native all-reduce."""
        self._count_step(step)
        moved = ring_bytes(num_bytes, self.world_size)
        self.tally.bucket(moved, moved)

    def reset_stats(self) -> None:
        """Start counting anew."""
        self.tally.reset()

    def present_stats(self) -> Stats:
        """Totals, with what the transport has moved and the memory held now."""
        held = sum(route.num_bytes for route in list(self.routes.values()))
        return self.tally.present(held, self.slots.num_bytes)

    def _count_step(self, step: int) -> bool:
        return self.tally.step(step, compressed=not (step < self.start or self.plan.all_raw))

    def _begin(self, step: int) -> None:
        if not self._count_step(step):
            return
        self._end()
        self._forms.follow(self.plan, step - self.start, self.learning_rate)
        # DDP rebuilds its buckets once or twice; the buffers of the old ones are given back.
        stale = [key for key, route in self.routes.items() if route.last_step < step - _STALE_STEPS]
        self.slots.release(stale)
        for key in stale:
            del self.routes[key]

    def _end(self) -> None:
        """Let the slots take what the last step left for them: nothing, if some rank met NaN or Inf in it."""
        self.tally.end_measure()
        if self._step_is_finite:
            self._settle()
            self.slots.commit()
        else:
            self.slots.discard()
            self.stats.nonfinite_steps += 1
        self._step_is_finite = True
        self._follow_optimizer()

    def _follow_optimizer(self) -> None:
        together: dict[Compressor, list[tuple[LayerState, float]]] = {}
        for name, change in self.changes.items():
            if (of := self.slots.layer(name)) is not None and math.isfinite(change):
                together.setdefault(self.plan[name], []).append((of, change))
        self.changes = {}
        for compressor, changes in together.items():
            compressor.updated(changes)

    def _settle(self) -> None:
        """Let compressors decide what their layers decide together."""
        together: dict[Compressor, list[LayerState]] = {}
        for layer, of in self.slots.touched_layers():
            # That of the plan: a layer's form in this step may differ from the others'.
            compressor = self.plan[layer.name]
            if compressor.settles:
                together.setdefault(compressor, []).append(of)
        for compressor, layers in together.items():
            compressor.end_step(layers, self._loss_scale)

    def _route(self, flat: Tensor, key: RouteKey, step: int) -> Route:
        route = self.routes.get(key)
        if route is None:
            route = self.routes[key] = self._new_route(flat, key[0], step)
        route.last_step = step
        return route

    def _new_route(self, flat: Tensor, layers: BucketLayers, step: int) -> Route:
        layout = Layout.build(self._place(flat, layers, step), self.world, flat.dtype, self.topology)
        sent_bytes = layout.sent_bytes(self.rank, self.transport) if self.world_size > 1 else 0
        if self.simulated:
            return Route(Layout.build(layout.layers, 1, flat.dtype), None, None, (), step, sent_bytes)
        # gloo aborts the process when two ranks expect different sizes: agree before the first message.
        names = ", ".join(layer.name for layer in layout.layers)
        agree({"layers of a bucket": names, "cut": f"{layout.digest:016x}"}, self.transport)
        return self._open(layout, step, sent_bytes)

    def _open(self, layout: Layout, step: int, sent_bytes: int) -> Route:
        """Make room for the messages of a new route. All ranks are known to want the same."""
        reduction = self.transport.open(layout.reduction_traffic()) if layout.has_owned else None
        gathering = gather_buffers(layout, self.transport) if layout.has_gathered else None
        return Route(layout, reduction, gathering, sum_buffers(layout), step, sent_bytes)

    def _place(self, flat: Tensor, layers: BucketLayers, step: int) -> list[Layer]:
        placed, start = [], 0
        for name, shape in layers:
            if name not in self.plan.layers:
                # Frozen when compress() was called, and trained now.
                self.plan, self.shapes[name] = self.plan.extended(name, shape), shape
                self._forms.add(name, self.plan, step - self.start, self.learning_rate)
            compressor = self._forms[name]
            if not isinstance(compressor, Coded | Summed):
                raise TypeError(f"{name} has {compressor}, which is neither coded nor summed")
            placed.append(Layer(name, start, shape, compressor))
            start += math.prod(shape)
        if start != flat.numel():
            raise ValueError(f"a bucket of {flat.numel()} elements came with layers of {start}")
        return placed
