"""Names of layers are those of the model before `torch.compile` or a checkpoint wrapper wrapped it or a part of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.parallel import DistributedDataParallel as DDP

import sharded
import thinwire
from harness import run_ranks
from ranks import alike

WAYS = ("plain", "whole", "parts", "checkpointed")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(64, 64)
        self.head = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.embed(x).relu())


def _compiled(module: nn.Module) -> Any:
    # What it compiles to does not matter here, and takes time.
    torch.compiler.set_stance("force_eager")
    return torch.compile(module, backend="eager")


def _net(way: str) -> nn.Module:
    torch.manual_seed(0)
    net = Net()
    if way == "parts":
        net.embed = _compiled(net.embed)
    if way == "checkpointed":
        net.embed = checkpoint_wrapper(net.embed)
    return _compiled(net) if way == "whole" else net


def _all_ways(train: Any, ways: tuple[str, ...] = WAYS) -> None:
    """The state after a training is the same whatever wraps the model, and loads into each of the others."""
    states = {way: train(way, None) for way in ways}
    resumed = {way: train(way, states["parts" if way == "plain" else "plain"]) for way in ways}
    for found in (states, resumed):
        for way in ways:
            assert list(found[way]) == list(found["plain"])
            assert alike(found[way], found["plain"]), way


def _ddp(rank: int) -> None:
    def train(way: str, state: dict[str, Tensor] | None) -> dict[str, Tensor]:
        model = _compiled(DDP(_net("plain"))) if way == "compiled" else DDP(_net(way))
        rules = {"embed.*": "ef(minmax(bits=2))", "head.weight": "minmax(bits=4)"}
        wire = thinwire.compress(model, rules, exclude=["embed.bias"], skip_if_slower=False)
        assert list(wire.plan.layers) == ["embed.weight", "embed.bias", "head.weight", "head.bias"]
        assert [str(c)[:3] for c in wire.plan.layers.values()] == ["ef(", "raw", "min", "raw"]
        if state is not None:
            wire.load_state_dict(state)
        model(torch.full((2, 64), rank + 1.0)).square().sum().backward()
        return wire.gather_state_dict()

    _all_ways(train, (*WAYS, "compiled"))


def _diloco(rank: int) -> None:
    def train(way: str, state: dict[str, Tensor] | None) -> dict[str, Tensor]:
        model = _net(way)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        local = thinwire.local.DiLoCo(model, optimizer, every=2)
        if state is not None:
            local.load_state_dict(state)
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.full((2, 64), rank + 1.0)).square().mean().backward()
            optimizer.step()
            local.step()
        gathered = local.gather_state_dict()
        local.close()
        return gathered

    _all_ways(train)


def _fsdp(rank: int) -> None:
    def train(way: str, state: dict[str, Tensor] | None) -> dict[str, Tensor]:
        def net() -> nn.Module:
            model = sharded.Net()
            for i in range(len(model.blocks) * (way != "plain")):
                wrap = checkpoint_wrapper if way == "checkpointed" else _compiled
                model.blocks[i] = wrap(model.blocks[i])
            return model

        model = sharded.build(net=net)
        run = _compiled(model) if way == "whole" else model
        rules = {"blocks.0.up.weight": "ef(minmax(bits=2))", "*down*": "minmax(bits=4)"}
        wire = sharded.compress(run, "minmax(bits=8)", rules, exclude=["blocks.1.down.weight"])
        raw = [name for name, c in wire.plan.layers.items() if name.startswith("gradients/") and str(c) == "raw()"]
        assert "gradients/blocks.1.down.weight" in raw
        assert "gradients/blocks.0.down.weight" not in raw
        if state is not None:
            wire.load_state_dict(state)
        sharded.train(run, 1)
        return wire.gather_state_dict()

    _all_ways(train)


@pytest.mark.parametrize("attach", [_ddp, _diloco, _fsdp])
def test_rules_and_states_are_those_of_the_model_whatever_wraps_it(attach: Any) -> None:
    run_ranks(attach, 2)
