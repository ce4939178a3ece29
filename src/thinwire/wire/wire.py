"""The Wire: what ``thinwire.compress()`` returns, and what keeps it alive."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

import torch
from torch import Tensor

from thinwire.collectives import (
    Buffers,
    Layer,
    Layout,
    Transport,
    TransportError,
    ring_bytes,
    scatter_reduce_allgather,
    sum_buffers,
    summed_all_reduce,
)
from thinwire.compressors import Coded, Summed
from thinwire.kernels import FORMAT_VERSION, cpu_level
from thinwire.plan import Plan, Speeds
from thinwire.wire import checkpoint
from thinwire.wire.agree import agree
from thinwire.wire.decline import decline as measure_and_decline
from thinwire.wire.parity import check_parity, resync
from thinwire.wire.simulate import simulate
from thinwire.wire.slots import Slots
from thinwire.wire.stats import Stats
from thinwire.wire.worker import Worker

BucketLayers = tuple[tuple[str, tuple[int, ...]], ...]
"""Names and shapes of the layers of a bucket, in order."""

_STALE_STEPS = 16


@dataclass
class _Route:
    """How a bucket travels: its layout, its buffers, and when it was last used."""

    layout: Layout
    messages: Buffers | None
    sums: Sequence[Tensor]
    last_step: int
    sent_bytes: int
    """What this rank hands to the transport for it in a compressed step."""

    @property
    def num_bytes(self) -> int:
        held = self.messages.num_bytes if self.messages else 0
        return held + sum(buffer.numel() * buffer.element_size() for buffer in self.sums)


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
    ) -> None:
        if start < 0:
            raise ValueError(f"start must not be negative, not {start}: it is the number of steps that stay dense")
        if not 0 <= seed < 2**63:
            raise ValueError(f"seed must be between 0 and 2**63 - 1, not {seed}")
        self.seed = seed
        self.start = start
        self.simulated = simulated
        self._asked = self._plan = plan
        self._shapes = {name: tuple(shape) for name, shape in shapes.items()}
        self._transport = transport
        self._step = -1
        self._stats = Stats()
        self._slots = Slots()
        self._routes: dict[tuple[BucketLayers, torch.dtype], _Route] = {}
        self._broken: TransportError | None = None
        self._found: Exception | None = None
        self._counted_step = -1
        self._step_is_finite = True
        self._attached = True
        self._speeds: Speeds | None = None
        agree(self._record(), transport)
        if decline and not simulated and self.world_size > 1:
            self._plan, self._speeds = measure_and_decline(plan, transport)
        self._worker = Worker("thinwire")

    @property
    def plan(self) -> Plan:
        """Which compressor each layer has."""
        return self._plan

    @property
    def declined(self) -> dict[str, str]:
        """Layers that stay raw because compressing them would have been slower, and the compressor they would have."""
        asked = self._asked.layers
        return {name: str(asked[name]) for name, c in self._plan.layers.items() if name in asked and asked[name] != c}

    @property
    def speeds(self) -> Speeds | None:
        """What declining measured; None with ``decline=False``."""
        return self._speeds

    @property
    def step(self) -> int:
        """Index of the last backward pass that communicated; −1 before the first."""
        return self._step

    @property
    def rank(self) -> int:
        return self._transport.rank

    @property
    def world_size(self) -> int:
        return self._transport.world_size

    @property
    def stats(self) -> Stats:
        """Totals so far, as a copy: what is under way is not in it."""
        held = sum(route.num_bytes for route in list(self._routes.values()))
        declined = len(self.declined)
        return dataclasses.replace(
            self._stats, buffer_bytes=held, slot_bytes=self._slots.num_bytes, declined_layers=declined
        )

    def reset_stats(self) -> None:
        """Start counting anew."""
        self._worker.call(self._reset_stats)

    def wire_bytes_per_step(self) -> int:
        """Bytes that this rank sends in a compressed step, by the formula of the buckets that the last step had."""
        return sum(route.sent_bytes for route in self._routes.values() if route.last_step == self._step)

    @property
    def dense(self) -> bool:
        """Whether the present step is uncompressed: it is before ``start``, or every layer is raw.

        The attachment then leaves gradients to a native all-reduce, as without a Wire, and calls `count_dense`.
        """
        return not self._attached or self._step < self.start or self._plan.all_raw

    def begin_step(self) -> None:
        """Count a new backward pass. Attachments call this before its first bucket."""
        self._step += 1

    def count_dense(self, num_bytes: int) -> None:
        """Count gradients of ``num_bytes`` that the attachment had summed by a native all-reduce."""
        self._count_step(self._step)
        moved = ring_bytes(num_bytes, self.world_size)
        self._stats.buckets += 1
        self._stats.dense_bytes += moved
        self._stats.payload_sent_bytes += moved
        self._stats.payload_received_bytes += moved

    def reduce(self, flat: Tensor, layers: BucketLayers, *, loss_scale: float = 1.0) -> torch.futures.Future[Tensor]:
        """Start replacing ``flat``, the gradients of ``layers`` end to end, by their mean over all ranks.

        ``loss_scale`` is how many times larger than the gradients its values are (a `GradScaler`'s scale). The future's
        result is ``flat`` itself; whatever goes wrong reaches the caller through it.
        """
        step = self._step
        return self._worker.submit(lambda: self._reduce(flat, layers, step, loss_scale))

    def simulate(self, flat: Tensor, layers: BucketLayers, *, loss_scale: float = 1.0) -> None:
        """Replace ``flat`` by what would arrive of it, here and now, and count the bytes that would have been sent.

        The attachment then takes the mean by a native all-reduce and shows it to `note_result`.
        """
        self._begin(self._step)
        key = (layers, flat.dtype)
        route = self._route(flat, key, self._step)
        state = self._slots.state(key, route.layout, loss_scale, flat.device)
        simulate(flat, route.layout, seed=self.seed, step=self._step, rank=self.rank, state=state)
        self._count(flat, route.sent_bytes, route.sent_bytes)

    def note_result(self, flat: Tensor) -> None:
        """See whether a mean is finite: if one of a step's is not, no slot moves in it (on any rank: means are equal)."""
        if self._plan.has_slots:
            self._step_is_finite &= math.isfinite(float(torch.linalg.vector_norm(flat, math.inf)))

    def check_parity(self, parameters: Mapping[str, Tensor]) -> None:
        """Compare all ranks' parameters, behind the training loop's back; this step's gradients raise a difference.

        In a dense step nothing else is under way in the worker, so it is waited for, and a difference is raised here.
        """
        step = self._step
        if self.dense:
            self._worker.call(lambda: self._check_parity(parameters, step))
            self._raise_found()
        else:
            self._worker.submit(lambda: self._check_parity(parameters, step))

    def resync(self, parameters: Mapping[str, Tensor]) -> None:
        """Give every rank rank 0's parameters, between steps. All ranks must call it."""
        self._worker.call(lambda: resync(parameters, self._transport))
        self._stats.resyncs += 1

    def state_dict(self) -> dict[str, Tensor]:
        """Step, seed, plan and this rank's slots, as tensors: loads with ``weights_only=True``.

        Keys of slots carry the rank, so the dictionaries of all ranks merge into one: save it with
        ``torch.distributed.checkpoint``, or one file for each rank.
        """
        state: dict[str, Tensor] = {}
        self._worker.call(lambda: state.update(self._collect()))
        return state

    def state_dict_of(self, world_size: int) -> dict[str, Tensor]:
        """The shape of the merged states of a world of ``world_size`` ranks, to load its checkpoint into.

            state = {"wire": wire.state_dict_of(8)}  # it was written by 8 ranks; this is another number
            torch.distributed.checkpoint.load(state, checkpoint_id=folder)
            wire.load_state_dict(state["wire"])
        """
        return checkpoint.template(self._plan, self._shapes, world_size)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a `state_dict`, on every rank, between steps.

        With as many ranks as before, each needs what it saved itself. With another number, each needs the merged
        dictionaries of all former ranks; the mean of what error feedback owes is kept (`thinwire.wire.slots.reshard`).

        Raises:
            ValueError: the state is of another wire format or of a model with other layers, or ranks are missing in it.
            DisagreementError: ranks loaded different states.
        """
        loaded = checkpoint.read(state, self._plan, self._shapes, self.rank, self.world_size)
        self._worker.call(lambda: self._adopt(loaded))

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

    def _record(self) -> dict[str, str]:
        """What all ranks must have in common, in the order in which a difference is best told."""
        try:
            library = version("thinwire")
        except PackageNotFoundError:
            library = "not installed"
        record = {
            "thinwire version": library,
            "wire format": str(FORMAT_VERSION),
            "seed": str(self.seed),
            "start": str(self.start),
            "simulated": str(self.simulated),
            "step": str(self._step),
        }
        if not all(compressor.exact_bits for compressor in self._plan.layers.values()):
            record |= {"CPU level": cpu_level(), "threads": str(torch.get_num_threads())}
        return record | {f"layer {name}": str(compressor) for name, compressor in self._plan.layers.items()}

    # What follows runs in the worker, or (simulated) in the thread that runs backward.

    def _reset_stats(self) -> None:
        self._stats = Stats()

    def _check_parity(self, parameters: Mapping[str, Tensor], step: int) -> Tensor:
        try:
            check_parity(parameters, self._transport, step)
        except Exception as error:  # noqa: BLE001 - raised by the bucket that follows
            self._found = error
        self._stats.parity_checks += 1
        return torch.empty(0)

    def _raise_found(self) -> None:
        found, self._found = self._found, None
        if found is not None:
            raise found

    def _collect(self) -> dict[str, Tensor]:
        self._end()
        return checkpoint.write(
            self._slots, self._plan, self._shapes, step=self._step, seed=self.seed, rank=self.rank, size=self.world_size
        )

    def _adopt(self, loaded: checkpoint.Loaded) -> None:
        self._step, self.seed, self._plan = loaded.step, loaded.seed, loaded.plan
        self._routes.clear()
        self._slots.replace(loaded.slots)
        agree(self._record(), self._transport)

    def _reduce(self, flat: Tensor, layers: BucketLayers, step: int, loss_scale: float) -> Tensor:
        if self._broken is not None:
            raise TransportError(f"the link broke earlier: {self._broken}")
        self._raise_found()
        try:
            if self.world_size > 1:
                self._communicate(flat, layers, step, loss_scale)
        except TransportError as error:
            self._broken = error
            raise
        except Exception:
            # Peers have the same news, or will: nobody commits this step.
            self._step_is_finite = False
            raise
        return flat

    def _communicate(self, flat: Tensor, layers: BucketLayers, step: int, loss_scale: float) -> None:
        self._begin(step)
        key = (layers, flat.dtype)
        route = self._route(flat, key, step)
        state = self._slots.state(key, route.layout, loss_scale, flat.device)
        layout, transport, clock = route.layout, self._transport, self._stats
        sent, received = transport.sent_bytes, transport.received_bytes
        if route.messages is not None:
            scatter_reduce_allgather(
                flat, layout, transport, route.messages, seed=self.seed, step=step, state=state, clock=clock
            )
        if route.sums:
            summed_all_reduce(
                flat, layout, transport, route.sums, seed=self.seed, step=step, state=state, clock=clock
            )
        self.note_result(flat)
        self._count(flat, transport.sent_bytes - sent, transport.received_bytes - received)

    def _count(self, flat: Tensor, sent: int, received: int) -> None:
        self._stats.buckets += 1
        self._stats.dense_bytes += ring_bytes(flat.numel() * flat.element_size(), self.world_size)
        self._stats.payload_sent_bytes += sent
        self._stats.payload_received_bytes += received

    def _count_step(self, step: int) -> bool:
        """Count a step when its first bucket comes; whether this was it."""
        if step == self._counted_step:
            return False
        self._counted_step = step
        self._stats.steps += 1
        self._stats.compressed_steps += not (step < self.start or self._plan.all_raw)
        return True

    def _begin(self, step: int) -> None:
        if not self._count_step(step):
            return
        self._end()
        # DDP rebuilds its buckets once or twice; the buffers of the old ones are given back.
        stale = [key for key, route in self._routes.items() if route.last_step < step - _STALE_STEPS]
        self._slots.release(stale)
        for key in stale:
            del self._routes[key]

    def _end(self) -> None:
        """Let the slots take what the last step left for them.

        They take nothing from a step in which some rank met NaN or Inf: the optimiser skips it too.
        """
        if self._step_is_finite:
            self._slots.commit()
        else:
            self._slots.discard()
            self._stats.nonfinite_steps += 1
        self._step_is_finite = True

    def _route(self, flat: Tensor, key: tuple[BucketLayers, torch.dtype], step: int) -> _Route:
        route = self._routes.get(key)
        if route is None:
            route = self._routes[key] = self._new_route(flat, key[0], step)
        route.last_step = step
        return route

    def _new_route(self, flat: Tensor, layers: BucketLayers, step: int) -> _Route:
        layout = Layout.build(self._place(flat, layers), self.world_size, flat.dtype)
        sent_bytes = layout.sent_bytes(self.rank) if self.world_size > 1 else 0
        if self.simulated:
            return _Route(Layout.build(layout.layers, 1, flat.dtype), None, (), step, sent_bytes)
        # gloo aborts the process when two ranks expect different sizes: agree before the first message.
        names = ", ".join(layer.name for layer in layout.layers)
        agree({"layers of a bucket": names, "cut": f"{layout.digest:016x}"}, self._transport)
        messages = Buffers.scatter_reduce_allgather(layout, self.rank) if layout.has_coded else None
        return _Route(layout, messages, sum_buffers(layout), step, sent_bytes)

    def _place(self, flat: Tensor, layers: BucketLayers) -> list[Layer]:
        placed, start = [], 0
        for name, shape in layers:
            if name not in self._plan.layers:
                # Frozen when compress() was called, and trained now.
                self._plan = self._plan.extended(name, shape)
                self._shapes[name] = shape
            compressor, numel = self._plan[name], math.prod(shape)
            if not isinstance(compressor, Coded | Summed):
                raise TypeError(f"{name} has {compressor}, which is neither coded nor summed")
            placed.append(Layer(name, start, numel, compressor))
            start += numel
        if start != flat.numel():
            raise ValueError(f"a bucket of {flat.numel()} elements came with layers of {start}")
        return placed
