"""One thread that reads ahead and writes behind, in order, with bounded memory."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from thinwire import threads
from thinwire.store.errors import StoreError

_LAST_WRITES_S = 10.0


class Background:
    """Runs jobs one after the other, in a thread that starts with the first. The error of a job is raised by the next
    call.

    Pending jobs hold at most ``max_bytes`` together (one larger job runs alone): `submit` blocks until there is room.
    """

    def __init__(self, max_bytes: int = 256 << 20) -> None:
        self._max_bytes = max_bytes
        self._jobs: deque[tuple[Callable[[], None], int]] = deque()
        self._changed = threading.Condition()
        self._held = 0
        self._busy = False
        self._closed = False
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    @property
    def held_bytes(self) -> int:
        """Memory of the jobs that are not done."""
        return self._held

    def submit(self, job: Callable[[], None], num_bytes: int = 0) -> None:
        """Add a job, which holds ``num_bytes`` of memory until it is done.

        Raises:
            StoreError: An earlier job failed.
        """
        with self._changed:
            self._raise()
            if self._closed:
                raise StoreError("this store is closed: make another stage to go on")
            if self._thread is None:
                self._thread = threads.start(self._run, name="thinwire store", end=self.end, within_s=_LAST_WRITES_S)
            while self._held and self._held + num_bytes > self._max_bytes and self._error is None:
                self._changed.wait()
            self._raise()
            self._jobs.append((job, num_bytes))
            self._held += num_bytes
            self._changed.notify_all()

    def wait(self) -> None:
        """Block until all jobs are done. Raises as `submit` does."""
        with self._changed:
            while (self._jobs or self._busy) and self._error is None:
                self._changed.wait()
            self._raise()

    def close(self) -> None:
        """Finish all jobs and end the thread. Errors are not raised any more."""
        self.end()
        if self._thread is not None:
            self._thread.join()

    def end(self) -> None:
        """Let the thread end once all jobs are done, without waiting for it."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _raise(self) -> None:
        if self._error is not None:
            raise StoreError(f"the message store failed: {self._error}") from self._error

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._jobs and not self._closed:
                    self._changed.wait()
                if not self._jobs or self._error is not None:
                    return
                job, num_bytes = self._jobs.popleft()
                self._busy = True
            try:
                job()
            except BaseException as error:  # noqa: BLE001 - raised in the thread that submits
                with self._changed:
                    self._error = error
            del job  # while the thread waits for the next one, nothing may live on that only this one needed
            with self._changed:
                self._held -= num_bytes
                self._busy = False
                self._changed.notify_all()
