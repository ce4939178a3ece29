"""CompressedAdamW on a model under FSDP2: the same steps as under DDP, checkpoints, what is refused."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import thinwire
from harness import on_ranks, run_ranks
from ranks import assert_alike
from sharded import Net, build, compress, initialized, train, whole
from thinwire.optim import CompressedAdamW

TWO_BITS = "gaussian(bits=2)"


def _optimizer(model: nn.Module, order: Any, **options: Any) -> CompressedAdamW:
    return CompressedAdamW(model.parameters(), **({"lr": 5e-3, "betas": (0.9, 0.95), "order": order} | options))


def _as_under_ddp(rank: int, size: int, order: Any, shape: tuple[int, ...], clip: float | None) -> None:
    """Steps whose messages are exact."""
    sharded = build(init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :]))
    optimizer = _optimizer(sharded, order, clip=clip)
    compress(sharded, optimizer=optimizer)
    train(sharded, 6, optimizer=optimizer)
    replica = DistributedDataParallel(initialized())
    optimizer = _optimizer(replica.module, order, clip=clip)
    thinwire.compress(replica, "raw", optimizer=optimizer)
    train(replica, 6, optimizer=optimizer)
    torch.testing.assert_close(whole(sharded), dict(replica.module.named_parameters()), rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    ("order", "shape", "clip"), [("pre", (2,), 0.2), ("update", (2,), None), ("pre", (2, 2), None)]
)
def test_steps_are_those_of_ddp(order: str, shape: tuple[int, ...], clip: float | None) -> None:
    size = math.prod(shape)
    run_ranks(_as_under_ddp, size, size, order, shape, clip)


@on_ranks(2)
def test_after_detach_the_optimizer_gets_gradients_again(rank: int, size: int) -> None:
    model = build()
    optimizer = _optimizer(model, "pre")
    wire = compress(model, "raw", TWO_BITS, optimizer=optimizer)
    train(model, 3, optimizer=optimizer)
    moments = [optimizer.state[p]["exp_avg_sq"].clone() for p in model.parameters()]
    assert all(m.shape == p.shape for m, p in zip(moments, model.parameters(), strict=True))
    for m in moments:
        dist.all_reduce(m)
    wire.detach()
    before = whole(model)
    train(model, 1, first=3, optimizer=optimizer)
    moved = max(float((after - before[name]).abs().max()) for name, after in whole(model).items())
    assert 0 < moved < 20 * 5e-3  # a gradient taken for an update would have been a step of its own length
    for parameter, expected in zip(model.parameters(), moments, strict=True):
        found = optimizer.state[parameter]["exp_avg_sq"]
        assert found.to_local().numel() < parameter.numel()  # each rank keeps those of its shard alone
        assert bool((found.full_tensor() >= 0.95 * expected / size - 1e-12).all())
    assert_alike(whole(model))


class _Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(7, 7)])
        self.head = nn.Linear(7, 7)

    def forward(self, x: Tensor) -> Tensor:
        (block,) = self.blocks
        return self.head(block(torch.tanh(block(x))))


@on_ranks(2)
def test_what_it_cannot_train_is_refused(rank: int, size: int) -> None:
    for net, says in ((_Twice, "reduced twice"), (Net, "set_gradient_divide_factor")):
        model = build(net=net)
        optimizer = _optimizer(model, "pre")
        compress(model, optimizer=optimizer)
        for module in model.modules():
            if net is Net and hasattr(module, "set_gradient_divide_factor"):
                module.set_gradient_divide_factor(3.0)
        with pytest.raises((NotImplementedError, RuntimeError), match=says):
            train(model, 2, optimizer=optimizer)
    model = build()
    with pytest.raises(ValueError, match="CompressedAdamW lacks"):
        compress(model, "raw", TWO_BITS, optimizer=CompressedAdamW(itertools.islice(model.parameters(), 2)))
    with pytest.warns(UserWarning, match="CompressedAdamW"):
        compress(model, "raw", "ef(onebit)", optimizer=torch.optim.AdamW(model.parameters()))
