"""Presets: arguments that DiLoCo takes."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

from harness import on_ranks, run_ranks
from ranks import assert_alike
from thinwire.local import DiLoCo, preset


@on_ranks(2)
def test_workers_end_with_the_same_weights(rank: int) -> None:
    for name, every in {"local_sgd": 3, "diloco": 3, "muloco": 3, "streaming": 12}.items():
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
        start = nn.utils.parameters_to_vector(model.parameters()).detach()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        local = DiLoCo(model, optimizer, **preset(name, every=every))
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(rank))
        for _ in range(2 * every):
            optimizer.zero_grad()
            (model(x) - x.flip(1)).square().mean().backward()
            optimizer.step()
            local.step()
        local.finish()
        end = nn.utils.parameters_to_vector(model.parameters()).detach()
        assert_alike(end)
        assert not torch.equal(end, start), name


def _sent(rank: int, options: dict[str, Any]) -> tuple[list[int], int]:
    """Bytes sent in every six steps, and the most that an exchange was said to have."""
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    local = DiLoCo(model, torch.optim.SGD(model.parameters(), lr=0.1), **options)
    counts = [0]
    for step in range(1, 49):
        local.step()
        if step % 6 == 0:
            counts.append(local.wire.stats.payload_sent_bytes)
    local.close()
    return [after - before for before, after in pairwise(counts)], local.peak_bytes


def test_streaming_sends_a_quarter_at_a_time() -> None:
    streaming = preset("streaming")
    bursts, peak = run_ranks(_sent, 2, streaming)[0]
    whole, whole_peak = run_ranks(_sent, 2, streaming | {"fragments": 1, "overlap": 0})[0]
    assert min(bursts) == max(bursts) > 0
    assert whole[:3] == whole[4:7] == [0, 0, 0]
    assert max(bursts) <= 0.26 * max(whole)
    assert sum(bursts) <= 1.04 * sum(whole)
    # Said beforehand, but for headers.
    assert max(bursts) == pytest.approx(peak, rel=0.05)
    assert max(whole) == pytest.approx(whole_peak, rel=0.05)
