"""The Wire: what ``thinwire.compress()`` returns, and what keeps it alive."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
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
    scatter_reduce_allgather,
)
from thinwire.compressors import Coded
from thinwire.kernels import FORMAT_VERSION, cpu_level
from thinwire.plan import Plan
from thinwire.wire.agree import agree
from thinwire.wire.stats import Stats
from thinwire.wire.worker import Worker

LayerNames = tuple[tuple[str, int], ...]
"""Names and numbers of elements of the layers of a bucket, in order."""

_STALE_STEPS = 16


@dataclass
class _Route:
    """A bucket's layout, its buffers and when it was last used."""

    layout: Layout
    buffers: Buffers | None
    """None if the plan is raw throughout."""
    last_step: int


class Wire:
    """Compressed communication of one model: its plan, its state, its statistics.

    ``state_dict()`` holds tensors only and belongs into every checkpoint: random draws depend on the step, so a run
    that resumes with it continues bit for bit.
    """

    def __init__(self, plan: Plan, transport: Transport, *, seed: int = 0, start: int = 0) -> None:
        if start < 0:
            raise ValueError(f"start must not be negative, not {start}: it is the number of steps that stay dense")
        if not 0 <= seed < 2**63:
            raise ValueError(f"seed must be between 0 and 2**63 - 1, not {seed}")
        self.seed = seed
        self.start = start
        self._plan = plan
        self._transport = transport
        self._step = -1
        self._stats = Stats()
        self._routes: dict[tuple[LayerNames, torch.dtype], _Route] = {}
        self._broken: TransportError | None = None
        self._counted_step = -1
        self._attached = True
        agree(self._record(), transport)
        self._worker = Worker("thinwire")

    @property
    def plan(self) -> Plan:
        """Which compressor each layer has."""
        return self._plan

    @property
    def step(self) -> int:
        """Index of the last backward pass that communicated; −1 before the first."""
        return self._step

    @property
    def world_size(self) -> int:
        return self._transport.world_size

    @property
    def stats(self) -> Stats:
        """Totals so far, as a copy: what is under way is not in it."""
        held = sum(route.buffers.num_bytes for route in self._routes.values() if route.buffers)
        return dataclasses.replace(self._stats, buffer_bytes=held)

    def reset_stats(self) -> None:
        """Start counting anew."""
        self._worker.call(self._reset_stats)

    def wire_bytes_per_step(self) -> int:
        """Bytes that this rank sends in a compressed step, by the formula of the buckets that the last step had."""
        return sum(
            route.layout.sent_bytes(self._transport.rank)
            if route.buffers
            else ring_bytes(route.layout.numel * route.layout.dtype.itemsize, self.world_size)
            for route in self._routes.values()
            if route.last_step == self._step
        )

    def begin_step(self) -> None:
        """Count a new backward pass. Attachments call this before its first bucket."""
        self._step += 1

    def reduce(self, flat: Tensor, layers: LayerNames) -> torch.futures.Future[Tensor]:
        """Start replacing ``flat``, the gradients of ``layers`` end to end, by their mean over all ranks.

        The future's result is ``flat`` itself. Whatever goes wrong reaches the caller through the future.
        """
        step = self._step
        return self._worker.submit(lambda: self._reduce(flat, layers, step))

    def state_dict(self) -> dict[str, Tensor]:
        """Step, seed and plan as tensors: loads with ``weights_only=True``."""
        return {
            "step": torch.tensor(self._step),
            "seed": torch.tensor(self.seed),
            "format_version": torch.tensor(FORMAT_VERSION),
            "plan": torch.frombuffer(bytearray(self._plan.to_json().encode()), dtype=torch.uint8),
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a `state_dict`. Must be called on every rank, between steps.

        Raises:
            ValueError: the state is of another wire format or of a model with other layers.
            DisagreementError: ranks loaded different states.
        """
        missing = {"step", "seed", "format_version", "plan"} - set(state)
        if missing:
            raise ValueError(f"this is not the state of a Wire: {', '.join(sorted(missing))} missing")
        if int(state["format_version"]) != FORMAT_VERSION:
            raise ValueError(
                f"the state has wire format {int(state['format_version'])}, this version of thinwire has "
                f"{FORMAT_VERSION}: resume with the version that wrote it, or start without this state"
            )
        plan = Plan.from_json(bytes(state["plan"].tolist()).decode())
        if set(plan) != set(self._plan):
            differing = sorted(set(plan) ^ set(self._plan))
            raise ValueError(f"the state is of a model with other layers; the first that differs is {differing[0]}")
        self._step, self.seed, self._plan = int(state["step"]), int(state["seed"]), plan
        self._worker.call(self._adopt)

    @property
    def attached(self) -> bool:
        """False once `detach` was called."""
        return self._attached

    def detach(self) -> None:
        """Stop compressing, between steps and on every rank: gradients go through a plain all-reduce from now on.

        PyTorch cannot unregister a communication hook: the one that is there passes gradients through. The model may be
        compressed again.
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
            "step": str(self._step),
        }
        if not all(compressor.exact_bits for compressor in self._plan.layers.values()):
            record["CPU level"] = cpu_level()
        return record | {f"layer {name}": str(compressor) for name, compressor in self._plan.layers.items()}

    def _adopt(self) -> None:
        self._routes.clear()
        agree(self._record(), self._transport)

    def _reset_stats(self) -> None:
        self._stats = Stats()

    def _reduce(self, flat: Tensor, layers: LayerNames, step: int) -> Tensor:
        """Runs in the worker."""
        if self._broken is not None:
            raise TransportError(f"the link broke earlier: {self._broken}")
        try:
            if self.world_size > 1:
                self._communicate(flat, layers, step)
        except TransportError as error:
            self._broken = error
            raise
        return flat

    def _communicate(self, flat: Tensor, layers: LayerNames, step: int) -> None:
        if step != self._counted_step:
            self._begin_counting(step)
        route = self._route(flat, layers, step)
        transport, stats = self._transport, self._stats
        sent, received = transport.sent_bytes, transport.received_bytes
        if step < self.start or route.buffers is None:
            with stats.stage("dense"):
                transport.all_reduce(flat.div_(self.world_size))
        else:
            scatter_reduce_allgather(
                flat, route.layout, transport, route.buffers, seed=self.seed, step=step, clock=stats
            )
        stats.buckets += 1
        stats.dense_bytes += ring_bytes(route.layout.numel * flat.element_size(), self.world_size)
        stats.payload_sent_bytes += transport.sent_bytes - sent
        stats.payload_received_bytes += transport.received_bytes - received

    def _begin_counting(self, step: int) -> None:
        self._counted_step = step
        self._stats.steps += 1
        self._stats.compressed_steps += step >= self.start
        # DDP rebuilds its buckets once or twice; the buffers of the old ones are given back.
        stale = [key for key, route in self._routes.items() if route.last_step < step - _STALE_STEPS]
        for key in stale:
            del self._routes[key]

    def _route(self, flat: Tensor, layers: LayerNames, step: int) -> _Route:
        key = (layers, flat.dtype)
        route = self._routes.get(key)
        if route is None:
            layout = Layout.build(self._place(flat, layers), self.world_size, flat.dtype)
            # gloo aborts the process when two ranks expect different sizes: agree before the first message.
            names = ", ".join(name for name, _ in layers)
            agree({"layers of a bucket": names, "cut": f"{layout.digest:016x}"}, self._transport)
            rank = self._transport.rank
            buffers = None if self._plan.all_raw else Buffers.scatter_reduce_allgather(layout, rank)
            route = self._routes[key] = _Route(layout, buffers, step)
        route.last_step = step
        return route

    def _place(self, flat: Tensor, layers: LayerNames) -> list[Layer]:
        placed, start = [], 0
        for name, numel in layers:
            if name not in self._plan.layers:
                raise KeyError(
                    f"{name} has no place in the plan: it was frozen or not there when compress() was called. "
                    "Call detach() and compress() again after such a change"
                )
            compressor = self._plan[name]
            if not isinstance(compressor, Coded):
                raise TypeError(f"{name} has {compressor}, which cannot travel in a coded message")
            placed.append(Layer(name, start, numel, compressor))
            start += numel
        if start != flat.numel():
            raise ValueError(f"a bucket of {flat.numel()} elements came with layers of {start}")
        return placed


def ring_bytes(num_bytes: int, world_size: int) -> int:
    """Bytes that each rank sends in a ring all-reduce of a tensor of ``num_bytes``."""
    return 2 * (world_size - 1) * num_bytes // world_size
