"""A world of one: the handle is there, nothing is sent, and checkpoints pass between it and worlds of any size."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import thinwire
from harness import run_ranks

RULES = "ef(minmax(bits=2))"
RESIDUAL = "residual/weight"


def layer() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(64, 64)


def test_the_handle_is_there_and_nothing_is_sent_or_changed() -> None:
    module = layer()
    wire = thinwire.compress(module, "4bit")
    (module(torch.ones(2, 64)) ** 2).sum().backward()
    gradient = module.weight.grad
    again = layer()
    (again(torch.ones(2, 64)) ** 2).sum().backward()
    assert gradient is not None
    assert torch.equal(gradient, again.weight.grad if again.weight.grad is not None else torch.zeros(0))
    assert (wire.rank, wire.world_size, wire.step, wire.attached) == (0, 1, -1, True)
    assert wire.stats.payload_sent_bytes == wire.sent_bytes() == 0
    assert (wire.declined, wire.unsuited, wire.decisions) == ({}, {}, ())
    assert repr(wire).startswith("Wire of one rank, which sends nothing: 1 of 2 layers")
    wire.load_state_dict(wire.gather_state_dict())
    wire.load_state_dict(wire.checkpointable().state_dict())
    wire.detach()
    assert not wire.attached


def test_compiled_modules_and_every_kind_of_argument_are_taken() -> None:
    compiled: Any = torch.compile(layer(), backend="eager")
    optimizer = torch.optim.SGD(compiled.parameters(), lr=0.1)
    for rules in ("auto", {"weight": "8bit"}, "fft(theta=diminishing)", "powersgd(rank=4)"):
        wire = thinwire.compress(compiled, rules, optimizer=optimizer, start=5, exclude=["bias"])
        assert set(wire.plan.layers) == {"weight", "bias"}
        assert wire.start == 5
        wire.detach()


def residual_of_two(rank: int, state: dict[str, Tensor] | None) -> tuple[dict[str, Tensor], Tensor, int]:
    model = DistributedDataParallel(layer())
    wire = thinwire.compress(model, RULES, skip_if_slower=False)
    if state is not None:
        wire.load_state_dict(state)
    else:
        (model(torch.full((2, 64), rank + 1.0)) ** 2).sum().backward()
    gathered = wire.gather_state_dict()
    unsent = torch.stack([gathered[f"rank{r}/{RESIDUAL}"] for r in range(2)]).mean(0)
    return gathered, unsent, wire.step


def test_a_checkpoint_goes_from_two_ranks_to_one_and_back_with_its_residual() -> None:
    gathered, unsent, step = run_ranks(residual_of_two, 2, None)[0]
    wire = thinwire.compress(layer(), RULES)
    wire.load_state_dict(gathered)
    alone = wire.gather_state_dict()
    assert wire.step == step == 0
    assert torch.allclose(alone[f"rank0/{RESIDUAL}"], unsent, atol=1e-6)
    for _, again, resumed in run_ranks(residual_of_two, 2, alone):
        assert torch.allclose(again, unsent, atol=1e-6)
        assert resumed == step
    assert unsent.any()
