"""Flat buffers without a model behind them: all that a process group sees (QNCCL in the thesis, section 3.5.4)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Hashable, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from thinwire.collectives import (
    Layer,
    Layout,
    Shard,
    Topology,
    Transport,
    TransportError,
    World,
    all_gather,
    complete,
    gather_buffers,
    part_layout,
    reduce_scatter,
    ring_bytes,
    sent_bytes,
    sharded_layout,
    sum_buffers,
    summed_all_reduce,
)
from thinwire.compressors import State
from thinwire.kernels import derive_key
from thinwire.wire.agree import agree
from thinwire.wire.link import settle
from thinwire.wire.route import Route
from thinwire.wire.stats import StageSeconds
from thinwire.wire.worker import Job, Then, Worker

Kind = Literal["all_reduce", "reduce_scatter", "all_gather"]

_IN_FLIGHT = 2
"""Buffers of one kind, content and dtype that may be under way at a time: each has messages of its own."""
STALE_OPERATIONS = 2048


@dataclass
class FlatStats(StageSeconds):
    """Totals of this rank since the process group was made."""

    compressed: int = 0
    """Buffers that travelled compressed."""
    matched: int = 0
    """Buffers in which registered layers were found; those of them that hold raw layers alone travelled exact."""
    uniform: int = 0
    """Buffers compressed as if they were one layer."""
    passed: int = 0
    """Buffers of these kinds of collectives that travelled exact, by gloo."""
    passed_bytes: int = 0
    """Bytes that these take, sent by a ring."""
    dense_bytes: int = 0
    """Bytes that the compressed buffers would have taken, sent exact by a ring."""
    payload_sent_bytes: int = 0
    """Bytes handed to the transport for compressed buffers: messages with their headers, without those of TCP."""
    payload_shared_bytes: int = 0
    """Of these, what ranks of the same node took from shared memory."""
    payload_received_bytes: int = 0
    buffer_bytes: int = 0
    """Memory that messages take on this rank now."""

    @property
    def ratio(self) -> float:
        """How many times fewer bytes were sent for the compressed buffers."""
        return self.dense_bytes / self.payload_sent_bytes if self.payload_sent_bytes else 1.0


class Contents(NamedTuple):
    """What a buffer holds, or each rank's part of it."""

    key: Hashable
    """Tells it apart from other contents."""
    layers: tuple[Layer, ...]
    shards: tuple[tuple[Shard, ...], ...] = ()
    """By rank, what its part holds, where parts differ or belong together; ``layers`` stand for no one's then."""
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


class Operation(NamedTuple):
    """One collective on one buffer."""

    kind: Kind
    contents: Contents
    dtype: torch.dtype
    fill: Callable[[], Tensor]
    """The flat buffer, when it is this operation's turn. An all-gather's holds this rank's part in its place."""
    scale: float = 1.0
    """Of the sum."""
    out: Tensor | None = None
    """Where a reduce-scatter leaves this rank's part, flat."""
    done: Callable[[Tensor], object] | None = None
    """Called with the buffer in the end."""
    draw: int | None = None
    """Stands for the count of collectives in the keys of random draws: of two with the same, the draws are the same."""
    state: Callable[[Tensor], State | None] | None = None
    """The slots of the buffer's compressors, when it is this operation's turn."""
    kept: dict[int, Tensor] | None = None
    """Of an all-gather: this rank's last messages (`thinwire.collectives.all_gather`)."""


@dataclass
class _Ways:
    """How buffers of one kind, content and dtype travel: in turn, by one set of messages or another."""

    layout: Layout | None = None
    routes: dict[int, tuple[Route, threading.Lock]] = field(default_factory=dict)
    taken: int = 0
    last: int = 0


class FlatEngine:
    """Runs compressed collectives on flat buffers, in the order in which they are handed over, on a `Worker`."""

    def __init__(self, transport: Transport, *, topology: Topology, seed: int, record: Mapping[str, str]) -> None:
        """``record``: what else all ranks must have in common.

        Raises:
            DisagreementError: they do not.
            ValueError: the topology does not fit this world.
            TransportError: a rank is gone or silent.
        """
        agree(record, transport)
        self.transport = transport
        self.topology, self.world = settle(topology, transport)
        self.stats = FlatStats()
        self.seed = seed
        self._worker = Worker("thinwire group")
        self._ways: dict[Hashable, _Ways] = {}
        self._operations = 0
        self._lock = threading.Lock()
        self._broken: TransportError | None = None

    def submit(self, operation: Operation) -> torch.futures.Future[Tensor]:
        """Start a collective; the future tells when it has ended, and how. All ranks must submit the same in turn."""
        with self._lock:
            number, self._operations = self._operations, self._operations + 1
            return self._worker.submit(self._job(operation, number))

    def agree(self, record: Mapping[str, str]) -> None:
        """Check that all ranks hold the same record, after what is under way.

        Raises:
            DisagreementError: they do not.
            TransportError: a rank is gone or silent.
        """
        self.alone(lambda: agree(record, self.transport))

    def alone(self, job: Callable[[], object]) -> None:
        """Run ``job`` after all operations handed over so far and before later ones; what it raises is raised here."""
        self._worker.call(job)

    def sent_bytes(self, kind: Kind, contents: Contents, dtype: torch.dtype) -> int:
        """Bytes that this rank hands to the transport for one such collective, headers included."""
        return sent_bytes_of(kind, lay_out(kind, contents, dtype, self.world, self.topology), self.transport)

    def present_stats(self) -> FlatStats:
        """Totals so far, as a copy: what is under way is partly in it."""
        held = sum(route.num_bytes for ways in list(self._ways.values()) for route, _ in list(ways.routes.values()))
        return replace(
            self.stats,
            payload_sent_bytes=self.transport.sent_bytes,
            payload_shared_bytes=self.transport.shared_bytes,
            payload_received_bytes=self.transport.received_bytes,
            buffer_bytes=held,
        )

    def close(self) -> None:
        """End the threads after what was handed over, and let go of the transport."""
        self._worker.close()

    def _job(self, operation: Operation, number: int) -> Job:
        if self._broken is not None:
            raise TransportError(f"the link broke earlier: {self._broken}")
        try:
            yield from self._run(operation, number)
        except TransportError as error:
            self._broken = error
            raise
        return torch.empty(0)

    def _run(self, operation: Operation, number: int) -> Generator[Then]:
        ways = self._present(operation, number)
        turn = ways.taken % _IN_FLIGHT
        ways.taken += 1
        if turn not in ways.routes:
            # Ranks agree on what is new, and open messages, by native collectives: those have one order.
            yield Then.ALONE
            ways.routes[turn] = (self._open(operation, ways), threading.Lock())
        route, lock = ways.routes[turn]
        # All ranks wait here for the same earlier operation, which all of them have begun.
        with ExitStack() as stack:
            stack.enter_context(lock)
            x = operation.fill()
            running = []
            state = operation.state(x) if operation.state is not None else None
            for collective in self._collectives(operation, x, route, number, state):
                # Closed early, by an error in another one, it tells its peers.
                running.append(stack.enter_context(closing(collective)))
                next(collective)
            yield Then.LATER
            for collective in running:
                complete(collective)
            if operation.done is not None:
                operation.done(x)
        num_bytes = operation.contents.numel * operation.dtype.itemsize
        self.stats.dense_bytes += dense_bytes(operation.kind, num_bytes, self.world.size)

    def _present(self, operation: Operation, number: int) -> _Ways:
        key = (operation.kind, operation.contents.key, operation.dtype)
        if key not in self._ways:
            # Every rank forgets the same at the same operation: they agree on it anew if it comes again.
            for other in [k for k, ways in self._ways.items() if ways.last < number - STALE_OPERATIONS]:
                del self._ways[other]
        ways = self._ways.setdefault(key, _Ways())
        ways.last = number
        return ways

    def _open(self, operation: Operation, ways: _Ways) -> Route:
        kind, transport = operation.kind, self.transport
        layout = ways.layout
        if layout is None:
            layout = lay_out(kind, operation.contents, operation.dtype, self.world, self.topology)
            about = f"{kind} of {operation.contents.numel} elements of {operation.dtype}"
            # gloo aborts the process when two ranks expect different sizes: agree before the first message.
            agree({"buffer": about, "layers": operation.contents.names, "cut": f"{layout.digest:016x}"}, transport)
            ways.layout = layout
        traffic = layout.reduction_traffic(up=kind != "all_gather", down=kind != "reduce_scatter")
        reduction = transport.open(traffic) if layout.has_owned else None
        gathering = gather_buffers(layout, transport) if layout.has_gathered else None
        return Route(layout, reduction, gathering, sum_buffers(layout), 0, sent_bytes(traffic, transport.rank))

    def _collectives(
        self, operation: Operation, x: Tensor, route: Route, number: int, state: State | None
    ) -> list[Generator[None]]:
        shared: dict[str, Any] = {"seed": self.seed, "step": number, "clock": self.stats, "state": state}
        layout, transport, scale = route.layout, self.transport, operation.scale
        if operation.kind == "all_reduce":
            options = {"scale": scale, "draw": operation.draw, **shared}
            found = [run(x, layout, transport, buffers, **options) for run, buffers in route.exchanges]
            if route.sums:
                found.append(summed_all_reduce(x, layout, transport, route.sums, scale=scale, **shared))
            return found
        if route.reduction is None:
            return []
        shared["draw"] = operation.draw
        if operation.kind == "reduce_scatter":
            out = operation.out
            return [reduce_scatter(x, layout, transport, route.reduction, scale=scale, out=out, **shared)]
        return [all_gather(x, layout, transport, route.reduction, kept=operation.kept, **shared)]


def lay_out(kind: Kind, contents: Contents, dtype: torch.dtype, world: World, topology: Topology) -> Layout:
    """How a buffer of these contents travels."""
    if kind == "all_reduce":
        return Layout.build(contents.layers, world, dtype, topology)
    if contents.shards:
        return sharded_layout(contents.shards, contents.part_numel, dtype, world, topology)
    return part_layout(contents.layers, world.size, dtype)


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
