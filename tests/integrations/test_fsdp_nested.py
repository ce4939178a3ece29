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

from harness import run_ranks
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


def _trained(rank: int, way: str, case: dict[str, Any]) -> dict[str, Any]:
    inside = "plain" if case.get("root") else way
    model = build(net=lambda: Through(inside, case.get("uses", 1)), reshard_after_forward=case.get("reshard", True))
    if case.get("frozen"):
        model.stem.requires_grad_(False)
        model.head.requires_grad_(False)
    wire = compress(model, DRAWS, "minmax(bits=4, bucket=64)", start=case.get("start", 0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.005)
    accumulate = case.get("accumulate", 1)
    losses = []
    for part in range(4 * accumulate):
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
    stats = wire.stats
    weights = torch.cat([p.to_local().detach().reshape(-1) for p in model.parameters()])
    return {"steps": (stats.steps, wire.step), "losses": losses, "weights": weights}


CASES: list[dict[str, Any]] = [
    {"start": 2},
    {"reshard": False, "frozen": True},
    {"frozen": True},
    {"accumulate": 3},
    {"root": True},
    {"uses": 2},
]


def _all_ways(rank: int, size: int) -> list[dict[str, dict[str, Any]]]:
    return [{way: _trained(rank, way, case) for way in _WAYS} for case in CASES]


@pytest.mark.filterwarnings("ignore:.*use_reentrant:UserWarning")
def test_a_backward_pass_within_another_one_begins_no_step() -> None:
    for case, *answers in zip(CASES, *run_ranks(_all_ways, 2, 2), strict=True):
        for way, trained in (each for answer in answers for each in answer.items()):
            assert trained["steps"] == (4, 3), (case, way)
        for answer in answers if "uses" not in case else ():
            # Modules that are used twice are reduced use by use there, in another order.
            for way, trained in answer.items():
                assert trained["losses"] == answer["plain"]["losses"], (case, way)
                assert torch.equal(trained["weights"], answer["plain"]["weights"]), (case, way)


def _several_roots(rank: int, size: int) -> tuple[int, bool]:
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
    pairs = zip(stock.parameters(), ours.parameters(), strict=True)
    return wire.stats.steps, all(torch.allclose(a.grad.to_local(), b.grad.to_local()) for a, b in pairs)


def test_several_roots_have_one_step() -> None:
    assert run_ranks(_several_roots, 2, 2) == [(3, True)] * 2
