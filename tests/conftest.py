"""For all tests."""

from __future__ import annotations

import signal

import pytest

LONG = (
    "test_repro_cgx",
    "test_repro_qsdp",
    "test_repro_lgreco",
    "test_repro_aqsgd",
    "test_examples",
    "test_compare",
    "test_demo",
    "test_repro_fullstack",
    "test_repro_fft",
    "test_repro_intsgd",
    "test_matrix",
)
"""Files that take the longest: begun last, one of them would keep one worker busy while the other has nothing to do."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Longest files first; the others as they were found (``--no-loadscope-reorder`` leaves it at that)."""
    order = {name: at for at, name in enumerate(LONG)}
    items.sort(key=lambda item: order.get(item.path.stem, len(LONG)))


def pytest_configure() -> None:
    """Processes that tests start can be interrupted, also where pytest itself runs in the background: a shell makes
    those ignore Ctrl-C, and whoever ignores it hands that on."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
