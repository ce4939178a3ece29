"""Callbacks for trainers: what they compress, keep in checkpoints and refuse."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thinwire
from harness import run_ranks
from thinwire.attach.trainers import merged

RULES = {"*": "ef(minmax(bits=2))"}


def model() -> DistributedDataParallel:
    torch.manual_seed(0)
    return DistributedDataParallel(nn.Linear(64, 64))


def train(ddp: nn.Module, rank: int, steps: int) -> torch.Tensor:
    for step in range(steps):
        x = torch.randn(4, 64, generator=torch.Generator().manual_seed(10 * rank + step))
        ddp.zero_grad()
        ddp(x).square().mean().backward()
    return torch.cat([p.grad.reshape(-1) for p in ddp.parameters() if p.grad is not None])


def alike(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def merge_on(rank: int) -> tuple[dict[str, torch.Tensor], bool, bool]:
    wire = thinwire.compress(model_ := model(), RULES, decline=False)
    train(model_, rank, 3)
    state, own = merged(wire), wire.state_dict()
    again = thinwire.compress(model(), RULES, decline=False)
    again.load_state_dict(state)
    return state, bool(own[f"rank{rank}/residual/weight"].any()), alike(again.state_dict(), own)


def test_the_states_of_all_ranks_in_one_give_each_its_own_back() -> None:
    (first, first_owes, first_same), (second, second_owes, second_same) = run_ranks(merge_on, 2)
    assert alike(first, second)
    assert {"rank0/residual/weight", "rank1/residual/weight"} <= set(first)
    assert not torch.equal(first["rank0/residual/weight"], first["rank1/residual/weight"])
    assert first_owes
    assert second_owes
    assert first_same
    assert second_same


def hugging_face_on(rank: int, folder: str) -> tuple[bool, str, str]:
    def begin(step: int, net: Any = None) -> Any:
        trainer = SimpleNamespace(model_wrapped=net or model())
        callback = thinwire.trainer_callback(trainer, RULES, decline=False)
        arguments, state = SimpleNamespace(output_dir=folder), SimpleNamespace(global_step=step)
        callback.on_train_begin(arguments, state, None)
        return trainer.model_wrapped, callback, arguments

    net, callback, arguments = begin(0)
    train(net, rank, 3)
    callback.on_save(arguments, SimpleNamespace(global_step=3), None)
    _, resumed, _ = begin(3)
    refusals = []
    for step, other in ((5, None), (0, nn.Linear(2, 2))):
        with pytest.raises((FileNotFoundError, TypeError)) as refused:
            begin(step, other)
        refusals.append(str(refused.value))
    return alike(callback.wire.state_dict(), resumed.wire.state_dict()), *refusals


@pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")
@pytest.mark.timeout(120)
def test_hugging_face_goes_on_from_its_checkpoints(tmp_path: Path) -> None:
    for same, missing, unwrapped in run_ranks(hugging_face_on, 2, str(tmp_path), timeout_s=90):
        assert same
        assert "checkpoint-5" in missing
        assert "start it with torchrun" in unwrapped


def lightning_on(rank: int) -> bool:
    states = []
    checkpoint: dict[str, Any] = {}
    for turn in range(2):
        callback = thinwire.lightning_callback(RULES, decline=False)
        net = model()
        trainer = SimpleNamespace(strategy=SimpleNamespace(model=net))
        if turn:
            callback.on_load_checkpoint(trainer, None, checkpoint)
        callback.on_train_start(trainer, None)
        if not turn:
            train(net, rank, 3)
            callback.on_save_checkpoint(trainer, None, checkpoint)
        states.append(callback.wire.state_dict())
    return alike(*states)


@pytest.mark.skipif(find_spec("pytorch_lightning") is None, reason="pytorch_lightning is not installed")
@pytest.mark.timeout(120)
def test_lightning_goes_on_from_its_checkpoints() -> None:
    assert run_ranks(lightning_on, 2, timeout_s=90) == [True, True]


@pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")
def test_a_world_of_one_is_left_alone(tmp_path: Path) -> None:
    callback = thinwire.trainer_callback(SimpleNamespace(model_wrapped=nn.Linear(2, 2)))
    callback.on_train_begin(SimpleNamespace(output_dir=str(tmp_path)), SimpleNamespace(global_step=0), None)
    callback.on_save(SimpleNamespace(output_dir=str(tmp_path)), SimpleNamespace(global_step=1), None)
    assert callback.wire is None
    assert not list(tmp_path.iterdir())
