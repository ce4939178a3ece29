"""Checkpoints that one rank writes: `gather_state_dict`, loaded by as many ranks, by more, and by libraries."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import sharded
import thinwire
from harness import run_ranks, run_threads
from nets import fingerprint, make, train
from thinwire.plan import Plan
from thinwire.runtime import WireSettings

FEEDBACK = "ef(minmax(bits=2))"
RESIDUAL = "residual/layers.0.weight"


def fresh(rank: int, **options: Any) -> tuple[Any, torch.optim.Optimizer, thinwire.Wire]:
    model = make(rank)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad])
    return model, optimizer, thinwire.compress(model, FEEDBACK, skip_if_slower=False, **options)


def alike(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    """Whether two states are the same to the bit; what a policy has not measured yet is NaN in both."""
    return a.keys() == b.keys() and all(
        torch.equal(a[name].isnan(), b[name].isnan()) and torch.equal(a[name].nan_to_num(), b[name].nan_to_num())
        for name in a
    )


def loads_one_ranks_state(rank: int) -> tuple[str, bool]:
    model, optimizer, wire = fresh(rank)
    train(model, rank, 2, optimizer=optimizer)
    mine = [wire.state_dict() if rank == 0 else None]
    dist.broadcast_object_list(mine)
    before = wire.state_dict()
    with pytest.raises((ValueError, thinwire.PeerFailedError), match="gather_state_dict") as refused:
        wire.load_state_dict(mine[0] or {})
    return str(refused.value), alike(wire.state_dict(), before)


def test_the_state_of_one_rank_is_refused_on_every_rank_and_hangs_none() -> None:
    (first, first_kept), (second, second_kept) = run_ranks(loads_one_ranks_state, 2)
    assert first.startswith("load_state_dict() failed on rank 1: ValueError: the state lacks rank1/residual/")
    assert second.startswith("the state lacks rank1/residual/")
    assert first_kept
    assert second_kept


def sharded_loads_one_ranks_state(rank: int) -> str:
    model = sharded.build()
    wire = sharded.compress(model, "raw", FEEDBACK)
    sharded.train(model, 2)
    mine = [wire.state_dict()]
    dist.broadcast_object_list(mine)
    with pytest.raises((ValueError, thinwire.PeerFailedError), match="gather_state_dict") as refused:
        wire.load_state_dict(mine[0])
    return str(refused.value)


def test_the_state_of_one_rank_of_a_sharded_model_is_refused_on_every_rank() -> None:
    first, second = run_ranks(sharded_loads_one_ranks_state, 2)
    assert first.startswith("load_state_dict() failed on rank 1: ")
    assert second.startswith("the state lacks rank1/residual/")


def test_what_a_policy_has_seen_is_in_the_gathered_state_of_every_rank() -> None:
    def gathers(transport: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        plan = Plan.build({"weight": (64, 64)}, "topk(density=0.1)")
        policy = thinwire.policies.parse_policy("lgreco(every=4, warmup=1)")
        wire = thinwire.Wire(plan, {"weight": (64, 64)}, transport, WireSettings(adapt=policy))
        for step in range(3):
            wire.begin_step()
            flat = torch.randn(64 * 64, generator=torch.Generator().manual_seed(10 * step + transport.rank))
            wire.observe(flat, (("weight", (64, 64)),))
            wire.reduce(flat, (("weight", (64, 64)),)).wait()
        gathered, own = wire.gather_state_dict(), wire.state_dict()
        wire.load_state_dict(gathered)
        assert alike(wire.state_dict(), own)
        wire.detach()
        return gathered, own

    (first, deciding), (second, _) = run_threads(gathers, 2)
    assert alike(first, second)
    assert deciding.keys() < first.keys()


def accelerated(rank: int, folder: str) -> tuple[bool, bytes, bytes]:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    from accelerate import Accelerator

    def begin() -> tuple[Any, Any, Any, Any]:
        accelerator = Accelerator(cpu=True)
        module = make(rank).module
        optimizer = torch.optim.Adam([p for p in module.parameters() if p.requires_grad])
        model, optimizer = accelerator.prepare(module, optimizer)
        wire = thinwire.compress(model, FEEDBACK, skip_if_slower=False)
        accelerator.register_for_checkpointing(wire.checkpointable())
        return accelerator, model, optimizer, wire

    accelerator, model, optimizer, wire = begin()
    train(model, rank, 3, optimizer=optimizer)
    accelerator.save_state(folder)
    own = wire.state_dict()
    train(model, rank, 2, first=3, optimizer=optimizer)
    again, resumed, its_optimizer, its_wire = begin()
    again.load_state(folder)
    same = alike(its_wire.state_dict(), own)
    train(resumed, rank, 2, first=3, optimizer=its_optimizer)
    return same, fingerprint(model), fingerprint(resumed)


@pytest.mark.skipif(find_spec("accelerate") is None, reason="accelerate is not installed")
@pytest.mark.timeout(300)
def test_accelerate_saves_and_loads_it(tmp_path: Path) -> None:
    for same, straight, resumed in run_ranks(accelerated, 2, str(tmp_path), timeout_s=250):
        assert same
        assert resumed == straight
