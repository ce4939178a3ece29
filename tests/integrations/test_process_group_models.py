"""Unmodified DDP, FSDP2 and meshes over the process group of backend thinwire, and registered layers."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire
from harness import on_ranks
from nets import DDP_OPTIONS, Net, assert_replicas_identical, batch, loss_of, train, trained
from ranks import assert_alike
from thinwire import ProcessGroup, ProcessGroupOptions
from thinwire.compat import ddp_ready_order


def group_of(options: ProcessGroupOptions | None = None) -> ProcessGroup:
    group = dist.new_group(backend="thinwire", pg_options=options)
    assert isinstance(group, ProcessGroup)
    return group


EVERYTHING = ProcessGroupOptions(where=lambda _: True)


def ddp_of(group=None, *, unused: bool = False, dtype=torch.float32, net: type[nn.Module] = Net, **options) -> DDP:
    torch.manual_seed(0)
    net = Net(unused) if net is Net else net()
    options = {"bucket_cap_mb": 0.05, **options}
    return DDP(net.to(dtype), process_group=group, find_unused_parameters=unused, **options)


@pytest.mark.parametrize("registered", [False, True])
@on_ranks(2)
def test_unmodified_ddp_trains(rank: int, registered: bool) -> None:
    for name, options in DDP_OPTIONS.items():
        group = group_of(None if registered else EVERYTHING)
        model = ddp_of(group, **options)
        if registered:
            thinwire.register_model(model)
        losses, exact = train(model, rank, 8, lr=0.03), train(ddp_of(**options), rank, 8, lr=0.03)
        assert_replicas_identical(model)
        assert losses == pytest.approx(exact, rel=0.03), name
        assert losses != exact, name
        stats = group.stats
        assert stats.compressed >= 8
        assert stats.ratio > (5 if name != "bf16 model" else 2.5)
        # Every bucket is what the registered layers make up, from the first pass on.
        assert stats.uniform == (0 if registered else stats.compressed)
        assert stats.matched >= stats.compressed or not registered


@on_ranks(2)
def test_a_sum_beside_a_models_gradients_is_exact(rank: int) -> None:
    for registered in (False, True):
        group = group_of()
        model, exact = ddp_of(group), ddp_of()
        if registered:
            thinwire.register_model(model)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for step in range(3):
                x = torch.exp(3 * torch.randn(8191, generator=torch.Generator().manual_seed(2 * step + rank)))
                y = x.clone()
                dist.all_reduce(x, group=group)
                dist.all_reduce(y)
                assert torch.equal(x, y)
                for m in (model, exact):
                    m.zero_grad()
                    loss_of(m, batch(rank, step)).backward()
        alike = all(torch.equal(a.grad, b.grad) for a, b in zip(trained(model), trained(exact), strict=True))
        said = [w for w in caught if "register_model" in str(w.message)]
        assert (alike, len(said), group.stats.compressed > 0) == (not registered, not registered, registered)
        assert group.stats.unknown == 3 if registered else group.stats.unknown > 3


@on_ranks(2)
def test_an_error_reaches_backward_and_ddp_stays_usable(rank: int) -> None:
    group = group_of(EVERYTHING)
    model = ddp_of(group)
    train(model, rank, 3, lr=0.03)

    def fail(*args, **kwargs):
        raise ValueError("no room for it")

    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(thinwire.compressors.MinMax, "encode", fail)
        with pytest.raises(RuntimeError, match="no room for it" if rank == 1 else "rank 1 failed in step"):
            loss_of(model, batch(rank, 3)).backward()
        dist.barrier()
    train(model, rank, 3, lr=0.03)
    assert_replicas_identical(model)
    assert_alike(group.stats.compressed)


MESHES = {2: {"shard": ProcessGroupOptions("minmax(bits=8, bucket=1024)")}, 4: {"rep": ProcessGroupOptions()}}
"""By number of ranks, what compresses along which dimension."""


def _sharded(rank: int, mesh: DeviceMesh) -> tuple[list[float], torch.Tensor]:
    """Losses of a training, and what checkpoints are made of: exact, and the same everywhere."""
    torch.manual_seed(0)
    model = Net()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    losses = train(model, rank, 8, lr=0.03)
    return losses, torch.cat([p.full_tensor().reshape(-1) for p in model.parameters()]).detach()


@pytest.mark.parametrize("size", MESHES)
@on_ranks()
def test_fsdp2_and_hsdp_over_a_mesh(rank: int, size: int) -> None:
    found, (name, options) = [], *MESHES[size].items()
    for override in ({}, {name: ("thinwire", options)}):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            shape = {"mesh_dim_names": ("rep", "shard")[-size // 2 :], "backend_override": override}
            mesh = init_device_mesh("cpu", (2,) * (size // 2), **shape)
        found.append((*_sharded(rank, mesh), mesh.get_group(name)))
        if size == 4:
            assert not isinstance(mesh.get_group("shard"), ProcessGroup)
    (want, exact, stock), (losses, full, group) = found
    assert not isinstance(stock, ProcessGroup)
    assert losses == pytest.approx(want, rel=0.02 if size == 2 else 0.03)
    assert_alike(full)
    assert 0 < float((full - exact).norm()) < 0.05 * float(exact.norm()) or size == 4
    # Of five groups of parameters: weights twice a step or once, gradients once.
    assert group.stats.compressed >= 8 * 5 * 2 if size == 2 else group.stats.compressed == 8 * 5


@on_ranks(2)
def test_registered_layers_keep_biases_raw_and_err_less(rank: int) -> None:
    """Buffers of layers of very different ranges, layer by layer and as one."""
    model = nn.Module()
    for name, shape in {"big": (64, 64), "bias": (64,), "small": (64, 48), "kept": (64, 32)}.items():
        model.register_parameter(name, nn.Parameter(torch.zeros(shape)))
    layered = group_of(ProcessGroupOptions(exclude=["kept"]))
    layered.register_model(model)
    uniform = group_of(EVERYTHING)
    generator = torch.Generator().manual_seed(rank)
    parts = [torch.randn(64 * 64), 100 * torch.randn(64), 1e-3 * torch.randn(64 * 48), torch.randn(64 * 32)]
    x = torch.cat([part * torch.rand((), generator=generator) for part in parts])
    exact = x.clone()
    dist.all_reduce(exact)

    def errors(group: ProcessGroup) -> list[float]:
        """Of each layer, and of all."""
        y = x.clone()
        dist.all_reduce(y, group=group)
        sizes = [part.numel() for part in parts]
        pairs = [*zip(y.split(sizes), exact.split(sizes), strict=True), (y, exact)]
        return [float((a - b).norm() / b.norm()) for a, b in pairs]

    big, bias, small, kept, whole = errors(layered)
    assert max(bias, kept) < 1e-6
    assert 0.01 < min(big, small) < max(big, small) < 0.2
    # Where a bucket of 128 values holds a bit of two layers, the smaller one is lost.
    _, coded_bias, lost, _, worse = errors(uniform)
    assert coded_bias > 0.01
    assert lost > 10 * small
    assert whole < worse
    assert (layered.stats.matched, layered.stats.uniform, layered.stats.compressed) == (1, 0, 1)
    assert (uniform.stats.matched, uniform.stats.uniform, uniform.stats.compressed) == (0, 1, 1)
    dist.all_reduce(torch.ones(x.numel() - 1), group=layered)
    assert (layered.stats.matched, layered.stats.uniform, layered.stats.unknown) == (1, 0, 1)


class Shuffled(nn.Module):
    """Uses its layers in another order than it registers them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 96)
        self.third = nn.Linear(96, 96)
        self.head = nn.Linear(96, 64)
        self.first = nn.Linear(96, 48)
        self.norm = nn.LayerNorm(48)
        self.second = nn.Linear(48, 96)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.third(self.second(self.norm(torch.relu(self.first(self.embed(tokens)))))))


def _biases(rank: int, net: type[nn.Module], options: dict) -> tuple[list[float], list[float], dict]:
    """By pass, the largest error of the mean of a 1-D parameter's gradient and of the others', over their norms."""
    group = group_of()
    model, exact = ddp_of(group, net=net, **options), ddp_of(net=net, **options)
    group.register_model(model)
    flat, matrices = [], []
    for step in range(6):
        for m in (model, exact):
            m.zero_grad()
            loss_of(m, batch(rank, step)).backward()
        pairs = [(a.grad, b.grad) for a, b in zip(trained(model), trained(exact), strict=True) if b.grad is not None]
        off = [(b.dim(), float((a - b).norm() / b.norm())) for a, b in pairs]
        flat.append(max(error for dim, error in off if dim == 1))
        matrices.append(max(error for dim, error in off if dim > 1))
    assert (ddp_ready_order(model) is not None) == (not model.find_unused_parameters)
    return flat, matrices, vars(group.stats)


@on_ranks(2)
def test_biases_in_buckets_of_ddp_are_raw_and_layers_in_another_order_are_found_once_ddp_tells(rank: int) -> None:
    for options in ({}, DDP_OPTIONS["static graph"], DDP_OPTIONS["find unused"], {"bucket_cap_mb": 25}):
        raw, coded, stats = _biases(rank, Net, options)
        assert max(raw) < 1e-5
        assert all(0.01 < error < 0.3 for error in coded)
        assert stats["uniform"] == 0
    flat, matrices, stats = _biases(rank, Shuffled, {})
    assert max(flat[0], *flat[3:]) < 1e-5
    # Buckets in which no layers are found, until DDP tells, are exact.
    assert all(error < 0.5 for error in matrices)
    assert all(error > 0.01 for error in matrices[3:])
    assert stats["matched"] >= stats["compressed"]
    assert 0 < stats["unknown"] <= 6


@on_ranks(2)
def test_what_cannot_be_registered_is_refused(rank: int) -> None:
    group = group_of()
    model = ddp_of(group)
    with pytest.raises(ValueError, match="matches no parameter"):
        group.register_model(model, rules={"nothing.*": "minmax"})
    with pytest.raises(ValueError, match=r"thinwire\.compress\(model\)"):
        group.register_model(model, rules="topk")
    with pytest.raises(TypeError, match="backend='thinwire'"):
        thinwire.register_model(ddp_of())
    mesh = init_device_mesh("cpu", (2,))
    with pytest.raises(TypeError, match="sharded"):
        group.register_model(fully_shard(nn.Linear(8, 8), mesh=mesh))
    group.register_model(model, rules={"embed*": "minmax(bits=2)", "*": "minmax(bits=8)"})
    assert len(train(model, rank, 2, lr=0.03)) == 2
