"""Precision × feature, each with several kinds of compressors: each cell trains, with its bytes asserted."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn

import thinwire
from harness import on_ranks
from nets import assert_replicas_identical, batch, loss_of, make, trained

PRECISIONS = ("fp32", "bf16", "autocast", "GradScaler")
FEATURES = ("accumulation", "clipping", "find_unused", "static_graph", "bucket view", "join", "torch.compile")
KINDS = {
    "coded": "minmax(bits=4)",
    "coded with error feedback": "ef(minmax(bits=2))",
    "gathered and low rank": {"embed.weight": "powersgd(rank=2)", "*": "topk(density=0.05) | minmax(bits=8)"},
    "summed": {"embed.weight": "ef(randk(density=0.2))", "*": "cast(bf16)"},
}
DDP_OPTIONS = {"find_unused": {"unused": True}, "static_graph": {"static_graph": True}}
# torch.compile cuts the graph at DDP's buckets, the first of which holds 1 MB.
DDP_OPTIONS["torch.compile"] = {"bucket_cap_mb": 2.0}
DDP_OPTIONS["bucket view"] = {"gradient_as_bucket_view": True}
_WARM_UP, _COUNTED = 3, 2


def _cell(rank: int, precision: str, feature: str, kind: str) -> None:
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    model = make(rank, dtype=dtype, **DDP_OPTIONS.get(feature, {}))
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, enabled=precision == "GradScaler")
    wire = thinwire.compress(model, KINDS[kind], skip_if_slower=False, grad_scaler=scaler)
    run = torch.compile(model, backend="aot_eager") if feature == "torch.compile" else model
    optimizer = torch.optim.SGD(trained(model), lr=0.02)
    autocast = torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "autocast")

    def backward(step: int) -> None:
        with autocast:
            loss = loss_of(run, batch(rank, step))
        scaler.scale(loss).backward()

    def one_step(step: int) -> None:
        optimizer.zero_grad()
        if feature == "accumulation":
            with model.no_sync():
                backward(1000 + step)
        backward(step)
        if feature == "clipping":
            scaler.unscale_(optimizer)
            norm = nn.utils.clip_grad_norm_(trained(model), 0.1)
            assert torch.isfinite(norm)
            clipped = torch.stack([p.grad.norm() for p in trained(model) if p.grad is not None]).norm()
            assert float(clipped) <= 0.102
        scaler.step(optimizer)
        scaler.update()

    steps = _WARM_UP + _COUNTED
    for step in range(_WARM_UP):
        one_step(step)
    wire.reset_stats()
    # Rank 1 runs out of data first: DDP calls the hook of a joined rank with zeros.
    mine = range(_WARM_UP, steps - (rank if feature == "join" else 0))
    with model.join() if feature == "join" else contextlib.nullcontext():
        for step in mine:
            one_step(step)
    stats = wire.stats
    assert stats.steps == stats.compressed_steps == _COUNTED, stats
    assert stats.payload_sent_bytes == _COUNTED * wire.sent_bytes() > 0
    assert stats.payload_sent_bytes < (0.65 if dtype == torch.float32 else 1.01) * stats.dense_bytes
    assert all(bool(torch.isfinite(p).all()) for p in model.parameters())
    if feature != "join":
        # After a join the last ranks' step is the joined rank's no more: DDP broadcasts the parameters itself.
        assert_replicas_identical(model)


@pytest.mark.parametrize("precision", PRECISIONS)
@on_ranks(2, timeout_s=250.0, group_timeout_s=60.0)
def test_precision(rank: int, precision: str) -> None:
    """With each feature, with which each kind of compressor goes in some precision."""
    kinds = list(KINDS)
    for i, feature in enumerate(FEATURES):
        kind = kinds[(i + PRECISIONS.index(precision)) % len(kinds)]
        try:
            _cell(rank, precision, feature, kind)
        except AssertionError as error:
            raise AssertionError(f"{precision}, {feature}, {kind}") from error
