"""Messages that are waited for and decoded ahead: in which order, how many at once, and what failures do."""

from __future__ import annotations

import gc
import threading
import time
import weakref

import pytest
import torch
from torch import Tensor

from thinwire.collectives import TransportError
from thinwire.pipeline.pipeline import AHEAD, Arrivals
from thinwire.threads import Worker

_LONG_S = 20.0


class Message:
    """A receive that ends when its message comes."""

    def __init__(self) -> None:
        self.came = threading.Event()
        self.error: Exception | None = None

    def wait(self) -> None:
        assert self.came.wait(_LONG_S)
        if self.error is not None:
            raise self.error

    def fail(self, error: Exception) -> None:
        self.error = error
        self.came.set()


class Side:
    """Messages 0 to ``num`` - 1, and what was decoded of them, in which thread."""

    def __init__(self, num: int) -> None:
        self.messages = [Message() for _ in range(num)]
        self.decoded: list[int] = []
        self.threads: dict[int, threading.Thread] = {}
        self.done = [threading.Event() for _ in range(num)]
        self.arrivals = Arrivals(self.messages, self.decode, expected=num)

    def come(self, *chunks: int) -> None:
        for chunk in chunks:
            self.messages[chunk].came.set()

    def decode(self, chunk: int) -> list[Tensor]:
        self.decoded.append(chunk)
        self.threads[chunk] = threading.current_thread()
        self.done[chunk].set()
        return [torch.tensor(chunk)]


def test_messages_are_decoded_ahead_in_order_and_no_more_than_a_few() -> None:
    side = Side(5)
    side.come(*range(5))
    for chunk in range(5):
        assert side.done[min(chunk + AHEAD - 1, 4)].wait(_LONG_S)
        assert len(side.decoded) <= chunk + AHEAD
        assert side.arrivals.take(chunk) == [torch.tensor(chunk)]
    assert side.decoded == list(range(5))
    assert side.arrivals.complete
    (thread,) = set(side.threads.values())
    assert thread is not threading.current_thread()
    thread.join(_LONG_S)
    assert not thread.is_alive()


def test_a_worker_that_is_late_decodes_in_the_order_of_the_sender(monkeypatch: pytest.MonkeyPatch) -> None:
    """A side keeps what it decodes in that order, and the sender has kept it in the order in which it sent."""
    go, submit = threading.Event(), Worker.submit
    monkeypatch.setattr(Worker, "submit", lambda self, job: submit(self, lambda: go.wait(_LONG_S) and job()))
    side = Side(2)
    side.come(1)
    taker = threading.Thread(target=side.arrivals.take, args=(0,))
    taker.start()
    go.set()
    assert not side.done[1].wait(0.2)
    side.come(0)
    taker.join(_LONG_S)
    side.arrivals.take(1)
    assert side.decoded == [0, 1]


@pytest.mark.parametrize("order", [[1, 0, 3, 2], [3, 2, 1, 0], [2, 0, 1, 3]])
def test_another_order_does_not_wait_for_what_is_sent_after_it(order: list[int]) -> None:
    for at_once in (False, True):
        side = Side(4)
        side.come(*range(4 * at_once))
        for chunk in order:
            side.come(chunk)
            assert side.arrivals.take(chunk) == [torch.tensor(chunk)]
        assert sorted(side.decoded) == [0, 1, 2, 3]
        assert side.arrivals.complete


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_is_decoded_once_the_step_is_given_up(fails: bool) -> None:
    side = Side(3)
    side.come(0)
    side.arrivals.take(0)
    thread = side.arrivals.worker.thread
    assert thread is not None
    side.arrivals.stop()
    if fails:
        side.messages[1].fail(TransportError("connection closed"))
    else:
        side.come(1, 2)
    thread.join(_LONG_S)
    assert not thread.is_alive()
    assert side.decoded == [0]
    assert not side.arrivals.complete


def test_a_step_that_is_given_up_waits_for_what_is_being_decoded() -> None:
    begun, end, decoded = threading.Event(), threading.Event(), []

    def decode(chunk: int) -> list[Tensor]:
        begun.set()
        assert end.wait(_LONG_S)
        decoded.append(chunk)
        return []

    message = Message()
    message.came.set()
    arrivals = Arrivals([message], decode, expected=1)
    assert begun.wait(_LONG_S)
    threading.Timer(0.05, end.set).start()
    arrivals.stop()
    assert decoded == [0]


def test_what_was_taken_is_not_held_on_to() -> None:
    side = Side(2)
    side.come(0)
    tensors = side.arrivals.take(0)
    gone = weakref.ref(tensors[0])
    del tensors
    # The thread that decoded them lets go once it waits for the next message, which may be a moment later.
    end = time.monotonic() + _LONG_S
    while gone() is not None and time.monotonic() < end:
        time.sleep(0.01)
        gc.collect()
    assert gone() is None, "while the thread waits for the next message"
    side.come(1)
    side.arrivals.take(1)
