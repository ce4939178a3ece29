"""Transports: point-to-point messages and native collectives over process groups.

Over gloo every receive is posted before the first send. Gloo announces a posted receive to the sender on the TCP stream
that carries payloads, too: a late announcement waits behind payloads, and a slow link becomes half-duplex. Gloo's own
all-to-all and all-gather have that problem and take 1.5 to 1.8 times as long.

A sender waits for that announcement, half a round trip at least. So receives into buffers that are used again and again
are posted ahead: those of the next exchange, once nothing is under way (`Transport.end`).
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from itertools import accumulate
from typing import NamedTuple, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.collectives.errors import CommunicationError, TransportError
from thinwire.collectives.failures import FailureDetector
from thinwire.compat import missing_member
from thinwire.compressors import Reduction
from thinwire.kernels import SharedCounter, align

_K = TypeVar("_K")

OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}

SMALL_BYTES = 1 << 20
"""Largest size for which messages are faster than a ring, with 4 and 8 ranks and over 10 ms two to four times; beyond,
a ring gains by adding one part of a tensor while the next one is on its way. The second lane has messages alone."""

_SMALL_REDUCTIONS = 256
"""Number of small all-reduces of a lane that may be under way."""

_LEAST_MAPPING = 1 << 20
"""Least bytes of memory that the system gives and takes back by itself."""
_LEAST_HUGE = 1 << 22
"""Least bytes of such memory for which huge pages are asked; the last of them need not be full."""

_LEAST_PART = 1 << 14
"""Least bytes of a message for one of several streams: about what a new TCP connection sends at once."""


def ring_bytes(num_bytes: int, world_size: int) -> int:
    """Return the bytes that each rank sends in a ring all-reduce of a tensor of ``num_bytes``."""
    return 2 * (world_size - 1) * num_bytes // world_size


class OutgoingMessage(NamedTuple):
    """A message that a rank sends to one or several ranks."""

    phase: int
    """Number of the message among those of its sender. Receivers identify it by phase and sender."""
    num_bytes: int
    """Size of the message, or an upper bound if ``late``."""
    receivers: tuple[int, ...]
    late: bool = False
    """Whether the size is sent first, so that the receive is posted later (`Messages.expect`)."""
    source: int | None = None
    """Rank that made the message, if its sender forwards it unchanged; None if the sender made it."""


Traffic = Sequence[Sequence[OutgoingMessage]]
"""Messages that each rank sends: a pure function of the layout."""


def arriving(traffic: Traffic, rank: int) -> dict[tuple[int, int], OutgoingMessage]:
    """Return the messages that ``rank`` receives, by phase and sender."""
    everything = [(peer, message) for peer, messages in enumerate(traffic) for message in messages]
    return {(message.phase, peer): message for peer, message in everything if rank in message.receivers}


def sent_bytes(traffic: Traffic, rank: int) -> int:
    """Return the bytes that ``rank`` hands to its transport. An upper bound if sizes depend on the data."""
    return sum(message.num_bytes * len(message.receivers) for message in traffic[rank])


def num_phases(traffic: Traffic) -> int:
    """Return the number of tags that the traffic needs between any two ranks."""
    return 1 + max((message.phase for messages in traffic for message in messages), default=-1)


class Pending(Protocol):
    """A send or receive under way."""

    def wait(self) -> None:
        """Block until the operation is done. Raises TransportError if the peer is gone or does not answer in time."""
        ...


class Awaited:
    """An operation under way that a function awaits."""

    def __init__(self, wait: Callable[[], None] = lambda: None) -> None:
        self.wait = wait


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


def returned_zeros(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros whose memory goes back to the system when they are freed; what was never written takes none.

    An allocator keeps freed memory for later, and puts smaller tensors that stay into it: a whole model's state, once
    or several times more, until the process ends.
    """
    num_bytes = numel * dtype.itemsize
    if device.type != "cpu" or num_bytes < _LEAST_MAPPING:
        return torch.zeros(numel, dtype=dtype, device=device)
    return torch.frombuffer(_mapping(num_bytes), dtype=dtype)


def _mapping(num_bytes: int) -> mmap.mmap:
    """Return new memory of zeros, straight from the system. In huge pages it is written in half the time: the system
    finds and clears each page when it is first touched."""
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE)
    if num_bytes >= _LEAST_HUGE and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def laid_out(messages: Mapping[_K, OutgoingMessage], memory: Tensor) -> dict[_K, Tensor]:
    """Return the room of each message in ``memory``, one after the other."""
    ends = accumulate(align(message.num_bytes) for message in messages.values())
    rooms = zip(messages.items(), ends, strict=True)
    return {key: memory[end - align(m.num_bytes) :][: m.num_bytes] for (key, m), end in rooms}


def inbox_for(incoming: Mapping[_K, OutgoingMessage]) -> tuple[dict[_K, Tensor], mmap.mmap | None]:
    """Return room for messages that are received, and its memory where that can be given back to the system."""
    num_bytes = room_bytes(incoming.values())
    if num_bytes < _LEAST_MAPPING:
        return laid_out(incoming, torch.zeros(num_bytes, dtype=torch.uint8, device="cpu")), None
    received = _mapping(num_bytes)
    return laid_out(incoming, torch.frombuffer(received, dtype=torch.uint8)), received


def room_bytes(messages: Iterable[OutgoingMessage]) -> int:
    """Return the bytes that messages take one after the other."""
    return sum(align(message.num_bytes) for message in messages)


class Arena:
    """Memory for messages that a rank sends, in which `Buffers` that are never under way at the same time take turns.

    It takes as much as the largest of them need. More is reserved, so that larger ones seldom need another: memory that
    was never written takes none.
    """

    def __init__(self) -> None:
        self.memory = torch.empty(0, dtype=torch.uint8, device="cpu")
        self.num_bytes = self.reserved = 0
        """Bytes in use, and bytes that are reserved on every rank."""
        self.others: Mapping[int, Tensor] = {}
        """Arenas of other ranks, whose messages this rank reads where they are."""
        self.unread: Sequence[tuple[int, SharedCounter, int]] = ()
        """Ranks that read the messages of the last exchange here, each with its word and what this is afterwards."""


def reservation(num_bytes: int) -> int:
    """Return how many bytes of an arena to reserve for messages of ``num_bytes``: a power of two."""
    return 1 << (num_bytes - 1).bit_length() if num_bytes else 0


@dataclass(eq=False)
class Buffers:
    """All messages that a rank sends and receives in one collective: made once, by `Transport.open`."""

    outgoing: Mapping[int, OutgoingMessage]
    """Messages that this rank sends, by phase."""
    outbox: Mapping[int, Tensor]
    inbox: Mapping[tuple[int, int], Tensor]
    """Memory of received messages, by phase and sender."""
    arriving: Mapping[tuple[int, int], OutgoingMessage]
    """Descriptions of the messages in the inbox, by phase and sender."""
    tag: int
    """First of the buffers' tags, one for each phase. The next exchange uses the same tags: its messages are sent
    later."""
    arena: Arena
    arena_bytes: int
    """Bytes of the arena that are for messages of these buffers."""
    work: Sequence[Tensor] = ()
    """Further memory that the collective keeps from step to step."""
    uses: int = 0
    """Number of exchanges begun."""
    ahead: Sequence[tuple[int, int]] = ()
    """Messages that may be received ahead, by phase and sender; see `receivable_ahead`."""
    posted: dict[tuple[int, int], Pending] = field(default_factory=dict)
    """Receives of the next exchange that have been posted, by phase and sender."""
    received: mmap.mmap | None = None
    """Memory of received messages that goes back to the system between two exchanges."""

    @property
    def num_bytes(self) -> int:
        """Memory in use, in bytes."""
        return self.arena_bytes + sum(tensor.numel() for tensor in (*self.inbox.values(), *self.work))


class Transport:
    """Sends uint8 tensors between ranks, and counts bytes. One over another transport, ``inner``, hands to that what it
    does not carry itself.

    Sends and receives may be called from several threads. All-reduces have two lanes: those of a lane are called in the
    same order on every rank, independently of the other lane, and a thread awaits its own in the same order on every
    rank, too. The other native collectives have no lane and must not run at the same time as any other operation.
    """

    rank: int
    world_size: int
    device = torch.device("cpu")
    """Device of the tensors in messages, and of those that are reduced."""

    def __init__(self, inner: Transport | None = None) -> None:
        self._inner = inner
        if inner is not None:
            self.rank, self.world_size = inner.rank, inner.world_size
        self.sent_bytes = self.received_bytes = self.shared_bytes = 0
        """Part of ``sent_bytes`` that receivers read from memory that they share with this rank."""
        self.broken = False
        """Whether the transport was given up: nothing is awaited on it any more."""
        self.aggregator: IntegerReducer | None = None
        """Reducer of integers in place of the process group, if given."""
        self.detector: FailureDetector | None = None if inner is None else inner.detector
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
        if self._inner is not None:
            return self._inner.new_tag(num)
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

    def open(self, traffic: Traffic, arena: Arena | None = None) -> Buffers:
        """Return buffers for the messages of a collective. All ranks must call this, in the same order.

        Messages that this rank makes lie in ``arena``, by default one of their own. One that it forwards is sent from
        the buffer in which it was received.
        """
        outgoing = {message.phase: message for message in traffic[self.rank]}
        incoming = arriving(traffic, self.rank)
        made = {phase: message for phase, message in outgoing.items() if message.source is None}
        arena, num_bytes = arena or Arena(), room_bytes(made.values())
        if num_bytes > arena.reserved:
            arena.reserved = reservation(num_bytes)
            arena.memory = returned_zeros(arena.reserved, torch.uint8, torch.device("cpu"))
        arena.num_bytes = max(num_bytes, arena.num_bytes)
        inbox, received = inbox_for(incoming)
        arrived = {phase: tensor for (phase, _), tensor in inbox.items()}
        rooms = laid_out(made, arena.memory) | {phase: arrived[phase] for phase in outgoing.keys() - made.keys()}
        outbox, tag = {phase: rooms[phase] for phase in outgoing}, self.new_tag(num_phases(traffic))
        buffers = Buffers(outgoing, outbox, inbox, incoming, tag, arena, num_bytes)
        buffers.ahead, buffers.received = receivable_ahead(outgoing, incoming), received
        return buffers

    def begin(self, buffers: Buffers) -> None:
        """Prepare for the first message of an exchange. All ranks must begin their exchanges in the same order."""
        self._advance()
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
        if buffers.received is not None:
            # The next messages may be received ahead, but are not there yet: until then their memory is nobody's.
            buffers.received.madvise(mmap.MADV_DONTNEED)
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

    @property
    def inner(self) -> Transport:
        """Transport under this one."""
        assert self._inner is not None, "a transport over no other one carries everything itself"
        return self._inner

    def _send(self, message: Tensor, peer: int, tag: int) -> Pending:
        return self.inner._send(message, peer, tag)

    def _receive(self, message: Tensor, peer: int, tag: int) -> Pending:
        return self.inner._receive(message, peer, tag)

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
        pending = self._start_all_reduce(x, lane, op)

        def wait() -> None:
            pending.wait()
            self._end_one()

        return Awaited(wait)

    def _start_aggregated(self, aggregator: IntegerReducer, x: Tensor, lane: int, op: Reduction, limit: int) -> Pending:
        self._advance()
        with self._explaining():
            pending = aggregator.start_all_reduce(x, lane=lane, op=op, limit=limit)

        def wait() -> None:
            with self._explaining():
                pending.wait()

        return Awaited(wait)

    @contextlib.contextmanager
    def _explaining(self) -> Iterator[None]:
        """Give a `TransportError` of an aggregator the rank that has caused it. One with a reason has its cause
        already: the aggregator itself."""
        try:
            yield
        except TransportError as error:
            if self.detector is None or error.reason is not None:
                raise
            raise self.detector.explain(error) from error

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

    def _advance(self) -> None:
        if self.detector is not None:
            self.detector.advance()

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
        if self._inner is not None:
            self._inner.close()

    def _start_all_reduce(self, x: Tensor, lane: int, op: Reduction) -> Pending:
        return self.inner._start_all_reduce(x, lane, op)

    def _start_native(self, x: Tensor, lane: int, op: Reduction) -> Pending:
        return self._start_all_reduce(x, lane, op)

    def broadcast(self, x: Tensor) -> None:
        """Replace ``x`` by that of rank 0."""
        self.inner.broadcast(x)

    def all_gather(self, x: Tensor) -> Tensor:
        """Return the tensors of all ranks, which are on the host, stacked by rank. Shapes and dtypes must agree."""
        return self.inner.all_gather(x)


def receivable_ahead(
    outgoing: Mapping[int, OutgoingMessage], incoming: Mapping[tuple[int, int], OutgoingMessage]
) -> list[tuple[int, int]]:
    """Return the messages, by phase and sender, that may be received ahead: those of known size between mutual senders.

    Such a sender cannot end an exchange that this rank has not begun, so what it sends is not lost; see
    `Transport.end`.
    """
    receivers = {peer for message in outgoing.values() if not message.late for peer in message.receivers}
    return [(phase, peer) for (phase, peer), message in incoming.items() if not message.late and peer in receivers]


class ErrorTranslation:
    """A context in which a ``RuntimeError`` of ``torch.distributed`` becomes a `TransportError`, with the rank that has
    caused it where a detector can tell. ``peer`` is the rank, within its group, that sends or receives the message."""

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
        first_line = next(iter(str(error).strip().splitlines()), type(error).__name__)
        failed = TransportError(
            f"{self._doing} failed: {first_line} (the timeout is {self._timeout.total_seconds():g} s); restart "
            "from the last checkpoint",
            rank=self._peer,
        )
        raise failed if self._detector is None else self._detector.explain(failed, suspect) from error


class PendingWork:
    """A collective of ``torch.distributed``, whose failure is a `TransportError`."""

    def __init__(
        self,
        work: dist.Work,
        doing: str,
        timeout: timedelta,
        peer: int | None = None,
        detector: FailureDetector | None = None,
    ) -> None:
        self._work, self._failing = work, ErrorTranslation(doing, timeout, peer, detector)

    def wait(self) -> None:
        with self._failing:
            self._work.wait()


def _joined(parts: Sequence[Pending]) -> Pending:
    """Return one message of several parts."""

    def wait() -> None:
        for part in parts:
            part.wait()

    return parts[0] if len(parts) == 1 else Awaited(wait)


_Post = Callable[[Tensor, int, int], Pending]
"""A function that starts to send or receive bytes: to or from which rank, and in which phase, 0 or 1."""


class ProcessGroupTransport(Transport):
    """Sends CPU tensors over torch process groups (gloo) that nothing else uses.

    The groups' own methods are called, so they may be groups that ``torch.distributed`` does not list.

    Args:
        group: the process group.
        timeout: that of the group, for error messages.
        owned: whether the groups were made for this transport and are destroyed by `close`.
        detector: finds the rank that caused a failure. `close` closes it.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        timeout: timedelta,
        *,
        owned: bool = False,
        detector: FailureDetector | None = None,
    ) -> None:
        super().__init__()
        self.detector = detector
        self.group = group
        self._summing = group
        self._streams: tuple[dist.ProcessGroup, ...] = (group,)
        self._owned = owned
        self.timeout = timeout
        self.rank = group.rank()
        self.world_size = group.size()
        # Tags of small all-reduces by lane: pairs that are used again and again.
        self._tags = tuple(itertools.cycle([self.new_tag(2) for _ in range(_SMALL_REDUCTIONS)]) for _ in range(2))

    def sum_over(self, group: dist.ProcessGroup) -> None:
        """Run large all-reduces over a further group of the same ranks, which this transport owns as it owns its
        others. All ranks must call this before the first of them."""
        self._summing = group

    def add_streams(self, groups: Sequence[dist.ProcessGroup]) -> None:
        """Send messages in parts over further groups of the same ranks, too, which this transport owns as it owns its
        others.

        All ranks must call this with as many groups, in the same order, before the first message.
        """
        self._streams = (*self._streams, *groups)

    def _send(self, message: Tensor, peer: int, tag: int) -> Pending:
        doing, parts = f"sending to rank {peer}", self._parts(message)
        return _joined([self._start(doing, partial(group.send, [part], peer, tag), peer) for group, part in parts])

    def _receive(self, message: Tensor, peer: int, tag: int) -> Pending:
        doing, parts = f"receiving from rank {peer}", self._parts(message)
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
        # The group runs its all-reduces in one order, which those of the second lane do not have.
        if self.world_size == 1 or (lane == 0 and (x.nbytes > SMALL_BYTES or not x.is_contiguous())):
            return self._start_native(x, lane, op)
        self._advance()
        # Ranks begin those of a lane in one order, so all of them take the same tags.
        tag = next(self._tags[lane])
        return small_reduction(
            x,
            op,
            rank=self.rank,
            num_ranks=self.world_size,
            send=lambda message, peer, phase: self._send(message, peer, tag + phase),
            receive=lambda message, peer, phase: self._receive(message, peer, tag + phase),
        )

    def _start_native(self, x: Tensor, lane: int, op: Reduction) -> Pending:
        self._advance()
        return self._start("the all-reduce", lambda: self._summing.allreduce([x], OPS[op]))

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
        if not self._streams:
            return
        groups, self._streams = (self._summing, *self._streams), ()
        if not self._owned:
            return
        del self.group, self._summing
        for group in dict.fromkeys(groups):
            # The default group may have been destroyed before, and the group may be broken, or not listed: then it ends
            # when nobody holds it.
            with contextlib.suppress(ValueError, RuntimeError, AssertionError):
                dist.destroy_process_group(group)

    def _start(self, doing: str, operation: Callable[[], dist.Work], peer: int | None = None) -> Pending:
        with ErrorTranslation(doing, self.timeout, peer, self.detector):
            return PendingWork(operation(), doing, self.timeout, peer, self.detector)


def small_reduction(x: Tensor, op: Reduction, *, rank: int, num_ranks: int, send: _Post, receive: _Post) -> Pending:
    """Start a sum or maximum over all ranks in two messages one after another, where a ring has 2(n−1).

    Each rank reduces one part of the tensor and sends the result to all others. Two ranks send each other the whole
    tensor, as many bytes in one message. All ranks end with the same bits. All receives are posted and this rank's
    values sent before this returns; waiting for the result replaces ``x``, which is contiguous.
    """
    flat = x.view(-1)
    parts = [flat, flat] if num_ranks == 2 else list(flat.tensor_split(num_ranks))
    mine = parts[rank]
    gathered = mine.new_empty(num_ranks, mine.numel())
    peers = [peer for peer in range(num_ranks) if peer != rank]
    owners = [peer for peer in peers if parts[peer].numel()]
    readers = peers if num_ranks > 2 and mine.numel() else []
    started = [receive(_bytes(gathered[peer]), peer, 0) for peer in peers if mine.numel()]
    # The memory of sent values is free: an owner has received them when its result is received.
    results = [receive(_bytes(parts[peer]), peer, 1) for peer in owners if num_ranks > 2]
    started += [send(_bytes(parts[peer]), peer, 0) for peer in owners]

    def wait() -> None:
        for pending in started:
            pending.wait()
        if num_ranks == 2:
            # A third of the time of the general way, in bf16 a sixth.
            (torch.maximum if op == "max" else torch.add)(mine, gathered[1 - rank], out=mine)
        else:
            gathered[rank] = mine
            if op == "max":
                torch.amax(gathered, 0, out=mine)
            else:
                torch.sum(gathered, 0, dtype=mine.dtype, out=mine)
        for pending in [send(_bytes(mine), peer, 1) for peer in readers] + results:
            pending.wait()

    return Awaited(wait)


def _bytes(part: Tensor) -> Tensor:
    return part.view(torch.uint8)


@contextlib.contextmanager
def contiguous_values(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the real values of a tensor in one piece, in the order of its indices. Changes by the body are copied to
    the tensor when it ends. Gloo reads and writes memory from a tensor's first element on, whatever its strides."""
    values = tensor.detach()
    values = torch.view_as_real(values) if values.is_complex() else values  # gloo supports no complex numbers
    whole = values.contiguous()
    yield whole
    if whole is not values:
        overwrite(values, whole)


def overwrite(tensor: Tensor, values: Tensor) -> None:
    """Copy values of its shape into a tensor. Elements that an expanded tensor repeats take the first one's value."""
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if stride == 0 and size > 1:
            # PyTorch refuses to write elements that share their memory.
            tensor, values = tensor.narrow(dim, 0, 1), values.narrow(dim, 0, 1)
    tensor.copy_(values)
