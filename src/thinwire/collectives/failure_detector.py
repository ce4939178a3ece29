"""Which rank is to blame for a failure: heartbeats between ranks, and reports that outlive any of them.

A collective that fails says little about the cause. gloo reports a closed connection or a timeout, and names at most
the peer that it waited for, which may itself have waited for the rank that died. So every rank has a thread that
exchanges heartbeats and reports over TCP connections of its own, in a ring: a rank is connected to the next one and to
the one before, and passes on what is new to it. Where a rank dies, its neighbours see their connections close and
report it; where several die, every part of the ring that is left lies beside one of them. No rank is special: PyTorch's
store, which lives on rank 0, is needed only to exchange the addresses.

Nothing is unpickled. A connection begins with a secret that went through the store, and is closed at the first frame
that is not of the format below. A frame is at most 277 bytes, and what waits to be sent is bounded.
"""

from __future__ import annotations

import contextlib
import fcntl
import hmac
import itertools
import os
import secrets
import selectors
import socket
import struct
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

from thinwire import threads
from thinwire.collectives.errors import CommunicationError, PeerFailedError, TransportError

_T = TypeVar("_T")
_SECRET_BYTES = 16
_HOST_BYTES = 64
_RECORD = struct.Struct(f"<?16sH{_SECRET_BYTES}s{_HOST_BYTES}s")
"""What a rank puts into the store: whether it is ready, IP address, port, secret, host. An error's text follows."""
_HELLO = struct.Struct(f"<4sI{_SECRET_BYTES}s")
"""The first bytes of a connection: format, rank of the sender, secret of the receiver."""
_MAGIC = b"twf1"
_FRAME = struct.Struct("<BBIIIQ")
"""Kind, bytes of the reason that follows, sender, the rank that it is about, sequence number, progress."""
_BEAT, _ENDED, _FAILED, _LEFT, _ERROR, _CALLING = range(6)

_BEAT_S = 0.5
_RANKS_A_BEAT = 64
"""Above so many ranks heartbeats are rarer, so that their number a second stays the same."""
_SILENT_BEATS = 6
_GRACE_S = 2.5
"""How long a failure waits for evidence of its cause."""
_REPORT_S = 1.0
"""The same for a failure that another rank has announced."""
_UNDER_WAY = 2
"""Collectives that may be under way at a time."""
_STRANGER_S = 10.0
_LEAVE_S = 3.0
"""How long rank 0, which has the store, stays for ranks that have yet to read which one failed."""
_MAX_WAITING_BYTES = 1 << 16
_MAX_REPORTS = 8
"""Of each rank."""
_MAX_STRANGERS = 8


@dataclass(frozen=True)
class _Member:
    """A rank, as the others reach it."""

    address: tuple[str, int]
    secret: bytes
    host: str


class Cause(NamedTuple):
    """Why a collective failed."""

    rank: int
    """In the default process group."""
    host: str
    reason: str


@dataclass(frozen=True)
class _Report:
    kind: int
    sender: int
    about: int
    sequence: int
    progress: int
    reason: str
    at: float


@dataclass
class _Link:
    """A connection to another rank, or to a stranger until the secret has come."""

    socket: socket.socket
    peer: int | None
    until: float = float("inf")
    """When a stranger has to have sent the secret."""
    received: bytearray = field(default_factory=bytearray)
    waiting: bytearray = field(default_factory=bytearray)


def announce_error(store: Any, key: str, rank: int, error: Exception) -> None:
    """Let the ranks that call, or will call, `connect` raise at once: this one will not come."""
    packed = _RECORD.pack(False, b"", 0, b"", socket.gethostname().encode()[:_HOST_BYTES])
    with contextlib.suppress(RuntimeError):
        store.set(f"{key}/{rank}", packed + f"{type(error).__name__}: {error}".encode()[:1024])


def _within(timeout: timedelta, call: Callable[[], _T]) -> _T:
    """What ``call`` returns or raises. PyTorch's store has calls that wait without end for a process that is stopped.

    Raises:
        TransportError: It takes longer than ``timeout`` and a second.
    """
    done: Future[_T] = Future()

    def run() -> None:
        try:
            done.set_result(call())
        except BaseException as error:  # noqa: BLE001 - raised in the caller
            done.set_exception(error)

    threads.start(run, name="thinwire meeting", end=lambda: None, within_s=0.0)
    try:
        return done.result(timeout.total_seconds() + 1.0)
    except FutureTimeoutError:
        reason = "PyTorch's store, which lives there, does not answer"
        raise TransportError(f"rank 0: {reason}: that process is stopped or cut off", rank=0, reason=reason) from None


def _meet(store: Any, key: str, ranks: Sequence[int], rank: int, packed: bytes, timeout: timedelta) -> list[_Member]:
    deadline = time.monotonic() + timeout.total_seconds()
    members: list[_Member] = []
    try:
        store.set(f"{key}/{rank}", packed)
        for other, number in enumerate(ranks):
            left = max(0.01, deadline - time.monotonic())
            try:
                store.wait([f"{key}/{other}"], timedelta(seconds=left))
            except RuntimeError:  # its time is over, or the store is gone, which the next line meets, too
                missing = [n for o, n in enumerate(ranks) if o >= other and not store.check([f"{key}/{o}"])]
                if not missing:
                    continue
                raise TransportError(
                    f"rank {', '.join(map(str, missing))} did not come within {timeout.total_seconds():g} s: every "
                    "rank must make this call, in the same order; that rank's own log may say why it did not",
                    rank=missing[0],
                    reason="it has not made the call in which all ranks meet",
                ) from None
            members.append(_member(store.get(f"{key}/{other}"), number))
    except CommunicationError:
        raise
    except RuntimeError as error:
        raise TransportError(
            f"PyTorch's store, which lives on rank 0, does not answer: {error}",
            rank=0,
            reason="PyTorch's store, which lives there, does not answer",
        ) from error
    return members


def _leave(store: Any, key: str, ranks: Sequence[int], rank: int, failed: int | None) -> None:
    """Let the others read which rank failed before rank 0 ends, and the store with it: they would blame rank 0."""
    with contextlib.suppress(RuntimeError):
        store.set(f"{key}/{rank}/left", b"")
        if ranks[rank] == 0:
            others = [f"{key}/{other}/left" for other, number in enumerate(ranks) if number != failed]
            store.wait(others, timedelta(seconds=_LEAVE_S))


def _member(packed: bytes, number: int) -> _Member:
    if len(packed) < _RECORD.size:
        raise TransportError(f"rank {number} put {len(packed)} bytes into the store, which cannot be", rank=number)
    ready, ip, port, secret, host = _RECORD.unpack_from(packed)
    name = _text(host)
    if not ready:
        reason = _text(packed[_RECORD.size :][:1024])
        raise PeerFailedError(f"rank {number} on {name} failed: {reason}", rank=number, host=name, reason=reason)
    return _Member((socket.inet_ntoa(ip[:4]), port), secret, name)


def _text(raw: bytes) -> str:
    text = raw.rstrip(b"\0").decode(errors="replace")
    return "".join(c if c.isprintable() else " " for c in text)


def _listen() -> socket.socket:
    for ip in _own_addresses():
        with contextlib.suppress(OSError):
            listener = socket.create_server((ip, 0))
            listener.setblocking(False)
            return listener
    raise TransportError("no address of this machine can be listened on, not even 127.0.0.1")


def _own_addresses() -> Iterator[str]:
    """IPv4 addresses at which other ranks may reach this one, the best first."""
    with contextlib.suppress(OSError, KeyError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        # SIOCGIFADDR: the address of the interface that gloo uses, too.
        name = os.environ["GLOO_SOCKET_IFNAME"].split(",")[0].encode()[:15]
        yield socket.inet_ntoa(fcntl.ioctl(probe.fileno(), 0x8915, struct.pack("256s", name))[20:24])
    with contextlib.suppress(OSError, KeyError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        # Connecting a datagram socket sends nothing, and gives it the address from which rank 0's machine is reached.
        probe.connect((os.environ["MASTER_ADDR"], 9))
        yield probe.getsockname()[0]
    with contextlib.suppress(OSError):
        yield socket.gethostbyname(socket.gethostname())
    yield "127.0.0.1"


class FailureDetector:
    """Knows which rank has ended, has fallen silent or has come no further, and why; see the module.

    It asks nothing of the training: `explain` is called when something has failed.
    """

    @staticmethod
    def connect(store: Any, key: str, ranks: Sequence[int], rank: int, timeout: timedelta) -> FailureDetector:
        """Connect ``ranks`` of the default process group. All of them must call this.

        Args:
            store: A ``torch.distributed.Store`` that all of them reach.
            key: A prefix in the store that nothing else uses.
            ranks: Numbers in the default process group, in the order of the group of the detector.
            rank: This rank's place in that order.
            timeout: How long to wait for the others.

        Raises:
            TransportError: Some rank did not call this in time.
            PeerFailedError: Some rank called `announce_error` instead.
        """
        listener = _listen()
        secret = secrets.token_bytes(_SECRET_BYTES)
        host = socket.gethostname()
        ip, port = listener.getsockname()[:2]
        packed = _RECORD.pack(True, socket.inet_aton(ip), port, secret, host.encode()[:_HOST_BYTES])
        try:
            members = _within(timeout, lambda: _meet(store, key, ranks, rank, packed, timeout))
        except BaseException as error:
            listener.close()
            failed = getattr(error, "rank", 0)
            if failed != 0:  # or the store may not answer
                with contextlib.suppress(TransportError):
                    _within(timedelta(seconds=_LEAVE_S), lambda: _leave(store, key, ranks, rank, failed))
            raise
        return FailureDetector(ranks, rank, members, listener)

    def __init__(self, ranks: Sequence[int], rank: int, members: Sequence[_Member], listener: socket.socket) -> None:
        self._ring = _Ring(ranks, rank, members, listener)
        _rings.add(self._ring)
        self._stop = weakref.finalize(self, self._ring.stop, "its program has ended")
        threads.start(self._ring.run, name="thinwire failures", end=self._stop)

    def advance(self) -> None:
        """Count a collective that this rank begins. All ranks begin the same ones."""
        self._ring.progress = next(self._ring.counter)

    def explain(self, error: TransportError, suspect: int | None = None) -> TransportError:
        """``error`` with the rank that caused it, if that can be found out, and report it to the other ranks.

        Takes up to 2.5 s where there is no evidence. ``suspect`` is the rank, within this detector's group, that the
        failed operation was for.
        """
        cause = self._ring.explain(str(error), suspect)
        if cause is None:
            return error
        named = TransportError(
            f"rank {cause.rank} on {cause.host}: {cause.reason}; so {error}",
            rank=cause.rank,
            host=cause.host,
            reason=cause.reason,
        )
        named.__cause__ = error.__cause__ or error
        return named

    def report(self, error: BaseException) -> None:
        """Tell the other ranks which error this one has met in the present collective, for `attribute`."""
        self._ring.send(_ERROR, self._ring.rank, f"{type(error).__name__}: {error}")

    def attribute(self, error: PeerFailedError) -> PeerFailedError:
        """``error`` with the rank that was the first to fail, and with what it has reported.

        A rank that another one made fail says so to others: the rank in ``error`` need not be the cause.
        """
        cause = self._ring.reported_error()
        if cause is None:
            return error
        text = f"{error} (rank {cause.rank} on {cause.host}: {cause.reason})"
        return PeerFailedError(text, rank=cause.rank, host=cause.host, reason=cause.reason)

    @contextlib.contextmanager
    def calling(self, what: str) -> Iterator[None]:
        """Tell the other ranks, while the body waits for them, which call this one is in that all ranks must make."""
        self._ring.send(_CALLING, self._ring.rank, what)
        yield
        self._ring.send(_CALLING, self._ring.rank)

    def close(self) -> None:
        """Say that this rank communicates no more, and end."""
        if self._stop.detach() is not None:
            self._ring.stop("it communicates no more: detach() was called there, or thinwire.compress() failed")


class _Ring:
    """The connections of a rank and what it has heard; `run` is its thread."""

    def __init__(self, ranks: Sequence[int], rank: int, members: Sequence[_Member], listener: socket.socket) -> None:
        self._ranks, self.rank, self._members = tuple(ranks), rank, members
        self.size = len(ranks)
        self.counter = itertools.count(1)
        self.progress = 0
        self._beat_s = _BEAT_S * max(1.0, self.size / _RANKS_A_BEAT)
        self._news = threading.Condition()
        self._reports: dict[tuple[int, int, int], _Report] = {}
        """By kind, sender and the rank that it is about, the last one; in the order in which the first ones came."""
        self._sequence = itertools.count(1)
        now = time.monotonic()
        self._heard: dict[int, tuple[int, int, float]] = {}
        """By rank, the sequence number of its last heartbeat, its progress and when it came."""
        self._cause: Cause | None = None
        self._searched = False
        self._peer_error: tuple[int, int, str] | None = None
        """This rank's progress when an error of another one ended what it did, that rank, and the error."""
        self._looped = now
        self._outbox: list[bytes] = []
        self._stopping = False
        self._listener: socket.socket | None = listener
        self._links: list[_Link] = []
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = socket.socketpair()
        for end in (self._wake_read, self._wake_write):
            end.setblocking(False)

    # What other threads call.

    def stop(self, reason: str) -> None:
        """Let the thread end, after its last words. At the end of a program that an exception ends, those are it."""
        if self._peer_error is not None and self._peer_error[0] == self.progress:
            self.send(_FAILED, *self._peer_error[1:])
        crash: object = getattr(sys, "last_value", None)
        if crash is not None:
            self.send(_ENDED, self.rank, f"its program has ended with {type(crash).__name__}: {crash}")
        else:
            self.send(_LEFT, self.rank, reason)
        self._stopping = True
        self._wake()

    def send(self, kind: int, about: int, reason: str = "") -> None:
        """Tell all ranks something."""
        text = reason.encode()[:255]
        sequence = next(self._sequence)
        frame = _FRAME.pack(kind, len(text), self.rank, about, sequence, self.progress) + text
        with self._news:
            self._outbox.append(frame)
            if kind != _BEAT:
                self._note(_Report(kind, self.rank, about, sequence, self.progress, reason, time.monotonic()))
        self._wake()

    def explain(self, text: str, suspect: int | None) -> Cause | None:
        with self._news:
            if self._searched:
                return self._cause
        self.send(_FAILED, self.rank if suspect is None else suspect, text)
        deadline = time.monotonic() + _GRACE_S
        found = None
        with self._news:
            while not self._searched:
                left = deadline - time.monotonic()
                found = self._evidence() or (self._circumstance(suspect) if left <= 0 else None)
                self._searched = found is not None or left <= 0
                if not self._searched:
                    self._news.wait(min(0.1, left))
            if found is not None:
                self._cause = self._named(*found)
        if found is not None and found[0] not in (self.rank, suspect):
            self.send(_FAILED, *found)
        return self._cause

    def reported_error(self) -> Cause | None:
        with self._news:
            self._news.wait_for(lambda: self._present_error() or self._accusation(), _REPORT_S)
            error, accusation = self._present_error(), self._accusation()
            if error is not None:
                found = error.sender, error.reason
            elif accusation is not None:
                found = accusation.about, accusation.reason
            else:
                return None
            self._peer_error = (self.progress, *found)
        return self._named(*found)

    def _accusation(self) -> _Report | None:
        """The first report of a rank that failed because of another one, which has not failed because of a third."""
        accusations = [r for r in self._reports.values() if r.kind == _FAILED and r.about != r.sender]
        accusers = {r.sender for r in accusations}
        return next((r for r in accusations if r.about not in accusers), None)

    def _present_error(self) -> _Report | None:
        """The first error that a rank has met in the collectives that are under way."""
        errors = [r for r in self._reports.values() if r.kind == _ERROR and r.sender != self.rank]
        return min((r for r in errors if r.progress >= self.progress - _UNDER_WAY), key=lambda r: r.at, default=None)

    def _named(self, rank: int, reason: str) -> Cause:
        return Cause(self._ranks[rank], self._members[rank].host, reason)

    # What is known. The caller holds the lock.

    def _evidence(self, *, certain: bool = True) -> tuple[int, str] | None:
        """A rank that is certainly gone or silent, which no other rank has caused.

        If not ``certain``: one that any of its neighbours takes to be gone.
        """
        now = time.monotonic()
        reports = self._reports.values()
        ended = [r for r in reports if r.kind in (_ENDED, _LEFT) and r.about != self.rank and self._holds(r)]
        caused = {r.sender for r in reports if r.kind == _FAILED and r.about != r.sender}
        first = next((r for r in ended if r.about not in caused and (not certain or self._confirmed(r, ended))), None)
        if first is not None:
            own = [r.reason for r in ended if r.about == r.sender == first.about]
            return first.about, own[0] if own else first.reason
        if not certain:
            return None
        accused = next((r for r in reports if r.kind == _FAILED and r.about == self.rank != r.sender), None)
        if accused is not None and "heartbeat" in accused.reason:
            return self.rank, accused.reason
        if now - self._looped > self._beat_s * 3:
            # This process itself was stopped, and has not yet read what came meanwhile.
            return None
        for distance in range(1, self.size):
            for rank in ((self.rank + distance) % self.size, (self.rank - distance) % self.size):
                if rank in self._heard and now - self._heard[rank][2] > self._beat_s * _SILENT_BEATS:
                    silence = now - self._heard[rank][2]
                    return rank, f"no heartbeat has come from it for {silence:.1f} s: it is stopped, or cut off"
        return None

    def _confirmed(self, report: _Report, ended: Sequence[_Report]) -> bool:
        """Whether the rank itself, or both of its neighbours in the ring that are left, say that it has ended: one that
        loses its own connections takes its neighbours to be gone."""
        if report.about == report.sender:
            return True
        neighbours = {(report.about + side) % self.size for side in (1, -1)} - {r.about for r in ended}
        return neighbours <= {r.sender for r in ended if r.about == report.about}

    def _holds(self, report: _Report) -> bool:
        """Whether nothing has come since from the rank that is said to have ended."""
        return report.kind == _LEFT or self._heard.get(report.about, (0, 0, 0.0))[2] <= report.at

    def _circumstance(self, suspect: int | None) -> tuple[int, str] | None:
        """The most likely cause where no rank is certainly gone."""
        if (unconfirmed := self._evidence(certain=False)) is not None:
            return unconfirmed
        progress = {rank: heard[1] for rank, heard in self._heard.items()} | {self.rank: self.progress}
        failed = [r for r in self._reports.values() if r.kind == _FAILED]
        # Who accuses another one was waiting for it.
        accusers = {r.sender for r in failed if r.about != r.sender}
        last = min(progress, key=lambda rank: (progress[rank], rank in accusers, rank))
        calls = [r for r in self._reports.values() if r.kind == _CALLING and r.reason]
        others = progress.keys() - {r.sender for r in calls}
        # Ranks that have gone on to something else will not come; ones that are behind may.
        if calls and others and 2 * len(calls) <= self.size and all(progress[r] > calls[0].progress for r in others):
            missing = ", ".join(str(self._ranks[rank]) for rank in sorted(others))
            return calls[0].sender, f"it is in {calls[0].reason}, which all ranks must call, and rank {missing} has not"
        if len(progress) == self.size and progress[last] < max(progress.values()):
            return last, (
                f"it is alive, and has begun {progress[last]} collectives where others have begun "
                f"{max(progress.values())}: it is stuck or late"
            )
        accused = [r.about for r in failed if r.about != r.sender]
        votes = Counter([rank for rank in accused if rank not in accusers] or accused)
        if votes:
            about = votes.most_common(1)[0][0]
            return about, "it is alive, and its connections are broken"
        return None if suspect is None else (suspect, "it did not answer")

    # The thread.

    def run(self) -> None:
        """Beat, listen and pass on, until `stop`."""
        try:
            self._selector.register(self._wake_read, selectors.EVENT_READ, None)
            if self._listener is not None:
                self._selector.register(self._listener, selectors.EVENT_READ, None)
            self._dial((self.rank + 1) % self.size)
            next_beat = 0.0
            while not (self._stopping and not self._outbox):
                now = time.monotonic()
                if now >= next_beat:
                    self.send(_BEAT, self.rank)
                    next_beat = now + self._beat_s
                self._flush()
                for key, events in self._selector.select(max(0.0, min(next_beat - now, self._beat_s))):
                    self._serve(key, events)
                now = time.monotonic()
                if now - self._looped > self._beat_s * 3:
                    # This process was stopped: others were not silent, they were not heard.
                    with self._news:
                        self._heard = {rank: (n, p, now) for rank, (n, p, _) in self._heard.items()}
                self._looped = now
                for link in [link for link in self._links if link.peer is None and link.until < now]:
                    self._drop(link)
            self._last_words()
        except OSError:
            pass  # the interpreter, or a test, closed what this works with
        finally:
            self.close()

    def _last_words(self) -> None:
        end = time.monotonic() + 0.3
        while any(link.waiting for link in self._links) and time.monotonic() < end:
            for key, events in self._selector.select(0.05):
                self._serve(key, events)

    def close(self) -> None:
        """Close all sockets."""
        for link in list(self._links):
            link.socket.close()
        self._links.clear()
        for end in (self._listener, self._wake_read, self._wake_write):
            if end is not None:
                end.close()
        self._selector.close()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            self._wake_write.send(b"\0")

    def _dial(self, peer: int) -> None:
        connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        connection.setblocking(False)
        link = _Link(connection, peer)
        link.waiting += _HELLO.pack(_MAGIC, self.rank, self._members[peer].secret)
        connection.connect_ex(self._members[peer].address)
        self._add(link)

    def _add(self, link: _Link) -> None:
        with contextlib.suppress(OSError):
            link.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._links.append(link)
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if link.waiting else 0)
        self._selector.register(link.socket, events, link)

    def _flush(self) -> None:
        with self._news:
            frames, self._outbox = self._outbox, []
        for frame in frames:
            self._pass_on(frame, None)

    def _pass_on(self, frame: bytes, source: _Link | None) -> None:
        for link in list(self._links):
            if link is source or link.peer is None or len(link.waiting) > _MAX_WAITING_BYTES:
                continue
            link.waiting += frame
            self._selector.modify(link.socket, selectors.EVENT_READ | selectors.EVENT_WRITE, link)

    def _serve(self, key: selectors.SelectorKey, events: int) -> None:
        if key.fileobj is self._wake_read:
            with contextlib.suppress(OSError):
                self._wake_read.recv(4096)
        elif key.fileobj is self._listener:
            self._accept()
        elif key.data in self._links:
            link = key.data
            try:
                if events & selectors.EVENT_WRITE:
                    sent = link.socket.send(link.waiting)
                    del link.waiting[:sent]
                    if not link.waiting:
                        self._selector.modify(link.socket, selectors.EVENT_READ, link)
                if events & selectors.EVENT_READ:
                    data = link.socket.recv(1 << 16)
                    if not data:
                        raise ConnectionResetError
                    link.received += data
                    self._read(link)
            except BlockingIOError:
                pass
            except (OSError, ValueError):
                self._drop(link)

    def _accept(self) -> None:
        assert self._listener is not None
        with contextlib.suppress(OSError):
            connection, _ = self._listener.accept()
            if sum(link.peer is None for link in self._links) >= _MAX_STRANGERS:
                connection.close()
                return
            connection.setblocking(False)
            self._add(_Link(connection, None, until=time.monotonic() + _STRANGER_S))

    def _read(self, link: _Link) -> None:
        """Take in what has come. Raises ``ValueError`` for what is not of the format."""
        if link.peer is None:
            if len(link.received) < _HELLO.size:
                return
            magic, peer, secret = _HELLO.unpack_from(link.received)
            before = (self.rank - 1) % self.size
            if magic != _MAGIC or peer != before or not hmac.compare_digest(secret, self._members[self.rank].secret):
                raise ValueError("a stranger")
            del link.received[: _HELLO.size]
            link.peer = peer
            self._hang_up_listener()
        while len(link.received) >= _FRAME.size:
            kind, length, sender, about, sequence, progress = _FRAME.unpack_from(link.received)
            if kind > _CALLING or sender >= self.size or about >= self.size:
                raise ValueError("no frame")
            if len(link.received) < _FRAME.size + length:
                return
            frame = bytes(link.received[: _FRAME.size + length])
            del link.received[: len(frame)]
            if sender != self.rank and self._take_in(frame, kind, sender, about, sequence, progress):
                self._pass_on(frame, link)

    def _hang_up_listener(self) -> None:
        if self._listener is not None:
            self._selector.unregister(self._listener)
            self._listener.close()
            self._listener = None

    def _take_in(self, frame: bytes, kind: int, sender: int, about: int, sequence: int, progress: int) -> bool:
        """Whether it is new."""
        now = time.monotonic()
        with self._news:
            if kind == _BEAT:
                if sender in self._heard and self._heard[sender][0] >= sequence:
                    return False
                self._heard[sender] = sequence, progress, now
                return True
            return self._note(_Report(kind, sender, about, sequence, progress, _text(frame[_FRAME.size :]), now))

    def _note(self, report: _Report) -> bool:
        key = report.kind, report.sender, report.about
        before = self._reports.get(key)
        if before is not None and before.sequence >= report.sequence:
            return False
        if before is None and sum(r.sender == report.sender for r in self._reports.values()) >= _MAX_REPORTS:
            return False
        self._reports[key] = report
        self._news.notify_all()
        return True

    def _drop(self, link: _Link) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(link.socket)
        link.socket.close()
        self._links.remove(link)
        if link.peer is not None and link.peer in self._heard and not self._stopping:
            self.send(_ENDED, link.peer, "its process has ended")


_rings: weakref.WeakSet[_Ring] = weakref.WeakSet()


def _close_in_child() -> None:
    # Else a data loader's worker would hold the connections of a training that has died open.
    for ring in list(_rings):
        with contextlib.suppress(OSError):
            ring.close()


os.register_at_fork(after_in_child=_close_in_child)
