"""Receives at one side of a stage boundary: a thread waits for messages and decodes them ahead."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import torch
from torch import Tensor

from thinwire import threads
from thinwire.collectives import Pending, TransportError

AHEAD = 2
"""Micro-batches that are decoded ahead of the stage: more would double the memory of GPipe's receives."""


class Arrivals:
    """The receives of one step at one side of a boundary.

    A thread of their own waits for them in the order of micro-batches, and decodes each while the stage computes. If a
    schedule works on another micro-batch first, the training's thread waits for that message and decodes it itself:
    the thread's message may be sent only after that.

    Args:
        receives: The pending receive of each micro-batch.
        decode: Decodes the message of a micro-batch, on the host.
        expected: Messages that the thread waits for, in its order, from the beginning. `expect` adds to them: the
            group's timeout counts from when a message is waited for.
    """

    def __init__(self, receives: Sequence[Pending], decode: Callable[[int], list[Tensor]], *, expected: int) -> None:
        self._receives, self._decode, self._expected = receives, decode, expected
        self._changed = threading.Condition()
        self._decoding = threading.Lock()
        self._decoded: dict[int, Future[list[Tensor]]] = {}
        self._taken: set[int] = set()
        self._next = 0
        """Micro-batch that the thread waits for, decodes, or turns to once there is room."""
        self._wanted: int | None = None
        """Micro-batch that the training's thread waits for."""
        self._stopped = False
        threads.start(self._run, name="thinwire arrivals", end=self._end)

    @property
    def complete(self) -> bool:
        """Whether all micro-batches were taken."""
        return len(self._taken) == len(self._receives)

    def expect(self) -> None:
        """Wait for one more message."""
        with self._changed:
            self._expected += 1
            self._changed.notify_all()

    def take(self, chunk: int) -> list[Tensor]:
        """Return the tensors of a micro-batch, once they are received. They are taken once.

        Raises:
            TransportError: The message was not received.
            PeerFailedError, MessageError: The message is not the expected one.
        """
        with self._changed:
            self._taken.add(chunk)
            if chunk == self._next or chunk in self._decoded:
                self._wanted = chunk
                self._changed.notify_all()
                self._changed.wait_for(lambda: chunk in self._decoded)
                decoded = self._decoded.pop(chunk)
                self._changed.notify_all()
                return decoded.result()
        self._receives[chunk].wait()
        with self._decoding:
            return self._decode(chunk)

    def stop(self) -> None:
        """Decode nothing from now on: the step is given up. A decoding under way is finished before this returns.

        The thread may still wait for a message. The neighbor, which gives up as well, sends a failed one in place of
        the next, so that this wait ends.
        """
        self._end()
        with self._decoding:
            pass

    def _end(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def _run(self) -> None:
        with torch.no_grad():
            while (chunk := self._turn()) is not None:
                decoded: Future[list[Tensor]] = Future()
                try:
                    if not self._wait(chunk):
                        return
                    with self._decoding:
                        if self._stopped:
                            return
                        decoded.set_result(self._decode(chunk))
                except BaseException as error:  # noqa: BLE001 - raised in the training's thread
                    decoded.set_exception(error)
                with self._changed:
                    self._decoded[chunk] = decoded
                    self._next = len(self._receives) if decoded.exception() is not None else self._after(chunk)
                    self._changed.notify_all()
                del decoded  # which would live on while the thread waits for the next one

    def _turn(self) -> int | None:
        """Return the next micro-batch, once there is room for it; None when there is none left to wait for."""

        def due() -> bool:
            room = self._next < self._expected and len(self._decoded) < AHEAD
            return self._stopped or self._next == len(self._receives) or self._next == self._wanted or room

        with self._changed:
            self._changed.wait_for(due)
            return None if self._stopped or self._next == len(self._receives) else self._next

    def _wait(self, chunk: int) -> bool:
        """Wait for a message. Return False if that fails in a step that was given up: nobody needs the error."""
        try:
            self._receives[chunk].wait()
        except TransportError:
            if self._stopped:
                return False
            raise
        return True

    def _after(self, chunk: int) -> int:
        """Return the first micro-batch behind this one that the training's thread has not taken itself."""
        return next((i for i in range(chunk + 1, len(self._receives)) if i not in self._taken), len(self._receives))
