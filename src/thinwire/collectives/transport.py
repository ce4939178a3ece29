"""Transports: point-to-point messages over a process group, or between threads of one process.

Over gloo every receive is posted before the first send. Gloo announces a posted receive to the sender on the TCP stream
that carries payloads, too: a late announcement waits behind payloads, and a slow link becomes half-duplex. Gloo's own
all-to-all and all-gather have that problem and take 1.5 to 1.8 times as long.

A sender waits for that announcement, half a round trip at least. So receives into buffers that are used again and again
are posted ahead: those of the next exchange, once nothing is under way (`Transport.end`).
"""

from __future__ import annotations

import contextlib
import itertools
import queue
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.collectives.errors import CommunicationError, TransportError
from thinwire.collectives.failures import FailureDetector
from thinwire.collectives.small_reduction import SMALL_BYTES, SmallReduction
from thinwire.collectives.traffic import Outgoing, Traffic, arriving, num_phases
from thinwire.compat import missing_member
from thinwire.compressors import Reduction

_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}

_SMALL_REDUCTIONS = 256
"""Number of small all-reduces of a lane that may be under way."""

_LEAST_PART = 1 << 14
"""Least bytes of a message for one of several streams: about what a new TCP connection sends at once."""


def ring_bytes(num_bytes: int, world_size: int) -> int:
    """Return the bytes that each rank sends in a ring all-reduce of a tensor of ``num_bytes``."""
    return 2 * (world_size - 1) * num_bytes // world_size


class Pending(Protocol):
    """A send or receive under way."""

    def wait(self) -> None:
        """Block until the operation is done. Raises TransportError if the peer is gone or does not answer in time."""
        ...


class IntegerReducer(Protocol):
    """Sums integers of all ranks: an `AggregatorClient`."""

    def start_all_reduce(self, x: Tensor, *, lane: int = 0, op: Reduction = "sum", limit: int = 0) -> Pending:
        """Start an all-reduce; see `Transport.start_all_reduce`."""
        ...

    def wire_bytes(self, numel: int, width: int, limit: int = 0) -> int:
        """Return the bytes of ``numel`` integers, each way: of ``width`` bytes each, or packed up to ``limit``."""
        ...

    def close(self) -> None:
        """End the session."""
        ...


@dataclass(eq=False)
class Buffers:
    """All messages that a rank sends and receives in one collective: allocated once, by `Transport.open`."""

    outgoing: Mapping[int, Outgoing]
    """Messages that this rank sends, by phase."""
    outbox: Mapping[int, Tensor]
    inbox: Mapping[tuple[int, int], Tensor]
    """Memory of received messages, by phase and sender."""
    arriving: Mapping[tuple[int, int], Outgoing]
    """Descriptions of the messages in the inbox, by phase and sender."""
    tag: int
    """First of the buffers' tags, one for each phase. The next exchange uses the same tags: its messages are sent
    later."""
    work: Sequence[Tensor] = ()
    """Further memory that the collective keeps from step to step."""
    uses: int = 0
    """Number of exchanges begun."""
    ahead: Sequence[tuple[int, int]] = ()
    """Messages that may be received ahead, by phase and sender; see `receivable_ahead`."""
    posted: dict[tuple[int, int], Pending] = field(default_factory=dict)
    """Receives of the next exchange that have been posted, by phase and sender."""

    @property
    def num_bytes(self) -> int:
        """Memory in use, in bytes."""
        tensors = {t.data_ptr(): t.numel() for t in (*self.outbox.values(), *self.inbox.values(), *self.work)}
        return sum(tensors.values())


class Transport(ABC):
    """Sends uint8 tensors between ranks, and counts bytes.

    Sends and receives may be called from several threads. All-reduces have two lanes: those of a lane are called in the
    same order on every rank, independently of the other lane, and a thread awaits its own in the same order on every
    rank, too. The other native collectives have no lane and must not run at the same time as any other operation.
    """

    rank: int
    world_size: int

    def __init__(self) -> None:
        self.sent_bytes = 0
        self.received_bytes = 0
        self.shared_bytes = 0
        """Part of ``sent_bytes`` that receivers read from memory that they share with this rank."""
        self.broken = False
        """Whether the transport was given up: nothing is awaited on it any more."""
        self.aggregator: IntegerReducer | None = None
        """Reducer of integers in place of the process group, if given."""
        self.detector: FailureDetector | None = None
        """Detector of the rank that has caused a failure, if given."""
        self._next_tag = 0
        self._under_way = 0
        """Number of exchanges and native all-reduces that have not ended."""
        self._resting: weakref.WeakSet[Buffers] = weakref.WeakSet()
        """Idle buffers that have been used at least twice: their next receives are posted ahead."""
        self._lock = threading.Lock()

    def give_up(self) -> None:
        """Mark the transport as broken. Called by every rank that sees a `TransportError`."""
        self.broken = True

    def new_tag(self, num: int) -> int:
        """Return the first of ``num`` tags that nothing else uses. All ranks must call this in the same order."""
        with self._lock:
            tag = self._next_tag
            self._next_tag = (tag + num) % (1 << 30)
        return tag

    def _count(self, sent: int, received: int, shared: int = 0) -> None:
        with self._lock:
            self.sent_bytes += sent
            self.received_bytes += received
            self.shared_bytes += shared

    @contextlib.contextmanager
    def uncounted(self) -> Iterator[None]:
        """Leave the bytes of the body, which probes the link, uncounted. No other operation may run."""
        before = self.sent_bytes, self.received_bytes, self.shared_bytes
        try:
            yield
        finally:
            self.sent_bytes, self.received_bytes, self.shared_bytes = before

    def open(self, traffic: Traffic) -> Buffers:
        """Allocate buffers for the messages of a collective. All ranks must call this, in the same order.

        A message that a rank forwards is sent from the buffer in which it was received.
        """
        outgoing = {message.phase: message for message in traffic[self.rank]}
        incoming = arriving(traffic, self.rank)
        inbox = {address: room(message) for address, message in incoming.items()}
        arrived = {phase: tensor for (phase, _), tensor in inbox.items()}
        outbox = {
            phase: room(message) if message.source is None else arrived[phase] for phase, message in outgoing.items()
        }
        ahead = receivable_ahead(outgoing, incoming)
        return Buffers(outgoing, outbox, inbox, incoming, self.new_tag(num_phases(traffic)), ahead=ahead)

    def begin(self, buffers: Buffers) -> None:
        """Prepare for the first message of an exchange. All ranks must begin their exchanges in the same order."""
        if self.detector is not None:
            self.detector.advance()
        with self._lock:
            self._under_way += 1
            self._resting.discard(buffers)
        buffers.uses += 1

    def end(self, buffers: Buffers) -> None:
        """End an exchange after its last message: received messages are not read any more.

        When nothing is under way any more, the receives of the next exchange are posted. Not before: a rank whose last
        message is still on the way may have ended, and its kernel drops the rest of that message if an announcement
        comes meanwhile. Nor for buffers that were used once, as to probe a link: they may be dropped, and others get
        their tags over a new transport, whose messages a receive that is still posted would take.
        """
        with self._lock:
            if buffers.uses > 1:
                self._resting.add(buffers)
        self._end_one()

    def _end_one(self) -> None:
        with self._lock:
            self._under_way -= 1
            if self._under_way or self.broken:
                return
            for buffers in self._resting:
                if buffers.posted:
                    continue
                for phase, peer in buffers.ahead:
                    posted = self._receive_ahead(buffers.inbox[phase, peer], peer, buffers.tag + phase)
                    if posted is not None:
                        buffers.posted[phase, peer] = posted

    def send_from(self, buffers: Buffers, phase: int, num_bytes: int) -> list[Pending]:
        """Send the first ``num_bytes`` of the message of a phase to its receivers."""
        message = buffers.outbox[phase][:num_bytes]
        return [self.send(message, peer, buffers.tag + phase) for peer in buffers.outgoing[phase].receivers]

    def receive_into(self, buffers: Buffers, phase: int, peer: int, num_bytes: int | None = None) -> Pending:
        """Receive a peer's message of a phase, of ``num_bytes`` or, by default, of the size of its buffer."""
        message = buffers.inbox[phase, peer][:num_bytes]
        if (posted := buffers.posted.pop((phase, peer), None)) is None:
            return self.receive(message, peer, buffers.tag + phase)
        self._count(0, message.numel())
        return posted

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

    def _receive_ahead(self, message: Tensor, peer: int, tag: int) -> Pending | None:
        """Post a receive before its exchange has begun; None where that gains nothing, or fails."""
        return None

    def start_all_reduce(self, x: Tensor, *, lane: int = 0, op: Reduction = "sum", limit: int = 0) -> Pending:
        """Start to replace ``x`` by its sum (or maximum) over all ranks, in its own dtype.

        Bytes are counted as those of a ring all-reduce. ``limit``: the largest magnitude of ranks' integers, which an
        aggregator then gets packed, and sends packed.
        """
        sent = self.all_reduce_bytes(x.numel(), x.dtype, limit)
        self._count(sent, self.all_reduce_bytes(x.numel(), x.dtype, limit * self.world_size))
        if self.aggregator is not None and not x.dtype.is_floating_point:
            return self._start_aggregated(self.aggregator, x, lane, op, limit)
        with self._lock:
            self._under_way += 1
        return _Ending(self._start_all_reduce(x, lane, op), self._end_one)

    def _start_aggregated(self, aggregator: IntegerReducer, x: Tensor, lane: int, op: Reduction, limit: int) -> Pending:
        if self.detector is None:
            return aggregator.start_all_reduce(x, lane=lane, op=op, limit=limit)
        self.detector.advance()
        with _CauseFinder(self.detector):
            return _PendingSum(aggregator.start_all_reduce(x, lane=lane, op=op, limit=limit), self.detector)

    def all_reduce(self, x: Tensor, *, lane: int = 0, op: Reduction = "sum") -> None:
        """Run `start_all_reduce`, and wait for its end."""
        self.start_all_reduce(x, lane=lane, op=op).wait()

    def native_all_reduce(self, x: Tensor) -> None:
        """Replace ``x`` by its sum as a training without thinwire does, whatever its size; for measurements."""
        num_bytes = ring_bytes(x.nbytes, self.world_size)
        self._count(num_bytes, num_bytes)
        self._start_native(x, 0, "sum").wait()

    def all_reduce_bytes(self, numel: int, dtype: torch.dtype, limit: int = 0) -> int:
        """Return the bytes that a rank sends, and receives, in an all-reduce; one way, of integers that an aggregator
        gets packed as magnitudes up to ``limit``."""
        if self.aggregator is not None and not dtype.is_floating_point:
            return self.aggregator.wire_bytes(numel, dtype.itemsize, limit)
        return ring_bytes(numel * dtype.itemsize, self.world_size)

    def close(self) -> None:
        """Release everything but process groups."""
        with self._lock:
            for buffers in self._resting:
                # Posted receives would keep connections open.
                buffers.posted.clear()
            self._resting.clear()
        if self.aggregator is not None:
            self.aggregator.close()
        if self.detector is not None:
            self.detector.close()

    @abstractmethod
    def _start_all_reduce(self, x: Tensor, lane: int, op: Reduction) -> Pending: ...

    def _start_native(self, x: Tensor, lane: int, op: Reduction) -> Pending:
        return self._start_all_reduce(x, lane, op)

    @abstractmethod
    def broadcast(self, x: Tensor) -> None:
        """Replace ``x`` by that of rank 0."""

    @abstractmethod
    def all_gather(self, x: Tensor) -> Tensor:
        """Return the tensors of all ranks, stacked by rank. Shapes and dtypes must agree."""


class _Ending:
    """A pending operation with a callback at its end."""

    def __init__(self, pending: Pending, ended: Callable[[], None]) -> None:
        self._pending, self._ended = pending, ended

    def wait(self) -> None:
        self._pending.wait()
        self._ended()


def receivable_ahead(
    outgoing: Mapping[int, Outgoing], incoming: Mapping[tuple[int, int], Outgoing]
) -> list[tuple[int, int]]:
    """Return the messages, by phase and sender, that may be received ahead: those of known size between mutual senders.

    Such a sender cannot end an exchange that this rank has not begun, so what it sends is not lost; see
    `Transport.end`.
    """
    receivers = {peer for message in outgoing.values() if not message.late for peer in message.receivers}
    return [(phase, peer) for (phase, peer), message in incoming.items() if not message.late and peer in receivers]


def room(message: Outgoing) -> Tensor:
    """Return a buffer for a message, in private memory."""
    return torch.zeros(message.num_bytes, dtype=torch.uint8, device="cpu")


class PendingWork:
    """A collective of ``torch.distributed``, whose failure is a `TransportError`.

    ``peer`` is the rank, within its group, that sends or receives the message.
    """

    def __init__(
        self,
        work: dist.Work,
        doing: str,
        timeout: timedelta,
        peer: int | None = None,
        detector: FailureDetector | None = None,
    ) -> None:
        self._work, self._failing = work, Failing(doing, timeout, peer, detector)

    def wait(self) -> None:
        with self._failing:
            self._work.wait()


class _PendingParts:
    """Pending parts of one message."""

    def __init__(self, parts: Sequence[Pending]) -> None:
        self._parts = parts

    def wait(self) -> None:
        for part in self._parts:
            part.wait()


def _joined(parts: Sequence[Pending]) -> Pending:
    return parts[0] if len(parts) == 1 else _PendingParts(parts)


class Failing:
    """A context in which a ``RuntimeError`` of ``torch.distributed`` becomes a `TransportError`, with the rank that has
    caused it where a detector can tell."""

    def __init__(
        self, doing: str, timeout: timedelta, peer: int | None = None, detector: FailureDetector | None = None
    ) -> None:
        self._doing, self._timeout, self._peer, self._detector = doing, timeout, peer, detector

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if not isinstance(error, RuntimeError) or isinstance(error, CommunicationError):
            return
        suspect = missing_member(error) if self._peer is None else self._peer
        failed = TransportError(
            f"{self._doing} failed: {_first_line(error)} (the timeout is {self._timeout.total_seconds():g} s); restart "
            "from the last checkpoint",
            rank=self._peer,
        )
        raise failed if self._detector is None else self._detector.explain(failed, suspect) from error


class _CauseFinder:
    """A context in which a `TransportError` of an aggregator gets the rank that has caused it.

    An error with a reason has its cause already: the aggregator itself.
    """

    def __init__(self, detector: FailureDetector) -> None:
        self._detector = detector

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, TransportError) and error.reason is None:
            raise self._detector.explain(error) from error


class _PendingSum:
    """A pending sum by an aggregator."""

    def __init__(self, pending: Pending, detector: FailureDetector) -> None:
        self._pending, self._explained = pending, _CauseFinder(detector)

    def wait(self) -> None:
        with self._explained:
            self._pending.wait()


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


class ProcessGroupTransport(Transport):
    """Sends CPU tensors over torch process groups (gloo) that nothing else uses.

    The groups' own methods are called, so they may be groups that ``torch.distributed`` does not list.

    Args:
        group: The process group.
        timeout: That of the group, for error messages.
        second: The group of the second lane, of the same ranks. Without one both lanes share ``group``, which is enough
            for a single thread.
        owned: Whether the groups were made for this transport and are destroyed by `close`.
        detector: Finds the rank that caused a failure. `close` closes it.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        timeout: timedelta,
        second: dist.ProcessGroup | None = None,
        *,
        owned: bool = False,
        detector: FailureDetector | None = None,
    ) -> None:
        super().__init__()
        self.detector = detector
        self.group = group
        self._lanes: tuple[dist.ProcessGroup, ...] = (group, second or group)
        self._streams: tuple[dist.ProcessGroup, ...] = (group,)
        self._owned = owned
        self.timeout = timeout
        self.rank = group.rank()
        self.world_size = group.size()
        # Tags of small all-reduces by lane: pairs that are used again and again.
        self._tags = tuple(itertools.cycle([self.new_tag(2) for _ in range(_SMALL_REDUCTIONS)]) for _ in self._lanes)

    def add_streams(self, groups: Sequence[dist.ProcessGroup]) -> None:
        """Send messages in parts over further groups of the same ranks, too, which this transport owns as it owns its
        others.

        All ranks must call this with as many groups, in the same order, before the first message.
        """
        self._streams = (*self._streams, *groups)

    def _send(self, message: Tensor, peer: int, tag: int) -> Pending:
        doing = f"sending to rank {peer}"
        parts = self._parts(message)
        return _joined([self._start(doing, partial(group.send, [part], peer, tag), peer) for group, part in parts])

    def _receive(self, message: Tensor, peer: int, tag: int) -> Pending:
        doing = f"receiving from rank {peer}"
        parts = self._parts(message)
        return _joined([self._start(doing, partial(group.recv, [part], peer, tag), peer) for group, part in parts])

    def _receive_ahead(self, message: Tensor, peer: int, tag: int) -> Pending | None:
        try:
            works = [group.recv([part], peer, tag) for group, part in self._parts(message)]
        except RuntimeError:
            # The peer has ended. That is an error if there is another exchange, which then says so.
            return None
        doing = f"receiving from rank {peer}"
        return _joined([PendingWork(work, doing, self.timeout, peer, self.detector) for work in works])

    def _parts(self, message: Tensor) -> list[tuple[dist.ProcessGroup, Tensor]]:
        """Return the parts of a message, each with its group: the message's size alone decides, on both sides."""
        num = max(1, min(len(self._streams), message.numel() // _LEAST_PART))
        return list(zip(self._streams, message.chunk(num), strict=False))

    def _start_all_reduce(self, x: Tensor, lane: int, op: Reduction) -> Pending:
        if self.world_size == 1 or x.nbytes > SMALL_BYTES or not x.is_contiguous():
            return self._start_native(x, lane, op)
        self._advance()
        # Ranks begin those of a lane in one order, so all of them take the same tags.
        tag = next(self._tags[lane])
        return SmallReduction(
            x,
            op,
            rank=self.rank,
            num_ranks=self.world_size,
            send=lambda message, peer, phase: self._send(message, peer, tag + phase),
            receive=lambda message, peer, phase: self._receive(message, peer, tag + phase),
        )

    def _start_native(self, x: Tensor, lane: int, op: Reduction) -> Pending:
        self._advance()
        return self._start("the all-reduce", lambda: self._lanes[lane].allreduce([x], _OPS[op]))

    def broadcast(self, x: Tensor) -> None:
        self._advance()
        self._start("the broadcast", lambda: self.group.broadcast(x, 0)).wait()

    def all_gather(self, x: Tensor) -> Tensor:
        self._advance()
        out = [torch.empty_like(x) for _ in range(self.world_size)]
        self._start("the all-gather", lambda: self.group.allgather(out, x)).wait()
        return torch.stack(out)

    def close(self) -> None:
        """Destroy the groups, if they are owned. The transport is unusable from then on. No operation may be
        running."""
        super().close()
        groups, self._lanes, self._streams = (*self._lanes, *self._streams), (), ()
        if not self._owned or not groups:
            return
        del self.group
        for group in dict.fromkeys(groups):
            # The default group may have been destroyed before, and the group may be broken, or not listed: then it ends
            # when nobody holds it.
            with contextlib.suppress(ValueError, RuntimeError, AssertionError):
                dist.destroy_process_group(group)

    def _advance(self) -> None:
        if self.detector is not None:
            self.detector.advance()

    def _start(self, doing: str, operation: Callable[[], dist.Work], peer: int | None = None) -> Pending:
        with Failing(doing, self.timeout, peer, self.detector):
            return PendingWork(operation(), doing, self.timeout, peer, self.detector)


class ForeignGroupTransport(ProcessGroupTransport):
    """Collectives of CPU tensors over a process group (gloo) that others use, too.

    It has native collectives alone. gloo knows single messages by their tags, and those of others may have the same.
    """

    def __init__(
        self, group: dist.ProcessGroup, timeout: timedelta, *, detector: FailureDetector | None = None
    ) -> None:
        super().__init__(group, timeout, detector=detector)

    def _start_all_reduce(self, x: Tensor, lane: int, op: Reduction) -> Pending:
        return self._start_native(x, lane, op)

    def _send(self, message: Tensor, peer: int, tag: int) -> Pending:
        raise TypeError("a process group that others use carries collectives, and no single messages")

    def _receive(self, message: Tensor, peer: int, tag: int) -> Pending:
        return self._send(message, peer, tag)


class LoopbackTransport(Transport):
    """Sends tensors between threads of one process that act as ranks: for tests, and for several ranks on one device.

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
        self.lanes = [
            (threading.Barrier(size), [torch.empty(0, dtype=torch.float32, device="cpu")] * size) for _ in range(2)
        ]
        self._lock = threading.Lock()
        self._mailboxes: dict[tuple[int, int, int], queue.SimpleQueue[Tensor]] = {}

    def mailbox(self, source: int, target: int, tag: int) -> queue.SimpleQueue[Tensor]:
        with self._lock:
            return self._mailboxes.setdefault((source, target, tag), queue.SimpleQueue())


class _Done:
    def wait(self) -> None:
        return


class _Sum:
    """A sum that is computed by ``wait``: all ranks wait for the sums of a lane in the same order."""

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
            text = f"nothing came from rank {self._peer} within {self._timeout_s:g} s"
            raise TransportError(text, rank=self._peer) from None
        if message.shape != self._into.shape:
            text = f"rank {self._peer} sent {message.numel()} bytes, expected {self._into.numel()}"
            raise TransportError(text, rank=self._peer)
        self._into.copy_(message)
