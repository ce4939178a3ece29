"""Two threads that do a Wire's communication, in the order in which DDP hands it over."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable, Generator
from concurrent.futures import Future as ConcurrentFuture
from enum import Enum

import torch
from torch import Tensor


class Then(Enum):
    """What a job yields when it leaves the first thread."""

    LATER = "later"
    """The second thread does the rest, after the jobs before it; the first goes on with the next job."""
    ALONE = "alone"
    """The same, but no other job is begun before this one has ended."""


Job = Generator[Then, None, Tensor]
_Queue = queue.SimpleQueue[Callable[[], None] | None]


class Worker:
    """Two FIFO threads: one encodes a bucket and sends it off, the other receives, sums and decodes.

    So the next bucket is on its way while the last one is still awaited, and the link never waits for arithmetic.
    Phases are never chained in callbacks: those run in an order that differs between ranks. The threads do not keep
    their Wire alive, and end with it; they are daemons, so that a rank that waits for a dead peer can still exit.
    """

    def __init__(self, name: str, num_threads: int | None = None) -> None:
        self._first: _Queue = queue.SimpleQueue()
        self._second: _Queue = queue.SimpleQueue()
        self._unfinished = 0
        self._idle = threading.Condition()
        num_threads = num_threads or torch.get_num_threads()
        for jobs, suffix in ((self._first, "send"), (self._second, "receive")):
            thread = threading.Thread(target=_run, args=(jobs, num_threads), name=f"{name} {suffix}", daemon=True)
            thread.start()
        self._stop = weakref.finalize(self, _end, self._first, self._second)

    def submit(self, job: Job) -> torch.futures.Future[Tensor]:
        """Run ``job`` after all jobs before it; the future gets what it returns, or its exception."""
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        second = self._second
        with self._idle:
            self._unfinished += 1

        def begin() -> None:
            then = self._advance(job, future)
            if then is Then.LATER:
                second.put(finish)
            elif then is Then.ALONE:
                ended = threading.Event()
                second.put(finish)
                second.put(ended.set)
                ended.wait()

        def finish() -> None:
            while self._advance(job, future) is not None:
                pass

        self._first.put(begin)
        return future

    def call(self, job: Callable[[], object]) -> None:
        """Run ``job`` alone, after all jobs before it, and wait for it. Its exception is raised here."""
        done: ConcurrentFuture[None] = ConcurrentFuture()

        def whole() -> Job:
            yield Then.ALONE
            try:
                job()
            except Exception as error:  # noqa: BLE001 - raised in the caller
                done.set_exception(error)
            else:
                done.set_result(None)
            return torch.empty(0)

        self.submit(whole())
        done.result()

    def wait_idle(self) -> None:
        """Wait until all jobs have ended, well or not."""
        with self._idle:
            self._idle.wait_for(lambda: not self._unfinished)

    def close(self) -> None:
        """End the threads after the jobs already handed over."""
        self._stop()

    def _advance(self, job: Job, future: torch.futures.Future[Tensor]) -> Then | None:
        """Run a job to where it yields; None if it has ended, and the future knows how."""
        try:
            return next(job)
        except StopIteration as end:
            tell: Callable[..., None] = future.set_result
            outcome = end.value
        except Exception as error:  # noqa: BLE001 - it belongs to whoever waits for the future
            tell, outcome = future.set_exception, error
        with self._idle:
            self._unfinished -= 1
            self._idle.notify_all()
        tell(outcome)
        return None


def _run(jobs: _Queue, num_threads: int) -> None:
    # OpenMP keeps the number of threads per calling thread: without this the worker would take all cores.
    torch.set_num_threads(num_threads)
    while (job := jobs.get()) is not None:
        job()
        # Or the last job, and through it a bucket, lives until the next one comes.
        del job


def _end(first: _Queue, second: _Queue) -> None:
    # The second ends after what the first has still to hand over.
    first.put(lambda: second.put(None))
    first.put(None)
