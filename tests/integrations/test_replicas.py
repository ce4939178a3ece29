"""FSDP2 with replicas: means of gradients on (n, 1) and (n, m) meshes, and under `replicate()`."""

from __future__ import annotations

import inspect
import os
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import sharded
import thinwire
from harness import on_ranks, run_ranks
from ranks import assert_alike
from thinwire.runtime.checkpoint import check_held
from thinwire.runtime.placement import ShardedLayer

STEPS = 4
NEW = "mesh" in inspect.signature(replicate).parameters
"""Whether this PyTorch builds `replicate()` on FSDP2 for a mesh, and divides on gloo: since 2.10."""
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


@pytest.mark.parametrize("how", ["mesh", *(["replicate"] if NEW else [])])
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


def _clipped(model: Any, step: int) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def _divided(model: Any) -> None:
    model.set_gradient_divide_factor(3.0)
    for block in model.blocks:
        block.set_gradient_divide_factor(3.0)


def _checkpointed(model: Any, *, use_reentrant: bool = False) -> None:
    for block in model.blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=use_reentrant)


def _hooked(model: Any) -> None:
    model.blocks[0].set_all_reduce_hook(lambda gradient: gradient.mul_(2.0))


def _by_columns(parameter: Any) -> Shard:
    return Shard(parameter.ndim - 1 if parameter.shape[-1] % 2 == 0 else 0)


LOW = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
HALF = MixedPrecisionPolicy(reduce_dtype=torch.float16)
LOOPS: dict[str, dict[str, Any]] = {
    "clipped": {"after": _clipped},
    "divided": {"change": _divided},  # gloo has no reduce-scatter that multiplies, and no shards then
    "accumulated": {"accumulate": 2},
    "accumulated among shards": {"accumulate": 2, "partly": True},
    "bf16": {"mp_policy": LOW},
    "reduced in fp16": {"mp_policy": HALF},
    "checkpointed": {"change": _checkpointed},
    "reentrant": {"change": partial(_checkpointed, use_reentrant=True)},
    "evaluated before": {"change": lambda model: torch.no_grad()(model)(sharded.batch(9, 0)[0])},
    "compiled": {"change": lambda model: [block.compile(backend="aot_eager") for block in model.blocks]},
    "hooked": {"change": _hooked},
    "used twice": {"net": sharded.Shared},
    "spare": {"net": lambda: sharded.Net(spare=True)},
    "along the columns": {"net": partial(sharded.Net, 36), "shard_placement_fn": _by_columns},
}


def _grown(mesh: Any, raw: bool, *, change: Any = None, after: Any = None, accumulate: int = 1, **loop: Any) -> Any:
    partly = loop.pop("partly", False)
    model = sharded.build(mesh, **loop)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    if change is not None:
        change(model)
    if raw:
        thinwire.compress(model, "raw", **({"weights": "raw"} if mesh.size(1) > 1 else {}))
    for step in range(2):
        for part in range(accumulate):
            last = part == accumulate - 1
            (model.set_requires_all_reduce if partly else model.set_requires_gradient_sync)(last)
            x, y = sharded.batch(accumulate * step + part, dist.get_rank())
            (model(x) - y).square().mean().backward()
        if after is not None:
            after(model, step)
        optimizer.step()
        optimizer.zero_grad()
    return sharded.whole(model)


@pytest.mark.parametrize("size", [2, 4])
@on_ranks(timeout_s=110.0)
def test_raw_means_are_those_of_pytorch(rank: int, size: int) -> None:
    mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicate", "shard"))
    for name, loop in LOOPS.items():
        if name == "divided" and (size > 2 or not NEW):
            continue
        stock, ours = (_grown(mesh, raw, **dict(loop)) for raw in (False, True))
        for key, value in ours.items():
            near = 1e-3 if "mp_policy" in loop else 1e-6
            torch.testing.assert_close(value, stock[key], rtol=10 * near, atol=near, msg=f"{name}: {key}")


@on_ranks(4)
def test_shards_and_their_means_are_compressed_by_one_argument(rank: int, size: int) -> None:
    stock = sharded.train(hybrid(2, 2), 6)[-1]
    model = hybrid(2, 2)
    wire = thinwire.compress(model, "ef(minmax(bits=4, bucket=64))", **OPTIONS)
    assert sharded.train(model, 6)[-1] == pytest.approx(stock, rel=0.05)
    assert_alike(sharded.whole(model))
    specs = {site: str(wire.plan[f"{site}/stem.weight"]) for site in ("weights", "gradients", "across")}
    assert specs["across"] == specs["gradients"] != specs["weights"]
    assert wire.sent_bytes("across") < 0.2 * 4 * sum(p.numel() for p in model.parameters())
    assert wire.stats.overlapped == 6 * 3, "reductions among shards are waited for before backward has ended"


@on_ranks(2)
def test_a_checkpoint_of_ddp_goes_on_without_it(rank: int, size: int) -> None:
    spec = "ef(minmax(bits=2, bucket=64))"
    ddp = DistributedDataParallel(sharded.initialized())
    former = thinwire.compress(ddp, spec, **OPTIONS)
    sharded.train(ddp, 2)
    model = hybrid(size, 1)
    with torch.no_grad():
        for p, q in zip(model.parameters(), ddp.parameters(), strict=True):
            p.to_local().copy_(q)
    wire = thinwire.compress(model, spec, **OPTIONS)
    wire.load_state_dict(former.gather_state_dict())
    assert sharded.train(model, 2, first=2) == sharded.train(ddp, 2, first=2)


def _rank_is_gone(rank: int, shards: bool, overlap: bool) -> bool:
    model = sharded.build() if shards else hybrid(2, 1)
    thinwire.compress(model, "8bit", skip_if_slower=False, min_numel=64, overlap=overlap)
    sharded.train(model, 2)
    if rank == 1:
        os._exit(3)
    with pytest.raises(thinwire.TransportError, match="rank 1 has died"):
        sharded.train(model, 5, first=2)
    return True


@pytest.mark.parametrize(("shards", "overlap"), [(False, True), (False, False), (True, True)])
def test_a_rank_that_is_gone_is_named(shards: bool, overlap: bool) -> None:
    assert run_ranks(_rank_is_gone, 2, shards, overlap, may_die=True, group_timeout_s=10.0) == [True, None]


def test_a_residual_that_another_shard_left_is_refused() -> None:
    layer = ShardedLayer("layer", (5, 2), 2)
    left = layer.spread(torch.ones(4), 1)
    check_held(left, layer.spread(torch.ones(4), 1), "layer")
    with pytest.raises(ValueError, match="of another shard"):
        check_held(left, layer.spread(torch.ones(6), 0), "layer")
