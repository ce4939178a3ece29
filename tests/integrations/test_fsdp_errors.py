"""What a sharded model cannot have is refused, clearly, by every rank; what PyTorch does not promise is checked."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import thinwire
from harness import on_ranks
from ranks import alike
from sharded import Net, batch, build, compress, train, whole
from thinwire import compat


@contextmanager
def refused(kind: type[Exception], says: str) -> Iterator[None]:
    with pytest.raises(kind, match=re.escape(says)):
        yield


@on_ranks(2)
def test_what_cannot_be_is_refused(rank: int, size: int) -> None:
    model, foreign = build(), torch.optim.AdamW(Net().parameters())
    for kind, says, of, *arguments, options in (
        (TypeError, "or one under fully_shard(), not Net", Net(), {}),
        (TypeError, "gradients is given twice", model, "4bit", {"gradients": "4bit"}),
        (TypeError, "simulate= is an argument of thinwire.compress_ddp()", model, {"simulate": True}),
    ):
        with refused(kind, says):
            thinwire.compress(of, *arguments, **options)
    pooled = build()
    pooled.set_allocate_memory_from_process_group_for_comm(True)
    replicas = build(init_device_mesh("cpu", (size, 1), mesh_dim_names=("replicate", "shard")))
    compress(taken := build())
    fully_shard(offloaded := Net(), offload_policy=CPUOffloadPolicy(pin_memory=False))
    compat.fsdp_groups(offloaded)[0].identity.device = torch.device("cuda")
    for kind, says, of, *specs, options in (
        (ValueError, "weights must arrive in every step", model, "topk(density=0.1)", {}),
        (ValueError, "weights must arrive in every step", model, "ef(minmax(bits=4))", {}),
        (ValueError, "not become messages of a fixed size that an owner", model, "raw", "powersgd(rank=2)", {}),
        (ValueError, "keeps a momentum of every element", model, "raw", "dgc(topk(density=0.1))", {}),
        (ValueError, "Names are those of model.named_parameters(); '*' stands", model, {"none.*": "minmax"}, {}),
        (ValueError, "schedules are for Distributed", model, "raw", "topk(density=((0, 0.5), (3, 0.1)))", {}),
        (ValueError, "residuals by the learning rate", model, "raw", "ef(minmax(bits=2), units=update)", {}),
        (ValueError, "means over replicas, and the model has none", model, {"across": "minmax"}),
        (ValueError, "auto is for DistributedDataParallel", model, "raw", "auto", {}),
        (ValueError, "weights= is for shards, and every rank has the whole", replicas, {}),
        (ValueError, "asks for the time of DDP buckets", model, {"adapt": "lgreco(objective='time')"}),
        (ValueError, "pass the one that trains it, AdamW(model", model, {"optimizer": foreign}),
        (RuntimeError, "model.to_empty(device=...) and initialize", build(net=lambda: Net().to("meta")), {}),
        (NotImplementedError, "CPUOffloadPolicy keeps shards on the host", offloaded, {}),
        (RuntimeError, "compressed already: call detach()", taken, {}),
        (RuntimeError, "are moved by ProcessGroupAllocAllGather", pooled, {}),
    ):
        with refused(kind, says):
            compress(of, *specs, **options)

    several = Net()
    several.stem.double().requires_grad_(False)
    for block in several.blocks:
        fully_shard(block)
    fully_shard(several)
    compress(several)
    x, y = batch(0, rank)
    with refused(TypeError, "parameters of several dtypes in one module are sent as bytes"):
        several(x.double())

    grown = build()
    compress(grown)
    at = compat.fsdp_groups(grown.blocks[0])[0].identity._all_gather_comm.attached
    at.padded["blocks.0.up.weight"] += 1
    with refused(RuntimeError, "places in the buffer are unknown"):
        grown(x)

    unused = build(net=lambda: Net(spare=True))
    compress(unused)
    compat.fill_unused(unused.blocks[0], False)
    loss = (unused(x) - y).square().mean()
    with refused(RuntimeError, "leave set_reduce_scatter_unused_params(True)"):
        loss.backward()


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


@on_ranks(2)
def test_modules_of_double_precision_stay_with_pytorch_and_say_why(rank: int) -> None:
    stock, raw, ours = (build(net=_net) for _ in range(3))
    compress(raw)
    wire = compress(ours, "minmax(bits=8)", "minmax(bits=4)", adapt="lgreco(every=2)")
    for model in (stock, raw, ours):
        train(model, 4)
    assert alike(whole(stock), whole(raw))
    assert not torch.equal(stock.stem.weight.full_tensor(), ours.stem.weight.full_tensor())
    assert set(wire.unsuited) == {f"{site}/blocks.0.up.weight" for site in ("weights", "gradients")}
    assert all("its dtype is torch.float64" in why for why in wire.unsuited.values())
    wire.load_state_dict(wire.gather_state_dict())
    with pytest.raises(TypeError, match=r"^no module can be compressed.*its dtype is torch\.float64"):
        compress(build(net=lambda: _net().double()))
    model = build(net=_net)
    optimizer = thinwire.optim.CompressedAdamW(model.parameters())
    with refused(ValueError, "CompressedAdamW needs what is sent of every layer, and of blocks.0.up.weight"):
        compress(model, optimizer=optimizer)


class _Outer(nn.Module):
    def __init__(self, **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)


@on_ranks(2)
def test_what_is_wrapped_otherwise_is_told_what_to_do(rank: int, size: int) -> None:
    from torch.distributed._composable.replicate import replicate

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        first = FullyShardedDataParallel(nn.Linear(8, 8), device_id=torch.device("cpu"))
    ddp = DistributedDataParallel(nn.Linear(8, 8))
    inside = nn.Sequential(nn.Tanh(), DistributedDataParallel(nn.Linear(8, 8)))
    for kind, says, model, options in (
        (TypeError, "use fully_shard() (FSDP2)", first, {}),
        (TypeError, "use fully_shard()", _Outer(inner=first), {}),
        (TypeError, "thinwire.compress(model.inner)", _Outer(inner=ddp), {}),
        (TypeError, "thinwire.compress(model.get_submodule('parts.1'))", _Outer(parts=inside), {}),
        (TypeError, "thinwire.compress(DistributedDataParallel(model))", replicate(nn.Linear(8, 8)), {}),
    ):
        with refused(kind, says):
            thinwire.compress(model, **options)
    mesh = init_device_mesh("cpu", (size, 1), mesh_dim_names=("replicate", "shard"))
    with pytest.warns(UserWarning, match=r"nothing is sent.*fully_shard\(\) with a mesh of two dimensions"):
        thinwire.compress(build(mesh["shard"]))


def test_private_names_that_are_gone_are_reported() -> None:
    class Changed:
        def _get_fsdp_state(self) -> object:
            return object()

    with pytest.raises(RuntimeError, match="does not tell how fully_shard lays out its buffers"):
        compat.fsdp_groups(Changed())
