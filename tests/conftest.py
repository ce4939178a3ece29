"""For all tests."""

from __future__ import annotations

import signal


def pytest_configure() -> None:
    """Processes that tests start can be interrupted, also where pytest itself runs in the background: a shell makes
    those ignore Ctrl-C, and whoever ignores it hands that on."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
