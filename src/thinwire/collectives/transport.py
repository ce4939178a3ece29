"""How messages move: point to point over a process group, or between threads of one process.

Over gloo every receive is posted before the first send. Gloo announces a posted receive to the sender on the same TCP
stream that carries payload; a late announcement queues behind payload and a slow link turns half-duplex. Its own
all-to-all and all-gather do that and take 1.5 to 1.8 times as long.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.collectives.traffic import Outgoing, Traffic, arriving, num_phases
from thinwire.compressors import Reduction

_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


class TransportError(RuntimeError):
    """The link to a rank is gone or silent: what was under way cannot be finished, and the link is of no more use."""


def ring_bytes(num_bytes: int, world_size: int) -> int:
    """Bytes that each rank sends in a ring all-reduce of a tensor of ``num_bytes``."""
    return 2 * (world_size - 1) * num_bytes // world_size


class Pending(Protocol):
    """A send or receive under way."""

    def wait(self) -> None:
        """Block until it is done. Raises TransportError if the peer is gone or does not answer in time."""
        ...


class IntegerReducer(Protocol):
    """Who adds up integers for all ranks: an `AggregatorClient`."""

    def start_all_reduce(self, x: Tensor, *, lane: int = 0, op: Reduction = "sum") -> Pending:
        """As `Transport.start_all_reduce`."""
        ...

    def wire_bytes(self, numel: int, width: int) -> int:
        """Bytes that a rank sends for so many integers of ``width`` bytes, and receives."""
        ...

    def close(self) -> None:
        """Leave."""
        ...


@dataclass
class Buffers:
    """Every message that a rank sends and receives in one collective: allocated once, by `Transport.open`."""

    outgoing: Mapping[int, Outgoing]
    """By phase."""
    outbox: Mapping[int, Tensor]
    inbox: Mapping[tuple[int, int], Tensor]
    """By phase and sender."""
    arriving: Mapping[tuple[int, int], Outgoing]
    """What is in the inbox, as its sender has it."""
    num_phases: int
    work: Sequence[Tensor] = ()
    """What else the collective keeps from step to step."""
    tag: int = field(default=0)
    """First tag of the exchange under way."""

    @property
    def num_bytes(self) -> int:
        """Memory held."""
        tensors = {t.data_ptr(): t.numel() for t in (*self.outbox.values(), *self.inbox.values(), *self.work)}
        return sum(tensors.values())


class Transport(ABC):
    """Moves uint8 tensors between ranks, and counts what it moves.

    Sends and receives may come from several threads. All-reduces have two lanes, each of which has one order on every
    rank, whatever happens on the other; the other collectives, which have none, are for when nothing else is under way.
    """

    rank: int
    world_size: int

    def __init__(self) -> None:
        self.sent_bytes = 0
        self.received_bytes = 0
        self.shared_bytes = 0
        """Of those sent: what its receivers took from memory that they share with this rank."""
        self.broken = False
        """Whether somebody gave it up: nothing is waited for on it any more."""
        self.aggregator: IntegerReducer | None = None
        """Where sums of integers go instead, if given."""
        self._next_tag = 0
        self._lock = threading.Lock()

    def give_up(self) -> None:
        """Called by whoever met a `TransportError`."""
        self.broken = True

    def new_tag(self, num: int) -> int:
        """First of ``num`` tags that no exchange under way uses. All ranks must call this in the same order."""
        with self._lock:
            tag = self._next_tag
            self._next_tag = (tag + num) % (1 << 20)
        return tag

    def _count(self, sent: int, received: int, shared: int = 0) -> None:
        with self._lock:
            self.sent_bytes += sent
            self.received_bytes += received
            self.shared_bytes += shared

    @contextlib.contextmanager
    def uncounted(self) -> Iterator[None]:
        """What the body moves is not counted: probes of the link. Nothing else may be under way."""
        before = self.sent_bytes, self.received_bytes, self.shared_bytes
        try:
            yield
        finally:
            self.sent_bytes, self.received_bytes, self.shared_bytes = before

    def open(self, traffic: Traffic) -> Buffers:
        """Make room for the messages of a collective. All ranks must call this, in the same order.

        A message that a rank hands on leaves from where it arrived.
        """
        outgoing = {message.phase: message for message in traffic[self.rank]}
        incoming = arriving(traffic, self.rank)
        inbox = {address: room(message) for address, message in incoming.items()}
        arrived = {phase: tensor for (phase, _), tensor in inbox.items()}
        outbox = {
            phase: room(message) if message.maker is None else arrived[phase] for phase, message in outgoing.items()
        }
        return Buffers(outgoing, outbox, inbox, incoming, num_phases(traffic))

    def begin(self, buffers: Buffers) -> None:
        """Before the first message of an exchange. All ranks must begin their exchanges in the same order."""
        buffers.tag = self.new_tag(buffers.num_phases)

    def end(self, buffers: Buffers) -> None:  # noqa: B027 - most transports have nothing to do
        """After the last message of an exchange: what arrived is not needed any more."""

    def send_from(self, buffers: Buffers, phase: int, num_bytes: int) -> list[Pending]:
        """Send the first ``num_bytes`` of the message of a phase to its receivers."""
        message = buffers.outbox[phase][:num_bytes]
        return [self.send(message, peer, buffers.tag + phase) for peer in buffers.outgoing[phase].receivers]

    def receive_into(self, buffers: Buffers, phase: int, peer: int, num_bytes: int | None = None) -> Pending:
        """Receive a peer's message of a phase, of ``num_bytes`` or of the size of its buffer."""
        return self.receive(buffers.inbox[phase, peer][:num_bytes], peer, buffers.tag + phase)

    def send(self, message: Tensor, peer: int, tag: int) -> Pending:
        self._count(message.numel(), 0)
        return self._send(message, peer, tag)

    def receive(self, message: Tensor, peer: int, tag: int) -> Pending:
        self._count(0, message.numel())
        return self._receive(message, peer, tag)

    @abstractmethod
    def _send(self, message: Tensor, peer: int, tag: int) -> Pending: ...

    @abstractmethod
    def _receive(self, message: Tensor, peer: int, tag: int) -> Pending: ...

    def start_all_reduce(self, x: Tensor, *, lane: int = 0, op: Reduction = "sum") -> Pending:
        """Begin to replace ``x`` by its sum (or maximum) over all ranks, in its own dtype. Counted as a
        ring all-reduce."""
        moved = self.all_reduce_bytes(x.numel(), x.dtype)
        self._count(moved, moved)
        if self.aggregator is not None and not x.dtype.is_floating_point:
            return self.aggregator.start_all_reduce(x, lane=lane, op=op)
        return self._start_all_reduce(x, lane, op)

    def all_reduce(self, x: Tensor, *, lane: int = 0, op: Reduction = "sum") -> None:
        """The same, to its end."""
        self.start_all_reduce(x, lane=lane, op=op).wait()

    def all_reduce_bytes(self, numel: int, dtype: torch.dtype) -> int:
        """Bytes that a rank sends in an all-reduce, and receives."""
        if self.aggregator is not None and not dtype.is_floating_point:
            return self.aggregator.wire_bytes(numel, dtype.itemsize)
        return ring_bytes(numel * dtype.itemsize, self.world_size)

    def close(self) -> None:
        """Let go of what is not a process group's."""
        if self.aggregator is not None:
            self.aggregator.close()

    @abstractmethod
    def _start_all_reduce(self, x: Tensor, lane: int, op: Reduction) -> Pending: ...

    @abstractmethod
    def broadcast(self, x: Tensor) -> None:
        """Replace ``x`` by that of rank 0."""

    @abstractmethod
    def all_gather(self, x: Tensor) -> Tensor:
        """The tensors of all ranks, stacked by rank. Shapes and dtypes must agree."""


def room(message: Outgoing) -> Tensor:
    """Memory for it that is this rank's alone."""
    return torch.zeros(message.num_bytes, dtype=torch.uint8)


class _PendingWork:
    def __init__(self, work: dist.Work, doing: str, timeout: timedelta) -> None:
        self._work, self._doing, self._timeout = work, doing, timeout

    def wait(self) -> None:
        try:
            self._work.wait()
        except RuntimeError as error:
            raise TransportError(
                f"{self._doing} failed: {_first_line(error)}. That rank has died, is stuck, or waits for one that "
                f"is (the process group's timeout is {self._timeout.total_seconds():g} s); restart from the last "
                "checkpoint"
            ) from error


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


class ProcessGroupTransport(Transport):
    """Over torch process groups that nobody else uses, of the same ranks. CPU tensors (gloo).

    ``second`` is the group of the second lane; without one both lanes are the first, for who uses but one thread.
    Groups are spoken to directly: they may be ones that ``torch.distributed`` has no list of. ``owned``: they were made
    for this transport alone, and end with it: each keeps threads and connections.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        timeout: timedelta,
        second: dist.ProcessGroup | None = None,
        *,
        owned: bool = False,
    ) -> None:
        super().__init__()
        self.group = group
        self._lanes: tuple[dist.ProcessGroup, ...] = (group, second or group)
        self._owned = owned
        self.timeout = timeout
        self.rank = group.rank()
        self.world_size = group.size()

    def _send(self, message: Tensor, peer: int, tag: int) -> Pending:
        return self._start(f"sending to rank {peer}", lambda: self.group.send([message], peer, tag))

    def _receive(self, message: Tensor, peer: int, tag: int) -> Pending:
        return self._start(f"receiving from rank {peer}", lambda: self.group.recv([message], peer, tag))

    def _start_all_reduce(self, x: Tensor, lane: int, op: Reduction) -> Pending:
        return self._start("the all-reduce", lambda: self._lanes[lane].allreduce([x], _OPS[op]))

    def broadcast(self, x: Tensor) -> None:
        self._start("the broadcast", lambda: self.group.broadcast(x, 0)).wait()

    def all_gather(self, x: Tensor) -> Tensor:
        out = [torch.empty_like(x) for _ in range(self.world_size)]
        self._start("the all-gather", lambda: self.group.allgather(out, x)).wait()
        return torch.stack(out)

    def close(self) -> None:
        """Let go of the groups, if they are this transport's own, between two operations: it is of no use then."""
        super().close()
        lanes, self._lanes = self._lanes, ()
        if not self._owned or not lanes:
            return
        del self.group
        for group in dict.fromkeys(lanes):
            # After the whole world was destroyed there is nothing left of it; after an error, nothing to wait for.
            with contextlib.suppress(ValueError, RuntimeError, AssertionError):
                dist.destroy_process_group(group)

    def _start(self, doing: str, operation: Callable[[], dist.Work]) -> Pending:
        try:
            return _PendingWork(operation(), doing, self.timeout)
        except RuntimeError as error:
            raise TransportError(f"{doing} failed: {_first_line(error)}") from error


class LoopbackTransport(Transport):
    """Between threads of one process that play the ranks: for tests, and for several ranks on one device.

    ``LoopbackTransport.world(n)`` makes the transports of all ranks.
    """

    def __init__(self, rank: int, world: _LoopbackWorld) -> None:
        super().__init__()
        self.rank = rank
        self.world_size = world.size
        self._world = world

    @staticmethod
    def world(size: int, timeout_s: float = 30.0) -> list[LoopbackTransport]:
        world = _LoopbackWorld(size, timeout_s)
        return [LoopbackTransport(rank, world) for rank in range(size)]

    def _send(self, message: Tensor, peer: int, tag: int) -> Pending:
        self._world.mailbox(self.rank, peer, tag).put(message.clone())
        return _Done()

    def _receive(self, message: Tensor, peer: int, tag: int) -> Pending:
        return _Arrival(message, self._world.mailbox(peer, self.rank, tag), self._world.timeout_s, peer)

    def _start_all_reduce(self, x: Tensor, lane: int, op: Reduction) -> Pending:
        if op == "max":
            return _Sum(x, lambda: self._gather(x, lane).amax(0))
        return _Sum(x, lambda: self._gather(x, lane).sum(0))

    def broadcast(self, x: Tensor) -> None:
        x.copy_(self.all_gather(x)[0])

    def all_gather(self, x: Tensor) -> Tensor:
        return self._gather(x, 0)

    def _gather(self, x: Tensor, lane: int) -> Tensor:
        barrier, shared = self._world.lanes[lane]
        shared[self.rank] = x.clone()
        barrier.wait(self._world.timeout_s)
        gathered = torch.stack(shared)
        barrier.wait(self._world.timeout_s)
        return gathered


class _LoopbackWorld:
    def __init__(self, size: int, timeout_s: float) -> None:
        self.size, self.timeout_s = size, timeout_s
        self.lanes = [(threading.Barrier(size), [torch.empty(0)] * size) for _ in range(2)]
        self._lock = threading.Lock()
        self._mailboxes: dict[tuple[int, int, int], queue.SimpleQueue[Tensor]] = {}

    def mailbox(self, source: int, target: int, tag: int) -> queue.SimpleQueue[Tensor]:
        with self._lock:
            return self._mailboxes.setdefault((source, target, tag), queue.SimpleQueue())


class _Done:
    def wait(self) -> None:
        return


class _Sum:
    """A sum that is taken when it is waited for: all ranks wait for those of a lane in one order."""

    def __init__(self, into: Tensor, total: Callable[[], Tensor]) -> None:
        self._into, self._total = into, total

    def wait(self) -> None:
        self._into.copy_(self._total())


class _Arrival:
    def __init__(self, into: Tensor, mailbox: queue.SimpleQueue[Tensor], timeout_s: float, peer: int) -> None:
        self._into, self._mailbox, self._timeout_s, self._peer = into, mailbox, timeout_s, peer

    def wait(self) -> None:
        try:
            message = self._mailbox.get(timeout=self._timeout_s)
        except queue.Empty:
            raise TransportError(f"nothing came from rank {self._peer} within {self._timeout_s:g} s") from None
        if message.shape != self._into.shape:
            raise TransportError(f"rank {self._peer} sent {message.numel()} bytes, expected {self._into.numel()}")
        self._into.copy_(message)
