"""Rates and times as people write them, and tools that the kernel does not start at once."""

from __future__ import annotations

import errno
import itertools
import os
import subprocess
from typing import Any

import pytest
from hypothesis import given, strategies as st

from thinwire_tools import lab
from thinwire_tools.lab import tools
from thinwire_tools.lab.network import default_burst_bytes, default_queue_bytes
from thinwire_tools.lab.units import parse_rates


def test_rates_and_times_are_read_as_people_write_them() -> None:
    rates = {"100mbit": 10**8, "2.5gbit": 2_500_000_000, "500kbit": 500_000, "9600 bit": 9600, " 1GBit ": 10**9}
    assert {text: lab.parse_rate(text) for text in rates} == rates
    times = {"20ms": 0.02, "500us": 0.0005, "1.5s": 1.5}
    assert {text: lab.parse_time(text) for text in times} == pytest.approx(times)
    # One rate is for all; several are in the order of ranks.
    assert parse_rates("1gbit", 3) == (10**9,) * 3
    assert parse_rates("1gbit,100mbit", 2) == parse_rates(["1gbit", "100mbit"], 2) == (10**9, 10**8)
    with pytest.raises(ValueError, match="2 rates for 3 ranks"):
        parse_rates("1gbit,100mbit", 3)


@given(st.integers(1000, 10**11))
def test_a_burst_holds_a_packet_and_is_short(rate: int) -> None:
    burst = default_burst_bytes(rate)
    assert burst >= 1514
    assert burst <= max(4096, rate / 8 * 0.0015 + 1)
    assert default_queue_bytes(rate, burst) >= max(rate / 8 * 0.05 - 1, 4 * burst)


@pytest.mark.parametrize(
    ("code", "times", "starts"), [(errno.ENOMEM, 2, 3), (errno.ENOMEM, 9, 5), (errno.EACCES, 9, 1)]
)
def test_a_tool_that_the_kernel_has_no_memory_for_is_started_again(
    monkeypatch: pytest.MonkeyPatch, code: int, times: int, starts: int
) -> None:
    run, calls = subprocess.run, itertools.count(1)

    def refusing(*args: Any, **options: Any) -> object:
        if next(calls) <= times:
            raise OSError(code, os.strerror(code))
        return run(*args, **options)

    monkeypatch.setattr(tools.subprocess, "run", refusing)
    monkeypatch.setattr(tools, "BETWEEN_STARTS_S", 0.0)
    if starts > times:
        assert tools.call([], "cat", [], lines=["a line"]) == "a line\n"
    else:
        with pytest.raises(lab.LabUnavailableError, match=f"cat` could not be started: {os.strerror(code)}"):
            tools.call([], "cat", [])
    assert next(calls) == starts + 1
