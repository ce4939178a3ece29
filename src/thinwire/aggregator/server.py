"""The aggregator: connections hand integers to the session of their training, whose workers all get the sums."""

from __future__ import annotations

import asyncio
import hmac
import secrets
import socket
import ssl
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np
import torch

from thinwire.aggregator.protocol import (
    GREETING,
    HEADER,
    MAX_LIMIT,
    MAX_SLOT_ELEMENTS,
    MAX_SLOTS,
    NONCE_BYTES,
    PROOF_BYTES,
    Greeting,
    Header,
    Kind,
    Op,
    ProtocolError,
    check_magic,
    error_frame,
    hello,
    packed,
    proof,
    unpacked,
)
from thinwire.arguments import check_int, check_number
from thinwire.kernels.format import GROUP

_RANGES = {1: np.iinfo(np.int8), 4: np.iinfo(np.int32)}
_DTYPES = {1: np.dtype("<i1"), 4: np.dtype("<i4")}
_CHECK_S = 0.1
GREETING_TIMEOUT_S = 10.0
_CLOSING_TIMEOUT_S = 5.0
_LEAST_INBOX_BYTES = 1 << 20
MAX_STRANGERS = 256
"""Number of connections that may be open without being part of a session: beyond that the oldest is dropped."""


@dataclass(frozen=True)
class Limits:
    """Limits of an aggregator's work and waits.

    Args:
        slots: chunks that may be under way at once; memory is 8 bytes for each of their elements, taken when used.
        slot_elements: integers in a chunk, at most.
        shares: a training that asks for no number of slots gets the total divided by this.
        join_timeout_s: how long a session's first worker waits for the last one.
        idle_timeout_s: how long a session may send nothing until it is ended and its slots are free for others.

    Raises:
        ValueError: a number is out of its range.
    """

    slots: int = 128
    slot_elements: int = 1 << 15
    shares: int = 4
    join_timeout_s: float = 60.0
    idle_timeout_s: float = 3600.0

    def __post_init__(self) -> None:
        check_int("slots", self.slots, 1, MAX_SLOTS)
        check_int("slot_elements", self.slot_elements, 1, MAX_SLOT_ELEMENTS)
        check_int("shares", self.shares, 1)
        check_number("join_timeout_s", self.join_timeout_s, above=0)
        check_number("idle_timeout_s", self.idle_timeout_s, above=0)


@dataclass
class Counters:
    """Counters of an aggregator since it was started."""

    sessions: int = 0
    """Number of sessions whose workers were all there."""
    failed_sessions: int = 0
    refused: int = 0
    """Number of connections that were dropped because they broke the protocol."""
    chunks: int = 0
    received_bytes: int = 0
    sent_bytes: int = 0


class SessionError(Exception):
    """A session has failed. The message names the reason and is sent to all workers."""

    def __init__(self, message: str, *, by_worker: bool = True) -> None:
        super().__init__(message)
        self.by_worker = by_worker
        """Whether some of the workers, which the message names, are the cause."""


@dataclass
class Slot:
    """One accumulator and its chunk."""

    wide: np.ndarray
    """Accumulator as int64 ``[elements]``, in which int32 values are added so that an overflow is detected."""
    narrow: np.ndarray
    """Accumulator as int32 ``[elements]`` in the same memory, in which int8 values are added."""
    header: Header | None = None
    """Header of the first contribution to the present chunk, or None."""
    ranks: set[int] = field(default_factory=set)
    since_s: float = 0.0

    @staticmethod
    def pool(count: int, elements: int) -> list[Slot]:
        memory = np.zeros((count, elements), dtype=np.int64)
        narrow = memory.view(np.int32)[:, :elements]
        return [Slot(memory[i], narrow[i]) for i in range(count)]

    def free(self) -> None:
        """Make the slot available for another chunk."""
        self.header = None
        self.ranks.clear()


class Session:
    """The workers of one training, independent of sockets. Times are seconds of one monotonic clock."""

    def __init__(self, greeting: Greeting, slots: list[Slot], slot_elements: int, now_s: float) -> None:
        self.greeting = greeting
        self.slots = slots
        self.slot_elements = slot_elements
        self.slots_per_lane = len(slots) // greeting.lanes
        self.joined: set[int] = set()
        self.left: set[int] = set()
        self.since_s = now_s
        self.heard_s = now_s
        """Last time at which a worker joined or sent integers."""
        self._next = [list(range(self.slots_per_lane)) for _ in range(greeting.lanes)]
        """Chunk that each slot of each lane serves next."""

    @property
    def complete(self) -> bool:
        return len(self.joined) == self.greeting.world_size

    def join(self, greeting: Greeting, now_s: float) -> None:
        """Add a worker.

        Raises:
            SessionError: its greeting differs from that of the first worker.
        """
        for name, mine in self.greeting._asdict().items():
            its = getattr(greeting, name)
            if name != "rank" and its != mine:
                raise SessionError(
                    f"ranks disagree: {name} is {its} for rank {greeting.rank} and {mine} for rank {self.greeting.rank}"
                )
        self.joined.add(greeting.rank)
        self.heard_s = now_s

    def leave(self, rank: int, how: str) -> None:
        """Remove a worker.

        Raises:
            SessionError: other workers wait for its integers, or not all have joined.
        """
        self.left.add(rank)
        for slot in self.slots:
            if slot.header is not None and rank not in slot.ranks:
                raise SessionError(f"rank {rank} {how}, and others wait for its integers")
        if not self.complete:
            raise SessionError(f"rank {rank} {how} before all were there")

    def add(self, rank: int, header: Header, payload: memoryview, now_s: float) -> bytes | None:
        """Add a worker's integers to a chunk. Once all have contributed, return the result frame for all workers.

        Raises:
            ProtocolError: the frame violates the protocol.
            SessionError: workers disagree about the chunk, or a sum overflowed.
        """
        if header.kind != Kind.CONTRIBUTE or not self.complete:
            raise ProtocolError(f"it sent a frame of kind {header.kind.name} when integers were due")
        if header.lane >= self.greeting.lanes or header.slot >= self.slots_per_lane or not header.elements:
            raise ProtocolError(f"it sent {header.elements} integers to slot {header.slot} of lane {header.lane}")
        expected = self._next[header.lane][header.slot]
        if header.chunk != expected:
            raise ProtocolError(f"it sent chunk {header.chunk} to slot {header.slot}, which serves chunk {expected}")
        if self.left:
            raise SessionError(f"rank {min(self.left)} has left, and rank {rank} sent integers to be added to its own")
        slot = self.slots[header.lane * self.slots_per_lane + header.slot]
        if rank in slot.ranks:
            raise ProtocolError(f"it sent chunk {header.chunk} twice")
        values = self._values(header, payload)
        held = (slot.narrow if header.width == 1 else slot.wide)[: header.elements]
        if slot.header is None:
            slot.header, slot.since_s = header, now_s
            np.copyto(held, values)
        elif slot.header != header:
            raise SessionError(
                f"ranks disagree on chunk {header.chunk} of lane {header.lane}: rank {rank} sends {_describe(header)}, "
                f"rank {min(slot.ranks)} {_describe(slot.header)}"
            )
        elif header.op == Op.MAX:
            np.maximum(held, values, out=held)
        else:
            np.add(held, values, out=held)
        slot.ranks.add(rank)
        self.heard_s = now_s
        if len(slot.ranks) < self.greeting.world_size:
            return None
        slot.free()
        self._next[header.lane][header.slot] += self.slots_per_lane
        return self._result(header, held)

    def _values(self, header: Header, payload: memoryview) -> np.ndarray:
        if not header.limit:
            return np.frombuffer(payload, dtype=_DTYPES[header.width])
        if header.limit * self.greeting.world_size > MAX_LIMIT:
            raise SessionError(
                f"sums of integers up to {header.limit} from {self.greeting.world_size} ranks do not fit into 8 bits"
            )
        return unpacked(payload, header.elements, header.limit).numpy()

    def _result(self, header: Header, held: np.ndarray) -> bytes:
        if header.limit:
            limit = header.limit * self.greeting.world_size
            sums = torch.from_numpy(held.astype(np.int8))
            return header._replace(kind=Kind.RESULT, limit=limit).pack() + packed(sums, limit)
        limits = _RANGES[header.width]
        if header.op == Op.SUM and (held.min() < limits.min or held.max() > limits.max):
            raise SessionError(
                f"a sum in chunk {header.chunk} of lane {header.lane} does not fit into int{8 * header.width}: send "
                "smaller integers, or wider ones",
                by_worker=False,
            )
        result = Header(Kind.RESULT, header.op, header.width, header.lane, header.slot, header.elements, header.chunk)
        return result.pack() + held.astype(_DTYPES[header.width]).tobytes()

    def check(self, now_s: float, join_timeout_s: float, idle_timeout_s: float) -> None:
        """Check the timeouts: for joining, for missing contributions, and for an idle session.

        Raises:
            SessionError: one has passed; the message names the missing ranks.
        """
        everybody, timeout_s = set(range(self.greeting.world_size)), self.greeting.timeout_ms / 1000
        if not self.complete:
            join_timeout_s = min(join_timeout_s, timeout_s)
            if now_s - self.since_s > join_timeout_s:
                raise SessionError(f"{_ranks(everybody - self.joined)} did not join within {join_timeout_s:g} s")
            return
        late = [slot for slot in self.slots if slot.header is not None and now_s - slot.since_s > timeout_s]
        if late:
            missing = set().union(*(everybody - slot.ranks for slot in late))
            raise SessionError(f"nothing came from {_ranks(missing)} within {timeout_s:g} s, and others wait for it")
        if now_s - self.heard_s > idle_timeout_s:
            raise SessionError(
                f"no worker sent anything within {idle_timeout_s:g} s: start the aggregator with a longer "
                "--idle-timeout if a training pauses for as long",
                by_worker=False,
            )

    @property
    def slots_in_use(self) -> int:
        """Number of slots that have a chunk."""
        return sum(slot.header is not None for slot in self.slots)


def _describe(header: Header) -> str:
    up_to = f" up to {header.limit}" if header.limit else ""
    return f"{header.elements} of int{8 * header.width}{up_to} to {header.op.name}"


def _ranks(ranks: set[int]) -> str:
    first = sorted(ranks)[:16]
    more = f" and {len(ranks) - len(first)} more" if len(ranks) > len(first) else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, first))}{more}"


class _Worker(asyncio.BufferedProtocol):
    """One connection: puts frames together from received bytes, and hands them to the aggregator."""

    transport: asyncio.Transport
    deadline: asyncio.TimerHandle
    """Timer that ends the connection if no greeting is received, or if the last frame is not read."""

    def __init__(self, aggregator: Aggregator) -> None:
        self._aggregator = aggregator
        self.nonce = secrets.token_bytes(NONCE_BYTES)
        self._inbox = bytearray(GREETING.size + PROOF_BYTES)
        """Buffer, large enough for frames once the worker has greeted: a silent connection costs little."""
        self._start = self._end = 0
        self.rank = -1
        self.session: Session | None = None
        self.closing = False
        """Whether the last frame was written: no other follows, and further bytes of the worker are discarded."""

    def __str__(self) -> str:
        host, port = self.transport.get_extra_info("peername")[:2]
        return f"{host}:{port}" + (f" (rank {self.rank})" if self.session else "")

    def make_room(self, num_bytes: int) -> None:
        """Allocate a buffer for frames. Called only between frames."""
        self._inbox = bytearray(num_bytes)
        self._start = self._end = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        transport.write(hello(self.nonce))
        self._aggregator.connected(self)

    def get_buffer(self, sizehint: int) -> memoryview:
        if self.closing or self._start == self._end:
            self._start = self._end = 0
        elif self._end == len(self._inbox):
            self._inbox[: self._end - self._start] = self._inbox[self._start : self._end]
            self._start, self._end = 0, self._end - self._start
        return memoryview(self._inbox)[self._end :]

    def buffer_updated(self, nbytes: int) -> None:
        if self.closing:
            return
        self._aggregator.counters.received_bytes += nbytes
        self._end += nbytes
        inbox = self._inbox
        with memoryview(inbox) as view:
            while not self.closing and (used := self._aggregator.take(self, view[self._start : self._end])):
                if self._inbox is not inbox:
                    return
                self._start += used

    def eof_received(self) -> None:
        self._aggregator.gone(self, "is gone")

    def connection_lost(self, exc: Exception | None) -> None:
        self._aggregator.gone(self, "is gone" if exc is None else f"is gone ({exc})")


class Aggregator:
    """Adds up the integers that workers of a training send, in a bounded pool of slots. Never sees a float.

    ``with Aggregator(...) as aggregator: aggregator.serve()`` serves several trainings at once, as far as there are
    slots for them, until `stop` is called, by another thread or a signal handler.

    Args:
        host: address to listen on; 0.0.0.0 for all interfaces.
        port: 0 takes a free one, which is in ``address``.
        limits: limits of work and waits.
        token: what workers must know to take part. Without one, all can who can connect: trusted networks only.
        tls: with it, connections are encrypted: ``ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)`` with a
            certificate loaded. Without, those on the network can read the sums, and change them where they can change
            packets.
        log: called with a line of text for each event.

    Raises:
        ValueError: a number is out of its range.
        OSError: the address is taken, or not of this machine.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        limits: Limits | None = None,
        token: str = "",
        tls: ssl.SSLContext | None = None,
        log: Callable[[str], object] = lambda line: None,
    ) -> None:
        limits = limits or Limits()
        check_int("port", port, 0, (1 << 16) - 1)
        self.counters = Counters()
        self.limits = limits
        self.num_slots, self._slot_elements = limits.slots, limits.slot_elements
        self._token, self._tls = token, tls
        self._log = log
        self._free = Slot.pool(limits.slots, limits.slot_elements)
        self._sessions: dict[int, Session] = {}
        self._workers: set[_Worker] = set()
        self._strangers: dict[_Worker, None] = {}
        """Connections that are not part of a session, the oldest first."""
        self._listener = socket.create_server(
            (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=256
        )
        host, port = self._listener.getsockname()[:2]
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        """Address ``host:port`` for `thinwire.Network(aggregator=...)`."""
        self._stopped = False

    @property
    def num_workers(self) -> int:
        return sum(len(session.joined - session.left) for session in list(self._sessions.values()))

    @property
    def num_strangers(self) -> int:
        """Number of connections that have not greeted yet."""
        return len(self._strangers)

    @property
    def slots_in_use(self) -> int:
        """Number of slots that have a chunk."""
        return sum(session.slots_in_use for session in list(self._sessions.values()))

    def __enter__(self) -> Aggregator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def stop(self) -> None:
        """End `serve`, from another thread or a signal handler."""
        self._stopped = True

    def serve(self) -> None:
        """Serve until `stop` is called; connected workers then get an error."""
        asyncio.run(self._serve())

    def close(self) -> None:
        """Stop listening."""
        self._listener.close()

    async def _serve(self) -> None:
        loop = asyncio.get_running_loop()
        tls = {"ssl": self._tls, "ssl_handshake_timeout": GREETING_TIMEOUT_S} if self._tls else {}
        server = await loop.create_server(lambda: _Worker(self), sock=self._listener, **tls)
        while not self._stopped:
            await asyncio.sleep(_CHECK_S)
            self._check_sessions(time.monotonic())
        server.close()
        for session in list(self._sessions.values()):
            self._fail(session, "the aggregator was stopped", by_worker=False)
        await asyncio.sleep(0)
        for worker in list(self._workers):
            worker.transport.abort()

    # ---- Connections ------------------------------------------------------------------------------------------------

    def connected(self, worker: _Worker) -> None:
        """Add a connection. It is dropped unless a greeting follows."""
        self._workers.add(worker)
        self._strangers[worker] = None
        if len(self._strangers) > MAX_STRANGERS:
            self.counters.refused += 1
            self.gone(next(iter(self._strangers)), "is one of too many")
        loop = asyncio.get_running_loop()
        worker.deadline = loop.call_later(GREETING_TIMEOUT_S, self._refuse, worker, "it said nothing")

    def take(self, worker: _Worker, data: memoryview) -> int:
        """Take the first received frame; return its bytes, or 0 if it is not complete."""
        try:
            return self._take(worker, data)
        except ProtocolError as error:
            self._refuse(worker, str(error))
        except SessionError as error:
            assert worker.session is not None
            self._fail(worker.session, str(error), by_worker=error.by_worker)
        return 0

    def _take(self, worker: _Worker, data: memoryview) -> int:
        if worker.session is None:
            check_magic(data)
            size = GREETING.size + PROOF_BYTES
            if len(data) < size:
                return 0
            greeting = Greeting.unpack(data[: GREETING.size])
            expected = proof(self._token, worker.nonce, data[: GREETING.size])
            if not hmac.compare_digest(bytes(data[GREETING.size : size]), expected):
                raise ProtocolError("its token is not the aggregator's: both need the same one, or none")
            self._join(worker, greeting)
            worker.deadline.cancel()
            self._strangers.pop(worker)
            worker.make_room(max(_LEAST_INBOX_BYTES, 2 * (HEADER.size + 4 * self._slot_elements)))
            return size
        if len(data) < HEADER.size:
            return 0
        header = Header.unpack(data[: HEADER.size], self._slot_elements)
        size = HEADER.size + header.payload_bytes
        if len(data) < size:
            return 0
        if header.kind == Kind.LEAVE:
            self.gone(worker, "has left")
            return 0
        frame = worker.session.add(worker.rank, header, data[HEADER.size : size], time.monotonic())
        if frame is not None:
            self.counters.chunks += 1
            self._send(worker.session, frame)
        return size

    def _send(self, session: Session, frame: bytes) -> None:
        # A worker reads the sum of a chunk before it sends the next one to the same slot.
        most = (1 + len(session.slots)) * (HEADER.size + max(4 * self._slot_elements, self._slot_elements + GROUP))
        for worker in self._session_workers(session):
            if worker.transport.get_write_buffer_size() > most:
                self._refuse(worker, "it sends integers and reads no sums")
                return
            worker.transport.write(frame)
            self.counters.sent_bytes += len(frame)

    def _session_workers(self, session: Session) -> list[_Worker]:
        return [worker for worker in self._workers if worker.session is session and not worker.closing]

    def _close_with(self, worker: _Worker, text: str, *, by_worker: bool) -> None:
        """Write why a connection ends, as its last frame. The worker has some seconds to read it and to close."""
        worker.closing = True
        worker.transport.write(error_frame(text, by_worker=by_worker))
        if worker.transport.can_write_eof():
            # Closing a socket with unread data would reset the connection, and the last frame would be lost.
            with suppress(OSError):  # a worker that has closed answers the frame with a reset; its loss is seen next
                worker.transport.write_eof()
        else:
            worker.transport.close()  # TLS has an end of its own, which its peer confirms
        worker.deadline.cancel()
        worker.deadline = asyncio.get_running_loop().call_later(_CLOSING_TIMEOUT_S, worker.transport.abort)

    # ---- Sessions ---------------------------------------------------------------------------------------------------

    def _join(self, worker: _Worker, greeting: Greeting) -> None:
        """Put a worker into its session, which begins with its first worker and serves once all are there."""
        session = self._sessions.get(greeting.session)
        if session is None:
            session = self._sessions[greeting.session] = self._new_session(greeting)
        if greeting.rank in session.joined:
            raise ProtocolError(f"rank {greeting.rank} of this session is here already: every rank joins once")
        worker.rank, worker.session = greeting.rank, session
        session.join(greeting, time.monotonic())
        if session.complete:
            self.counters.sessions += 1
            self._log(f"{greeting.world_size} workers, {len(session.slots)} slots")
            self._send(session, Header(Kind.WELCOME, elements=self._slot_elements, chunk=session.slots_per_lane).pack())

    def _new_session(self, greeting: Greeting) -> Session:
        share = max(self.num_slots // self.limits.shares, greeting.lanes)
        wanted = greeting.slots or min(share, len(self._free))
        wanted -= wanted % greeting.lanes
        if not greeting.lanes <= wanted <= len(self._free):
            raise ProtocolError(
                f"it wants {wanted or greeting.lanes} slots, and {len(self._free)} of {self.num_slots} are free: "
                "ask for fewer (aggregator='host:port?slots=16'), or start an aggregator with more --slots"
            )
        slots, self._free = self._free[:wanted], self._free[wanted:]
        return Session(greeting, slots, self._slot_elements, time.monotonic())

    def gone(self, worker: _Worker, how: str) -> None:
        """Remove a worker that left or broke off."""
        session = worker.session
        self._workers.discard(worker)
        self._strangers.pop(worker, None)
        worker.deadline.cancel()
        worker.transport.abort()
        if session is None or worker.closing:
            return
        worker.closing = True
        try:
            session.leave(worker.rank, how)
        except SessionError as error:
            self._fail(session, str(error), by_worker=error.by_worker)
            return
        if session.left >= session.joined:
            self._log("all workers have left")
            self._end(session)

    def _refuse(self, worker: _Worker, why: str) -> None:
        """Drop a worker that broke the protocol, with its session, and tell it why."""
        self.counters.refused += 1
        self._log(f"dropped {worker}: {why}")
        self._close_with(worker, f"the aggregator dropped this worker: {why}", by_worker=False)
        if worker.session is not None:
            self._fail(worker.session, f"rank {worker.rank} was dropped: {why}", by_worker=True)

    def _fail(self, session: Session, why: str, *, by_worker: bool) -> None:
        """End a session with an error for all its workers, one of which may be the cause."""
        if self._sessions.get(session.greeting.session) is not session:
            return
        self.counters.failed_sessions += 1
        self._log(f"session ended: {why}")
        self._end(session)
        for worker in self._session_workers(session):
            self._close_with(worker, why, by_worker=by_worker)

    def _end(self, session: Session) -> None:
        if self._sessions.pop(session.greeting.session, None) is not None:
            for slot in session.slots:
                slot.free()
            self._free += session.slots

    def _check_sessions(self, now_s: float) -> None:
        for session in list(self._sessions.values()):
            try:
                session.check(now_s, self.limits.join_timeout_s, self.limits.idle_timeout_s)
            except SessionError as error:
                self._fail(session, str(error), by_worker=error.by_worker)
