"""Runs the exchanges of one transport.

DDP's buckets, FSDP2's weights and gradients, and the buffers of a process group all go through a `Channel`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Container, Generator, Hashable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch
from torch import Tensor

from thinwire import threads
from thinwire.collectives import (
    Algorithm,
    CollectiveCall,
    DeviceTransport,
    Layout,
    Transport,
    TransportError,
    World,
    complete,
    part_layout,
    sharded_layout,
)
from thinwire.kernels import derive_key
from thinwire.runtime.consistency import agree
from thinwire.runtime.exchange import (
    Contents,
    DeviceRoute,
    Exchange,
    HostRoute,
    Key,
    Kind,
    Route,
    dense_bytes,
    sent_bytes_in,
)
from thinwire.runtime.executor import Executor, Job, StreamExecutor, ThreadExecutor
from thinwire.runtime.probe import settle
from thinwire.runtime.stats import ProfilerRanges, TrafficStats

_S = TypeVar("_S", bound=TrafficStats)
_T = TypeVar("_T")
_STALE_EXCHANGES = 2048
_CLOSE_S = 1.0


@dataclass
class _Routes:
    """The routes of exchanges with the same key, which take turns."""

    layout: Layout | None = None
    by_turn: dict[int, tuple[Route, threading.Lock]] = field(default_factory=dict)
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
                self._routes.by_turn[self._turn] = channel._new_route(self._routes, exchange), threading.Lock()
            self._route, lock = self._routes.by_turn[self._turn]
            # All ranks wait here for the same earlier exchange, which all of them have begun.
            stack.enter_context(lock)
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

    @property
    def held_bytes(self) -> int:
        return self._exchange.held_bytes

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

    def _new_route(self, routes: _Routes, exchange: Exchange) -> Route:
        """Return a layout and its messages, after all ranks have agreed that the layout is the same."""
        kind, contents, dtype = exchange.kind, exchange.contents, exchange.dtype
        layout = routes.layout
        if layout is None:
            layout = self.layout(kind, contents, dtype)
            # gloo aborts the process when two ranks expect different sizes: agree before the first message.
            record = {"buffer": f"{kind} of {contents.numel} elements of {dtype}", "layers": contents.names}
            agree(record | {"cut": f"{layout.digest:016x}"}, self.transport)
        if isinstance(self.transport, DeviceTransport):
            route: Route = DeviceRoute(kind, layout, self.transport)
        else:
            route = HostRoute(kind, layout, self.transport)
        # Set only now: ranks that did not agree ask again.
        routes.layout = layout
        return route

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
        routes = [route for routes in list(self._routes.values()) for route, _ in list(routes.by_turn.values())]
        return sum(route.num_bytes for route in routes)

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
