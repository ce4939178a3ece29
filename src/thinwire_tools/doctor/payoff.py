"""The gain of compression by ratio and bandwidth: equation 4 of the FFT paper (section 3.3)."""

from __future__ import annotations

import math


def minimal_ratio(bandwidth: float, both_ways_s_per_byte: float) -> float:
    """Return the least compression ratio that makes steps faster on a link of ``bandwidth`` bytes per second.

    It is infinite where none does. ``both_ways_s_per_byte``: seconds to compress and decompress a byte.
    """
    spent = bandwidth * both_ways_s_per_byte
    return 1 / (1 - spent) if spent < 1 else math.inf


def useful_bandwidth(both_ways_s_per_byte: float) -> float:
    """Return the bandwidth, in bytes per second, above which no ratio makes steps faster (where equation 4 ends)."""
    return 1 / both_ways_s_per_byte
