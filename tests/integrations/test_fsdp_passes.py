"""When a step begins and ends, for modules used twice, replicas, and whoever reads gradients early."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh

from harness import on_ranks
from ranks import alike, of_ranks
from sharded import Shared, batch, build, compress, train, whole

W4 = "minmax(bits=4, bucket=64)"
COARSE = "ef(minmax(bits=2, bucket=128))"


def _mesh(replicas: int, shards: int) -> Any:
    return init_device_mesh("cpu", (replicas, shards), mesh_dim_names=("replicate", "shard"))


@on_ranks(4)
def test_means_over_replicas_are_exact_before_the_start_in_modules_that_are_used_twice(rank: int, size: int) -> None:
    mesh, found = _mesh(2, 2), []
    for spec in ("raw", W4):
        model = build(mesh, net=Shared)
        wire = compress(model, "raw", "raw", across=spec, start=2)
        train(model, 2, optimizer=torch.optim.SGD(model.parameters(), lr=0.005))
        assert (wire.step, wire.stats.steps) == (1, 2)
        found.append(whole(model))
    assert alike(*found)


@on_ranks(4)
def test_replicas_draw_by_themselves_for_gradients_and_alike_for_weights(rank: int, size: int) -> None:
    """Replicas with the same gradients: each quantizes them by itself, so that errors average out."""
    model = build(_mesh(2, 2)["shard"])
    compress(model, W4, W4)
    x, y = batch(0, rank % 2)
    (model(x) - y).square().mean().backward()
    weights = model.blocks[0].up.weight
    found = of_ranks((weights.grad.to_local(), weights.to_local().detach()))
    (gradient, shard), (other, same) = found[rank], found[(rank + 2) % 4]
    assert torch.equal(shard, same)
    assert not torch.equal(gradient, other)
    torch.testing.assert_close(gradient, other, rtol=0.5, atol=0.2)


HOOKS = {"module": 2, "overlap": 0, "nothing": 3}
"""Units whose reduction goes on while backward does, by what stands in the way."""


@on_ranks(2)
def test_overlap_is_left_where_gradients_may_be_read(rank: int, size: int) -> None:
    x, y = batch(0, rank)
    for how, overlapped in HOOKS.items():
        stock, ours = build(), build()
        wire = compress(ours, overlap=how != "overlap")
        for model in (stock, ours):
            if how == "module":
                # Behind FSDP2's own hooks, which reduce when a block's input has its gradient.
                model.blocks[1].register_full_backward_hook(lambda *_: None)
            (model(x) - y).square().mean().backward()
        for a, b in zip(ours.parameters(), stock.parameters(), strict=True):
            torch.testing.assert_close(a.grad.full_tensor(), b.grad.full_tensor(), rtol=1e-5, atol=1e-6)
        assert wire.stats.overlapped == overlapped
