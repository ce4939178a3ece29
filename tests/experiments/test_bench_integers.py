"""``python -m experiments bench integers``: what is compared sends as many bits as its description says."""

from __future__ import annotations

import math

import pytest
import torch

from experiments.bench.integers import SPECS
from thinwire.collectives import Layer, Layout
from thinwire.compressors import Summed, for_world, parse


def test_bits_of_what_is_compared_are_those_of_the_page() -> None:
    """Of 4 ranks, as a ring's mean: docs/integers.md."""
    shape, found = (1000, 1000), []
    for spec in SPECS:
        compressor = for_world(parse(spec), 4, math.prod(shape))
        assert isinstance(compressor, Summed)
        layout = Layout.build([Layer("w", 0, shape, compressor)], 4, torch.float32)
        found.append(8 * max(layout.sent_bytes(rank) for rank in range(4)) / (1.5 * math.prod(shape)))
        assert compressor.wire_bytes(shape) == pytest.approx(found[-1] * math.prod(shape) / 8, rel=0.01)
    assert found == pytest.approx([8, 5, 3, 3], rel=0.02)
