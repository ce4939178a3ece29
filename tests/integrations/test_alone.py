"""A world of one: the handle is there, nothing is sent, and checkpoints pass between it and worlds of any size."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import thinwire
from harness import run_ranks
from thinwire.optim import CompressedAdamW, QuantizedAdam


def layer() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(64, 64)


def test_the_handle_is_there_and_nothing_is_sent_or_changed() -> None:
    module, again = layer(), layer()
    wire = thinwire.compress(module, "4bit")
    for each in (module, again):
        (each(torch.ones(2, 64)) ** 2).sum().backward()
    assert torch.equal(module.weight.grad, again.weight.grad)
    assert (wire.rank, wire.world_size, wire.step, wire.attached) == (0, 1, -1, True)
    assert wire.stats.payload_sent_bytes == wire.wire_bytes_per_step() == 0
    assert (wire.declined, wire.unsuited, wire.decisions) == ({}, {}, ())
    assert repr(wire).startswith("Wire of one rank, which sends nothing: 1 of 2 layers")
    wire.load_state_dict(wire.gather_state_dict())
    wire.load_state_dict(wire.checkpointable().state_dict())
    wire.detach()
    assert not wire.attached
    other = torch.optim.SGD(layer().parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"optimizer holds no parameter of this model: .* SGD\(model.parameters\(\)\)"):
        thinwire.compress(layer(), optimizer=other)


def test_compiled_modules_and_every_kind_of_argument_are_taken() -> None:
    compiled: Any = torch.compile(layer(), backend="eager")
    optimizer = torch.optim.SGD(compiled.parameters(), lr=0.1)
    for rules in ("auto", {"weight": "8bit"}, "fft(theta=diminishing)", "powersgd(rank=4)"):
        wire = thinwire.compress(compiled, rules, optimizer=optimizer, start=5, exclude=["bias"])
        assert set(wire.plan.layers) == {"weight", "bias"}
        assert wire.start == 5
        wire.detach()


STEPPING: dict[str, tuple[Callable[[nn.Module], torch.optim.Optimizer], str]] = {
    "SGD": (lambda module: torch.optim.SGD(module.parameters(), lr=0.1), "ef(minmax(bits=2))"),
    "CompressedAdamW": (lambda module: CompressedAdamW(module.parameters()), "gaussian(bits=2)"),
    "QuantizedAdam": (lambda module: QuantizedAdam(module.parameters(), warmup=1), "gaussian(bits=2)"),
}


def one_step(module: nn.Module, kind: str, state: dict[str, Tensor] | None) -> tuple[dict[str, str], dict[str, Tensor]]:
    """The plan, and the state after a step, or as it was loaded."""
    make, rules = STEPPING[kind]
    optimizer = make(module)
    paired = optimizer if kind != "SGD" else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        wire = thinwire.compress(module, rules, optimizer=paired, skip_if_slower=False, min_numel=0)
    if state is None:
        rank = dist.get_rank() if dist.is_initialized() else 0
        (module(torch.full((2, 64), rank + 1.0)) ** 2).sum().backward()
        optimizer.step()
    else:
        wire.load_state_dict(state)
    assert wire.step == 0
    return {name: str(compressor) for name, compressor in wire.plan.layers.items()}, wire.gather_state_dict()


def of_two(rank: int, kind: str, state: dict[str, Tensor] | None) -> tuple[dict[str, str], dict[str, Tensor]]:
    return one_step(DistributedDataParallel(layer()), kind, state)


@pytest.mark.parametrize("kind", STEPPING)
def test_one_rank_and_two_have_one_plan_and_one_anothers_state(kind: str) -> None:
    """The plan is the optimizer's, too: error feedback is in it, or is not."""
    plan, saved = one_step(layer(), kind, None)
    (plan_of_two, saved_by_two), _ = run_ranks(of_two, 2, kind, None)
    resumed, passed_on = one_step(layer(), kind, saved_by_two)
    assert plan == plan_of_two == resumed
    check_means(passed_on, saved_by_two)
    for state in (saved, passed_on):
        for resumed, loaded in run_ranks(of_two, 2, kind, state):
            assert resumed == plan
            check_means(loaded, state)


def of_ranks(state: dict[str, Tensor]) -> dict[str, list[Tensor]]:
    """What each rank keeps, by name."""
    found: dict[str, list[Tensor]] = {}
    for key, value in state.items():
        rank, _, name = key.partition("/")
        if rank.startswith("rank") and name.startswith(("exp_avg", "residual")):
            found.setdefault(name, []).append(value)
    return found


def check_means(loaded: dict[str, Tensor], saved: dict[str, Tensor]) -> None:
    """Moments of each rank are the mean of all that were saved; residuals have the same mean."""
    before, after = of_ranks(saved), of_ranks(loaded)
    assert before.keys() <= after.keys()
    for name, values in before.items():
        found = after[name] if name.startswith("exp_avg") else [torch.stack(after[name]).mean(0)]
        for value in found:
            torch.testing.assert_close(value, torch.stack(values).mean(0))
