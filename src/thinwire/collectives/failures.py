"""Detection of the rank that caused a failure, by heartbeats and reports of all ranks in the process groups' store.

A collective that fails says little about the cause. gloo reports a closed connection or a timeout, and names at most
the peer that it waited for, which may itself have waited for the rank that died. So ranks meet in PyTorch's store
before they communicate, where each may announce that it fails, and every rank has a thread that keeps a record of it
there, and reads those of the others. The first rank that finds the cause of a failure writes it there, and all others
take it.

The store lives in one process, rank 0 or the launcher. It ends with that process at once, and does not answer where
that is stopped: both are evidence, too. Where rank 0 ends by itself, it waits until the others have read why.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import socket
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, TimeoutError as FutureTimeoutError, wait
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

from thinwire import threads
from thinwire.collectives.errors import CommunicationError, PeerFailedError, TransportError
from thinwire.compat import store_rank

_T = TypeVar("_T")
_BEAT_S, _LOOK_S = 0.5, 0.05
"""Seconds between two writes and reads of records; and while something waits for them."""
_RANKS_A_BEAT = 64
"""Number of ranks above which both are rarer, so that the requests a second stay the same."""
_SILENT_BEATS, _CLOSED_BEATS = 6, 3
"""Heartbeats that a rank must miss to count as stopped; or as ended, where a connection to it is closed."""
GRACE_S = 2.5
"""Seconds that a failure waits for evidence of its cause."""
_REPORT_S = 1.0
"""Seconds that a failure which another rank has announced waits for evidence."""
_LINGER_S = 3.0
"""Seconds that rank 0, which has the store, stays for ranks that have yet to read its last record, or which failed."""
_UNDER_WAY = 2
"""Number of collectives that may be under way at a time."""
_SILENCE = re.compile("imed out|timeout caused|within|no heartbeat")
"""Pattern of errors in which a connection is still open."""


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
            ValueError: it is damaged, or not a rank's.
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


def loaded(data: bytes) -> Any:
    """Return a JSON value from the store. Raises `ValueError` where it is invalid, or too long for a record."""
    if len(data) > 1 << 15:  # a record's texts have at most 1000 characters each
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


class Cause(NamedTuple):
    """Cause of a collective's failure."""

    rank: int | None
    """Rank in the default process group; None for the launcher."""
    host: str
    reason: str

    @staticmethod
    def read(data: bytes) -> Cause:
        """Return the cause that a rank has written. Raises `ValueError` where it is damaged, or not a rank's."""
        rank, *texts = told if isinstance(told := loaded(data), list) and told else [None]
        return Cause(None if rank is None else checked(rank, int), *checked(texts, (str, str)))


class FailureDetector:
    """Detects which rank has exited, stopped sending heartbeats, or fallen behind, and why; see the module.

    It asks nothing of the training: `explain` is called when something has failed.
    """

    @staticmethod
    def connect(store: Any, key: str, ranks: Sequence[int], rank: int, timeout: timedelta) -> FailureDetector:
        """Connect ``ranks`` of the default process group. All of them must call this.

        Args:
            store: a ``torch.distributed.Store`` that all of them reach.
            key: a prefix in the store that nothing else uses.
            ranks: numbers in the default process group, in the order of the group of the detector.
            rank: this rank's place in that order.
            timeout: how long to wait for the others.

        Raises:
            TransportError: some rank did not call this in time.
            PeerFailedError: some rank called `announce_error` instead, or has failed in this.
        """
        try:
            # Threads start first: the others must not wait for a rank that has announced itself and cannot start them.
            detector = FailureDetector(store, key, ranks, rank)
            try:
                detector.board.begin(*meet(store, key, ranks, rank, timeout))
            except BaseException:
                detector.close()
                raise
        except Exception as error:
            if getattr(error, "rank", None) is None:  # for a reason that no other rank knows
                announce_error(store, key, rank, error)
            raise
        return detector

    def __init__(self, store: Any, key: str, ranks: Sequence[int], rank: int) -> None:
        self.board = Board(store, key, ranks, rank)
        self._stop = weakref.finalize(self, self.board.stop, "its program has ended")
        within_s = _LINGER_S if self.board.has_store else threads.GRACE_S
        threads.start(self.board.run, name="thinwire failures", end=self._stop, within_s=within_s)

    def waiting(self, call: Callable[[], _T], doing: str) -> _T:
        """Return the result of ``call``, which waits for all ranks and would wait for a lost one until its timeout.

        It runs in a thread of its own, in which it is left behind if a rank is lost.

        Raises:
            TransportError: a rank has ended, has said that it communicates no more, or is silent.
        """
        done = in_thread(call)
        while not wait([done], _LOOK_S).done:
            if self.board.anyone_gone():
                raise self.explain(TransportError(f"{doing} was given up"))
        return done.result()

    def advance(self) -> None:
        """Count a collective that this rank begins. All ranks begin the same ones."""
        self.board.mine.progress = next(self.board.counter)

    def explain(self, error: TransportError, suspect: int | None = None) -> TransportError:
        """Return ``error`` with the rank that caused it, if that can be found out, and tell the other ranks.

        Takes up to 2.5 s where there is no evidence. ``suspect`` is the rank, within this detector's group, that the
        failed operation was for.
        """
        cause = self.board.explain(str(error), suspect)
        if cause is None:
            return error
        who = cause.host if cause.rank is None else f"rank {cause.rank} on {cause.host}"
        named = TransportError(f"{who}: {cause.reason}; so {error}", **cause._asdict())
        named.__cause__ = error.__cause__ or error
        return named

    def report(self, error: BaseException) -> None:
        """Tell the other ranks which error this one has met in the present collective, for `attribute`."""
        self.board.tell(error=(line(f"{type(error).__name__}: {error}"), self.board.mine.progress))

    def attribute(self, error: PeerFailedError) -> PeerFailedError:
        """Return ``error`` with the rank that was the first to fail, and with the error that it has reported.

        A rank that another one made fail says so to others: the rank in ``error`` need not be the cause.
        """
        cause = self.board.reported_error()
        if cause is None:
            return error
        text = f"{error} (rank {cause.rank} on {cause.host}: {cause.reason})"
        return PeerFailedError(text, **cause._asdict())

    @contextlib.contextmanager
    def calling(self, what: str) -> Iterator[None]:
        """Tell the other ranks, while the body waits for them, in which call of all ranks this one is."""
        self.board.tell(call=(what, self.board.mine.progress))
        try:
            yield
        except TransportError:
            raise  # the others, whose collectives fail with this one, have yet to ask for the cause
        except Exception:
            self.board.tell(call=None)
            raise
        self.board.tell(call=None)

    def close(self, error: BaseException | None = None) -> None:
        """Announce that this rank communicates no more, because of ``error`` if there is one, and end."""
        if self._stop.detach() is not None:
            why = "detach() was called there" if error is None else f"{type(error).__name__}: {error}"
            self.board.stop(f"it communicates no more: {why}")
            if self.board.has_store:
                self.board.over.wait(_LINGER_S)


class Board:
    """Records of all ranks, by place; `run` is the thread that keeps them up to date, and alone uses the store."""

    def __init__(self, store: Any, key: str, ranks: Sequence[int], rank: int) -> None:
        self._ranks, self.rank = tuple(ranks), rank
        self._keys = [*(f"{key}/{place}" for place in range(len(ranks))), f"{key}/cause"]
        self._owner = store_rank(store)
        self._host = self._ranks.index(self._owner) if self._owner in self._ranks else None
        """Place of the rank that has the store, if one of these has it."""
        self.has_store = self._host == rank
        self._store = store
        """Store, kept until `run` ends: that of PyTorch's process groups may end with them."""
        self._client: Any = None
        scale = max(1.0, len(ranks) / _RANKS_A_BEAT)
        self._beat_s, self._look_s = _BEAT_S * scale, _LOOK_S * scale
        self.counter = itertools.count(1)
        self.mine = Record("")
        self.records: list[Record] = []
        self._heard: list[float] = []
        """Time at which each rank's count of beats last increased."""
        self._asked = self._read = 0.0
        """Times at which records were last asked for, and last read."""
        self._lost: float | None = None
        """Time at which the store was found to be gone."""
        self._found: Cause | None = None
        self._cause: Cause | None = None
        """Cause that this rank has found, and that the ranks agree on."""
        self._searched = False
        self._peer_error: tuple[int, tuple[int, str]] | None = None
        """This rank's progress when an error of another one ended its operation, that rank, and the error."""
        self._news = threading.Condition()
        """Lock on the fields above, which also wakes those that wait for them."""
        self._urgent = False
        self._ready, self.over = threading.Event(), threading.Event()
        """Events that this rank has met the others, or will not; and that `run` has ended."""

    # Methods of other threads.

    def begin(self, client: Any, records: list[Record]) -> None:
        """Let the thread begin, now that the ranks have met."""
        now = time.monotonic()
        self._client, self.records, self.mine = client, records, records[self.rank]
        self._asked, self._read, self._heard = now, now, [now] * len(records)
        self._ready.set()

    def tell(self, **what: Any) -> None:
        """Change this rank's record, and let the others know."""
        with self._news:
            vars(self.mine).update(what)
            self._hurry()

    def stop(self, reason: str) -> None:
        """End the thread after its last record, whose reason is the exception that ends the program, if one does."""
        if self._peer_error is not None and self._peer_error[0] == self.mine.progress:
            self.mine.failed = self._peer_error[1]
        crash: object = getattr(sys, "last_value", None)
        if crash is not None:
            reason = f"its program has ended with {type(crash).__name__}: {crash}"
        self.mine.ended = self.mine.ended or line(reason)
        self._ready.set()
        self.tell()

    def explain(self, text: str, suspect: int | None) -> Cause | None:
        since = time.monotonic()
        with self._news:
            if not self._searched:
                self.tell(failed=(self.rank if suspect is None else suspect, line(text)))
            while not self._searched:
                late_s = time.monotonic() - since - GRACE_S
                guess = late_s >= (0.0 if self._all_answered(since) else self._beat_s * _SILENT_BEATS)
                self._found = self._found or self._find(suspect, since, guess=guess)
                # Another rank may have found another cause: the first one in the store counts.
                if self._cut_off(since) or late_s > _REPORT_S:
                    self._cause = self._cause or self._found
                self._searched = self._cause is not None or (guess and self._found is None)
                if not self._searched:
                    self._hurry(self._look_s)
            return self._cause

    def anyone_gone(self) -> bool:
        with self._news:
            return self._gone(patience=2) is not None

    def reported_error(self) -> Cause | None:
        until = time.monotonic() + _REPORT_S
        with self._news:
            while not (found := self._present_error() or self._accusation()) and time.monotonic() < until:
                self._hurry(self._look_s)
            if found is None:
                return None
            self._peer_error = self.mine.progress, found
            return self._named(*found)

    def _hurry(self, wait_s: float = 0.0) -> None:
        """Make the thread write and read at once, and continue so for some time."""
        self._urgent = True
        self._news.notify_all()
        self._news.wait_for(lambda: False, wait_s)

    def _find(self, suspect: int | None, since: float, *, guess: bool) -> Cause | None:
        found = self._gone(since)
        if found is None and self._lost is not None:
            # Records are too old to tell which rank has fallen behind.
            found = self._accusation()
            if found is None and self._host is None:
                where = os.environ.get("MASTER_ADDR", "an unknown host")
                return Cause(self._owner, where, "PyTorch's store, which lives there, is gone")
        elif found is None and guess:
            found = self._likeliest(suspect)
        if found is None:
            return None
        if found[0] not in (self.rank, suspect):
            self.mine.failed = found
        return self._named(*found)

    def _named(self, place: int, reason: str) -> Cause:
        return Cause(self._ranks[place], self.records[place].host, reason)

    # The thread.

    def run(self) -> None:
        """Write and read records, until this rank has ended."""
        self._ready.wait()
        ended: float | None = None
        try:
            while self._client is not None:
                if self.mine.ended and ended is None:
                    ended = time.monotonic()
                self.exchange()
                with self._news:
                    if self._is_over(ended):
                        break
                    self._news.wait_for(lambda: self._urgent, self._beat_s if ended is None else self._look_s)
        except Exception:  # noqa: BLE001 - whatever it is, no record will be read any more
            self._lost = time.monotonic()
        finally:
            self._client = self._store = None
            self.over.set()

    def exchange(self) -> None:
        with self._news:
            self._urgent, self._asked = False, time.monotonic()
            self.mine.beat += 1
            mine, found = str(self.mine), self._found
        self._client.set(self._keys[self.rank], mine)
        if found is not None:
            self._client.compare_set(self._keys[-1], "", json.dumps(found))
        *records, cause = self._client.multi_get(self._keys)
        with self._news:
            now = time.monotonic()
            # After a pause this process itself was stopped: the others' heartbeats were sent, but not read.
            pause = now - self._read if now - self._read > self._beat_s * _CLOSED_BEATS else 0.0
            before, self.records = self.records, [self._read_record(*each) for each in enumerate(records)]
            self.records[self.rank] = self.mine
            for place, (old, new) in enumerate(zip(before, self.records, strict=True)):
                self._heard[place] = now if new.beat != old.beat else self._heard[place] + pause
            self._read = now
            if cause and self._cause is None:
                with contextlib.suppress(ValueError):
                    self._cause = Cause.read(cause)

    def _read_record(self, place: int, data: bytes) -> Record:
        """Return a rank's record, or the last valid one if the present one is damaged."""
        try:
            return Record.read(data, len(self.records))
        except ValueError:
            return self.records[place]

    def _is_over(self, ended: float | None) -> bool:
        """Whether to leave the store alone from now on. ``ended``: the time since which this rank has been writing that
        it has ended."""
        if self.has_store and ended is not None:
            alive = self._read - self._beat_s * _CLOSED_BEATS
            known = all(record.ended or heard < alive for record, heard in zip(self.records, self._heard, strict=True))
            return known or self._read > ended + _LINGER_S - 0.5
        if self._host is not None and not self.has_store and (reason := self.records[self._host].ended):
            # PyTorch would write the stack of a thread that uses the store once it has ended.
            self._lost = self._read
            self.mine.failed = self.mine.failed or (self._host, reason)
            self.mine.ended = self.mine.ended or "the store has ended"
            self._urgent = True
        return ended is not None

    # Conclusions from the records.

    def _cut_off(self, since: float | None) -> bool:
        """Whether the store is gone, or has not answered ``since`` some time, other than while this process slept."""
        now, pending = time.monotonic(), self._asked > self._read
        silent = pending and now - self._asked > self._beat_s * _SILENT_BEATS
        return self._lost is not None or (silent and since is not None and now - since > 1.0)

    def _all_answered(self, since: float) -> bool:
        """Whether each rank has sent a heartbeat ``since`` the failure, or said what became of it, or no answer can be
        read. On a starved machine an answer may take longer than `GRACE_S`."""
        # A heartbeat that is read soon after the failure may have been sent before it.
        sent = since + self._beat_s
        return self._cut_off(since) or all(
            record is self.mine or record.ended or self._caused(place) or heard > sent
            for place, (record, heard) in enumerate(zip(self.records, self._heard, strict=True))
        )

    def _caused(self, place: int) -> bool:
        """Whether a rank says that another one made it fail."""
        failed = self.records[place].failed
        return failed is not None and failed[0] != place

    def _closed(self) -> Collection[int]:
        """Return the ranks to which another one has lost its connection, all where it does not know to which."""
        failures = [(sender, *r.failed) for sender, r in enumerate(self.records) if r.failed is not None]
        closed = {(sender, about) for sender, about, why in failures if not _SILENCE.search(why)}
        unknown = any(sender == about for sender, about in closed)
        return range(len(self.records)) if unknown else {about for _, about in closed}

    def _gone(self, since: float | None = None, patience: int = 1) -> tuple[int, str] | None:
        """Return the rank that was the first to stop, and why; None while another one may have stopped before."""
        cut_off, all_closed, stops = self._cut_off(since), self._closed(), list[tuple[float, int, str]]()
        for place, (record, heard) in enumerate(zip(self.records, self._heard, strict=True)):
            if record is self.mine or self._caused(place):
                continue
            reason, closed, quiet_s = record.ended, place in all_closed, self._read - heard
            if place == self._host and cut_off:
                closed, heard, quiet_s = self._lost is not None, self._lost or self._asked, float("inf")
            limit = _CLOSED_BEATS if closed or cut_off else _SILENT_BEATS
            if not reason and quiet_s > self._beat_s * limit * patience:
                silence = f"no heartbeat has come from it for {time.monotonic() - heard:.1f} s"
                reason = "its process has ended" if closed else f"{silence}: it is stopped, or cut off"
            if reason or not cut_off:
                stops.append((heard, place, reason))
        # The order of ranks whose last heartbeats were less than an interval apart is unknown: any known reason counts.
        until = min(stops, default=(0.0, 0, ""))[0] + self._beat_s
        known = [(heard, place, reason) for heard, place, reason in stops if reason and heard < until]
        return min(known)[1:] if known else None

    def _likeliest(self, suspect: int | None) -> tuple[int, str] | None:
        """Return the most likely cause where no rank is certainly gone."""
        records = dict(enumerate(self.records))
        progress = {place: record.progress for place, record in records.items()}
        for place, record in records.items():
            if record.ended and record is not self.mine and not self._caused(place):
                return place, record.ended
        # A rank that accuses another one was waiting for it.
        accusers = {place for place in records if self._caused(place)}
        calls = [(place, *r.call) for place, r in records.items() if r.call is not None]
        others = sorted(records.keys() - {place for place, _, _ in calls})
        # Ranks that have gone on to something else will not join the call; ones that are behind may.
        if calls and others and 2 * len(calls) <= len(records) and all(progress[o] > calls[0][2] for o in others):
            missing = ", ".join(str(self._ranks[place]) for place in others)
            return calls[0][0], f"it is in {calls[0][1]}, which all ranks must call, and rank {missing} has not"
        last = min(progress, key=lambda place: (progress[place], place in accusers, place))
        if progress[last] < max(progress.values()):
            return last, (
                f"it is alive, and has begun {progress[last]} collectives where others have begun "
                f"{max(progress.values())}: it is stuck or late"
            )
        accused = [r.failed[0] for place, r in records.items() if r.failed is not None and place in accusers]
        votes = Counter([place for place in accused if place not in accusers] or accused)
        if votes:
            return votes.most_common(1)[0][0], "it is alive, and its connections are broken"
        return None if suspect is None else (suspect, "it did not answer")

    def _accusation(self) -> tuple[int, str] | None:
        """Return the failure of a rank by another one, which has not failed because of a third."""
        for place, record in enumerate(self.records):
            if record is not self.mine and record.failed and self._caused(place) and not self._caused(record.failed[0]):
                return record.failed
        return None

    def _present_error(self) -> tuple[int, str] | None:
        """Return the first error that a rank has met in the collectives that are under way."""
        errors = [(r.error[1], place, r.error[0]) for place, r in enumerate(self.records) if r.error is not None]
        errors = [e for e in errors if e[1] != self.rank and e[0] >= self.mine.progress - _UNDER_WAY]
        return min(errors)[1:] if errors else None


def announce_error(store: Any, key: str, rank: int, error: Exception) -> None:
    """Make the ranks that call, or will call, `FailureDetector.connect` raise at once: this one will not join."""
    with contextlib.suppress(RuntimeError):
        store.set(f"{key}/{rank}", str(Record(socket.gethostname(), line(f"{type(error).__name__}: {error}"))))


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
                _within(timedelta(seconds=_LINGER_S), lambda: _leave(store, key, ranks, rank, failed))
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
        TransportError: it takes longer than ``timeout`` and a second.
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
            store.wait(others, timedelta(seconds=_LINGER_S))
