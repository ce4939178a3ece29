"""How ranks find each other: addresses and secrets, exchanged through PyTorch's store.

What the store holds is not trusted: a record has a fixed size, and the text of an error is cut and made printable.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

from thinwire import threads
from thinwire.collectives.errors import CommunicationError, PeerFailedError, TransportError
from thinwire.collectives.failures.evidence import printable

_T = TypeVar("_T")
SECRET_BYTES = 16
_HOST_BYTES = 64
_RECORD = struct.Struct(f"<?16sH{SECRET_BYTES}s{_HOST_BYTES}s")
"""What a rank puts into the store: whether it is ready, IP address, port, secret, host. An error's text follows."""
_LEAVE_S = 3.0
"""How long rank 0, which has the store, stays for ranks that have yet to read which one failed."""


@dataclass(frozen=True)
class Member:
    """A rank, as the others reach it."""

    address: tuple[str, int]
    secret: bytes
    host: str


def announce_error(store: Any, key: str, rank: int, error: Exception) -> None:
    """Let the ranks that call, or will call, `connect` raise at once: this one will not come."""
    packed = _RECORD.pack(False, b"", 0, b"", socket.gethostname().encode()[:_HOST_BYTES])
    with contextlib.suppress(RuntimeError):
        store.set(f"{key}/{rank}", packed + f"{type(error).__name__}: {error}".encode()[:1024])


@contextlib.contextmanager
def announcing(store: Any, key: str, rank: int) -> Iterator[None]:
    """Call `announce_error` where the body fails on this rank, for a reason that no other rank knows."""
    try:
        yield
    except Exception as error:
        if getattr(error, "rank", None) is None:
            announce_error(store, key, rank, error)
        raise


def enter(
    store: Any, key: str, ranks: Sequence[int], rank: int, listener: socket.socket, timeout: timedelta
) -> list[Member]:
    """Put this rank's address, where ``listener`` listens, into the store, and wait for those of all ``ranks``.

    The other arguments and the errors are those of `FailureDetector.connect`.
    """
    secret = secrets.token_bytes(SECRET_BYTES)
    host = socket.gethostname()
    ip, port = listener.getsockname()[:2]
    packed = _RECORD.pack(True, socket.inet_aton(ip), port, secret, host.encode()[:_HOST_BYTES])
    try:
        return _within(timeout, lambda: _meet(store, key, ranks, rank, packed, timeout))
    except CommunicationError as error:
        failed = error.rank
        if failed != 0:  # or the store may not answer
            with contextlib.suppress(TransportError):
                _within(timedelta(seconds=_LEAVE_S), lambda: _leave(store, key, ranks, rank, failed))
        raise


def beside(call: Callable[[], _T]) -> Future[_T]:
    """What ``call`` will return or raise, in a thread of its own that nobody has to wait for."""
    done: Future[_T] = Future()

    def run() -> None:
        try:
            done.set_result(call())
        except BaseException as error:  # noqa: BLE001 - raised in the caller
            done.set_exception(error)

    threads.start(run, name="thinwire meeting", end=lambda: None, within_s=0.0)
    return done


def _within(timeout: timedelta, call: Callable[[], _T]) -> _T:
    """What ``call`` returns or raises. PyTorch's store has calls that wait without end for a process that is stopped.

    Raises:
        TransportError: It takes longer than ``timeout`` and a second.
    """
    done = beside(call)
    try:
        return done.result(timeout.total_seconds() + 1.0)
    except FutureTimeoutError:
        reason = "PyTorch's store, which lives there, does not answer"
        raise TransportError(f"rank 0: {reason}: that process is stopped or cut off", rank=0, reason=reason) from None


def _meet(store: Any, key: str, ranks: Sequence[int], rank: int, packed: bytes, timeout: timedelta) -> list[Member]:
    deadline = time.monotonic() + timeout.total_seconds()
    members: list[Member] = []
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


def _member(packed: bytes, number: int) -> Member:
    if len(packed) < _RECORD.size:
        raise TransportError(f"rank {number} put {len(packed)} bytes into the store, which cannot be", rank=number)
    ready, ip, port, secret, host = _RECORD.unpack_from(packed)
    name = printable(host)
    if not ready:
        reason = printable(packed[_RECORD.size :][:1024])
        raise PeerFailedError(f"rank {number} on {name} failed: {reason}", rank=number, host=name, reason=reason)
    return Member((socket.inet_ntoa(ip[:4]), port), secret, name)


def listen() -> socket.socket:
    """A socket at which the others may reach this rank."""
    why = None
    for ip in _own_addresses():
        try:
            listener = socket.create_server((ip, 0))
        except OSError as error:
            why = error
        else:
            listener.setblocking(False)
            return listener
    raise TransportError(f"no address of this machine can be listened on, not even 127.0.0.1: {why}") from why


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
