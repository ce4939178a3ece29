"""The thread that works beside a rank's stages: it compresses and sends their messages, and loads and saves records."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from thinwire.store import Background

T = TypeVar("T")


class Beside:
    """Runs jobs one after the other in a thread beside the training's, which computes meanwhile.

    While a step runs, nothing else touches the stores of a rank's stages: a record that is loaded ahead and one that is
    saved behind cannot meet. The order of the jobs is that of the calls, so that both sides of a boundary, and a run
    that is resumed, do the same. No job waits for another rank, so `wait` ends.
    """

    def __init__(self) -> None:
        self._background = Background()
        weakref.finalize(self, self._background.end)

    def submit(self, job: Callable[[], T]) -> Future[T]:
        """Add a job. What it returns, or raises, is in the future."""
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(job())
            except BaseException as error:  # noqa: BLE001 - raised by whoever asks for the result
                future.set_exception(error)

        self._background.submit(run)
        return future

    def wait(self) -> None:
        """Block until all jobs are done."""
        self._background.wait()
