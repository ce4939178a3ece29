"""Words that threads of one process wait for. Between processes: test_shared_memory.py."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from thinwire.kernels import HAVE_NATIVE, LINE_BYTES, SharedCounter

pytestmark = pytest.mark.skipif(not HAVE_NATIVE, reason="the native core is not in use")

WRAP = 1 << 32


def memory(num_bytes: int = 2 * LINE_BYTES) -> torch.Tensor:
    return torch.zeros(num_bytes, dtype=torch.uint8)


@pytest.mark.parametrize("spin_s", [0.0, 50e-6])
def test_threads_play_ball(spin_s: float) -> None:
    """Each finds what the other wrote before it raised its word, across the wrap of the counters."""
    area, payload = memory(), torch.zeros(2, dtype=torch.int64)
    words = [SharedCounter(area, 0), SharedCounter(area, LINE_BYTES)]
    first, num = WRAP - 1000, 3000
    for word in words:
        word.post(first)
    wrong = []

    def answer() -> None:
        for i in range(1, num + 1):
            if not words[0].wait(first + i, timeout_s=10.0, spin_s=spin_s) or int(payload[0]) != i:
                wrong.append(i)
                return
            payload[1] = -i
            words[1].post(first + i)

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    for i in range(1, num + 1):
        payload[0] = i
        words[0].post(first + i)
        assert words[1].wait(first + i, timeout_s=10.0, spin_s=spin_s)
        assert int(payload[1]) == -i
    thread.join(30.0)
    assert not wrong
    assert words[0].value == words[1].value == (first + num) % WRAP


def test_counters_wrap() -> None:
    """A word is ahead of the values up to 2^31 - 1 before it, and of no other."""
    word = SharedCounter(memory(), 0)
    for value in (0, 7, (1 << 31) - 3, 1 << 31, WRAP - 4, WRAP - 1):
        for reached in (0, 1, 5, (1 << 31) - 1):
            word.post(value + reached)
            assert word.wait(value, timeout_s=0.0)
            if reached:
                word.post(value - reached)
                assert not word.wait(value, timeout_s=0.0)
                assert not word.wait(value, timeout_s=0.002, spin_s=0.001)


def test_all_who_wait_wake() -> None:
    area = memory()
    woken = []
    threads = [
        threading.Thread(target=lambda: woken.append(SharedCounter(area, 0).wait(1, timeout_s=10.0)), daemon=True)
        for _ in range(5)
    ]
    for thread in threads:
        thread.start()
    time.sleep(0.05)
    assert not woken
    SharedCounter(area, 0).post(1)
    for thread in threads:
        thread.join(30.0)
    assert woken == [True] * 5


@pytest.mark.parametrize("spin_s", [0.0, 1e-4, 10.0])
def test_a_wait_ends_in_time(spin_s: float) -> None:
    start = time.monotonic()
    assert not SharedCounter(memory(), 0).wait(1, timeout_s=0.1, spin_s=spin_s)
    assert 0.1 <= time.monotonic() - start < 10.0


def test_a_place_that_is_none_raises() -> None:
    area = memory()
    for offset in (-4, 2 * LINE_BYTES - 3, 2 * LINE_BYTES, 1 << 62, 2):
        with pytest.raises(ValueError, match="no place"):
            SharedCounter(area, offset)
    for other in (area.view(torch.int32), area.view(2, LINE_BYTES), area[::2]):
        with pytest.raises(ValueError, match="contiguous"):
            SharedCounter(other, 0)
