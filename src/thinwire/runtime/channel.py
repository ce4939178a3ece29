"""One collective on one flat buffer: what is sent where, the messages for it, and the loop that runs it.

DDP's buckets, FSDP2's weights and gradients, and the buffers of a process group all go through a `Channel`.
"""

from __future__ import annotations

import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Hashable, Iterator, Mapping
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field, replace
from typing import Generic, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

from thinwire import threads
from thinwire.collectives import (
    Algorithm,
    Buffers,
    CollectiveCall,
    DeviceBuffers,
    DeviceTransport,
    Layer,
    Layout,
    Shard,
    ShardBuffers,
    Transport,
    TransportError,
    World,
    all_gather,
    all_reduce,
    complete,
    device_all_gather,
    device_all_reduce,
    device_reduce_scatter,
    encoded,
    gather_buffers,
    gather_mean,
    packed_sums,
    part_layout,
    reduce_scatter,
    ring_bytes,
    sent_bytes,
    sharded_layout,
    sum_buffers,
    summed_all_reduce,
)
from thinwire.compressors import Clipping, Coded, Count, Saturating, Segments, State, find_mixin
from thinwire.kernels import derive_key, is_dense
from thinwire.runtime.consistency import agree
from thinwire.runtime.executor import Executor, Job, StreamExecutor, Then, ThreadExecutor
from thinwire.runtime.probe import settle
from thinwire.runtime.stats import ProfilerRanges, TrafficStats

_S = TypeVar("_S", bound=TrafficStats)
_T = TypeVar("_T")
Kind = Literal["all_reduce", "reduce_scatter", "all_gather"]

BucketLayers = tuple[tuple[str, tuple[int, ...]], ...]
"""Names and shapes of the layers of a bucket, in order."""


def bucket_parts(flat: Tensor, layers: BucketLayers) -> Iterator[tuple[str, Tensor]]:
    """The layers of a bucket, by name and in their shapes, as views of its flat buffer."""
    start = 0
    for name, shape in layers:
        numel = math.prod(shape)
        yield name, flat[start : start + numel].view(shape)
        start += numel


def in_order_of(parameter: Tensor, values: Tensor) -> Tensor:
    """A layer of a DDP bucket by the indices of its parameter, as a view.

    DDP keeps values in the order in which the parameter lies in memory, if that leaves no gaps.
    """
    values = values.view(parameter.shape)
    if parameter.is_contiguous() or not is_dense(parameter):
        return values
    return values.as_strided(parameter.shape, parameter.stride(), values.storage_offset())


_IN_FLIGHT = 2
"""Buffers of one kind, content and dtype that may be under way at a time: each has messages of its own."""
_STALE_OPERATIONS = 2048
_CLOSE_S = 1.0


class Contents(NamedTuple):
    """The layers in a buffer that is all-reduced (``layers``), or in each rank's part of a sharded one (``shards``)."""

    key: Hashable
    """Distinguishes these contents from others."""
    layers: tuple[Layer, ...]
    shards: tuple[tuple[Shard, ...], ...] = ()
    """By rank, the shards in its part, where parts differ or belong together; ``layers`` is empty then."""
    part_numel: int = 0
    """Elements of each part, where there are shards."""

    @property
    def numel(self) -> int:
        return self.part_numel or sum(layer.numel for layer in self.layers)

    @property
    def names(self) -> str:
        if self.shards:
            return ", ".join(dict.fromkeys(shard.name for part in self.shards for shard in part))
        return ", ".join(layer.name for layer in self.layers)


@dataclass
class Operation(ABC):
    """One collective on one buffer. Subclasses provide the buffer and take the result; methods run in the executor."""

    kind: Kind
    contents: Contents
    dtype: torch.dtype

    scale: float = field(default=1.0, init=False)
    """The factor of the sum."""
    draw: int | None = field(default=None, init=False)
    """Overrides the number of the operation in the key of random draws; equal values repeat the draws."""
    out: Tensor | None = field(default=None, init=False)
    """Where a reduce-scatter leaves this rank's part, flat."""
    kept: dict[int, Tensor] | None = field(default=None, init=False)
    """Of an all-gather: this rank's last messages (`thinwire.collectives.all_gather`)."""

    @abstractmethod
    def buffer(self) -> Tensor:
        """The flat buffer. That of an all-gather holds this rank's part in its place."""

    def state(self, x: Tensor) -> State | None:
        """The slots of the compressors for the buffer ``x``."""
        return None

    def finish(self, x: Tensor) -> None:  # noqa: B027 - most have nothing to do
        """Called with the buffer once it holds the result."""


@dataclass
class Route:
    """The layout of a buffer and the messages in which it is sent: made once, used in every step."""

    layout: Layout
    sent_bytes: int
    """Bytes that this rank hands to the transport each time, at most."""

    @property
    def num_bytes(self) -> int:
        """Memory held."""
        return 0

    def collectives(
        self,
        x: Tensor,
        transport: Transport,
        call: CollectiveCall,
        out: Tensor | None = None,
        kept: dict[int, Tensor] | None = None,
    ) -> list[Generator[None]]:
        """The collectives of this buffer; each yields once, when its first messages are on their way."""
        raise NotImplementedError("a simulated buffer is not sent")

    def encoded(self, rank: int) -> Iterator[tuple[Coded, Segments, Tensor]]:
        """The messages that this rank encoded last, by compressor."""
        return iter(())

    def limits(self, rank: int) -> tuple[Count, Count]:
        """Values that saturated in this rank's last messages, and values that found no room in them."""
        saturated: Count = 0
        overflowed: Count = 0
        for compressor, segments, message in self.encoded(rank):
            if (saturating := find_mixin(compressor, Saturating)) is not None:
                more, over = saturating.limits(message, segments)
                saturated, overflowed = saturated + more, overflowed + over
        return saturated, overflowed

    def clipped(self, state: State | None) -> tuple[Count, int]:
        """Values that this rank clipped to fit into integers in the last step, and all that it made integers of."""
        clipped: Count = 0
        rounded = 0
        for s in self.layout.sums:
            for compressor, parts in s.members:
                clipping = find_mixin(compressor, Clipping)
                if clipping is not None and s.round == 0:
                    clipped += clipping.clipped(parts.parts, state)
                    rounded += sum(part.piece.numel for part in parts)
        return clipped, rounded


class HostRoute(Route):
    """Messages in the host's memory: between process groups of gloo, and in shared memory."""

    def __init__(self, kind: Kind, layout: Layout, transport: Transport) -> None:
        super().__init__(layout, sent_bytes_of(kind, layout, transport))
        traffic = layout.reduction_traffic(up=kind != "all_gather", down=kind != "reduce_scatter")
        self._kind: Kind = kind
        # Layers that are cut among owners, layers that every rank gathers, and layers that are summed.
        self._reduction: Buffers | None = transport.open(traffic) if layout.has_owned else None
        self._gathering: Buffers | None = gather_buffers(layout, transport) if layout.has_gathered else None
        self._sums = sum_buffers(layout)
        self._packed = packed_sums(layout, transport)

    @property
    def num_bytes(self) -> int:
        held = sum(buffers.num_bytes for buffers in (self._reduction, self._gathering) if buffers is not None)
        held += sum(s.num_bytes for s in self._packed.values())
        return held + sum(buffer.numel() * buffer.element_size() for buffer in self._sums)

    def collectives(
        self,
        x: Tensor,
        transport: Transport,
        call: CollectiveCall,
        out: Tensor | None = None,
        kept: dict[int, Tensor] | None = None,
    ) -> list[Generator[None]]:
        started = []
        if self._kind == "all_gather":
            if self._reduction is not None:
                started.append(all_gather(x, self.layout, transport, self._reduction, call, kept=kept))
            return started
        if self._kind == "reduce_scatter":
            if self._reduction is not None:
                started.append(reduce_scatter(x, self.layout, transport, self._reduction, call, out=out))
            return started
        if self._reduction is not None:
            started.append(all_reduce(x, self.layout, transport, self._reduction, call))
        if self._gathering is not None:
            started.append(gather_mean(x, self.layout, transport, self._gathering, call))
        if self._sums:
            started.append(summed_all_reduce(x, self.layout, transport, self._sums, call, self._packed))
        return started

    def encoded(self, rank: int) -> Iterator[tuple[Coded, Segments, Tensor]]:
        messages = []
        if self._reduction is not None:
            messages += [(chunk, self._reduction.outbox[phase]) for chunk, phase in encoded(self.layout, rank)]
        if self._gathering is not None:
            work, outbox = self._gathering.work, self._gathering.outbox
            messages += [(chunk, work[rank] if work else outbox[k]) for k, chunk in enumerate(self.layout.gathered)]
        for chunk, message in messages:
            for compressor, segments in chunk.groups:
                yield compressor, segments, message


class DeviceRoute(Route):
    """Messages in a device's memory: a collective is only enqueued there, and has ended as far as the host knows."""

    def __init__(self, kind: Kind, layout: Layout, transport: DeviceTransport) -> None:
        rank, device = transport.rank, transport.device
        if kind == "all_reduce":
            self._buffers: DeviceBuffers | ShardBuffers = DeviceBuffers.allocate(layout, rank, device)
            super().__init__(layout, self._buffers.sent_bytes)
        else:
            self._buffers = ShardBuffers.open(layout, rank, device, up=kind == "reduce_scatter")
            super().__init__(layout, sent_bytes_of(kind, layout, transport))

    @property
    def num_bytes(self) -> int:
        return (self._buffers if isinstance(self._buffers, DeviceBuffers) else self._buffers.messages).num_bytes

    def collectives(
        self,
        x: Tensor,
        transport: Transport,
        call: CollectiveCall,
        out: Tensor | None = None,
        kept: dict[int, Tensor] | None = None,
    ) -> list[Generator[None]]:
        return [self._enqueue(x, transport, call, out)]

    def _enqueue(self, x: Tensor, transport: Transport, call: CollectiveCall, out: Tensor | None) -> Generator[None]:
        assert isinstance(transport, DeviceTransport)
        if isinstance(self._buffers, DeviceBuffers):
            device_all_reduce(x, self.layout, transport, self._buffers, call)
        elif out is not None:
            device_reduce_scatter(x, out, transport, self._buffers, call)
        else:
            device_all_gather(x, transport, self._buffers, call)
        yield

    def encoded(self, rank: int) -> Iterator[tuple[Coded, Segments, Tensor]]:
        if isinstance(self._buffers, DeviceBuffers):
            for (compressor, segments), message in self._buffers.encoded():
                yield compressor, segments, message


@dataclass
class _Routes:
    """The routes of buffers of one kind, content and dtype, which take turns."""

    layout: Layout | None = None
    by_turn: dict[int, tuple[Route, threading.Lock]] = field(default_factory=dict)
    taken: int = 0
    last: int = 0


class Channel(Generic[_S]):
    """Runs collectives between the ranks of one transport on one executor, in the order in which they are submitted."""

    def __init__(
        self, transport: Transport, executor: Executor, stats: _S, *, algorithm: Algorithm, world: World, seed: int
    ) -> None:
        self.transport, self.executor, self.stats = transport, executor, stats
        self.algorithm, self.world, self.seed = algorithm, world, seed
        self._routes: dict[Hashable, _Routes] = {}
        self._operations = 0
        self._lock = threading.Lock()
        self._broken: TransportError | None = None

    @staticmethod
    def connect(
        transport: Transport, stats: _S, *, algorithm: Algorithm, seed: int, record: Mapping[str, str]
    ) -> Channel[_S]:
        """A channel with an executor of its own. ``record``: what else all ranks must have in common.

        Raises:
            DisagreementError: they do not.
            ValueError: the collective algorithm does not fit this world.
            TransportError: a rank is gone or silent.
        """
        agree(record, transport)
        algorithm, world = settle(algorithm, transport)
        if isinstance(transport, DeviceTransport):
            # FSDP2 has streams of its own for gathers and reductions, and events between them.
            executor: Executor = StreamExecutor(transport.device, own_stream=False)
        else:
            executor = ThreadExecutor("thinwire group")
        return Channel(transport, executor, stats, algorithm=algorithm, world=world, seed=seed)

    # Operations, for clients that have a buffer and what to do with it.

    def submit(self, operation: Operation) -> torch.futures.Future[Tensor]:
        """Start a collective; the future says when it has ended, and how. All ranks submit the same in turn."""
        with self._lock:
            number, self._operations = self._operations, self._operations + 1
            return self.executor.submit(self.guarded(self._run(operation, number)))

    def _run(self, operation: Operation, number: int) -> Job:
        routes = self._routes_of(operation, number)
        turn = routes.taken % _IN_FLIGHT
        routes.taken += 1
        if turn not in routes.by_turn:
            # Ranks agree on what is new, and open messages, by native collectives: those have one order.
            yield Then.ALONE
            kind, contents, dtype = operation.kind, operation.contents, operation.dtype
            layout, record = routes.layout, None
            if layout is None:
                layout = self.layout(kind, contents, dtype)
                record = {"buffer": f"{kind} of {contents.numel} elements of {dtype}", "layers": contents.names}
            routes.by_turn[turn] = self.open(kind, layout, record), threading.Lock()
            # Known from now on: ranks that did not agree ask again.
            routes.layout = layout
        route, lock = routes.by_turn[turn]
        # All ranks wait here for the same earlier operation, which all of them have begun.
        with lock:
            x = operation.buffer()
            state, scale, draw = operation.state(x), operation.scale, operation.draw
            call = CollectiveCall(self.seed, number, scale=scale, state=state, clock=self.stats, draw=draw)
            yield from self.exchange(route, x, call, out=operation.out, kept=operation.kept)
            operation.finish(x)
        num_bytes = operation.contents.numel * operation.dtype.itemsize
        self.stats.dense_bytes += dense_bytes(operation.kind, num_bytes, self.world.size)
        return torch.empty(0, dtype=torch.float32, device="cpu")

    def _routes_of(self, operation: Operation, number: int) -> _Routes:
        key = (operation.kind, operation.contents.key, operation.dtype)
        if key not in self._routes:
            # Every rank forgets the same at the same operation: they agree on it anew if it comes again.
            for other in [k for k, routes in self._routes.items() if routes.last < number - _STALE_OPERATIONS]:
                del self._routes[other]
        routes = self._routes.setdefault(key, _Routes())
        routes.last = number
        return routes

    # The steps of an operation, for DDP, whose buckets have a schedule, statistics and a route of their own.

    def layout(self, kind: Kind, contents: Contents, dtype: torch.dtype) -> Layout:
        """How the contents of a buffer are cut and who owns which piece."""
        if kind == "all_reduce":
            return Layout.build(contents.layers, self.world, dtype, self.algorithm)
        if contents.shards:
            return sharded_layout(contents.shards, contents.part_numel, dtype, self.world, self.algorithm)
        return part_layout(contents.layers, self.world.size, dtype)

    def open(self, kind: Kind, layout: Layout, record: Mapping[str, str] | None) -> Route:
        """Make the messages for a layout, after all ranks have agreed that it is the same, and on ``record``.

        None for ``record``: they have agreed on this layout before.
        """
        if record is not None:
            # gloo aborts the process when two ranks expect different sizes: agree before the first message.
            agree({**record, "cut": f"{layout.digest:016x}"}, self.transport)
        if isinstance(self.transport, DeviceTransport):
            return DeviceRoute(kind, layout, self.transport)
        return HostRoute(kind, layout, self.transport)

    def exchange(
        self,
        route: Route,
        x: Tensor,
        call: CollectiveCall,
        *,
        out: Tensor | None = None,
        kept: dict[int, Tensor] | None = None,
        failed: Exception | None = None,
    ) -> Generator[Then]:
        """Run all collectives of a buffer. Yields ``Then.LATER`` when its first messages are on their way.

        ``failed``: what has gone wrong on this rank, which is raised once the others have been told. They cannot be
        where there are sums: native all-reduces are run to their end.
        """
        if isinstance(self.transport, DeviceTransport):
            call = replace(call, clock=ProfilerRanges())
        with ExitStack() as stack:
            running = []
            for collective in route.collectives(x, self.transport, call, out, kept):
                # Closed early, by an error in another one, it reports the failure to its peers.
                running.append(stack.enter_context(closing(collective)))
                next(collective)
            if failed is not None and not route.layout.sums:
                for collective in running:
                    with suppress(type(failed)):
                        collective.throw(failed)
                raise failed
            yield Then.LATER
            # Otherwise every buffer under way would wait for the timeout once more, after a rank has fallen silent.
            self._check_link()
            for collective in running:
                complete(collective)

    def guarded(self, job: Job) -> Job:
        """``job``, which raises at once if the link broke before it, and breaks the link if it meets a
        `TransportError`."""
        self._check_link()
        try:
            return (yield from job)
        except TransportError as error:
            self._broken = error
            raise

    def _check_link(self) -> None:
        if self._broken is not None:
            broken = self._broken
            raise TransportError(
                f"the link broke earlier: {broken}", rank=broken.rank, host=broken.host, reason=broken.reason
            )

    # Between operations.

    def agree(self, record: Mapping[str, str]) -> None:
        """Check that all ranks hold the same record, after what is under way.

        Raises:
            DisagreementError: they do not.
            TransportError: a rank is gone or silent.
        """
        self.alone(lambda: agree(record, self.transport))

    def alone(self, job: Callable[[], _T]) -> _T:
        """Run ``job`` after all operations handed over so far and before later ones, and return what it returns. What
        it raises is raised here."""
        return self.executor.call(job)

    def sent_bytes(self, kind: Kind, contents: Contents, dtype: torch.dtype) -> int:
        """Bytes that this rank hands to the transport for one such collective, headers included."""
        return sent_bytes_of(kind, self.layout(kind, contents, dtype), self.transport)

    def present_stats(self) -> _S:
        """Totals so far, as a copy: what is under way is partly in it."""
        held = [route for routes in list(self._routes.values()) for route, _ in list(routes.by_turn.values())]
        return replace(
            self.stats,
            payload_sent_bytes=self.transport.sent_bytes,
            payload_shared_bytes=self.transport.shared_bytes,
            payload_received_bytes=self.transport.received_bytes,
            buffer_bytes=sum(route.num_bytes for route in held),
        )

    def close(self) -> None:
        """Take no more operations; those handed over are finished, and then connections are closed.

        Those of a channel that still waits for a dead rank stay open.
        """
        self.executor.close()
        if self.executor.runs_here:
            # The last bucket's future held who closes the channel: this thread has to end first.
            threads.start(self._close_transport, name="thinwire release", end=lambda: None)
        else:
            self._close_transport()

    def _close_transport(self) -> None:
        if self.executor.join(_CLOSE_S):
            self.transport.close()


def sent_bytes_of(kind: Kind, layout: Layout, transport: Transport) -> int:
    """Bytes that a rank hands to the transport for one collective, headers included."""
    if kind == "all_reduce":
        return layout.sent_bytes(transport.rank, transport)
    traffic = layout.reduction_traffic(up=kind != "all_gather", down=kind != "reduce_scatter")
    return sent_bytes(traffic, transport.rank)


def dense_bytes(kind: Kind, num_bytes: int, world_size: int) -> int:
    """Bytes that each rank sends by a ring: of a buffer of ``num_bytes``, or one of parts of ``num_bytes`` each."""
    return ring_bytes(num_bytes, world_size) if kind == "all_reduce" else (world_size - 1) * num_bytes


def group_seed(seed: int, ranks: tuple[int, ...]) -> int:
    """The seed of a process group of these global ranks: two groups of one program must not draw alike."""
    return derive_key(seed, *ranks)
