"""One thread that does a Wire's communication, in the order in which DDP hands it over."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future as ConcurrentFuture

import torch
from torch import Tensor


class Worker:
    """A FIFO thread. Phases are never chained in callbacks: those run in an order that differs between ranks.

    The thread does not keep its Wire alive, and ends with it; it is a daemon, so that a rank that waits for a dead peer
    can still exit.
    """

    def __init__(self, name: str, num_threads: int | None = None) -> None:
        jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._jobs = jobs
        num_threads = num_threads or torch.get_num_threads()
        self._thread = threading.Thread(target=_run, args=(jobs, num_threads), name=name, daemon=True)
        self._thread.start()
        self._stop = weakref.finalize(self, jobs.put, None)

    def submit(self, job: Callable[[], Tensor]) -> torch.futures.Future[Tensor]:
        """Run ``job`` after all jobs before it; the future gets its result, or its exception."""
        future: torch.futures.Future[Tensor] = torch.futures.Future()

        def run() -> None:
            try:
                result = job()
            except Exception as error:  # noqa: BLE001 - it belongs to whoever waits for the future
                future.set_exception(error)  # pyright: ignore[reportArgumentType]
            else:
                future.set_result(result)

        self._jobs.put(run)
        return future

    def call(self, job: Callable[[], object], timeout_s: float | None = None) -> None:
        """Run ``job`` after all jobs before it, and wait for it. Its exception is raised here."""
        done: ConcurrentFuture[None] = ConcurrentFuture()

        def run() -> None:
            try:
                job()
            except Exception as error:  # noqa: BLE001 - raised in the caller
                done.set_exception(error)
            else:
                done.set_result(None)

        self._jobs.put(run)
        done.result(timeout_s)

    def close(self) -> None:
        """End the thread after the jobs already handed over."""
        self._stop()


def _run(jobs: queue.SimpleQueue[Callable[[], None] | None], num_threads: int) -> None:
    # OpenMP keeps the number of threads per calling thread: without this the worker would take all cores.
    torch.set_num_threads(num_threads)
    while (job := jobs.get()) is not None:
        job()
        # Or the last job, and through it a bucket, lives until the next one comes.
        del job
