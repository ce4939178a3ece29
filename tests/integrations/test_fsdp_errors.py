"""What a sharded model cannot have is refused, clearly, by every rank; what PyTorch does not promise is checked."""

from __future__ import annotations

import os
import warnings
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
from thinwire.integrations.fsdp import QuantisedAllGather, QuantisedReduceScatter
from thinwire.runtime.placement import Placement, ShardedLayer


def _refused(rank: int, size: int) -> dict[str, str]:
    texts: dict[str, str] = {}

    def refused(about: str, kind: type[Exception], call: Any) -> None:
        with pytest.raises(kind) as error:
            call()
        texts[about] = str(error.value)

    model = build()
    refused("plain", TypeError, lambda: thinwire.compress(Net()))
    refused("rules", TypeError, lambda: thinwire.compress(model, "minmax(bits=4, bucket=128)"))
    refused("keyword", TypeError, lambda: thinwire.compress(model, compressor="4bit"))
    refused("simulate", TypeError, lambda: thinwire.compress(model, simulate=True))
    refused("topk weights", ValueError, lambda: compress(model, "topk(density=0.1)", "raw"))
    refused("ef weights", ValueError, lambda: compress(model, "ef(minmax(bits=4, bucket=128))", "raw"))
    refused("powersgd", ValueError, lambda: compress(model, "raw", "powersgd(rank=2)"))
    refused(
        "pattern", ValueError, lambda: thinwire.compress(model, weights={"nothing.*": "minmax(bits=4, bucket=128)"})
    )
    scheduled = "topk(density=((0, 0.5), (3, 0.1)))"
    refused("schedule", ValueError, lambda: compress(model, "raw", scheduled))
    refused("rate", ValueError, lambda: compress(model, "raw", "ef(minmax(bits=2), units=update)"))
    refused("across", ValueError, lambda: compress(model, across="minmax(bits=4, bucket=128)"))
    refused("time", ValueError, lambda: compress(model, "minmax(bits=4, bucket=64)", adapt="lgreco(objective='time')"))
    refused("meta", RuntimeError, lambda: compress(build(net=lambda: Net().to("meta"))))
    foreign = torch.optim.AdamW(Net().parameters())
    refused("optimizer", ValueError, lambda: compress(model, optimizer=foreign))
    compress(model)
    refused("twice", RuntimeError, lambda: compress(model))

    pooled = build()
    pooled.set_allocate_memory_from_process_group_for_comm(True)
    refused("pooled", RuntimeError, lambda: compress(pooled))

    several = Net()
    several.stem.double().requires_grad_(False)
    mesh = init_device_mesh("cpu", (size,))
    for block in several.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(several, mesh=mesh)
    compress(several)
    refused("dtypes", TypeError, lambda: several(batch(0, rank)[0].double()))

    grown = build()
    compress(grown)
    at = compat.fsdp_groups(grown.blocks[0])[0].identity._all_gather_comm.attached
    at.padded["blocks.0.up.weight"] += 1
    refused("layout", RuntimeError, lambda: grown(batch(0, rank)[0]))

    unused = build(net=lambda: Net(spare=True))
    compress(unused)
    unused.blocks[0].set_reduce_scatter_unused_params(False)
    x, y = batch(0, rank)
    refused("unused", RuntimeError, lambda: (unused(x) - y).square().mean().backward())
    return texts


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


def test_what_cannot_be_is_refused() -> None:
    wanted = {
        "plain": "takes a DistributedDataParallel model, or one under fully_shard(), not Net",
        "rules": "thinwire.compress(model, gradients='minmax(bits=4, bucket=128)', weights=",
        "keyword": "thinwire.compress(model, gradients='4bit', weights=",
        "simulate": "simulate= is an argument of thinwire.compress_ddp() (DistributedDataParallel)",
        "topk weights": "weights must arrive in every step",
        "ef weights": "weights must arrive in every step",
        "powersgd": "does not become messages of a fixed size that an owner of shards can add up",
        "pattern": "head.weight. Names are those of model.named_parameters(); '*' stands for any characters",
        "schedule": "schedules are for DistributedDataParallel models",
        "rate": "weights residuals by the learning rate",
        "across": "say with replicas= which process group takes them",
        "time": "asks for the time of DDP buckets",
        "meta": "call model.to_empty(device=...) and initialise them, then thinwire.compress(",
        "optimizer": "optimizer holds no parameter of this model: pass the one that trains it, AdamW(model",
        "twice": "compressed already: call detach()",
        "pooled": "are moved by ProcessGroupAllocAllGather",
        "dtypes": "parameters of several dtypes in one module are sent as bytes",
        "layout": "places in the buffer are unknown",
        "unused": "leave set_reduce_scatter_unused_params(True)",
    }
    for texts in run_ranks(_refused, 2, 2):
        for about, text in wanted.items():
            assert text in texts[about], about


class _Outer(nn.Module):
    def __init__(self, **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)


def _otherwise_wrapped(rank: int, size: int) -> dict[str, str]:
    from torch.distributed._composable.replicate import replicate
    from torch.distributed._composable.replicate_with_fsdp import replicate as replicate_with_fsdp

    texts: dict[str, str] = {}

    def refused(about: str, kind: type[Exception], model: nn.Module, **options: Any) -> None:
        with pytest.raises(kind) as error:
            thinwire.compress(model, **options)
        texts[about] = str(error.value)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        first = FullyShardedDataParallel(nn.Linear(8, 8), device_id=torch.device("cpu"))
    refused("FSDP1", TypeError, first)
    refused("FSDP1 inside", TypeError, _Outer(inner=first))
    refused("DDP inside", TypeError, _Outer(inner=DistributedDataParallel(nn.Linear(8, 8))))
    inside = nn.Sequential(nn.Tanh(), DistributedDataParallel(nn.Linear(8, 8)))
    refused("DDP deeper inside", TypeError, _Outer(parts=inside))
    refused("replicate", TypeError, replicate(nn.Linear(8, 8)))
    mesh = init_device_mesh("cpu", (size, 1), mesh_dim_names=("replicate", "shard"))
    refused("replicate of FSDP2", NotImplementedError, replicate_with_fsdp(nn.Linear(8, 8), mesh=mesh["replicate"]))
    refused("shards of one rank", NotImplementedError, build(mesh))
    refused("nothing across", ValueError, build(mesh["shard"]), replicas=mesh["replicate"].get_group())
    options = {"replicas": mesh["replicate"].get_group(), "across": "4bit", "adapt": "lgreco(every=5)"}
    refused("nothing to adapt", ValueError, build(mesh["shard"]), **options)
    with pytest.warns(UserWarning, match="nothing is sent") as warned:
        thinwire.compress(build(mesh["shard"]))
    texts["replicas that nobody named"] = str(warned[0].message)
    return texts


def test_what_is_wrapped_otherwise_is_told_what_to_do() -> None:
    wanted = {
        "FSDP1": "use fully_shard() (FSDP2)",
        "FSDP1 inside": "use fully_shard() (FSDP2)",
        "DDP inside": "thinwire.compress(model.inner)",
        "DDP deeper inside": "thinwire.compress(model.get_submodule('parts.1'))",
        "replicate": "thinwire.compress(DistributedDataParallel(model))",
        "replicate of FSDP2": "is replicated by replicate(): ",
        "shards of one rank": "is replicated by fully_shard() on a mesh whose shards have one rank",
        "nothing across": "give across='minmax(bits=4, bucket=128)'",
        "nothing to adapt": "adapt= chooses compressors of weights and gradients",
        "replicas that nobody named": "replicas=mesh['replicate'].get_group()",
    }
    for texts in run_ranks(_otherwise_wrapped, 2, 2):
        for about, text in wanted.items():
            assert text in texts[about], about


def _under_a_default_device(rank: int, size: int) -> bool:
    """``meta`` stands for ``cuda``, which scripts set."""
    torch.set_default_device("meta")
    try:
        with torch.device("cpu"):
            model = build()
        wire = compress(model, "minmax(bits=8, bucket=64)", "ef(minmax(bits=4, bucket=64))")
        with torch.device("cpu"):
            train(model, 2)
        wire.load_state_dict(wire.gather_state_dict())
        template = wire.state_dict_of(3)
        state = wire.state_dict()
    finally:
        torch.set_default_device(None)
    return all(value.device.type == "cpu" for value in (*state.values(), *template.values()))


def test_a_default_device_is_not_that_of_states() -> None:
    assert run_ranks(_under_a_default_device, 2, 2) == [True, True]


def _disagree(rank: int, size: int) -> str:
    model = build()
    with pytest.raises(thinwire.DisagreementError) as error:
        compress(model, f"minmax(bits={4 + rank}, bucket=64)")
    return str(error.value)


def test_ranks_that_were_given_different_things_all_raise() -> None:
    for text in run_ranks(_disagree, 2, 2):
        assert "weights: " in text
        assert "bits=4" in text
        assert "bits=5" in text


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


def _without_sockets(rank: int, size: int) -> str:
    model = build()
    socket = FSDPModule.set_custom_all_gather
    del FSDPModule.set_custom_all_gather
    try:
        with pytest.raises(RuntimeError) as error:
            compress(model)
    finally:
        FSDPModule.set_custom_all_gather = socket  # type: ignore[method-assign]
    return str(error.value)


def test_a_pytorch_without_the_sockets_is_reported() -> None:
    for text in run_ranks(_without_sockets, 2, 2):
        assert "FSDPModule.set_custom_all_gather is missing in this PyTorch" in text


def _told_by_pytorch(rank: int, size: int) -> Any:
    """What `compat.fsdp_groups` says, beside what is public."""
    model = build(net=lambda: Net(tied=True))
    mesh = init_device_mesh("cpu", (size,))
    pair = nn.ModuleList([nn.Linear(5, 3), nn.Linear(3, 2)])
    fully_shard([pair[0], pair[1]], mesh=mesh)
    found = []
    for module in (*model.blocks, model):
        for group in compat.fsdp_groups(module):
            named = {id(p): n for n, p in model.named_parameters()}
            layers = [ShardedLayer(named[id(p.now())], p.shape, size, p.dim) for p in group.parameters]
            placement = Placement(layers, size)
            found.append((placement.part_numel, sum(p.padded_numel for p in group.parameters)))
            for layer, p in zip(layers, group.parameters, strict=True):
                assert layer.shape == tuple(p.now().shape)
                assert layer.shape_of(rank) == tuple(p.now().to_local().shape)
            assert not group.reads_at_once()
            assert not group.other_comm
            assert not group.replicated
            assert not group.fills_unused
            assert group.device.type == "cpu"
            assert group.process_group.size() == size
            assert all(p.whole() is None for p in group.parameters)
    model(batch(0, rank)[0])
    for group in (group for module in (*model.blocks, model) for group in compat.fsdp_groups(module)):
        wholes = [whole for p in group.parameters if (whole := p.whole()) is not None]
        assert [tuple(whole.shape) for whole in wholes] == [p.shape for p in group.parameters]
    groups = [compat.fsdp_groups(module)[0] for module in pair]
    assert groups[0].identity is groups[1].identity
    assert len(groups[0].parameters) == 4
    return found


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_what_pytorch_tells_of_its_buffers(num_ranks: int) -> None:
    for found in run_ranks(_told_by_pytorch, num_ranks, num_ranks):
        assert len(found) == 3
        assert all(ours == theirs for ours, theirs in found)


def _grouped(rank: int, size: int) -> Any:
    """Modules that were sharded together have one buffer."""
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(7, 33), nn.Tanh(), nn.Linear(33, 7))
        mesh = init_device_mesh("cpu", (size,))
        fully_shard([model[0], model[2]], mesh=mesh)
        models.append(fully_shard(model, mesh=mesh))
    wire = compress(models[1])
    return [train(model, 4) for model in models], wire.stats.gathers


def test_modules_that_are_sharded_together() -> None:
    for (stock, ours), gathers in run_ranks(_grouped, 2, 2):
        torch.testing.assert_close(ours, stock, rtol=1e-5, atol=1e-6)
        assert gathers == 8


def test_a_private_name_that_is_gone_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    class Changed:
        def _get_fsdp_state(self) -> object:
            return object()

    with pytest.raises(RuntimeError, match="does not tell how fully_shard lays out its buffers"):
        compat.fsdp_groups(Changed())


def test_nothing_is_queued_outside_of_backward() -> None:
    called: list[int] = []
    assert not compat.at_end_of_backward(lambda: called.append(1))
    x = torch.ones(2, requires_grad=True)
    y = (x * 2).sum()
    y.register_hook(lambda _: called.append(2) if compat.at_end_of_backward(lambda: called.append(3)) else None)
    y.backward()
    assert called == [2, 3]


def test_the_names_of_our_collectives_are_those_that_are_looked_for() -> None:
    assert {QuantisedAllGather.__name__, QuantisedReduceScatter.__name__}.isdisjoint(compat.DEFAULT_COMMS)
