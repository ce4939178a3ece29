"""``python -m experiments bench owners``: what is compared costs what its description says."""

from __future__ import annotations

import pytest
import torch

from experiments.bench.owners import METHODS, specs_of
from thinwire.collectives import Layer, Layout
from thinwire.compressors import Coded, parse


@pytest.mark.parametrize("num_ranks", [4, 8])
@pytest.mark.parametrize("method", METHODS)
def test_owners_cost_two_messages_of_all_or_as_much_for_more_values(method: str, num_ranks: int) -> None:
    costs = []
    for spec in specs_of(method, 0.01, num_ranks, 16384):
        compressor = parse(spec)
        assert isinstance(compressor, Coded)
        layout = Layout.build([Layer("w", 0, (1 << 20,), compressor)], num_ranks, torch.float32)
        costs.append(sum(layout.sent_bytes(rank) for rank in range(num_ranks)))
    gathered, owned, more = costs
    assert owned / gathered == pytest.approx(2 / num_ranks, rel=0.2)
    assert 0.7 < more / gathered < 1.1  # where more are chosen, the index of each is shorter
