"""Threads that do a Wire's communication, and Python's part of others', in the order in which it is handed over."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable, Generator
from concurrent.futures import Future as ConcurrentFuture
from enum import Enum
from functools import partial
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire import threads


class Then(Enum):
    """What a job yields when it leaves the first thread."""

    LATER = "later"
    """The second thread does the rest, after the jobs before it; the first goes on with the next job."""
    ALONE = "alone"
    """The same, but no other job is begun before this one has ended."""


Job = Generator[Then, None, Tensor]
_Queue = queue.SimpleQueue[Callable[[], None] | None]
_T = TypeVar("_T")


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
        self._stop = weakref.finalize(self, _end, self._first, self._second)
        for jobs, suffix in ((self._first, "send"), (self._second, "receive")):
            threads.start(partial(_run, jobs, num_threads), name=f"{name} {suffix}", end=self._stop)

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


class Follower:
    """A thread that runs Python once a collective under way has ended; it starts with the first.

    gloo's own threads must not: nobody can wait for them when the interpreter ends (`thinwire.threads`). One follower
    is for one process group, whose collectives all ranks start in one order.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: _Queue | None = None

    def follow(self, work: dist.Work, result: Callable[[], _T]) -> torch.futures.Future[_T]:
        """A future with what ``result`` returns once ``work`` has ended. What either raises, waiting for it raises."""
        if self._jobs is None:
            self._jobs = queue.SimpleQueue()
            stop = weakref.finalize(self, self._jobs.put, None)
            threads.start(partial(_run, self._jobs, torch.get_num_threads()), name=self._name, end=stop)
        ended: torch.futures.Future[None] = torch.futures.Future()
        # DDP's reducer takes an exception that was set for a result; one that a callback raises it raises.
        outcome = ended.then(lambda done: _outcome(done, result))

        def wait() -> None:
            try:
                work.wait()
            except Exception as error:  # noqa: BLE001 - it belongs to whoever waits for the future
                ended.set_exception(error)  # pyright: ignore[reportArgumentType]
            else:
                ended.set_result(None)

        self._jobs.put(wait)
        return outcome

    def mean(self, flat: Tensor, group: dist.ProcessGroup) -> torch.futures.Future[Tensor]:
        """Replace ``flat`` by its mean over the group's ranks, by the all-reduce that stock DDP does."""
        work = dist.all_reduce(flat.div_(group.size()), group=group, async_op=True)
        assert work is not None
        if flat.device.type != "cpu":
            # What a device still has to do does not hold its future up: this runs here and now.
            return work.get_future().then(lambda future: future.value()[0])
        return self.follow(work, lambda: flat)


def _outcome(ended: torch.futures.Future[None], result: Callable[[], _T]) -> _T:
    ended.value()
    return result()


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
