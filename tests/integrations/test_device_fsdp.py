"""Sharded models on a device: the same bytes as over the host, bit for bit. Here the device is the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from device_cases import check_shards_alike
from harness import on_ranks
from ranks import alike, assert_alike
from sharded import Net, batch, build, train, whole
from thinwire import Network
from thinwire.integrations.fsdp import ShardedOptions, attach_fsdp
from thinwire.runtime import Wire

CPU = torch.device("cpu")
SPECS = ("minmax(bits=4)", "raw", "ef(minmax(bits=2))", "qsgd(bits=3, bucket=64)", "ef(topk(density=0.1))")


def _compress(model: Any, weights: str | None, gradients: str, as_device: bool, **options: Any) -> Wire:
    made = ShardedOptions(
        weights=weights, gradients=gradients, skip_if_slower=False, min_numel=64, as_device=as_device, **options
    )
    return attach_fsdp(model, made)


PAIRS = {
    2: [
        ("minmax(bits=8, bucket=1024)", "minmax(bits=8, bucket=1024)"),
        ("delta(minmax(bits=4, bucket=64))", "minmax(bits=8, bucket=1024)"),
        ("levels(bits=4, bucket=64, learn_at=(0, 2), min_numel=100)", "ef(topk(density=0.2))"),
        ("minmax(bits=3, bucket=64)", "raw", {"master": False}),
    ],
    3: [
        ("lattice(bits=6, bucket=128)", "ef(minmax(bits=3, bucket=64))"),
        ("delta(minmax(bits=4, bucket=64))", "raw"),
        ("qsgd(bits=4, bucket=64)", "ef(minmax(bits=3))", {"master": False, "network": Network(algorithm="ring")}),
        ("raw", "ef(maxabs(bits=4))", {"network": Network(algorithm="hierarchical(inside=minmax(bits=8))")}),
    ],
}


@pytest.mark.parametrize("size", PAIRS)
@on_ranks()
def test_training_is_the_same_bit_for_bit(rank: int, size: int) -> None:
    x, y = batch(6, rank)
    for weights, gradients, *more in PAIRS[size]:
        found, sent = [], []
        for as_device in (False, True):
            model = build(net=lambda: Net(spare=True), reshard_after_forward=not weights.startswith("delta"))
            wire = _compress(model, weights, gradients, as_device, **dict(*more))
            losses = train(model, 3, optimizer=torch.optim.SGD(model.parameters(), lr=0.01))
            ((model(x) - y).square().mean() * (float("inf") if rank == 1 else 1.0)).backward()
            state, stats = wire.state_dict(), wire.stats
            counts = (stats.steps, stats.gathers, stats.reductions, stats.nonfinite_steps)
            sent.append(stats.payload_sent_bytes)
            assert stats.buffer_bytes > 0 or not as_device
            wire.detach()
            found.append((losses, whole(model), state, counts))
        assert alike(*found)
        assert sent[1] <= 1.3 * sent[0]


@pytest.mark.parametrize("size", [2, 4])
@on_ranks()
def test_replicas_are_the_same_bit_for_bit(rank: int, size: int) -> None:
    mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicate", "shard"))
    spec, found = "ef(minmax(bits=4, bucket=128))", []
    for as_device in (False, True):
        model = build(mesh)
        _compress(model, "minmax(bits=8)" if size == 4 else None, spec, as_device)
        found.append((train(model, 3), whole(model)))
    assert alike(*found)
    assert_alike(whole(model))


def test_both_halves_end_as_over_the_host() -> None:
    for num_ranks, spec in ((1, SPECS[0]), (2, "raw"), *((3, spec) for spec in SPECS)):
        check_shards_alike(spec, num_ranks)
    for algorithm in ("ring", "tree", "hierarchical", "hierarchical(inside=same, across=leaders)"):
        for spec in SPECS[:4]:
            check_shards_alike(spec, 5, algorithm=algorithm)
