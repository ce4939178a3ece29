"""The heartbeats and reports of all ranks, over TCP connections in a ring.

Nothing is unpickled. A connection begins with a secret that went through the store, and is closed at the first frame
that is not of the format below. A frame is at most 277 bytes, and what waits to be sent is bounded.
"""

from __future__ import annotations

import contextlib
import hmac
import itertools
import os
import selectors
import socket
import struct
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

from thinwire import threads
from thinwire.collectives.errors import PeerFailedError, TransportError
from thinwire.collectives.failures.evidence import (
    BEAT,
    CALLING,
    ENDED,
    ERROR,
    FAILED,
    LEFT,
    Evidence,
    Report,
    printable,
)
from thinwire.collectives.failures.rendezvous import SECRET_BYTES, Member, announcing, beside, enter, listen

_T = TypeVar("_T")
_HELLO = struct.Struct(f"<4sI{SECRET_BYTES}s")
"""The first bytes of a connection: format, rank of the sender, secret of the receiver."""
_MAGIC = b"twf1"
_FRAME = struct.Struct("<BBIIIQ")
"""Kind, bytes of the reason that follows, sender, the rank that it is about, sequence number, progress."""

_BEAT_S = 0.5
_RANKS_A_BEAT = 64
"""Above so many ranks heartbeats are rarer, so that their number a second stays the same."""
GRACE_S = 2.5
"""How long a failure waits for evidence of its cause."""
_REPORT_S = 1.0
"""The same for a failure that another rank has announced."""
_LOOK_S = 0.1
"""How often `FailureDetector.waiting` looks whether a rank is gone."""
_STRANGER_S = 10.0
_LAST_WORDS_S = 0.3
"""How long a rank that ends tries to send what it has to say."""
_MAX_WAITING_BYTES = 1 << 16
_MAX_STRANGERS = 8


class Cause(NamedTuple):
    """Why a collective failed."""

    rank: int
    """In the default process group."""
    host: str
    reason: str


@dataclass
class _Link:
    """A connection to another rank, or to a stranger until the secret has come."""

    socket: socket.socket
    peer: int | None
    until: float = float("inf")
    """When a stranger has to have sent the secret."""
    received: bytearray = field(default_factory=bytearray)
    waiting: bytearray = field(default_factory=bytearray)


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
            PeerFailedError: Some rank called `announce_error` instead, or has failed in this.
        """
        with announcing(store, key, rank):
            # What takes threads, files and memory comes first: the others must not wait for a rank that is short of
            # them and has said that it is there.
            listener = listen()
            try:
                detector = FailureDetector(ranks, rank, listener)
            except BaseException:
                listener.close()
                raise
            try:
                detector._ring.begin(enter(store, key, ranks, rank, listener, timeout))
            except BaseException:
                detector.close()
                raise
        return detector

    def __init__(self, ranks: Sequence[int], rank: int, listener: socket.socket) -> None:
        self._ring = _Ring(ranks, rank, listener)
        _rings.add(self._ring)
        self._stop = weakref.finalize(self, self._ring.stop, "its program has ended")
        threads.start(self._ring.run, name="thinwire failures", end=self._stop)

    @property
    def heard(self) -> frozenset[int]:
        """The ranks of this detector's group whose heartbeats have arrived, without this one."""
        return frozenset(self._ring.evidence.heard)

    def waiting(self, call: Callable[[], _T], doing: str) -> _T:
        """What ``call`` returns, which waits for all ranks, and would wait until its timeout for one that is gone. It
        runs in a thread of its own, and is left alone there where a rank is.

        Raises:
            TransportError: A rank has ended, or has said that it communicates no more.
        """
        done = beside(call)
        while not wait([done], _LOOK_S).done:
            if self._ring.anyone_gone():
                raise self.explain(TransportError(f"{doing} was given up"))
        return done.result()

    def advance(self) -> None:
        """Count a collective that this rank begins. All ranks begin the same ones."""
        self._ring.evidence.progress = next(self._ring.counter)

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
        self._ring.send(ERROR, self._ring.rank, f"{type(error).__name__}: {error}")

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
        self._ring.send(CALLING, self._ring.rank, what)
        try:
            yield
        except TransportError:
            raise  # the others, whose collectives fail with this one, have yet to ask for the cause
        except Exception:
            self._ring.send(CALLING, self._ring.rank)
            raise
        self._ring.send(CALLING, self._ring.rank)

    def close(self, error: BaseException | None = None) -> None:
        """Say that this rank communicates no more, because of ``error`` if there is one, and end."""
        if self._stop.detach() is not None:
            why = "detach() was called there" if error is None else f"{type(error).__name__}: {error}"
            self._ring.stop(f"it communicates no more: {why}")


class _Ring:
    """The connections of a rank and what it has heard; `run` is its thread."""

    def __init__(self, ranks: Sequence[int], rank: int, listener: socket.socket) -> None:
        self._ranks, self.rank = tuple(ranks), rank
        self._members: Sequence[Member] = ()
        self._ready = threading.Event()
        """Set when this rank has met the others, or will not."""
        self.size = len(ranks)
        self.counter = itertools.count(1)
        self._beat_s = _BEAT_S * max(1.0, self.size / _RANKS_A_BEAT)
        self._news = threading.Condition()
        """Held by whoever looks at the evidence."""
        self.evidence = Evidence(rank, self._ranks, self._beat_s)
        self._sequence = itertools.count(1)
        self._cause: Cause | None = None
        self._searched = False
        self._peer_error: tuple[int, int, str] | None = None
        """This rank's progress when an error of another one ended what it did, that rank, and the error."""
        self._outbox: list[bytes] = []
        self._stopping = False
        self._listener: socket.socket | None = listener
        self._links: list[_Link] = []
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = socket.socketpair()
        self._dialling = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        for end in (self._wake_read, self._wake_write, self._dialling):
            end.setblocking(False)

    # What other threads call.

    def stop(self, reason: str) -> None:
        """Let the thread end, after its last words. At the end of a program that an exception ends, those are it."""
        if self._peer_error is not None and self._peer_error[0] == self.evidence.progress:
            self.send(FAILED, *self._peer_error[1:])
        crash: object = getattr(sys, "last_value", None)
        if crash is not None:
            self.send(ENDED, self.rank, f"its program has ended with {type(crash).__name__}: {crash}")
        else:
            self.send(LEFT, self.rank, reason)
        self._stopping = True
        self._ready.set()
        self._wake()

    def begin(self, members: Sequence[Member]) -> None:
        """Let the thread connect to the others."""
        self._members = members
        self._ready.set()

    def send(self, kind: int, about: int, reason: str = "") -> None:
        """Tell all ranks something."""
        text = reason.encode()[:255]
        sequence = next(self._sequence)
        progress = self.evidence.progress
        frame = _FRAME.pack(kind, len(text), self.rank, about, sequence, progress) + text
        with self._news:
            self._outbox.append(frame)
            if kind != BEAT:
                self._note(Report(kind, self.rank, about, sequence, progress, reason, time.monotonic()))
        self._wake()

    def explain(self, text: str, suspect: int | None) -> Cause | None:
        with self._news:
            if self._searched:
                return self._cause
        self.send(FAILED, self.rank if suspect is None else suspect, text)
        deadline = time.monotonic() + GRACE_S
        cause = None
        with self._news:
            while not self._searched:
                left = deadline - time.monotonic()
                cause = self.evidence.cause(suspect, guess=left <= 0)
                self._searched = cause is not None or left <= 0
                if not self._searched:
                    self._news.wait(min(0.1, left))
            if cause is not None:
                self._cause = self._named(*cause)
        if cause is not None and cause[0] not in (self.rank, suspect):
            self.send(FAILED, *cause)
        return self._cause

    def anyone_gone(self) -> bool:
        with self._news:
            return self.evidence.ended() is not None

    def reported_error(self) -> Cause | None:
        with self._news:
            heard = self.evidence
            self._news.wait_for(lambda: heard.present_error() or heard.accusation(), _REPORT_S)
            error, accusation = heard.present_error(), heard.accusation()
            if error is not None:
                cause = error.sender, error.reason
            elif accusation is not None:
                cause = accusation.about, accusation.reason
            else:
                return None
            self._peer_error = (heard.progress, *cause)
        return self._named(*cause)

    def _named(self, rank: int, reason: str) -> Cause:
        return Cause(self._ranks[rank], self._members[rank].host, reason)

    # The thread.

    def run(self) -> None:
        """Beat, listen and pass on, until `stop`."""
        self._ready.wait()
        try:
            if not self._members:
                return
            self._selector.register(self._wake_read, selectors.EVENT_READ, None)
            if self._listener is not None:
                self._selector.register(self._listener, selectors.EVENT_READ, None)
            self._dial((self.rank + 1) % self.size)
            next_beat = 0.0
            while not (self._stopping and not self._outbox):
                now = time.monotonic()
                if now >= next_beat:
                    self.send(BEAT, self.rank)
                    next_beat = now + self._beat_s
                self._flush()
                for key, events in self._selector.select(max(0.0, min(next_beat - now, self._beat_s))):
                    self._serve(key, events)
                with self._news:
                    self.evidence.stay_awake()
                now = time.monotonic()
                for link in [link for link in self._links if link.peer is None and link.until < now]:
                    self._drop(link)
            self._last_words()
        except OSError:
            pass  # the interpreter, or a test, closed what this works with
        finally:
            self.close()

    def _last_words(self) -> None:
        end = time.monotonic() + _LAST_WORDS_S
        while any(link.waiting for link in self._links):
            for key, events in self._selector.select(0.05):
                self._serve(key, events)
            if time.monotonic() > end:  # only now: this thread may not have been let run for as long
                return

    def close(self) -> None:
        """Close all sockets."""
        for link in list(self._links):
            link.socket.close()
        self._links.clear()
        for end in (self._listener, self._dialling, self._wake_read, self._wake_write):
            if end is not None:
                end.close()
        self._selector.close()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            self._wake_write.send(b"\0")

    def _dial(self, peer: int) -> None:
        link = _Link(self._dialling, peer)
        link.waiting += _HELLO.pack(_MAGIC, self.rank, self._members[peer].secret)
        link.socket.connect_ex(self._members[peer].address)
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
                # What has come before the end of a connection counts, whether or not anything can still be sent.
                if events & selectors.EVENT_READ:
                    data = link.socket.recv(1 << 16)
                    if not data:
                        raise ConnectionResetError
                    link.received += data
                    self._read(link)
                if events & selectors.EVENT_WRITE:
                    self._write(link)
            except BlockingIOError:
                pass
            except (OSError, ValueError):
                self._drop(link)

    def _write(self, link: _Link) -> None:
        try:
            sent = link.socket.send(link.waiting)
        except BlockingIOError:
            return
        except OSError:
            sent = len(link.waiting)  # reading finds the end of the connection, after the other rank's last words
        del link.waiting[:sent]
        if not link.waiting:
            self._selector.modify(link.socket, selectors.EVENT_READ, link)

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
            if kind > CALLING or sender >= self.size or about >= self.size:
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
        with self._news:
            if kind == BEAT:
                return self.evidence.beat(sender, sequence, progress)
            reason = printable(frame[_FRAME.size :])
            return self._note(Report(kind, sender, about, sequence, progress, reason, time.monotonic()))

    def _note(self, report: Report) -> bool:
        new = self.evidence.note(report)
        if new:
            self._news.notify_all()
        return new

    def _drop(self, link: _Link) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(link.socket)
        link.socket.close()
        self._links.remove(link)
        if link.peer is not None and link.peer in self.evidence.heard and not self._stopping:
            self.send(ENDED, link.peer, "its process has ended")


_rings: weakref.WeakSet[_Ring] = weakref.WeakSet()


def _close_in_child() -> None:
    # Else a data loader's worker would hold the connections of a training that has died open.
    for ring in list(_rings):
        with contextlib.suppress(OSError):
            ring.close()


os.register_at_fork(after_in_child=_close_in_child)
