"""When compression pays: equations 1 to 4 of the FFT paper, and the throughputs that go into them."""

from __future__ import annotations

import math

import pytest

from experiments.papers.fft import payoff as cost
from thinwire import parse
from thinwire.compressors import FFT
from thinwire_tools.doctor.payoff import minimal_ratio, useful_bandwidth

SPEEDS = cost.Throughputs(convert=100e9, transform=50e9, pack=25e9, select=20e9)


def test_the_cost_model_is_that_of_the_paper() -> None:
    # 2/100 + 1/50 + 1/25 + 1/20 = 0.13 seconds a gigabyte.
    assert SPEEDS.seconds_per_byte == pytest.approx(0.13e-9)
    assert cost.compression_seconds(2e9, SPEEDS) == pytest.approx(0.26)
    # 10 Gbit/s are 1.25 GB/s: 1 GB takes 0.8 s, a fifth of it 0.16 s.
    assert cost.communication_seconds(1e9, 1.25e9, 5) == pytest.approx(0.16)
    assert cost.saved_seconds(1e9, 1.25e9, 5) == pytest.approx(0.64)
    # 1 / (1 - 1.25 * 0.26) = 1 / 0.675
    assert minimal_ratio(1.25e9, 2 * SPEEDS.seconds_per_byte) == pytest.approx(1 / 0.675)
    # 56 Gbit/s are 7 GB/s, and 7 * 0.26 is over one.
    assert minimal_ratio(7e9, 2 * SPEEDS.seconds_per_byte) == math.inf
    assert useful_bandwidth(2 * SPEEDS.seconds_per_byte) == pytest.approx(1e9 / 0.26)


def test_at_the_minimal_ratio_saving_and_cost_are_equal() -> None:
    for bandwidth in (0.1e9, 1e9, 3e9):
        ratio = minimal_ratio(bandwidth, 2 * SPEEDS.seconds_per_byte)
        saved = cost.saved_seconds(1e9, bandwidth, ratio)
        assert saved == pytest.approx(2 * cost.compression_seconds(1e9, SPEEDS))


def test_the_bitmap_costs_what_it_has_bits() -> None:
    # 25 million values: 5 MB of values at a ratio of 20, and 3.125 MB of bitmap.
    assert cost.message_bytes(100e6, 20, bitmap=False) == pytest.approx(5e6)
    assert cost.message_bytes(100e6, 20, bitmap=True) == pytest.approx(8.125e6)
    assert cost.ratio_with_bitmap(20) == pytest.approx(100 / 8.125)


def test_throughputs_are_measured() -> None:
    fft = parse("fft(theta=0.85, bits=10)")
    assert isinstance(fft, FFT)
    found = cost.measure(10_000, fft, 1)
    assert all(1e6 < value < 1e13 for value in vars(found).values())
