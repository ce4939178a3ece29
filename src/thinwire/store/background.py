"""The thread that reads records ahead and writes them behind, with bounded memory."""

from __future__ import annotations

from collections.abc import Callable

from thinwire.store.errors import StoreError
from thinwire.threads import Worker

_LAST_WRITES_S = 10.0


class Background:
    """Runs jobs one after the other in a thread. The error of a job is raised by the next call.

    Pending jobs keep at most ``max_bytes`` together (one larger job runs alone): `submit` blocks until there is room.
    """

    def __init__(self, max_bytes: int = 256 << 20) -> None:
        self._worker = Worker("thinwire store", max_bytes=max_bytes, within_s=_LAST_WRITES_S)
        self._error: Exception | None = None

    @property
    def held_bytes(self) -> int:
        """Bytes of memory of the jobs that are not done."""
        return self._worker.held_bytes

    def submit(self, job: Callable[[], None], num_bytes: int = 0) -> None:
        """Add a job, which keeps ``num_bytes`` of memory until it is done.

        Raises:
            StoreError: An earlier job failed.
        """

        def run() -> None:
            if self._error is None:
                try:
                    job()
                except Exception as error:  # noqa: BLE001 - raised in the thread that submits
                    self._error = error

        self._raise()
        if self._worker.closed:
            raise StoreError("this store is closed: make another stage to go on")
        self._worker.submit(run, num_bytes)
        self._raise()

    def wait(self) -> None:
        """Block until all jobs are done. Raises as `submit` does."""
        self._worker.wait()
        self._raise()

    def close(self) -> None:
        """Finish all jobs and end the thread. Errors are not raised any more."""
        self._worker.close()
        self._worker.join()

    def _raise(self) -> None:
        if self._error is not None:
            raise StoreError(f"the message store failed: {self._error}") from self._error
