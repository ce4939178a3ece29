"""CompressedAdamW under `thinwire.compress`: what is sent, and what it costs in loss."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import thinwire
from harness import on_ranks
from nets import assert_replicas_identical, make, train, trained
from thinwire.optim import CompressedAdamW

TWO_BITS = "gaussian(bits=2)"
LR = 3e-3


def _attach(rank: int, compressor: str, order: Any = "pre", **options: Any) -> tuple[nn.Module, CompressedAdamW, Any]:
    model = make(rank)
    optimizer = CompressedAdamW(trained(model), lr=LR, betas=(0.9, 0.99), order=order)
    wire = thinwire.compress(model, compressor, optimizer=optimizer, skip_if_slower=False, min_numel=64, **options)
    return model, optimizer, wire


@pytest.mark.parametrize(
    ("compressor", "order", "margin"),
    [(TWO_BITS, "pre", 0.05), ("onebit(bucket=512)", "update", 0.10), ("topk(density=0.05)", "update", 0.15)],
)
@on_ranks(2)
def test_few_bits_end_where_full_precision_does(rank: int, compressor: str, order: Any, margin: float) -> None:
    losses = []
    for spec in ("raw", compressor):
        model, optimizer, wire = _attach(rank, spec, order)
        losses.append(sum(train(model, rank, 60, optimizer=optimizer)[-10:]))
        assert_replicas_identical(model)
        assert wire.stats.payload_sent_bytes > 0
        assert any(str(c).startswith("ef(") for c in wire.plan.layers.values()) == (spec != "raw")
    assert rank or losses[1] < (1 + margin) * losses[0]


class Strided(nn.Module):
    """Parameters whose elements do not lie in memory in the order of their indices; one of them has gaps."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 6, 3).to(memory_format=torch.channels_last)
        self.transposed = nn.Parameter(torch.randn(12, 8).t())
        self.gaps = nn.Parameter(torch.randn(8, 24)[:, :12])

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x).square().mean() + (x.flatten(1)[:, :8] @ (self.transposed + 2 * self.gaps)).pow(4).mean()


@on_ranks(2)
def test_ranks_step_as_one_does_whatever_the_order_of_parameters_in_memory(rank: int) -> None:
    """Ranks of the same data; DDP's buckets hold gradients as their parameters lie in memory."""
    for options in ({}, {"order": "update", "clip": 0.5}):
        torch.manual_seed(0)
        alone = Strided()
        model = copy.deepcopy(alone)
        ours, theirs = (CompressedAdamW(each.parameters(), lr=LR, **options) for each in (model, alone))
        ddp = nn.parallel.DistributedDataParallel(model)
        wire = thinwire.compress(ddp, "raw", optimizer=ours, skip_if_slower=False)
        for step in range(10):
            if step == 5:
                saved = wire.gather_state_dict()
                wire.load_state_dict(saved)
                for (name, mine), other in zip(model.named_parameters(), alone.parameters(), strict=True):
                    for moment, values in theirs.local_state(other).items():
                        torch.testing.assert_close(saved[f"rank{rank}/{moment}/{name}"], values)
                        torch.testing.assert_close(ours.state[mine][moment].flatten(), values)
            if step == 7:
                wire.detach()
            for net, optimizer in ((ddp, ours), (alone, theirs)):
                optimizer.zero_grad()
                net(torch.randn(3, 4, 5, 5, generator=torch.Generator().manual_seed(step))).backward()
                optimizer.step()
            torch.testing.assert_close(list(model.parameters()), list(alone.parameters()))


@on_ranks(2)
def test_an_optimizer_that_lacks_a_parameter_is_refused_and_one_that_no_wire_knows_is_told_of_once(rank: int) -> None:
    model = make(rank)
    with pytest.raises(ValueError, match="CompressedAdamW lacks"):
        thinwire.compress(model, TWO_BITS, optimizer=CompressedAdamW(trained(model)[:-1], lr=LR))
    for attached in ("", "locally", "wire"):
        model = make(rank)
        optimizer = CompressedAdamW(trained(model), lr=LR)
        if attached == "locally":
            thinwire.local.DiLoCo(model.module, optimizer, compressor="raw")
        elif attached == "wire":
            thinwire.compress(model, TWO_BITS, optimizer=optimizer)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                optimizer.step()
        told = [w.filename for w in caught if "no Wire is attached to this CompressedAdamW" in str(w.message)]
        assert told == [__file__] * (not attached)
