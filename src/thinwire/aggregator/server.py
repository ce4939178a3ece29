"""The aggregator's sockets: one thread that reads frames, hands integers to their session and answers all workers."""

from __future__ import annotations

import contextlib
import selectors
import socket
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from thinwire.aggregator.session import Session, SessionError, Slot
from thinwire.collectives.aggregation import (
    GREETING,
    HEADER,
    MAX_SLOT_ELEMENTS,
    MAX_SLOTS,
    Greeting,
    Header,
    Kind,
    ProtocolError,
    error_frame,
)

_TURN_S = 0.1
_GREETING_TIMEOUT_S = 10.0
_CLOSING_TIMEOUT_S = 5.0
_LEAST_INBOX_BYTES = 1 << 20
_MOST_BUFFERS = 64


@dataclass
class Counters:
    """What an aggregator did since it was started."""

    sessions: int = 0
    """Sessions whose workers were all there."""
    failed_sessions: int = 0
    refused: int = 0
    """Connections that were dropped because they broke the protocol."""
    chunks: int = 0
    received_bytes: int = 0
    sent_bytes: int = 0


class _Worker:
    """One connection."""

    def __init__(self, sock: socket.socket, name: str, inbox_bytes: int, now_s: float) -> None:
        self.sock = sock
        self.name = name
        self.since_s = now_s
        self.greeting: Greeting | None = None
        self.session: Session | None = None
        self.inbox = bytearray(inbox_bytes)
        self.start = self.end = 0
        self.outbox: deque[memoryview] = deque()
        self.closing_s: float | None = None
        """When it is closed at the latest: what it is still to be told is sent first."""

    @property
    def told(self) -> str:
        return f"{self.name} (rank {self.greeting.rank})" if self.greeting else self.name


class Aggregator:
    """Adds up what the workers of a training send, in a bounded pool of slots. Never sees a float.

    ``with Aggregator(...) as aggregator: aggregator.serve()`` serves one training after another, or several at once if
    they ask for no more slots than there are, until `stop` is called, by another thread or a signal handler.

    Args:
        host: where to listen; 0.0.0.0 for all interfaces. Whoever can connect can take part: trusted networks only.
        port: 0 takes a free one; ``address`` tells.
        slots: chunks that may be under way at once; memory is 8 bytes for each of their elements.
        slot_elements: integers in a chunk, at most.
        join_timeout_s: how long a session's first worker waits for the last one.
        tell: is told what happens, in lines of text.

    Raises:
        ValueError: a size is out of its range.
        OSError: the address is taken, or not of this machine.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        slots: int = 128,
        slot_elements: int = 1 << 15,
        join_timeout_s: float = 60.0,
        tell: Callable[[str], object] = lambda line: None,
    ) -> None:
        if not 1 <= slots <= MAX_SLOTS:
            raise ValueError(f"slots must be between 1 and {MAX_SLOTS}, not {slots}")
        if not 1 <= slot_elements <= MAX_SLOT_ELEMENTS:
            raise ValueError(f"slot elements must be between 1 and {MAX_SLOT_ELEMENTS}, not {slot_elements}")
        self.counters = Counters()
        self.num_slots = slots
        self._slot_elements = slot_elements
        self._join_timeout_s = join_timeout_s
        self._tell = tell
        self._free = Slot.pool(slots, slot_elements)
        self._sessions: dict[int, Session] = {}
        self._workers: dict[socket.socket, _Worker] = {}
        self._selector = selectors.DefaultSelector()
        self._listener = socket.create_server((host, port), family=_family(host), backlog=256)
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._wake, self._awake = socket.socketpair()
        self._awake.setblocking(False)
        self._selector.register(self._awake, selectors.EVENT_READ)
        self._stopped = False

    @property
    def address(self) -> str:
        """``host:port`` for `thinwire.compress(aggregator=...)`."""
        host, port = self._listener.getsockname()[:2]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    @property
    def num_workers(self) -> int:
        """Workers that are here now."""
        return sum(len(session.joined - session.left) for session in list(self._sessions.values()))

    @property
    def slots_in_use(self) -> int:
        """Slots that hold a chunk now."""
        return sum(session.slots_in_use for session in list(self._sessions.values()))

    def __enter__(self) -> Aggregator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def stop(self) -> None:
        """End `serve`, from another thread or a signal handler."""
        self._stopped = True
        with contextlib.suppress(OSError):
            self._wake.send(b"x")

    def serve(self) -> None:
        """Serve until `stop` is called; the workers that are here are told."""
        while not self._stopped:
            for key, events in self._selector.select(_TURN_S):
                sock = key.fileobj
                if sock is self._listener:
                    self._accept()
                elif sock is self._awake:
                    self._awake.recv(4096)
                elif (worker := self._workers.get(sock)) is not None:  # type: ignore[arg-type]
                    self._attend(worker, events)
            self._look_around(time.monotonic())
        for session in list(self._sessions.values()):
            self._fail(session, "the aggregator was stopped")

    def close(self) -> None:
        """Give everything back."""
        for worker in list(self._workers.values()):
            self._drop(worker)
        for sock in (self._listener, self._wake, self._awake):
            sock.close()
        self._selector.close()

    # ---- Sockets ----------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        try:
            sock, peer = self._listener.accept()
        except OSError:
            return
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        inbox_bytes = max(_LEAST_INBOX_BYTES, 2 * (HEADER.size + 4 * self._slot_elements))
        self._workers[sock] = _Worker(sock, f"{peer[0]}:{peer[1]}", inbox_bytes, time.monotonic())
        self._selector.register(sock, selectors.EVENT_READ)

    def _attend(self, worker: _Worker, events: int) -> None:
        try:
            if events & selectors.EVENT_WRITE:
                self._send(worker)
            if events & selectors.EVENT_READ and worker.sock in self._workers:
                self._receive(worker)
        except ProtocolError as error:
            self._refuse(worker, str(error))
        except SessionError as error:
            assert worker.session is not None
            self._fail(worker.session, str(error))
        except OSError as error:
            self._gone(worker, f"is gone ({error.strerror or error})")

    def _receive(self, worker: _Worker) -> None:
        if worker.start == worker.end:
            worker.start = worker.end = 0
        elif worker.end == len(worker.inbox):
            worker.inbox[: worker.end - worker.start] = worker.inbox[worker.start : worker.end]
            worker.start, worker.end = 0, worker.end - worker.start
        with memoryview(worker.inbox) as view:
            try:
                count = worker.sock.recv_into(view[worker.end :])
            except (BlockingIOError, InterruptedError):
                return
            if not count:
                self._gone(worker, "is gone")
                return
            if worker.closing_s is not None:
                return
            self.counters.received_bytes += count
            worker.end += count
            while worker.closing_s is None and (used := self._take(worker, view[worker.start : worker.end])):
                worker.start += used

    def _take(self, worker: _Worker, data: memoryview) -> int:
        """Take the first frame of what came in; how many bytes it had, or 0 if it is not all there."""
        if worker.session is None:
            if len(data) < GREETING.size:
                return 0
            self._greet(worker, Greeting.unpack(data[: GREETING.size]))
            return GREETING.size
        if len(data) < HEADER.size:
            return 0
        header = Header.unpack(data[: HEADER.size], self._slot_elements)
        size = HEADER.size + header.payload_bytes
        if len(data) < size:
            return 0
        assert worker.greeting is not None
        if header.kind == Kind.LEAVE:
            self._gone(worker, "has left")
            return 0
        frame = worker.session.add(worker.greeting.rank, header, data[HEADER.size : size], time.monotonic())
        if frame is not None:
            self.counters.chunks += 1
            self._answer(worker.session, frame)
        return size

    def _answer(self, session: Session, frame: bytes) -> None:
        for worker in list(self._workers.values()):
            if worker.session is session and worker.closing_s is None:
                worker.outbox.append(memoryview(frame))
                try:
                    self._send(worker)
                except OSError as error:
                    self._gone(worker, f"is gone ({error.strerror or error})")

    def _send(self, worker: _Worker) -> None:
        while worker.outbox:
            try:
                sent = worker.sock.sendmsg(list(_first(worker.outbox)))
            except (BlockingIOError, InterruptedError):
                break
            self.counters.sent_bytes += sent
            while sent:
                first = worker.outbox[0]
                if sent < len(first):
                    worker.outbox[0] = first[sent:]
                    break
                sent -= len(first)
                worker.outbox.popleft()
        if not worker.outbox and worker.closing_s is not None:
            self._drop(worker)
            return
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if worker.outbox else 0)
        if self._selector.get_key(worker.sock).events != wanted:
            self._selector.modify(worker.sock, wanted)

    def _drop(self, worker: _Worker) -> None:
        if self._workers.pop(worker.sock, None) is not None:
            self._selector.unregister(worker.sock)
            worker.sock.close()

    # ---- Sessions ---------------------------------------------------------------------------------------------------

    def _greet(self, worker: _Worker, greeting: Greeting) -> None:
        session = self._sessions.get(greeting.session)
        if session is None:
            wanted = greeting.slots or self.num_slots
            wanted -= wanted % greeting.lanes
            if not greeting.lanes <= wanted <= len(self._free):
                raise ProtocolError(
                    f"it wants {wanted or greeting.lanes} slots, and {len(self._free)} of {self.num_slots} are free: "
                    "ask for fewer (aggregator='host:port?slots=16'), or start an aggregator with more --slots"
                )
            taken, self._free = self._free[:wanted], self._free[wanted:]
            session = self._sessions[greeting.session] = Session(greeting, taken, self._slot_elements, time.monotonic())
        worker.greeting = greeting
        session_error = None
        try:
            session.join(greeting)
        except SessionError as error:
            session_error = error
        worker.session = session
        if session_error is not None:
            raise session_error
        if session.complete:
            self.counters.sessions += 1
            self._tell(f"{greeting.world_size} workers, {len(session.slots)} slots")
            welcome = Header(Kind.WELCOME, elements=self._slot_elements, chunk=session.slots_per_lane)
            self._answer(session, welcome.pack())

    def _gone(self, worker: _Worker, how: str) -> None:
        """Let a worker go that left or broke off."""
        session, greeting = worker.session, worker.greeting
        self._drop(worker)
        if session is None or greeting is None or worker.closing_s is not None:
            return
        try:
            session.leave(greeting.rank, how)
        except SessionError as error:
            self._fail(session, str(error))
            return
        if session.left >= session.joined:
            self._tell("all workers have left")
            self._end(session)

    def _refuse(self, worker: _Worker, why: str) -> None:
        """Drop a worker that broke the protocol, and tell it; with it ends its session."""
        self.counters.refused += 1
        self._tell(f"dropped {worker.told}: {why}")
        session = worker.session
        self._close_with(worker, f"the aggregator dropped this worker: {why}")
        if session is not None and worker.greeting is not None:
            self._fail(session, f"rank {worker.greeting.rank} was dropped: {why}")

    def _fail(self, session: Session, why: str) -> None:
        """End a session: all its workers are told why."""
        if self._sessions.get(session.greeting.session) is not session:
            return
        self.counters.failed_sessions += 1
        self._tell(f"session ended: {why}")
        self._end(session)
        for worker in list(self._workers.values()):
            if worker.session is session and worker.closing_s is None:
                self._close_with(worker, why)

    def _end(self, session: Session) -> None:
        if self._sessions.pop(session.greeting.session, None) is not None:
            for slot in session.slots:
                slot.free()
            self._free += session.slots

    def _close_with(self, worker: _Worker, text: str) -> None:
        """Send a worker what is due and this text, and then close."""
        worker.closing_s = time.monotonic() + _CLOSING_TIMEOUT_S
        worker.outbox.append(memoryview(error_frame(text)))
        with contextlib.suppress(OSError):
            self._send(worker)
            return
        self._drop(worker)

    def _look_around(self, now_s: float) -> None:
        for session in list(self._sessions.values()):
            try:
                session.check(now_s, self._join_timeout_s)
            except SessionError as error:
                self._fail(session, str(error))
        for worker in list(self._workers.values()):
            if worker.closing_s is not None and now_s > worker.closing_s:
                self._drop(worker)
            elif worker.session is None and worker.closing_s is None and now_s - worker.since_s > _GREETING_TIMEOUT_S:
                self._refuse(worker, "it said nothing")


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _first(outbox: deque[memoryview]) -> list[memoryview]:
    return [outbox[i] for i in range(min(len(outbox), _MOST_BUFFERS))]
