"""Work beside the stream that runs backward, and values that the host learns later. On a CPU both happen at once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor

from thinwire.wire.worker import Job


class StreamWorker:
    """Does a Wire's communication in the thread that hands it over, on a stream of its own beside the current one.

    A job runs to its end as far as the host is concerned; the device goes through it later, after what the current
    stream had to do when the job came, and the future tells whoever waits for it to wait on the device. It takes the
    place of a `Worker` and of its threads: kernels and collectives are only enqueued. On a CPU there are no streams,
    and a job simply runs.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # Of high priority: a message that leaves early is worth more than a kernel of backward that starts early.
        self._stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None

    def submit(self, job: Job) -> torch.futures.Future[Tensor]:
        """Enqueue ``job``; the future gets what it returns, or its exception."""
        future: torch.futures.Future[Tensor]
        # The list of devices makes the future note the streams on which its result is made.
        future = torch.futures.Future(devices=[self._device]) if self._stream else torch.futures.Future()
        tell: Callable[..., None] = future.set_result
        with self._beside():
            try:
                outcome = _whole(job)
            except Exception as error:  # noqa: BLE001 - it belongs to whoever waits for the future
                tell, outcome = future.set_exception, error
            tell(outcome)
        return future

    def call(self, job: Callable[[], object]) -> None:
        """Run ``job`` after all before it; what the current stream does next comes after it. Raises what it raises."""
        with self._beside():
            job()
        if self._stream:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def wait_idle(self) -> None:
        """Nothing to wait for: what writes to a bucket next is enqueued behind what was enqueued before."""

    def close(self) -> None:
        """Nothing to end."""

    @contextmanager
    def _beside(self) -> Iterator[None]:
        # Backward may have been called inside autocast, which would make factors and sums of 16 bits.
        with on_the_host(), torch.autocast("cuda" if self._stream else "cpu", enabled=False):
            if self._stream is None:
                yield
                return
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(self._stream):
                yield


def _whole(job: Job) -> Tensor:
    while True:
        try:
            next(job)
        except StopIteration as end:
            return end.value


def on_the_host() -> AbstractContextManager[object]:
    """Inside, a tensor that is made without a device is on the CPU, whatever `torch.set_default_device` says."""
    return nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu")


class Later:
    """Small tensors that a device computes, for the host to read once they are there, without stopping it before."""

    def __init__(self) -> None:
        self._noted: list[tuple[Tensor, torch.cuda.Event | None]] = []

    def note(self, values: Tensor) -> None:
        """Send ``values`` to the host when the current stream has computed them."""
        here = values.to("cpu", non_blocking=True)  # into pinned memory, where PyTorch puts it by itself
        event = None
        if values.is_cuda:
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(values.device))
        self._noted.append((here, event))

    def read(self) -> list[Tensor]:
        """What was noted since the last call. Waits for what is not there yet."""
        noted, self._noted = self._noted, []
        for _, event in noted:
            if event is not None:
                event.synchronize()
        return [values for values, _ in noted]


def elapsed(run: Callable[[], object], device: torch.device) -> float:
    """Seconds that ``run`` takes: on a device, its work there, as its own clock has it."""
    if device.type != "cuda":
        started = time.perf_counter()
        run()
        return time.perf_counter() - started
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    stream = torch.cuda.current_stream(device)
    first.record(stream)
    run()
    last.record(stream)
    last.synchronize()
    return first.elapsed_time(last) / 1e3
