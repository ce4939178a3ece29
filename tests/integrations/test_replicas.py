"""FSDP2 with replicas: means of gradients on (n, 1) and (n, m) meshes, and under `replicate()`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import sharded
import thinwire
from harness import on_ranks
from ranks import of_ranks

STEPS = 4
OPTIONS: dict[str, Any] = {"skip_if_slower": False, "min_numel": 64}


def hybrid(rows: int, columns: int, **options: Any) -> Any:
    mesh = init_device_mesh("cpu", (rows, columns), mesh_dim_names=("replicate", "shard"))
    return sharded.build(mesh, **options)


def replicated(size: int) -> Any:
    model, mesh = sharded.initialized(), init_device_mesh("cpu", (size,), mesh_dim_names=("replicate",))
    for block in model.blocks:
        replicate(block, mesh=mesh)
    return replicate(model, mesh=mesh)


def same_slots(*wires: thinwire.Wire) -> bool:
    first, second = ({k: v for k, v in wire.state_dict().items() if k.startswith("rank")} for wire in wires)
    return first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)


@pytest.mark.parametrize("how", ["mesh", "replicate"])
@pytest.mark.parametrize(
    "spec", ["raw", "4bit", "ef(minmax(bits=2, bucket=64, rounding=stochastic))", "powersgd(rank=2)"]
)
@on_ranks(2)
def test_whole_modules_train_as_under_ddp(rank: int, size: int, how: str, spec: str) -> None:
    """To the same bits; messages of several buckets in place of one are a few bytes longer."""
    ddp = DistributedDataParallel(sharded.initialized(), bucket_cap_mb=25.0)
    model = hybrid(size, 1) if how == "mesh" else replicated(size)
    wires = [thinwire.compress(each, spec, **OPTIONS) for each in (ddp, model)]
    losses = [sharded.train(each, STEPS) for each in (ddp, model)]
    assert losses[0] == losses[1]
    theirs = {name.removeprefix("module."): p.detach() for name, p in ddp.named_parameters()}
    for name, value in sharded.whole(model).items():
        assert torch.equal(value, theirs[name]), name
    assert wires[1].stats.steps == STEPS
    sent = [wire.stats.payload_sent_bytes for wire in wires]
    assert sent[0] <= sent[1] < 1.1 * sent[0]
    assert same_slots(*wires)
