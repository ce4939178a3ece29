"""A backward pass within another one, of a reentrant checkpoint or a ``Function``, is a part of one step."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils.checkpoint import checkpoint

from harness import on_ranks
from ranks import alike
from sharded import Net, batch, build, compress

DRAWS = "qsgd(bits=4, bucket=64)"
"""Drawn at random, so that weights that are gathered with another draw are others."""


class _Within(torch.autograd.Function):
    """Keeps a module's graph, and runs its backward pass within its own."""

    @staticmethod
    def forward(ctx: Any, module: nn.Module, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.x = x.detach().requires_grad_()
        with torch.enable_grad():
            ctx.y = module(ctx.x)
        return ctx.y.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.y.backward(grad)
        return None, ctx.x.grad


_WAYS: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "plain": lambda module, x: module(x),
    "reentrant": partial(checkpoint, use_reentrant=True),
    "within": _Within.apply,
}


class Through(Net):
    """Each block is used, once or twice, in one of these ways."""

    def __init__(self, way: str, uses: int) -> None:
        super().__init__(depth=3)
        self.way, self.uses = way, uses

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            for _ in range(self.uses):
                x = _WAYS[self.way](block, x)
        return self.head(x)


def _trained(rank: int, way: str, case: dict[str, Any]) -> tuple[tuple[int, int], list[float], Tensor]:
    """Steps as they were counted, losses, and weights."""
    inside = "plain" if case.get("root") else way
    model = build(net=lambda: Through(inside, case.get("uses", 1)), reshard_after_forward=case.get("reshard", True))
    if case.get("frozen"):
        model.stem.requires_grad_(False)
        model.head.requires_grad_(False)
    wire = compress(model, DRAWS, "minmax(bits=4, bucket=64)", start=case.get("start", 0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.005)
    accumulate = case.get("accumulate", 1)
    losses = []
    for part in range(3 * accumulate):
        last = part % accumulate == accumulate - 1
        model.set_requires_gradient_sync(last)
        x, y = batch(part, rank)
        x.requires_grad_()
        loss = ((_WAYS[way](model, x) if case.get("root") else model(x)) - y).square().mean()
        loss.backward()
        losses.append(float(loss.detach()))
        if last:
            optimizer.step()
            optimizer.zero_grad()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    weights = torch.cat([p.to_local().detach().reshape(-1) for p in model.parameters()])
    return (wire.stats.steps, wire.step), losses, weights


CASES: list[dict[str, Any]] = [
    {"start": 2},
    {"reshard": False, "frozen": True},
    {"accumulate": 2},
    {"root": True},
    {"uses": 2},
]


@pytest.mark.filterwarnings("ignore:.*use_reentrant:UserWarning")
@on_ranks(2)
def test_a_backward_pass_within_another_one_begins_no_step(rank: int, size: int) -> None:
    for case in CASES:
        plain = None
        for way in _WAYS:
            steps, *trained = _trained(rank, way, case)
            assert steps == (3, 2), (case, way)
            plain = plain or trained
            # Modules that are used twice are reduced use by use there, in another order.
            assert alike(trained, plain) or "uses" in case, (case, way)


@on_ranks(2)
def test_several_roots_have_one_step(rank: int, size: int) -> None:
    """Blocks of which each is a root of FSDP2, which ends their passes one by one."""
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(7, 7), nn.Tanh()) for _ in range(3)))
        for block in model:
            fully_shard(block)
        models.append(model)
    stock, ours = models
    wire = compress(ours, min_numel=1)
    for step in range(3):
        x, y = batch(step, rank)
        for model in models:
            # The first block's input needs no gradient: it is reduced when the pass ends.
            (model(x) - y).square().mean().backward()
    for a, b in zip(stock.parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(a.grad.to_local(), b.grad.to_local())
    assert wire.stats.steps == 3
