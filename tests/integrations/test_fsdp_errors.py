"""What a sharded model cannot have is refused, clearly, by every rank; what PyTorch does not promise is checked."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import thinwire
from harness import run_ranks
from sharded import Net, batch, build, compress, train
from thinwire import compat


def _errors(rank: int, size: int) -> dict[str, list[str]]:
    """What is raised, by what it must name; of the first ones by calls for one model."""
    found: dict[str, list[str]] = {}

    def refused(kind: type[Exception], text: str, call: Callable[..., object], *args: Any, **options: Any) -> None:
        with pytest.raises(kind) as error:
            call(*args, **options)
        found.setdefault(text, []).append(str(error.value))

    model, foreign = build(), torch.optim.AdamW(Net().parameters())
    lgreco = "lgreco(objective='time')"
    refused(TypeError, "or one under fully_shard(), not Net", thinwire.compress, Net())
    refused(TypeError, "gradients='minmax(bits=4)', weights=", thinwire.compress, model, "minmax(bits=4)")
    refused(TypeError, "gradients='4bit', weights=", thinwire.compress, model, compressor="4bit")
    refused(TypeError, "simulate= is an argument of thinwire.compress_ddp()", thinwire.compress, model, simulate=True)
    refused(ValueError, "weights must arrive in every step", compress, model, "topk(density=0.1)", "raw")
    refused(ValueError, "weights must arrive in every step", compress, model, "ef(minmax(bits=4))", "raw")
    refused(ValueError, "not become messages of a fixed size that an owner", compress, model, "raw", "powersgd(rank=2)")
    refused(
        ValueError, "Names are those of model.named_parameters(); '*' stands", compress, model, {"none.*": "minmax"}
    )
    scheduled = "topk(density=((0, 0.5), (3, 0.1)))"
    refused(ValueError, "schedules are for DistributedDataParallel models", compress, model, "raw", scheduled)
    refused(ValueError, "residuals by the learning rate", compress, model, "raw", "ef(minmax(bits=2), units=update)")
    refused(ValueError, "say with replicas= which process group takes them", compress, model, across="minmax")
    refused(ValueError, "asks for the time of DDP buckets", compress, model, "minmax(bits=4)", adapt=lgreco)
    refused(ValueError, "pass the one that trains it, AdamW(model", compress, model, optimizer=foreign)
    meta = build(net=lambda: Net().to("meta"))
    refused(RuntimeError, "model.to_empty(device=...) and initialise them, then thinwire.compress(", compress, meta)
    compress(model)
    refused(RuntimeError, "compressed already: call detach()", compress, model)
    pooled = build()
    pooled.set_allocate_memory_from_process_group_for_comm(True)
    refused(RuntimeError, "are moved by ProcessGroupAllocAllGather", compress, pooled)

    several = Net()
    several.stem.double().requires_grad_(False)
    mesh = init_device_mesh("cpu", (size,))
    for block in several.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(several, mesh=mesh)
    compress(several)
    x, y = batch(0, rank)
    refused(TypeError, "parameters of several dtypes in one module are sent as bytes", several, x.double())

    grown = build()
    compress(grown)
    at = compat.fsdp_groups(grown.blocks[0])[0].identity._all_gather_comm.attached
    at.padded["blocks.0.up.weight"] += 1
    refused(RuntimeError, "places in the buffer are unknown", grown, x)

    unused = build(net=lambda: Net(spare=True))
    compress(unused)
    unused.blocks[0].set_reduce_scatter_unused_params(False)
    loss = (unused(x) - y).square().mean()
    refused(RuntimeError, "leave set_reduce_scatter_unused_params(True)", loss.backward)
    return found


def test_what_cannot_be_is_refused() -> None:
    for found in run_ranks(_errors, 2, 2):
        for text, errors in found.items():
            assert all(text in error for error in errors), (text, errors)


class Exact(nn.Module):
    """A block of double precision between others."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(35, 35, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.up(x.double()).to(x.dtype)


def _net() -> Net:
    net = Net()
    net.blocks[0] = Exact()
    return net


def _double(rank: int) -> tuple[bool, bool, dict[str, str], str]:
    stock, raw, ours = (build(net=_net) for _ in range(3))
    compress(raw)
    wire = compress(ours, "minmax(bits=8)", "minmax(bits=4)", adapt="lgreco(every=2)")
    for model in (stock, raw, ours):
        train(model, 4)
    pairs = zip(stock.parameters(), raw.parameters(), strict=True)
    same = all(torch.equal(a.full_tensor(), b.full_tensor()) for a, b in pairs)
    changed = not torch.equal(stock.stem.weight.full_tensor(), ours.stem.weight.full_tensor())
    unsuited = wire.unsuited
    wire.load_state_dict(wire.gather_state_dict())
    with pytest.raises(TypeError, match=r"its dtype is torch\.float64") as error:
        compress(build(net=lambda: _net().double()))
    model = build(net=_net)
    with pytest.raises(
        ValueError, match=r"CompressedAdamW needs what is sent of every layer, and of blocks\.0\.up\.weight"
    ):
        compress(model, optimizer=thinwire.optim.CompressedAdamW(model.parameters()))
    return same, changed, unsuited, str(error.value)


def test_modules_of_double_precision_stay_with_pytorch_and_say_why() -> None:
    for same, changed, unsuited, refused in run_ranks(_double, 2):
        assert (same, changed) == (True, True)
        assert set(unsuited) == {f"{site}/blocks.0.up.weight" for site in ("weights", "gradients")}
        assert all("its dtype is torch.float64" in why for why in unsuited.values())
        assert refused.startswith("no module can be compressed")


class _Outer(nn.Module):
    def __init__(self, **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)


def _otherwise_wrapped(rank: int, size: int) -> dict[str, str]:
    """What is said, by what it must tell."""
    from torch.distributed._composable.replicate import replicate
    from torch.distributed._composable.replicate_with_fsdp import replicate as replicate_with_fsdp

    found: dict[str, str] = {}

    def refused(kind: type[Exception], text: str, model: nn.Module, **options: Any) -> None:
        with pytest.raises(kind) as error:
            thinwire.compress(model, **options)
        found[text] = str(error.value)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        first = FullyShardedDataParallel(nn.Linear(8, 8), device_id=torch.device("cpu"))
    refused(TypeError, "use fully_shard() (FSDP2)", first)
    refused(TypeError, "use fully_shard()", _Outer(inner=first))
    refused(TypeError, "thinwire.compress(model.inner)", _Outer(inner=DistributedDataParallel(nn.Linear(8, 8))))
    inside = nn.Sequential(nn.Tanh(), DistributedDataParallel(nn.Linear(8, 8)))
    refused(TypeError, "thinwire.compress(model.get_submodule('parts.1'))", _Outer(parts=inside))
    refused(TypeError, "thinwire.compress(DistributedDataParallel(model))", replicate(nn.Linear(8, 8)))
    mesh = init_device_mesh("cpu", (size, 1), mesh_dim_names=("replicate", "shard"))
    replicas = mesh["replicate"].get_group()
    replicated = replicate_with_fsdp(nn.Linear(8, 8), mesh=mesh["replicate"])
    refused(NotImplementedError, "is replicated by replicate(): ", replicated)
    refused(NotImplementedError, "replicated by fully_shard() on a mesh whose shards have one rank", build(mesh))
    refused(ValueError, "give across='minmax(bits=4, bucket=128)'", build(mesh["shard"]), replicas=replicas)
    options = {"replicas": replicas, "across": "4bit", "adapt": "lgreco(every=5)"}
    refused(ValueError, "adapt= chooses compressors of weights and gradients", build(mesh["shard"]), **options)
    with pytest.warns(UserWarning, match="nothing is sent") as warned:
        thinwire.compress(build(mesh["shard"]))
    return {**found, "replicas=mesh['replicate'].get_group()": str(warned[0].message)}


def test_what_is_wrapped_otherwise_is_told_what_to_do() -> None:
    for found in run_ranks(_otherwise_wrapped, 2, 2):
        for text, said in found.items():
            assert text in said


def _rank_is_gone(rank: int, size: int) -> str:
    model = build()
    compress(model, "minmax(bits=8, bucket=64)", "minmax(bits=8, bucket=64)")
    train(model, 2)
    if rank == 1:
        os._exit(3)
    try:
        train(model, 5, first=2)
    except thinwire.TransportError as error:
        return str(error)
    return "went on"


def test_a_rank_that_died_is_an_error_not_a_hang() -> None:
    here, gone = run_ranks(_rank_is_gone, 2, 2, may_die=True, group_timeout_s=10.0)
    assert gone is None
    assert "rank 1 has died" in str(here)


def test_private_names_that_are_gone_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    class Changed:
        def _get_fsdp_state(self) -> object:
            return object()

    with pytest.raises(RuntimeError, match="does not tell how fully_shard lays out its buffers"):
        compat.fsdp_groups(Changed())
    monkeypatch.delattr(FSDPModule, "set_custom_all_gather")
    with pytest.raises(RuntimeError, match=r"FSDPModule\.set_custom_all_gather is missing in this PyTorch"):
        thinwire.prefetch(Net())
