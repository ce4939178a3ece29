"""The meeting of ranks in PyTorch's store before they communicate, in which a rank may announce that it fails."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

from thinwire import threads
from thinwire.collectives.errors import CommunicationError, PeerFailedError, TransportError

_T = TypeVar("_T")
_LEAVE_S = 3.0
"""Seconds that rank 0, which has the store, stays for ranks that have yet to read which one failed."""


@dataclass
class Record:
    """A rank's report on itself in the store. Ranks are places in the group."""

    host: str
    absent: str = ""
    """Reason why the rank does not join the meeting."""
    beat: int = 0
    """A count that increases as long as the rank's process runs."""
    progress: int = 0
    """Number of collectives that the rank has begun."""
    call: tuple[str, int] | None = None
    """Call of all ranks that the rank is in, and its progress then."""
    error: tuple[str, int] | None = None
    """Last error that the rank has met within a collective, and its progress then."""
    failed: tuple[int, str] | None = None
    """Rank that made an operation fail, itself if that is not known, and why."""
    ended: str = ""
    """Reason why the rank communicates no more."""

    def __str__(self) -> str:
        return json.dumps({name: value for name, value in vars(self).items() if value})

    @staticmethod
    def read(data: bytes, num_ranks: int) -> Record:
        """Return the record that a rank has written, its texts within bounds.

        Raises:
            ValueError: It is damaged, or not a rank's.
        """
        told = loaded(data)
        if not isinstance(told, dict) or "host" not in told or not told.keys() <= _KINDS.keys():
            raise ValueError("not a rank's record")
        record = Record(**{name: checked(value, _KINDS[name]) for name, value in told.items()})
        if record.failed is not None and not 0 <= record.failed[0] < num_ranks:
            raise ValueError(f"there is no rank {record.failed[0]}")
        return record


_KINDS: dict[str, Any] = {
    **dict.fromkeys(("host", "absent", "ended"), str),
    **dict.fromkeys(("beat", "progress"), int),
    **dict.fromkeys(("call", "error"), (str, int)),
    "failed": (int, str),
}
_MOST_BYTES = 1 << 15
"""Largest size of a record, whose texts have at most 1000 characters each."""


def loaded(data: bytes) -> Any:
    """Return a JSON value from the store. Raises `ValueError` where it is invalid, or too long for a record."""
    if len(data) > _MOST_BYTES:
        raise ValueError(f"{len(data)} bytes are not a record")
    try:
        return json.loads(data)
    except RecursionError as error:
        raise ValueError(str(error)) from None


def checked(value: Any, kind: Any) -> Any:
    """Return a value from the store, its texts cut, if it is of a kind or a list of kinds. Raises `ValueError`."""
    if isinstance(kind, tuple):
        if not isinstance(value, list) or len(value) != len(kind):
            raise ValueError(f"not {len(kind)} values")
        return tuple(map(checked, value, kind))
    if type(value) is not kind:
        raise ValueError(f"not {kind.__name__}")
    return line(value) if kind is str else value


def line(text: object) -> str:
    """Return the beginning of a text without control characters."""
    return "".join(c if c.isprintable() else " " for c in str(text))[:1000]


def announce_error(store: Any, key: str, rank: int, error: Exception) -> None:
    """Make the ranks that call, or will call, `FailureDetector.connect` raise at once: this one will not join."""
    with contextlib.suppress(RuntimeError):
        store.set(f"{key}/{rank}", str(Record(socket.gethostname(), line(f"{type(error).__name__}: {error}"))))


@contextlib.contextmanager
def announcing(store: Any, key: str, rank: int) -> Iterator[None]:
    """Call `announce_error` where the body fails on this rank, for a reason that no other rank knows."""
    try:
        yield
    except Exception as error:
        if getattr(error, "rank", None) is None:
            announce_error(store, key, rank, error)
        raise


def meet(store: Any, key: str, ranks: Sequence[int], rank: int, timeout: timedelta) -> tuple[Any, list[Record]]:
    """Put this rank's first record into the store, and wait for those of all ``ranks``.

    Returns a client of the store that nothing else uses, so that it answers while others wait, and the records. The
    arguments and errors are those of `FailureDetector.connect`.
    """
    try:
        return _within(timeout, lambda: _meet(store, key, ranks, rank, timeout))
    except CommunicationError as error:
        failed = error.rank
        if failed != 0:  # or the store may not answer
            with contextlib.suppress(TransportError):
                _within(timedelta(seconds=_LEAVE_S), lambda: _leave(store, key, ranks, rank, failed))
        raise


def in_thread(call: Callable[[], _T]) -> Future[_T]:
    """Run ``call`` in a thread of its own, which nobody has to wait for, and return the future of its result."""
    done: Future[_T] = Future()

    def run() -> None:
        try:
            done.set_result(call())
        except BaseException as error:  # noqa: BLE001 - raised in the caller
            done.set_exception(error)

    threads.start(run, name="thinwire meeting", end=lambda: None, within_s=0.0)
    return done


def _within(timeout: timedelta, call: Callable[[], _T]) -> _T:
    """Return the result of ``call``. PyTorch's store has calls that wait without end for a process that is stopped.

    Raises:
        TransportError: It takes longer than ``timeout`` and a second.
    """
    done = in_thread(call)
    try:
        return done.result(timeout.total_seconds() + 1.0)
    except FutureTimeoutError:
        reason = "PyTorch's store, which lives there, does not answer"
        raise TransportError(f"rank 0: {reason}: that process is stopped or cut off", rank=0, reason=reason) from None


def _meet(store: Any, key: str, ranks: Sequence[int], rank: int, timeout: timedelta) -> tuple[Any, list[Record]]:
    deadline = time.monotonic() + timeout.total_seconds()
    records: list[Record] = []
    try:
        # Fails at once where the store is gone; a new client would try to connect for long.
        store.check([f"{key}/{rank}"])
        client = store.clone()
        if rank == 0:
            client.set(f"{key}/cause", "")
        client.set(f"{key}/{rank}", str(Record(socket.gethostname())))
        for other, number in enumerate(ranks):
            left = max(0.01, deadline - time.monotonic())
            try:
                client.wait([f"{key}/{other}"], timedelta(seconds=left))
            except RuntimeError:  # its time is over, or the store is gone, which the next line meets, too
                missing = [n for o, n in enumerate(ranks) if o >= other and not client.check([f"{key}/{o}"])]
                if not missing:
                    continue
                raise TransportError(
                    f"rank {', '.join(map(str, missing))} did not come within {timeout.total_seconds():g} s: every "
                    "rank must make this call, in the same order; that rank's own log may say why it did not",
                    rank=missing[0],
                    reason="it has not made the call in which all ranks meet",
                ) from None
            try:
                its = Record.read(client.get(f"{key}/{other}"), len(ranks))
            except ValueError as error:
                reason = f"its record in PyTorch's store is damaged: {error}"
                raise TransportError(f"rank {number}: {reason}", rank=number, reason=reason) from None
            if its.absent:
                raise PeerFailedError(
                    f"rank {number} on {its.host} failed: {its.absent}", rank=number, host=its.host, reason=its.absent
                )
            records.append(its)
    except CommunicationError:
        raise
    except RuntimeError as error:
        raise TransportError(
            f"PyTorch's store, which lives on rank 0, does not answer: {error}",
            rank=0,
            reason="PyTorch's store, which lives there, does not answer",
        ) from error
    return client, records


def _leave(store: Any, key: str, ranks: Sequence[int], rank: int, failed: int | None) -> None:
    """Wait until the others have read which rank failed, or else the store ends with rank 0, and they blame rank 0."""
    with contextlib.suppress(RuntimeError):
        store.set(f"{key}/{rank}/left", b"")
        if ranks[rank] == 0:
            others = [f"{key}/{other}/left" for other, number in enumerate(ranks) if number != failed]
            store.wait(others, timedelta(seconds=_LEAVE_S))
