"""Daemon threads that are asked to end, and joined, when the interpreter ends.

A daemon thread in PyTorch's C++ that wants the interpreter back while that is ending aborts the whole process
("terminate called without an active exception"): the interpreter ends the thread, through destructors that must not be
left. A training whose last step has just ended is such a moment.
"""

from __future__ import annotations

import atexit
import math
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch

GRACE_S = 1.0
_T = TypeVar("_T")


@dataclass(frozen=True)
class _End:
    tell: Callable[[], object]
    within_s: float


_started: weakref.WeakKeyDictionary[threading.Thread, _End] = weakref.WeakKeyDictionary()


def start(
    run: Callable[[], object], *, name: str, end: Callable[[], object], within_s: float = GRACE_S
) -> threading.Thread:
    """Start a daemon thread.

    Args:
        run: the thread's function.
        name: its name in debuggers and profilers.
        end: tells it to end, soon and without waiting for it. Called when the interpreter ends; before that, by the one
            that started it.
        within_s: seconds that the interpreter then waits for it; a thread that waits for a dead peer is left behind.
    """
    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    _started[thread] = _End(end, within_s)
    return thread


class Worker:
    """Runs jobs one after the other, in a daemon thread that starts with the first, or with `start`.

    The thread does not keep the worker alive. It ends, after the jobs that it was given, with `close`, with the worker
    or with the interpreter. PyTorch computes in it with as many threads as in the one that makes the worker.

    Args:
        name: the thread's name in debuggers and profilers.
        max_bytes: memory that jobs may keep together (one larger job runs alone): `submit` waits until there is room
            for a job that keeps any.
        after: the worker whose jobs add to this one's, which ends when that one has ended.
        within_s: seconds that the interpreter then waits for it.
    """

    def __init__(
        self, name: str, *, max_bytes: float = math.inf, after: Worker | None = None, within_s: float = GRACE_S
    ) -> None:
        self._jobs = _Jobs()
        self._name, self._num_threads, self._max_bytes = name, torch.get_num_threads(), max_bytes
        if after is not None:
            after._jobs.last = self._jobs
        self._end, self._within_s = weakref.finalize(self, (after or self)._jobs.close), within_s
        self.thread: threading.Thread | None = None

    @property
    def closed(self) -> bool:
        """Whether the worker takes no more jobs."""
        return self._jobs.closed

    @property
    def held_bytes(self) -> int:
        """Bytes of memory of the jobs that have not ended."""
        return self._jobs.held_bytes

    def submit(self, job: Callable[[], _T], num_bytes: int = 0) -> Future[_T]:
        """Add a job, which keeps ``num_bytes`` until it has ended. Its result, or error, is in the future.

        Raises:
            RuntimeError: the worker is closed.
        """
        jobs, future = self._jobs, Future()
        with jobs.changed:
            jobs.changed.wait_for(
                lambda: not (num_bytes and jobs.held_bytes) or jobs.held_bytes + num_bytes <= self._max_bytes
            )
            if jobs.closed:
                raise RuntimeError(f"{self._name}: closed")
            self.start()
            jobs.waiting.append(_Submitted(job, num_bytes, future))
            jobs.held_bytes += num_bytes
            jobs.unfinished += 1
            jobs.changed.notify_all()
        return future

    def start(self) -> None:
        """Start the thread, if it has not been started: so that a process that is short of threads says so here."""
        with self._jobs.changed:
            if self.thread is None:
                run = partial(self._jobs.run, self._num_threads)
                self.thread = start(run, name=self._name, end=self._end, within_s=self._within_s)
                self._jobs.started = True

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait, after `close`, for the thread to end, for so long at most; return whether it has."""
        if self.thread is not None:
            self.thread.join(timeout_s)
        return self.thread is None or not self.thread.is_alive()

    def wait(self) -> None:
        """Wait until all jobs have ended, whether they failed or not."""
        with self._jobs.changed:
            self._jobs.changed.wait_for(lambda: not self._jobs.unfinished)

    def close(self) -> None:
        """Take no more jobs; those that were given are finished."""
        self._end()


class _Submitted(NamedTuple):
    job: Callable[[], Any]
    num_bytes: int
    future: Future[Any]


class _Jobs:
    """State that a worker shares with its thread."""

    def __init__(self) -> None:
        self.waiting: deque[_Submitted] = deque()
        self.changed = threading.Condition()
        self.unfinished = self.held_bytes = 0
        self.started = self.closed = False
        self.last: _Jobs | None = None
        """Jobs of the worker that ends after this one."""

    def close(self) -> None:
        with self.changed:
            self.closed = True
            self.changed.notify_all()
        if not self.started and self.last is not None:
            self.last.close()

    def run(self, num_threads: int) -> None:
        # OpenMP's number of threads is per calling thread: this one would take all cores.
        torch.set_num_threads(num_threads)
        while (submitted := self._next()) is not None:
            try:
                submitted.future.set_result(submitted.job())
            except BaseException as error:  # noqa: BLE001 - raised where the result is asked for
                submitted.future.set_exception(error)
            num_bytes = submitted.num_bytes
            # Otherwise the job, and its memory, would live until the next one.
            del submitted
            with self.changed:
                self.unfinished -= 1
                self.held_bytes -= num_bytes
                self.changed.notify_all()
        if self.last is not None:
            self.last.close()

    def _next(self) -> _Submitted | None:
        with self.changed:
            self.changed.wait_for(lambda: self.waiting or self.closed)
            return self.waiting.popleft() if self.waiting else None


@atexit.register
def _end_all() -> None:
    # In a child that was forked, its parent's threads are not alive. One that ends may start another: the last to hold
    # a handle closes its connections in a thread of their own.
    told: set[threading.Thread] = set()
    while alive := [(t, end) for t, end in list(_started.items()) if t.is_alive() and t not in told]:
        now = time.monotonic()
        for thread, end in alive:
            end.tell()
            told.add(thread)
        for thread, end in alive:
            thread.join(max(0.0, now + end.within_s - time.monotonic()))
