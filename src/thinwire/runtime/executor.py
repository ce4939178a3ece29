"""Executors of communication: two threads next to the training loop, or a stream next to the one that runs backward."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future as ConcurrentFuture
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.collectives import FailureDetector, Pending, PendingWork
from thinwire.compat import group_timeout, makes_on_the_host
from thinwire.threads import Worker

CLOSED = (
    "closed: after detach() (or the end of the process group) nothing is sent any more. Call state_dict() before, or "
    "compress the model again"
)

_T = TypeVar("_T")


class Job(ABC):
    """Work in two parts: the second may wait for other ranks, and the first of the next job goes on meanwhile."""

    def begin(self) -> bool:
        """Prepare the first part; return whether both parts must run while no other job is under way."""
        return False

    @abstractmethod
    def start(self) -> None:
        """Run the first part."""

    @abstractmethod
    def finish(self) -> Tensor:
        """Run the second part, after those of all jobs before it."""


class Alone(Job, Generic[_T]):
    """A call that runs while no other job is under way."""

    def __init__(self, run: Callable[[], _T]) -> None:
        self._run = run
        self.done: ConcurrentFuture[_T] = ConcurrentFuture()
        """Future of the call's result or error."""

    def begin(self) -> bool:
        return True

    def start(self) -> None:
        try:
            self.done.set_result(self._run())
        except Exception as error:  # noqa: BLE001 - raised in the caller
            self.done.set_exception(error)

    def finish(self) -> Tensor:
        return torch.empty(0, dtype=torch.float32, device="cpu")


class Executor(ABC):
    """Runs a Wire's communication, job after job, in the order in which all ranks submit it."""

    @abstractmethod
    def submit(self, job: Job) -> torch.futures.Future[Tensor]:
        """Run ``job`` after all jobs before it; the future gets its result, or its exception.

        Raises:
            RuntimeError: the executor is closed.
        """

    @abstractmethod
    def call(self, job: Callable[[], _T]) -> _T:
        """Run ``job`` alone, after all jobs before it; return its result, or raise its error.

        Raises:
            RuntimeError: the executor is closed.
        """

    @abstractmethod
    def wait_idle(self) -> None:
        """Wait until all jobs have ended, whether they failed or not."""

    @abstractmethod
    def close(self) -> None:
        """Accept no more jobs; those submitted are finished."""

    @abstractmethod
    def join(self, timeout_s: float) -> bool:
        """Wait after `close`, at most ``timeout_s``, until nothing runs; return whether that is so. Not from a job."""

    @property
    def on_own_thread(self) -> bool:
        """Whether the calling thread is one of the executor's own."""
        return False


class ThreadExecutor(Executor):
    """Two FIFO threads: one encodes a bucket and sends it off, the other receives, sums and decodes.

    So the next bucket is on its way while the last one is still awaited, and the link never waits for arithmetic.
    Phases are never chained in callbacks: those run in an order that differs between ranks. The threads do not keep
    their Wire alive, and end with it; they are daemons, so that a rank that waits for a dead peer can still exit.
    """

    def __init__(self, name: str) -> None:
        self._unfinished = 0
        self._idle = threading.Condition()
        self._first = Worker(f"{name} send")
        self._second = Worker(f"{name} receive", after=self._first)
        for worker in (self._first, self._second):
            worker.start()

    def submit(self, job: Job) -> torch.futures.Future[Tensor]:
        if self._first.closed:
            raise RuntimeError(CLOSED)
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        with self._idle:
            self._unfinished += 1

        def begin() -> None:
            try:
                alone = job.begin()
                if not alone:
                    job.start()
            except BaseException as error:  # noqa: BLE001 - the future raises it
                self._end(future.set_exception, error)
                return
            ended = self._second.submit(partial(finish, alone))
            if alone:
                ended.result()

        def finish(alone: bool) -> None:
            tell: Callable[..., None] = future.set_result
            try:
                if alone:
                    job.start()
                outcome: object = job.finish()
            except BaseException as error:  # noqa: BLE001 - the future raises it
                tell, outcome = future.set_exception, error
            self._end(tell, outcome)

        try:
            self._first.submit(begin)
        except RuntimeError:
            with self._idle:
                self._unfinished -= 1
            raise RuntimeError(CLOSED) from None
        return future

    def call(self, job: Callable[[], _T]) -> _T:
        alone = Alone(job)
        self.submit(alone)
        return alone.done.result()

    def wait_idle(self) -> None:
        with self._idle:
            self._idle.wait_for(lambda: not self._unfinished)

    def close(self) -> None:
        self._first.close()

    @property
    def on_own_thread(self) -> bool:
        return threading.current_thread() in (self._first.thread, self._second.thread)

    def join(self, timeout_s: float) -> bool:
        end = time.monotonic() + timeout_s
        return self._first.join(timeout_s) and self._second.join(max(0.0, end - time.monotonic()))

    def _end(self, tell: Callable[..., None], outcome: object) -> None:
        with self._idle:
            self._unfinished -= 1
            self._idle.notify_all()
        tell(outcome)


class Follower:
    """A thread that runs Python code once a collective has ended; it starts with the first one.

    gloo's own threads must not: nobody can wait for them when the interpreter ends (`thinwire.threads`). One follower
    is for one process group, whose collectives all ranks start in one order.
    """

    def __init__(self, name: str) -> None:
        self._worker = Worker(name)
        self._shared: Worker | None = None

    def share(self, executor: ThreadExecutor) -> None:
        """Use the second thread of ``executor`` in place of one more, until that is closed."""
        self._shared = executor._second

    def follow(self, work: Any, result: Callable[[], _T], *, on_host: bool = True) -> torch.futures.Future[_T]:
        """Return a future with what ``result`` returns once ``work``, a `Pending`, has ended. It raises what either
        raises. Unless ``on_host``, ``work`` is a device's, of PyTorch.

        For a communication hook of DDP, see `for_reducer`.
        """
        if not on_host:
            # The future does not wait for the device: the callback runs here and now.
            return work.get_future().then(lambda ended: (ended.value(), result())[1])
        future: torch.futures.Future[_T] = torch.futures.Future()

        def wait() -> None:
            try:
                work.wait()
                outcome = result()
            except Exception as error:  # noqa: BLE001 - the future raises it
                future.set_exception(error)  # pyright: ignore[reportArgumentType]
            else:
                future.set_result(outcome)

        worker = self._worker if self._shared is None or self._shared.closed else self._shared
        worker.submit(wait)
        return future

    def mean(
        self, flat: Tensor, group: dist.ProcessGroup, detector: FailureDetector | None = None
    ) -> torch.futures.Future[Tensor]:
        """Replace ``flat`` by its mean over the group's ranks, by the all-reduce that stock DDP does.

        The future raises `TransportError` if a rank is gone or silent, with its name where ``detector`` knows it.
        """
        if detector is not None:
            detector.advance()
        work = _start_mean(flat, group)
        if flat.device.type != "cpu":
            return self.follow(work, lambda: flat, on_host=False)
        return self.follow(PendingWork(work, "the all-reduce", group_timeout(group), detector=detector), lambda: flat)


def start_mean(flat: Tensor, group: dist.ProcessGroup) -> Pending:
    """Start what `Follower.mean` does, for a caller that waits for it in its own thread."""
    return PendingWork(_start_mean(flat, group), "the all-reduce", group_timeout(group))


def _start_mean(flat: Tensor, group: dist.ProcessGroup) -> dist.Work:
    work = dist.all_reduce(flat.div_(group.size()), group=group, async_op=True)
    assert work is not None
    return work


def followed_by(
    future: torch.futures.Future[_T], job: Callable[[_T], _T], device: torch.device
) -> torch.futures.Future[_T]:
    """Return a future with what ``job`` returns when it is called with the result of ``future``, which is on
    ``device``. It raises what either raises, with its own type, which errors of a callback of ``then()`` would lose."""
    followed: torch.futures.Future[_T]
    followed = torch.futures.Future(devices=[device] if device.type == "cuda" else None)

    def end(_: object) -> None:
        try:
            result = job(future.value())
        except Exception as error:  # noqa: BLE001 - the future raises it
            followed.set_exception(error)  # pyright: ignore[reportArgumentType]
        else:
            followed.set_result(result)

    future.add_done_callback(end)
    return followed


def together(parts: Sequence[torch.futures.Future[Tensor]], flat: Tensor) -> torch.futures.Future[Tensor]:
    """Return the future of ``flat``, of whose parts ``parts`` are the futures: they come in this order."""

    def end(_: Tensor) -> Tensor:
        for part in parts:
            part.value()  # raises its error
        return flat

    return followed_by(parts[-1], end, flat.device)


def for_reducer(future: torch.futures.Future[_T]) -> torch.futures.Future[_T]:
    """Return ``future`` in a form for DDP's reducer, which takes an exception set from Python for the result, but one
    that a callback raises for an error: a ``RuntimeError`` with the exception's text."""
    return future.then(lambda ended: ended.value())


class Work(dist.Work):
    """PyTorch's handle of a collective, which is complete when all ``futures`` are: thinwire's, and gloo's for tensors
    that are not compressed.

    Its own future completes without a call of `wait`, as DistributedDataParallel needs. Errors are raised by `wait` and
    by waiting for the future.
    """

    def __init__(self, futures: Sequence[torch.futures.Future], outputs: Any) -> None:
        super().__init__()
        self._futures, self._outputs = futures, outputs

    def wait(self, timeout: object = None) -> bool:
        """Block until it is done. ``timeout`` is ignored: every message has the timeout of the process group."""
        for future in self._futures:
            future.wait()
        return True

    def get_future(self) -> torch.futures.Future:
        def outputs(ended: torch.futures.Future) -> Any:
            # DDP's reducer sees exceptions that a callback raises, but not those that Python sets on a future: it would
            # read a result out of the latter.
            for future in self._futures if len(self._futures) > 1 else (ended,):
                future.value()
            return self._outputs

        several = len(self._futures) > 1
        return (torch.futures.collect_all(list(self._futures)) if several else self._futures[0]).then(outputs)

    def result(self) -> Any:
        return self._outputs

    def is_completed(self) -> bool:
        return all(future.done() for future in self._futures)

    def is_success(self) -> bool:
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        """Return the error of a collective that is done; None if it has none or is not done."""
        try:
            if self.is_completed():
                self.wait()
        except Exception as error:  # noqa: BLE001 - returned
            return error
        return None


class StreamExecutor(Executor):
    """Runs a Wire's communication in the thread that submits it, on a stream of its own next to the current one.

    A job runs to its end as far as the host is concerned; the device runs it later, after the work that the current
    stream had when the job came, and a wait for the future is a wait on the device. It takes the place of a
    `ThreadExecutor` and of its threads: kernels and collectives are only enqueued. On a CPU there are no streams, and a
    job simply runs.
    """

    def __init__(self, device: torch.device, *, own_stream: bool = True) -> None:
        """``own_stream``: whether jobs run on a stream of their own, or on the current one, as FSDP2 expects."""
        self._device, self._closed = device, False
        # The priority is high: a message that leaves early is worth more than a kernel of backward that starts early.
        own_stream = own_stream and device.type == "cuda"
        self._stream = torch.cuda.Stream(device, priority=-1) if own_stream else None

    def submit(self, job: Job) -> torch.futures.Future[Tensor]:
        future: torch.futures.Future[Tensor]
        # The list of devices makes the future note the streams on which its result is made.
        future = torch.futures.Future(devices=[self._device] if self._device.type == "cuda" else None)
        tell: Callable[..., None] = future.set_result
        with self._on_comm_stream():
            try:
                job.begin()
                job.start()
                outcome: object = job.finish()
            except Exception as error:  # noqa: BLE001 - the future raises it
                tell, outcome = future.set_exception, error
            tell(outcome)
        return future

    def call(self, job: Callable[[], _T]) -> _T:
        with self._on_comm_stream():
            result = job()
        if self._stream:
            # Later work of the current stream comes after it.
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
        return result

    def wait_idle(self) -> None:
        """Return at once: what writes to a bucket next is enqueued behind what was enqueued before."""

    def close(self) -> None:
        self._closed = True

    def join(self, timeout_s: float) -> bool:
        """Return True: jobs end in the call that submits them."""
        return True

    @contextmanager
    def _on_comm_stream(self) -> Iterator[None]:
        # Backward may have been called inside autocast, which would make factors and sums of 16 bits.
        if self._closed:
            raise RuntimeError(CLOSED)
        with on_the_host(), torch.autocast("cuda" if self._device.type == "cuda" else "cpu", enabled=False):
            if self._stream is None:
                yield
                return
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(self._stream):
                yield


def on_the_host() -> AbstractContextManager[object]:
    """Return a context in which tensors without a given device are on the CPU, despite `torch.set_default_device`."""
    return nullcontext() if makes_on_the_host() else torch.device("cpu")


class AsyncReadback:
    """Small tensors that a device computes, for the host to read once they have arrived, without stopping it before."""

    def __init__(self) -> None:
        self._noted: list[tuple[Tensor, torch.cuda.Event | None]] = []

    def __len__(self) -> int:
        """Return the number of tensors noted since the last call of `read`."""
        return len(self._noted)

    def note(self, values: Tensor) -> None:
        """Send ``values`` to the host when the current stream has computed them."""
        here = values.to("cpu", non_blocking=True)  # into pinned memory, where PyTorch puts it by itself
        event = None
        if values.is_cuda:
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(values.device))
        self._noted.append((here, event))

    def read(self) -> list[Tensor]:
        """Return the tensors noted since the last call. Waits for those that have not arrived yet."""
        noted, self._noted = self._noted, []
        for _, event in noted:
            if event is not None:
                event.synchronize()
        return [values for values, _ in noted]

    def read_finite(self) -> bool:
        """Return whether all values noted since the last call are finite."""
        return all(bool(torch.isfinite(values)) for values in self.read())


@dataclass(frozen=True)
class Mark:
    """A moment of the host's clock, or of a device's: that at which a stream there comes to it."""

    at: float | torch.cuda.Event

    def since(self, earlier: Mark) -> float:
        """Return the seconds from ``earlier`` to this mark of the same clock. Waits until a device has come to both."""
        if isinstance(self.at, torch.cuda.Event):
            assert isinstance(earlier.at, torch.cuda.Event)
            for event in (earlier.at, self.at):
                event.synchronize()
            return earlier.at.elapsed_time(self.at) / 1e3
        assert not isinstance(earlier.at, torch.cuda.Event)
        return self.at - earlier.at


def mark(device: torch.device) -> Mark:
    """Return a mark of now, or of when the device's current stream has done what it was given so far."""
    if device.type != "cuda":
        return Mark(time.perf_counter())
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return Mark(event)


def elapsed(run: Callable[[], object], device: torch.device) -> float:
    """Return the seconds that ``run`` takes: on a device, those of its work there, by the device's clock."""
    first = mark(device)
    run()
    return mark(device).since(first)
