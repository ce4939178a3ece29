"""Exchanges, which are collectives on flat buffers; their routes, which hold layouts and messages; and the channel that
runs them over one transport.

DDP's buckets, FSDP2's weights and gradients, and the buffers of a process group all go through a `Channel`.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Generator, Hashable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from itertools import cycle
from typing import Generic, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

from thinwire import threads
from thinwire.collectives import (
    Algorithm,
    Arena,
    Buffers,
    CollectiveCall,
    DeviceBuffers,
    DeviceTransport,
    Layer,
    Layout,
    Shard,
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
from thinwire.compressors import Clipping, Coded, Compressor, Count, Saturating, Segments, State, find_mixin
from thinwire.kernels import derive_key
from thinwire.runtime.consistency import agree
from thinwire.runtime.executor import Executor, Job, StreamExecutor, ThreadExecutor
from thinwire.runtime.probe import settle
from thinwire.runtime.stats import ProfilerRanges, TrafficStats

_S = TypeVar("_S", bound=TrafficStats)
_T = TypeVar("_T")
_STALE_EXCHANGES = 2048
_CLOSE_S = 1.0

Kind = Literal["all_reduce", "reduce_scatter", "all_gather"]
Key = tuple[Kind, Hashable, torch.dtype]


class Contents(NamedTuple):
    """The layers in a buffer that is all-reduced (``layers``), or in each rank's part of a sharded one (``shards``)."""

    key: Hashable
    """Key that distinguishes these contents from others."""
    layers: tuple[Layer, ...]
    shards: tuple[tuple[Shard, ...], ...] = ()
    """Shards in each rank's part, where parts differ or belong together; ``layers`` is empty then."""
    part_numel: int = 0
    """Number of elements of each part, where there are shards."""

    @property
    def numel(self) -> int:
        return self.part_numel or sum(layer.numel for layer in self.layers)

    @property
    def names(self) -> str:
        if self.shards:
            return ", ".join(dict.fromkeys(shard.name for part in self.shards for shard in part))
        return ", ".join(layer.name for layer in self.layers)


NOTHING = Contents((), ())


@dataclass(kw_only=True)
class Exchange(ABC):
    """A collective on a flat buffer: its contents, where they come from, and what becomes of the result.

    Each kind of traffic has a subclass. Methods run in the channel's executor, in the order of submission: `begin`
    and `start` before the messages, `finish` after them.
    """

    kind: Kind
    dtype: torch.dtype
    contents: Contents = NOTHING
    """Contents of the buffer, the same on all ranks; `begin` sets them where they are known only then."""
    scale: float | None = None
    """Factor of the sum; None for the mean."""
    number: int | None = None
    """Number of the exchange in its messages and random draws; None for the channel's own count."""
    draw: int | None = None
    """Number that overrides ``number`` in the key of random draws; equal values repeat the draws."""
    out: Tensor | None = None
    """Flat tensor in which a reduce-scatter leaves this rank's part."""
    kept: dict[int, Tensor] | None = None
    """Last messages of this rank in an all-gather (`thinwire.collectives.all_gather`)."""
    turns: int = 2
    """Number of exchanges of the same contents that may be under way at a time: each has messages of its own. Of those
    with one turn two may be under way, whatever their contents: they share the memory of messages."""
    alone: bool = False
    """Whether no other exchange may be under way meanwhile: this one calls native collectives, which have one order."""
    failed: Exception | None = None
    """Error that this rank has met already: the other ranks, which wait for its messages, are told of it instead."""

    @property
    def key(self) -> Key:
        """Key of the route: exchanges with equal keys use the same one."""
        return self.kind, self.contents.key, self.dtype

    def begin(self) -> None:  # noqa: B027 - most have nothing to do
        """Prepare the exchange, in turn, even while earlier exchanges are under way."""

    @abstractmethod
    def start(self, route: Route) -> tuple[Tensor, State | None]:
        """Return the flat buffer and the slots of its compressors. The buffer of an all-gather holds this rank's part
        in its place."""

    def finish(self, x: Tensor, route: Route) -> None:  # noqa: B027 - most have nothing to do
        """Use the buffer ``x``, which holds the result now."""

    def fail(self) -> None:  # noqa: B027 - most have nothing to do
        """Note, in place of `finish`, that something but the link has failed: the other ranks know of it, or will."""

    @property
    def result(self) -> Tensor:
        """Result of the exchange's future."""
        return torch.empty(0, dtype=torch.float32, device="cpu")


@dataclass
class Route:
    """The layout of a buffer and the messages in which it is sent: made once, used in every step."""

    layout: Layout
    sent_bytes: int
    """Bytes that this rank hands to the transport each time, at most."""

    @property
    def num_bytes(self) -> int:
        """Bytes of memory that messages take, without those in arenas."""
        return 0

    def collectives(
        self, x: Tensor, transport: Transport, call: CollectiveCall, exchange: Exchange
    ) -> list[Generator[None]]:
        """Return the collectives of this buffer; each yields once, when its first messages are on their way."""
        raise NotImplementedError("a simulated buffer is not sent")

    def encoded(self, rank: int) -> Iterator[tuple[Coded, Segments, Tensor]]:
        """Return the messages that this rank encoded last, by compressor."""
        return iter(())

    def limits(self, rank: int) -> tuple[Count, Count]:
        """Return how many values saturated in this rank's last messages, and how many found no room in them."""
        saturated: Count = 0
        overflowed: Count = 0
        for compressor, segments, message in self.encoded(rank) if self._saturating else ():
            if (saturating := self._saturating.get(compressor)) is not None:
                more, over = saturating.limits(message, segments)
                saturated, overflowed = saturated + more, overflowed + over
        return saturated, overflowed

    @cached_property
    def _saturating(self) -> dict[Compressor, Saturating]:
        groups = (group for chunk in (*self.layout.chunks, *self.layout.gathered) for group in chunk.groups)
        found = {compressor: find_mixin(compressor, Saturating) for compressor, _ in groups}
        return {compressor: mixin for compressor, mixin in found.items() if mixin is not None}

    def clipped(self, state: State | None) -> tuple[Count, int]:
        """Return how many values this rank clipped to fit into integers in the last step, of how many made integers."""
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

    def __init__(self, kind: Kind, layout: Layout, transport: Transport, turn: Turn) -> None:
        super().__init__(layout, sent_bytes_in(kind, layout, transport))
        traffic = layout.reduction_traffic(up=kind != "all_gather", down=kind != "reduce_scatter")
        self._kind: Kind = kind
        # Layers that are cut among owners, layers that every rank gathers, and layers that are summed.
        self._reduction: Buffers | None = transport.open(traffic, turn.reduced) if layout.chunks else None
        self._gathering = gather_buffers(layout, transport, turn.gathered) if layout.gathered else None
        self._sums = sum_buffers(layout)
        self._packed = packed_sums(layout, transport)

    @property
    def num_bytes(self) -> int:
        held = sum(b.num_bytes - b.arena_bytes for b in (self._reduction, self._gathering) if b is not None)
        held += sum(s.num_bytes for s in self._packed.values())
        return held + sum(buffer.numel() * buffer.element_size() for buffer in self._sums)

    def collectives(
        self, x: Tensor, transport: Transport, call: CollectiveCall, exchange: Exchange
    ) -> list[Generator[None]]:
        started = []
        if self._reduction is not None:
            sent = x, self.layout, transport, self._reduction, call
            if self._kind == "all_gather":
                started.append(all_gather(*sent, kept=exchange.kept))
            elif self._kind == "reduce_scatter":
                started.append(reduce_scatter(*sent, out=exchange.out))
            else:
                started.append(all_reduce(*sent))
        # What is gathered whole, or summed, is so in all-reduces alone.
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
        up, down = kind != "all_gather", kind != "reduce_scatter"
        self._buffers = DeviceBuffers.allocate(layout, transport.rank, transport.device, up=up, down=down)
        self._kind: Kind = kind
        sent = self._buffers.sent_bytes if kind == "all_reduce" else sent_bytes_in(kind, layout, transport)
        super().__init__(layout, sent)

    @property
    def num_bytes(self) -> int:
        return self._buffers.num_bytes

    def collectives(
        self, x: Tensor, transport: Transport, call: CollectiveCall, exchange: Exchange
    ) -> list[Generator[None]]:
        return [self._enqueue(x, transport, call, exchange)]

    def _enqueue(self, x: Tensor, transport: Transport, call: CollectiveCall, exchange: Exchange) -> Generator[None]:
        assert isinstance(transport, DeviceTransport)
        way = self.layout, transport, self._buffers, call
        if self._kind == "all_reduce":
            device_all_reduce(x, *way)
        elif exchange.out is not None:
            device_reduce_scatter(x, exchange.out, *way)
        else:
            device_all_gather(x, *way, kept=exchange.kept)
        yield

    def encoded(self, rank: int) -> Iterator[tuple[Coded, Segments, Tensor]]:
        if self._kind == "all_reduce":
            for (compressor, segments), message in self._buffers.encoded(self.layout):
                yield compressor, segments, message


def sent_bytes_in(kind: Kind, layout: Layout, transport: Transport) -> int:
    """Return the bytes that a rank hands to the transport for one collective, headers included."""
    if kind == "all_reduce":
        return layout.sent_bytes(transport.rank, transport)
    traffic = layout.reduction_traffic(up=kind != "all_gather", down=kind != "reduce_scatter")
    return sent_bytes(traffic, transport.rank)


def dense_bytes(kind: Kind, num_bytes: int, world_size: int) -> int:
    """Return the bytes that each rank sends by a ring, for a buffer of ``num_bytes`` or one of parts of this size."""
    return ring_bytes(num_bytes, world_size) if kind == "all_reduce" else (world_size - 1) * num_bytes


class Turn:
    """Memory of messages that one exchange at a time uses, which holds the lock."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.reduced, self.gathered = Arena(), Arena()


@dataclass
class _Routes:
    """The routes of exchanges with the same key, which take turns."""

    layout: Layout | None = None
    by_turn: dict[int, tuple[Route, Turn]] = field(default_factory=dict)
    taken: int = 0
    last: int = 0


class _Run(Job):
    """An exchange under way."""

    def __init__(self, channel: Channel, exchange: Exchange, count: int) -> None:
        self._channel, self._exchange, self._count = channel, exchange, count
        self._open = ExitStack()
        """Contexts that, closed early by an error, report it to peers and let the next exchange take its turn."""
        self._collectives: list[Generator[None]] = []

    def begin(self) -> bool:
        channel, exchange = self._channel, self._exchange
        with self._noting_failure():
            channel._check_link()
            exchange.begin()
            self._routes = channel._get_routes(exchange.key, self._count)
            self._turn = self._routes.taken % exchange.turns
            self._routes.taken += 1
            # Ranks agree on what is new, and open messages, by native collectives: those have one order.
            return exchange.alone or self._turn not in self._routes.by_turn

    def start(self) -> None:
        channel, exchange = self._channel, self._exchange
        with self._noting_failure(), ExitStack() as stack:
            if self._turn not in self._routes.by_turn:
                self._routes.by_turn[self._turn] = channel._new_route(self._routes, exchange)
            self._route, turn = self._routes.by_turn[self._turn]
            # All ranks wait here for the same earlier exchange, which all of them have begun.
            stack.enter_context(turn.lock)
            self._x, state = exchange.start(self._route)
            number = self._count if exchange.number is None else exchange.number
            clock = ProfilerRanges() if isinstance(channel.transport, DeviceTransport) else channel.stats
            call = CollectiveCall(channel.seed, number, exchange.scale, state, clock, exchange.draw)
            for collective in self._route.collectives(self._x, channel.transport, call, exchange):
                self._collectives.append(stack.enter_context(closing(collective)))
                next(collective)
            if exchange.failed is not None:
                self._tell(exchange.failed)
            self._open = stack.pop_all()

    def _tell(self, failed: Exception) -> None:
        # Native all-reduces are run to their end: their peers cannot be told.
        if self._route.layout.sums:
            return
        for collective in self._collectives:
            with suppress(type(failed)):
                collective.throw(failed)
        raise failed

    def finish(self) -> Tensor:
        exchange = self._exchange
        with self._noting_failure(), self._open:
            # Otherwise every buffer under way would wait for the timeout once more, after a rank has fallen silent.
            self._channel._check_link()
            for collective in self._collectives:
                complete(collective)
            exchange.finish(self._x, self._route)
        if exchange.failed is not None:
            raise exchange.failed
        num_bytes = exchange.contents.numel * exchange.dtype.itemsize
        channel = self._channel
        channel.stats.dense_bytes += dense_bytes(exchange.kind, num_bytes, channel.world.size)
        return exchange.result

    @contextmanager
    def _noting_failure(self) -> Iterator[None]:
        try:
            yield
        except TransportError as error:
            self._channel._broken = self._channel._broken or error
            raise
        except Exception:
            self._exchange.fail()
            raise


class Channel(Generic[_S]):
    """Runs collectives between the ranks of one transport on one executor, in the order in which they are submitted."""

    def __init__(
        self, transport: Transport, executor: Executor, stats: _S, *, algorithm: Algorithm, world: World, seed: int
    ) -> None:
        self.transport, self.executor = transport, executor
        self.count_in(stats)
        self.algorithm, self.world, self.seed = algorithm, world, seed
        self._routes: dict[Key, _Routes] = {}
        self._turns = cycle((Turn(), Turn()))
        self._submitted = 0
        self._lock = threading.Lock()
        self._broken: TransportError | None = None

    @staticmethod
    def connect(
        transport: Transport, stats: _S, *, algorithm: Algorithm, seed: int, record: Mapping[str, str]
    ) -> Channel[_S]:
        """Return a channel with an executor of its own. ``record`` has other facts that must be equal on all ranks.

        Raises:
            DisagreementError: they are not equal.
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

    def submit(self, exchange: Exchange) -> torch.futures.Future[Tensor]:
        """Start an exchange; return the future of its result. All ranks submit the same exchanges in the same order."""
        with self._lock:
            count, self._submitted = self._submitted, self._submitted + 1
            return self.executor.submit(_Run(self, exchange, count))

    def _get_routes(self, key: Key, count: int) -> _Routes:
        if key not in self._routes:
            # Every rank forgets the same at the same exchange: they agree on it once more if it comes again.
            for other in [k for k, routes in self._routes.items() if routes.last < count - _STALE_EXCHANGES]:
                del self._routes[other]
        routes = self._routes.setdefault(key, _Routes())
        routes.last = count
        return routes

    def _new_route(self, routes: _Routes, exchange: Exchange) -> tuple[Route, Turn]:
        """Return a layout and its messages, after all ranks have agreed that the layout is the same, and their turn."""
        kind, contents, dtype = exchange.kind, exchange.contents, exchange.dtype
        layout = routes.layout
        if layout is None:
            layout = self.layout(kind, contents, dtype)
            # gloo aborts the process when two ranks expect different sizes: agree before the first message.
            record = {"buffer": f"{kind} of {contents.numel} elements of {dtype}", "layers": contents.names}
            agree(record | {"cut": f"{layout.digest:016x}"}, self.transport)
        turn = next(self._turns) if exchange.turns == 1 else Turn()
        if isinstance(self.transport, DeviceTransport):
            route: Route = DeviceRoute(kind, layout, self.transport)
        else:
            route = HostRoute(kind, layout, self.transport, turn)
        # Set only now: ranks that did not agree ask again.
        routes.layout = layout
        return route, turn

    def forget(self, contents: Container[Hashable]) -> None:
        """Free the messages of contents with these keys. All ranks do so between the same exchanges."""
        for key in [key for key in self._routes if key[1] in contents]:
            del self._routes[key]

    def layout(self, kind: Kind, contents: Contents, dtype: torch.dtype) -> Layout:
        """Return the layout of a buffer: how its contents are cut, and which rank owns which piece."""
        if kind == "all_reduce":
            return Layout.build(contents.layers, self.world, dtype, self.algorithm)
        if contents.shards:
            return sharded_layout(contents.shards, contents.part_numel, dtype, self.world, self.algorithm)
        return part_layout(contents.layers, self.world.size, dtype)

    def _check_link(self) -> None:
        if self._broken is not None:
            broken = self._broken
            raise TransportError(
                f"the link broke earlier: {broken}", rank=broken.rank, host=broken.host, reason=broken.reason
            )

    def agree(self, record: Mapping[str, str]) -> None:
        """Check that all ranks hold the same record, after the exchanges under way.

        Raises:
            DisagreementError: they do not.
            TransportError: a rank is gone or silent.
        """
        self.alone(lambda: agree(record, self.transport))

    def alone(self, job: Callable[[], _T]) -> _T:
        """Run ``job`` between all exchanges submitted so far and later ones; return its result, or raise its error."""
        return self.executor.call(job)

    def sent_bytes(self, kind: Kind, contents: Contents, dtype: torch.dtype) -> int:
        """Return the bytes that this rank hands to the transport for one such collective, headers included."""
        return sent_bytes_in(kind, self.layout(kind, contents, dtype), self.transport)

    @property
    def buffer_bytes(self) -> int:
        """Bytes of memory that messages take now."""
        held = [each for routes in list(self._routes.values()) for each in list(routes.by_turn.values())]
        arenas = {arena for _, turn in held for arena in (turn.reduced, turn.gathered)}
        return sum(route.num_bytes for route, _ in held) + sum(arena.num_bytes for arena in arenas)

    def count_in(self, stats: _S) -> None:
        """Count in ``stats`` from now on."""
        self.stats, transport = stats, self.transport
        self._counted_from = transport.sent_bytes, transport.received_bytes, transport.shared_bytes

    def add_to(self, stats: TrafficStats) -> None:
        """Add the bytes that the transport has moved since `count_in`, and the memory of messages, to ``stats``."""
        sent, received, shared = self._counted_from
        stats.payload_sent_bytes += self.transport.sent_bytes - sent
        stats.payload_received_bytes += self.transport.received_bytes - received
        stats.payload_shared_bytes += self.transport.shared_bytes - shared
        stats.buffer_bytes += self.buffer_bytes

    def close(self) -> None:
        """Accept no more exchanges; finish those submitted, and then close connections.

        Connections of a channel that still waits for a dead rank stay open.
        """
        self.executor.close()
        if self.executor.on_own_thread:
            # The last bucket's future kept the channel's owner alive until now: this thread has to end first.
            threads.start(self._close_transport, name="thinwire release", end=lambda: None)
        else:
            self._close_transport()

    def _close_transport(self) -> None:
        if self.executor.join(_CLOSE_S):
            self.transport.close()


def group_seed(seed: int, ranks: tuple[int, ...]) -> int:
    """Return the seed of a process group of these global ranks: two groups of one program must not draw alike."""
    return derive_key(seed, *ranks)
