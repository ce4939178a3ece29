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
from harness import run_ranks
from nets import DDP_OPTIONS, Net, assert_replicas_identical, batch, loss_of, train, trained
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


# --- DistributedDataParallel -----------------------------------------------------------------------------------------


def _trains(rank: int, registered: bool) -> dict[str, tuple[list[float], list[float], dict]]:
    found = {}
    for name, options in DDP_OPTIONS.items():
        group = group_of(None if registered else EVERYTHING)
        model = ddp_of(group, **options)
        if registered:
            thinwire.register_model(model)
        losses = train(model, rank, 8, lr=0.03)
        assert_replicas_identical(model)
        exact = train(ddp_of(**options), rank, 8, lr=0.03)
        found[name] = losses, exact, {"ratio": group.stats.ratio, **vars(group.stats)}
    return found


@pytest.mark.parametrize("registered", [False, True])
def test_unmodified_ddp_trains(registered: bool) -> None:
    for name, (losses, exact, stats) in (each for found in run_ranks(_trains, 2, registered) for each in found.items()):
        assert losses == pytest.approx(exact, rel=0.03), name
        assert losses != exact, name
        assert stats["compressed"] >= 8
        assert stats["ratio"] > (5 if name != "bf16 model" else 2.5)
        if registered:
            # Every bucket: they are what the registered layers make up, from the first pass on.
            assert stats["uniform"] == 0
            assert stats["matched"] >= stats["compressed"]
        else:
            assert stats["uniform"] == stats["compressed"]


def _beside_a_model(rank: int) -> list[tuple[list[str], bool, bool, int, int]]:
    """Train a model, without and with registering it, that sums something else in its forward pass, too."""
    found = []
    for registered in (False, True):
        group = group_of()
        model, exact = ddp_of(group), ddp_of()
        if registered:
            thinwire.register_model(model)
        same = True
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for step in range(3):
                x = torch.exp(3 * torch.randn(8191, generator=torch.Generator().manual_seed(2 * step + rank)))
                y = x.clone()
                dist.all_reduce(x, group=group)
                dist.all_reduce(y)
                same &= torch.equal(x, y)
                for m in (model, exact):
                    m.zero_grad()
                    loss_of(m, batch(rank, step)).backward()
        alike = all(torch.equal(a.grad, b.grad) for a, b in zip(trained(model), trained(exact), strict=True))
        said = [str(w.message) for w in caught if "register_model" in str(w.message)]
        found.append((said, same, alike, group.stats.compressed, group.stats.unknown))
    return found


def test_a_sum_beside_a_models_gradients_is_exact() -> None:
    for found in run_ranks(_beside_a_model, 2):
        for registered, (said, same, alike, compressed, unknown) in enumerate(found):
            assert same
            assert alike == (not registered)
            assert len(said) == (not registered)
            assert (compressed > 0) == registered
            assert unknown == 3 if registered else unknown > 3


def _accumulates(rank: int) -> tuple[int, float]:
    group = group_of(ProcessGroupOptions("minmax(bits=8)", where=lambda _: True))
    model, exact = ddp_of(group), ddp_of()
    for m in (model, exact):
        with m.no_sync():
            loss_of(m, batch(rank, 0)).backward()
        loss_of(m, batch(rank, 1)).backward()
    pairs = list(zip(trained(model), trained(exact), strict=True))
    off = sum(float((a.grad - b.grad).norm() ** 2) for a, b in pairs) ** 0.5
    return group.stats.compressed, off / sum(float(b.grad.norm() ** 2) for _, b in pairs) ** 0.5


def test_no_sync_accumulates() -> None:
    for compressed, off in run_ranks(_accumulates, 2):
        assert compressed == 1
        assert 0 < off < 0.02


def _compiled(rank: int) -> tuple[list[float], list[float], int]:
    group = group_of(ProcessGroupOptions("minmax(bits=8)", where=lambda _: True))
    model = ddp_of(group, bucket_cap_mb=25)
    compiled = torch.compile(model, backend="aot_eager")
    losses = train(compiled, rank, 6, lr=0.03)
    assert_replicas_identical(model)
    return losses, train(ddp_of(), rank, 6, lr=0.03), group.stats.compressed


def test_ddp_under_compile() -> None:
    for losses, exact, compressed in run_ranks(_compiled, 2):
        assert losses == pytest.approx(exact, rel=0.02)
        assert compressed >= 6


def _breaks_once(rank: int) -> tuple[str, int]:
    group = group_of(EVERYTHING)
    model = ddp_of(group)
    train(model, rank, 3, lr=0.03)
    encode = thinwire.compressors.MinMax.encode

    def fail(*args, **kwargs):
        raise ValueError("no room for it")

    if rank == 1:
        thinwire.compressors.MinMax.encode = fail
    with pytest.raises(RuntimeError) as error:
        loss_of(model, batch(rank, 3)).backward()
    dist.barrier()
    thinwire.compressors.MinMax.encode = encode
    train(model, rank, 3, lr=0.03)
    assert_replicas_identical(model)
    return str(error.value), group.stats.compressed


def test_an_error_reaches_backward_and_ddp_stays_usable() -> None:
    theirs, ours = run_ranks(_breaks_once, 2)
    assert "rank 1 failed in step" in theirs[0]
    assert "no room for it" in ours[0]
    assert theirs[1] == ours[1]


def _layerwise_over_it(rank: int) -> tuple[int, int]:
    group = group_of()
    model = ddp_of(group)
    wire = thinwire.compress(model, skip_if_slower=False)
    train(model, rank, 4, lr=0.03)
    assert_replicas_identical(model)
    return wire.stats.compressed_steps, group.stats.compressed


def test_compress_goes_its_own_way() -> None:
    assert run_ranks(_layerwise_over_it, 2) == [(4, 0), (4, 0)]


# --- meshes ----------------------------------------------------------------------------------------------------------

EIGHT = ProcessGroupOptions("minmax(bits=8, bucket=1024)")


def _sharded(rank: int, mesh: DeviceMesh) -> tuple[list[float], torch.Tensor]:
    """Losses of a training, and what checkpoints are made of: exact, and the same everywhere."""
    torch.manual_seed(0)
    model = Net()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    losses = train(model, rank, 8, lr=0.03)
    return losses, torch.cat([p.full_tensor().reshape(-1) for p in model.parameters()]).detach()


def _fsdp(rank: int) -> tuple[list[float], list[float], torch.Tensor, torch.Tensor, int]:
    found = []
    for override in ({}, {"shard": ("thinwire", EIGHT)}):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("shard",), backend_override=override)
        found.append((*_sharded(rank, mesh), mesh.get_group("shard")))
    (want, exact, _), (losses, full, group) = found
    return want, losses, exact, full, group.stats.compressed


def test_fsdp2_over_a_mesh() -> None:
    results = run_ranks(_fsdp, 2)
    for want, losses, exact, full, compressed in results:
        assert losses == pytest.approx(want, rel=0.02)
        assert torch.equal(full, results[0][3])
        assert 0 < float((full - exact).norm()) < 0.05 * float(exact.norm())
        # Of five groups of parameters: weights twice a step or once, gradients once.
        assert compressed >= 8 * 5 * 2


def _hsdp(rank: int) -> tuple[list[float], list[float], bytes, int]:
    found = []
    for override in ({}, {"rep": ("thinwire", ProcessGroupOptions())}):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rep", "shard"), backend_override=override)
        found.append((*_sharded(rank, mesh), mesh.get_group("rep")))
    (want, _, stock), (losses, full, group) = found
    assert not isinstance(stock, ProcessGroup)
    return want, losses, full.numpy().tobytes(), group.stats.compressed


def test_hsdp_with_a_compressed_replicate_dimension() -> None:
    results = run_ranks(_hsdp, 4)
    for want, losses, full, compressed in results:
        assert losses == pytest.approx(want, rel=0.03)
        assert full == results[0][2]
        assert compressed == 8 * 5


# --- registered layers -----------------------------------------------------------------------------------------------


def _layout(rank: int) -> dict[str, float]:
    """Relative errors of a buffer of layers of very different ranges, layer by layer and as one."""
    layers = [("big", (64, 64)), ("big.bias", (64,)), ("small", (64, 48)), ("kept", (64, 32))]
    layered = group_of(ProcessGroupOptions(exclude=["kept"], layout=layers))
    uniform = group_of(EVERYTHING)
    generator = torch.Generator().manual_seed(rank)
    parts = [torch.randn(64 * 64), 100 * torch.randn(64), 1e-3 * torch.randn(64 * 48), torch.randn(64 * 32)]
    x = torch.cat([part * torch.rand((), generator=generator) for part in parts])
    exact, found = x.clone(), {}
    dist.all_reduce(exact)
    for name, group in (("uniform", uniform), ("layered", layered)):
        y, start = x.clone(), 0
        dist.all_reduce(y, group=group)
        for (layer, _), part in zip(layers, parts, strict=True):
            where = slice(start, start + part.numel())
            found[f"{name} {layer}"] = float((y - exact)[where].norm() / exact[where].norm())
            start += part.numel()
        found[name] = float((y - exact).norm() / exact.norm())
    assert (layered.stats.matched, layered.stats.uniform, layered.stats.compressed) == (1, 0, 1)
    assert (uniform.stats.matched, uniform.stats.uniform, uniform.stats.compressed) == (0, 1, 1)
    other = torch.ones(x.numel() - 1)
    dist.all_reduce(other, group=layered)
    assert (layered.stats.matched, layered.stats.uniform, layered.stats.unknown) == (1, 0, 1)
    # The same layout of every rank's part.
    part = torch.empty(x.numel())
    dist.reduce_scatter_single(part, x.repeat(2), group=layered)
    gathered = torch.empty(2, x.numel())
    dist.all_gather_single(gathered.view(-1), x, group=layered)
    where = slice(4096, 4096 + 64)
    found["scattered bias"] = float((part - exact)[where].norm() / exact[where].norm())
    found["gathered bias"] = float((gathered[rank] - x)[where].norm())
    assert layered.stats.matched == 3
    return found


def test_a_registered_layout_keeps_biases_raw_and_errs_less() -> None:
    for found in run_ranks(_layout, 2):
        assert found["layered big.bias"] < 1e-6
        assert found["layered kept"] < 1e-6
        assert 0.01 < found["layered big"] < 0.2
        assert 0.01 < found["layered small"] < 0.2
        # Where a bucket of 128 values holds a bit of two layers, the smaller one is lost.
        assert found["uniform big.bias"] > 0.01
        assert found["uniform small"] > 10 * found["layered small"]
        assert found["layered"] < found["uniform"]
        assert found["scattered bias"] < 1e-6
        assert found["gathered bias"] == 0


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


def _biases_of_all(rank: int) -> tuple[list[tuple[list[float], list[float], dict]], tuple]:
    ways = [{}, DDP_OPTIONS["static graph"], DDP_OPTIONS["find unused"], {"bucket_cap_mb": 25}]
    return [_biases(rank, Net, options) for options in ways], _biases(rank, Shuffled, {})


def test_biases_in_buckets_of_ddp_are_raw_and_layers_in_another_order_are_found_once_ddp_tells() -> None:
    for in_order, (flat, matrices, stats) in run_ranks(_biases_of_all, 2):
        for raw, coded, of_order in in_order:
            assert max(raw) < 1e-5
            assert all(0.01 < error < 0.3 for error in coded)
            assert of_order["uniform"] == 0
        assert flat[0] < 1e-5
        assert max(flat[3:]) < 1e-5
        # Buckets in which no layers are found, until DDP tells, are exact.
        assert all(error < 0.5 for error in matrices)
        assert all(error > 0.01 for error in matrices[3:])
        assert stats["matched"] >= stats["compressed"]
        assert 0 < stats["unknown"] <= 6


def _refuses(rank: int) -> None:
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


def test_what_cannot_be_registered_is_refused() -> None:
    run_ranks(_refuses, 2)
