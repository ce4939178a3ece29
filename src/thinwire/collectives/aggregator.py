"""A worker's side of in-network aggregation: integer tensors go up in chunks, and come back as sums, in place."""

from __future__ import annotations

import contextlib
import secrets
import selectors
import socket
import threading
import time
import weakref
from collections import deque
from dataclasses import dataclass, field

import torch
from torch import Tensor

from thinwire.collectives.aggregation import (
    HEADER,
    Greeting,
    Header,
    Kind,
    Op,
    ProtocolError,
)
from thinwire.collectives.transport import Pending, TransportError
from thinwire.compressors import Reduction

_OPS = {"sum": Op.SUM, "max": Op.MAX}
_WIDTHS = {torch.int8: 1, torch.int32: 4}
_BUFFERS_A_CALL = 32
_TURN_S = 0.5
_GRACE_S = 5.0
"""The aggregator tells who is missing; this much later its own silence is an error."""


@dataclass
class _Job:
    """One all-reduce: its bytes, and how many chunks are still out."""

    data: memoryview
    width: int
    op: Op
    link: _Link
    sent: int = 0
    """Elements."""
    received: int = 0
    done: threading.Event = field(default_factory=threading.Event)
    error: TransportError | None = None

    @property
    def numel(self) -> int:
        return len(self.data) // self.width

    def wait(self) -> None:
        started_s = time.monotonic()
        while not self.done.wait(_TURN_S):
            self.link.check(started_s)
        if self.error is not None:
            raise self.error


@dataclass
class _Lane:
    """All-reduces in their order, and the chunks of them that are out."""

    slots: int
    waiting: deque[_Job] = field(default_factory=deque)
    out: deque[tuple[Header, memoryview, _Job]] = field(default_factory=deque)
    next_chunk: int = 0


class AggregatorClient:
    """This rank's connection to an aggregator (``thinwire aggregator``).

    Each lane has an order of its own, which must be the same on all ranks, and its share of the aggregator's slots: so
    many chunks are in flight. A thread of its own sends and receives.

    Args:
        address: ``host:port``; ``host:port?slots=16`` asks for that many slots instead of all.
        rank, world_size: of this worker.
        session: a number that all ranks of this training share and nobody else has.
        timeout_s: how long ranks may wait for one another.
        lanes: how many orders there are.

    Raises:
        ValueError: the address is none.
        TransportError: no aggregator answers there, it refuses, or not all ranks came.
    """

    def __init__(
        self, address: str, *, rank: int, world_size: int, session: int, timeout_s: float, lanes: int = 2
    ) -> None:
        host, port, slots = parse_address(address)
        target = address.partition("?")[0]
        self.address = address
        try:
            sock = socket.create_connection((host, port), timeout=timeout_s)
        except OSError as error:
            raise TransportError(
                f"no aggregator answers at {target} ({error.strerror or error}): start one there with "
                f"thinwire aggregator --host {host} --port {port}"
            ) from error
        greeting = Greeting(rank, world_size, lanes, slots, max(1, int(timeout_s * 1000)), session)
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            sock.sendall(greeting.pack())
            sock.settimeout(timeout_s + _GRACE_S)
            welcome = _welcome(sock)
        except (OSError, ProtocolError) as error:
            sock.close()
            raise TransportError(f"the aggregator at {target} gave no welcome: {error}") from error
        except TransportError:
            sock.close()
            raise
        self.slot_elements, self.slots_per_lane = welcome.elements, welcome.chunk
        self._link = _Link(sock, target, [_Lane(welcome.chunk) for _ in range(lanes)], welcome.elements, timeout_s)
        threading.Thread(target=self._link.run, name="thinwire aggregator", daemon=True).start()
        self._finalizer = weakref.finalize(self, self._link.close)

    def start_all_reduce(self, x: Tensor, *, lane: int = 0, op: Reduction = "sum") -> Pending:
        """Begin to replace ``x`` (int8 or int32, contiguous, on the CPU) by its sum or maximum over all ranks.

        Raises:
            TypeError: ``x`` holds no such integers.
            TransportError: the connection broke earlier; waiting raises it when it breaks later.
        """
        if x.dtype not in _WIDTHS or x.device.type != "cpu" or not x.is_contiguous():
            raise TypeError(f"an aggregator adds contiguous int8 or int32 tensors on the CPU, not {x.dtype} {x.device}")
        data = x.numpy().reshape(-1).data.cast("B") if x.numel() else memoryview(b"")
        job = _Job(data, _WIDTHS[x.dtype], _OPS[op], self._link)
        if not x.numel():
            job.done.set()
        else:
            self._link.submit(job, lane)
        return job

    def all_reduce(self, x: Tensor, *, lane: int = 0, op: Reduction = "sum") -> None:
        """The same, to its end."""
        self.start_all_reduce(x, lane=lane, op=op).wait()

    def wire_bytes(self, numel: int, width: int) -> int:
        """Bytes that a worker sends for so many integers of ``width`` bytes, and receives: headers and integers."""
        return -(-numel // self.slot_elements) * HEADER.size + numel * width

    def close(self) -> None:
        """Leave. What is under way is given up."""
        self._finalizer()


class _Link:
    """The socket and its thread. Holds no reference to the client, which ends it when it goes."""

    def __init__(self, sock: socket.socket, target: str, lanes: list[_Lane], slot_elements: int, timeout_s: float):
        self._sock, self._target, self._lanes = sock, target, lanes
        self._slot_elements = slot_elements
        self._lock = threading.Lock()
        self._outbox: deque[memoryview] = deque()
        self._header = bytearray(HEADER.size)
        self._into: memoryview | None = None
        """Where the payload of the frame that is arriving goes; None while its header is."""
        self._have = 0
        self._text: bytearray | None = None
        self._error: TransportError | None = None
        self._wake, self._awake = socket.socketpair()
        self._closing = False
        self._timeout_s = timeout_s
        self._heard_s = time.monotonic()
        sock.setblocking(False)
        self._awake.setblocking(False)

    def submit(self, job: _Job, lane: int) -> None:
        with self._lock:
            if self._error is not None:
                raise TransportError(f"the link to the aggregator broke earlier: {self._error}")
            self._lanes[lane].waiting.append(job)
        self._nudge()

    def check(self, since_s: float) -> None:
        """Raise if an answer is due since then and nothing was heard for too long."""
        if time.monotonic() - max(since_s, self._heard_s) > self._timeout_s + _GRACE_S:
            raise TransportError(
                f"nothing came from the aggregator at {self._target} within {self._timeout_s + _GRACE_S:g} s"
            )

    def close(self) -> None:
        self._closing = True
        self._nudge()

    def _nudge(self) -> None:
        with contextlib.suppress(OSError):
            self._wake.send(b"x")

    def run(self) -> None:
        """The thread: until it is closed, or breaks."""
        selector = selectors.DefaultSelector()
        selector.register(self._awake, selectors.EVENT_READ)
        selector.register(self._sock, selectors.EVENT_READ)
        try:
            while not self._closing:
                self._fill()
                wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._outbox else 0)
                selector.modify(self._sock, wanted)
                for key, events in selector.select(_TURN_S):
                    if key.fileobj is self._awake:
                        self._awake.recv(4096)
                        continue
                    if events & selectors.EVENT_READ:
                        self._receive()
                    if events & selectors.EVENT_WRITE:
                        self._send()
            self._leave()
            self._end(TransportError("the connection to the aggregator was closed"))
        except TransportError as error:
            self._end(error)
        except (OSError, ProtocolError) as error:
            self._end(TransportError(f"the link to the aggregator at {self._target} broke: {error}"))
        finally:
            selector.close()
            for sock in (self._sock, self._wake, self._awake):
                sock.close()

    def _fill(self) -> None:
        """Put as many chunks into the outbox as there are free slots, of all lanes in turn."""
        with self._lock:
            moved = True
            while moved:
                moved = False
                for number, lane in enumerate(self._lanes):
                    if lane.waiting and len(lane.out) < lane.slots:
                        self._put(number, lane)
                        moved = True

    def _put(self, number: int, lane: _Lane) -> None:
        job = lane.waiting[0]
        count = min(self._slot_elements, job.numel - job.sent)
        slot = lane.next_chunk % lane.slots
        header = Header(Kind.CONTRIBUTE, job.op, job.width, number, slot, count, lane.next_chunk)
        chunk = job.data[job.sent * job.width : (job.sent + count) * job.width]
        self._outbox += (memoryview(header.pack()), chunk)
        lane.out.append((header, chunk, job))
        lane.next_chunk += 1
        job.sent += count
        if job.sent == job.numel:
            lane.waiting.popleft()

    def _send(self) -> None:
        first = [self._outbox[i] for i in range(min(len(self._outbox), _BUFFERS_A_CALL))]
        try:
            sent = self._sock.sendmsg(first)
        except (BlockingIOError, InterruptedError):
            return
        while sent:
            head = self._outbox[0]
            if sent < len(head):
                self._outbox[0] = head[sent:]
                return
            sent -= len(head)
            self._outbox.popleft()

    def _receive(self) -> None:
        while True:
            target = self._into if self._into is not None else memoryview(self._header)
            if self._have < len(target):
                try:
                    count = self._sock.recv_into(target[self._have :])
                except (BlockingIOError, InterruptedError):
                    return
                if not count:
                    raise TransportError(f"the aggregator at {self._target} is gone: restart from the last checkpoint")
                self._have += count
                self._heard_s = time.monotonic()
                if self._have < len(target):
                    continue
            self._have = 0
            if self._into is None:
                self._begin_payload()
            elif self._text is not None:
                raise TransportError(f"the aggregator at {self._target} says: {self._text.decode(errors='replace')}")
            else:
                self._end_payload()

    def _begin_payload(self) -> None:
        header = Header.unpack(self._header, self._slot_elements)
        if header.kind == Kind.ERROR:
            self._text = bytearray(header.elements)
            self._into = memoryview(self._text)
            return
        if header.kind != Kind.RESULT or header.lane >= len(self._lanes) or not self._lanes[header.lane].out:
            raise ProtocolError(f"it sent a frame of kind {header.kind.name} that nobody waits for")
        asked, chunk, _ = self._lanes[header.lane].out[0]
        if header != asked._replace(kind=Kind.RESULT):
            raise ProtocolError(f"it sent chunk {header.chunk} when {asked.chunk} was due")
        # All of this chunk was sent, or there would be no sum of it: its place is free.
        self._into = chunk

    def _end_payload(self) -> None:
        self._into = None
        header = Header.unpack(self._header, self._slot_elements)
        _, _, job = self._lanes[header.lane].out.popleft()
        job.received += header.elements
        if job.received == job.numel:
            job.done.set()
        self._fill()

    def _leave(self) -> None:
        if not self._outbox:
            with contextlib.suppress(OSError):
                self._sock.settimeout(1.0)
                self._sock.sendall(Header(Kind.LEAVE).pack())

    def _end(self, error: TransportError) -> None:
        with self._lock:
            self._error = error
            jobs = {id(job): job for lane in self._lanes for job in (*lane.waiting, *(job for _, _, job in lane.out))}
        for job in jobs.values():
            job.error = error
            job.done.set()


def parse_address(text: str) -> tuple[str, int, int]:
    """Host, port and slots (0: all) of ``"host:port"``, ``"[::1]:port"`` or ``"host:port?slots=16"``.

    Raises:
        ValueError: it is none of these.
    """
    target, asks, query = text.partition("?")
    host, _, port = target.rpartition(":")
    name, _, slots = query.partition("=")
    good = bool(host) and port.isdecimal() and 0 < int(port) < 1 << 16
    if not good or (asks and (name != "slots" or not slots.isdecimal() or not int(slots))):
        raise ValueError(f"an aggregator's address is host:port or host:port?slots=16, not {text!r}")
    return host.strip("[]"), int(port), int(slots or 0)


def _welcome(sock: socket.socket) -> Header:
    """The first frame from the aggregator, which comes when all ranks are there."""
    data = _exactly(sock, HEADER.size)
    header = Header.unpack(data, 0)
    if header.kind == Kind.ERROR:
        text = _exactly(sock, header.elements).decode(errors="replace")
        raise TransportError(f"the aggregator says: {text}")
    if header.kind != Kind.WELCOME or not header.elements or not header.chunk:
        raise ProtocolError(f"it answered with a frame of kind {header.kind.name}")
    return header


def _exactly(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = sock.recv(size - len(data))
        if not more:
            raise ProtocolError("it closed the connection")
        data += more
    return data


def session_number() -> int:
    """A number for a session that nobody else has, for rank 0 to share."""
    return secrets.randbits(62)
