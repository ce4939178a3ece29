"""Daemon threads that are asked to end, and joined, when the interpreter ends.

A daemon thread in PyTorch's C++ that wants the interpreter back while that is ending aborts the whole process
("terminate called without an active exception"): the interpreter ends the thread, through destructors that must not be
left. A training whose last step has just ended is such a moment.
"""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass

GRACE_S = 1.0


@dataclass(frozen=True)
class _End:
    tell: Callable[[], object]
    within_s: float


_started: weakref.WeakKeyDictionary[threading.Thread, _End] = weakref.WeakKeyDictionary()


def start(
    run: Callable[[], object], *, name: str, end: Callable[[], object], within_s: float = GRACE_S
) -> threading.Thread:
    """Start a daemon thread.

    Args:
        run: What it does.
        name: What debuggers and profilers call it.
        end: Tells it to end, soon and without waiting for it. Called when the interpreter ends; before that, by whoever
            started it.
        within_s: Seconds that the interpreter then waits for it; a thread that waits for a dead peer is left behind.
    """
    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    _started[thread] = _End(end, within_s)
    return thread


@atexit.register
def _end_all() -> None:
    # In a child that was forked, its parent's threads are not alive. One that ends may start another: the last to hold
    # a handle closes its connections in a thread of their own.
    told: set[threading.Thread] = set()
    while alive := [(t, end) for t, end in list(_started.items()) if t.is_alive() and t not in told]:
        now = time.monotonic()
        for thread, end in alive:
            end.tell()
            told.add(thread)
        for thread, end in alive:
            thread.join(max(0.0, now + end.within_s - time.monotonic()))
