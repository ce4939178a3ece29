"""Sharded models on a device: the same bytes as over the host, bit for bit. Here the device is the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from harness import run_ranks, run_threads
from sharded import Net, batch, build, same, train, whole
from thinwire import TransportError, parse
from thinwire.attach.fsdp import ShardedOptions, compress_fsdp
from thinwire.collectives import (
    DeviceLoopbackTransport,
    LoopbackTransport,
    Shard,
    ShardBuffers,
    World,
    all_gather,
    complete,
    device_all_gather,
    device_reduce_scatter,
    parse_topology,
    reduce_scatter,
    sharded_layout,
)
from thinwire.compressors import State
from thinwire.wire import ShardedWire

CPU = torch.device("cpu")
SPECS = ("minmax(bits=4)", "raw", "ef(minmax(bits=2))", "qsgd(bits=3, bucket=64)", "ef(topk(density=0.1))")


def _compress(model: Any, weights: str, gradients: str, as_device: bool, **options: Any) -> ShardedWire:
    made = ShardedOptions(decline=False, min_numel=64, as_device=as_device, **options)
    return compress_fsdp(model, {"weights": weights, "gradients": gradients, "across": "minmax(bits=6)"}, made)


def _trains(rank: int, size: int, as_device: bool, weights: str, gradients: str) -> dict[str, Any]:
    model = build(net=lambda: Net(spare=True))
    wire = _compress(model, weights, gradients, as_device)
    losses = train(model, 6, optimizer=torch.optim.SGD(model.parameters(), lr=0.01))
    x, y = batch(6, rank)
    ((model(x) - y).square().mean() * (float("inf") if rank == 1 else 1.0)).backward()
    state = wire.state_dict()
    stats = wire.stats
    counts = (stats.steps, stats.gathers, stats.reductions, stats.nonfinite_steps, stats.payload_sent_bytes)
    return {"losses": losses, "whole": whole(model), "state": state, "counts": counts, "buffers": stats.buffer_bytes}


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize(
    ("weights", "gradients"),
    [
        ("minmax(bits=8, bucket=1024)", "minmax(bits=8, bucket=1024)"),
        ("lattice(bits=6, bucket=128)", "ef(minmax(bits=3, bucket=64))"),
        ("levels(bits=4, bucket=64, learn_at=(0, 2), min_numel=100)", "ef(topk(density=0.2))"),
    ],
)
def test_training_is_the_same_bit_for_bit(num_ranks: int, weights: str, gradients: str) -> None:
    there, here = (run_ranks(_trains, num_ranks, num_ranks, device, weights, gradients) for device in (True, False))
    for ours, hosts in zip(there, here, strict=True):
        assert ours["losses"] == hosts["losses"]
        assert same([ours["whole"], hosts["whole"]])
        assert same([ours["state"], hosts["state"]])
        assert ours["counts"][:4] == hosts["counts"][:4]
        assert ours["counts"][4] <= 1.3 * hosts["counts"][4]
        assert ours["buffers"] > 0


def _replicas(rank: int, size: int, as_device: bool) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = build(mesh["shard"])
    spec = "minmax(bits=8, bucket=128)"
    _compress(model, spec, spec, as_device, replicas=mesh["replicate"].get_group())
    return {"losses": train(model, 4), "whole": whole(model)}


def test_replicas_are_the_same_bit_for_bit() -> None:
    there, here = (run_ranks(_replicas, 4, 4, device) for device in (True, False))
    assert [answer["losses"] for answer in there] == [answer["losses"] for answer in here]
    assert same([answer["whole"] for answer in (*there, *here)])


def _halves(transport: Any, layout: Any, device: bool, x: torch.Tensor, part_numel: int) -> tuple[torch.Tensor, ...]:
    rank, size = transport.rank, transport.world_size
    slots = layout.slots
    state = State.fresh(slots, x.numel()) if slots else None
    reduced, gathered = torch.zeros(part_numel), torch.zeros(size * part_numel)
    for start, numel in ((0, 2000 - 500 * rank), (2048, 700)):
        gathered.view(size, -1)[rank, start : start + numel] = x.view(size, -1)[rank, start : start + numel]
    if device:
        up, down = (ShardBuffers.open(layout, rank, CPU, up=way) for way in (True, False))
        device_reduce_scatter(x.clone(), reduced, transport, up, seed=1, draw=2, scale=0.5, state=state)
        device_all_gather(gathered, transport, down, seed=1, draw=2, state=state)
    else:
        up, down = (transport.open(layout.reduction_traffic(up=way, down=not way)) for way in (True, False))
        options = {"seed": 1, "step": 9, "draw": 2, "state": state}
        complete(reduce_scatter(x.clone(), layout, transport, up, scale=0.5, out=reduced, **options))
        complete(all_gather(gathered, layout, transport, down, **options))
    return reduced, gathered


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("spec", SPECS)
def test_both_halves_end_as_over_the_host(num_ranks: int, spec: str) -> None:
    compressor = parse(spec)
    parts, part_numel = [], 3000
    for rank in range(num_ranks):
        mine = [
            Shard("w", 0, 2000 - 500 * rank, 2048 * rank, compressor),
            Shard("v", 2048, 700, 768 * rank, parse("raw")),
        ]
        parts.append(mine)
    layout = sharded_layout(parts, part_numel, torch.float32, World(num_ranks))
    values = [torch.randn(num_ranks * part_numel, generator=torch.Generator().manual_seed(r)) for r in range(num_ranks)]
    hosts = run_threads(lambda t: _halves(t, layout, False, values[t.rank], part_numel), num_ranks)
    devices = DeviceLoopbackTransport.world(LoopbackTransport.world(num_ranks), CPU)
    theirs = run_threads(lambda t: _halves(devices[t.rank], layout, True, values[t.rank], part_numel), num_ranks)
    for (reduced, gathered), (device_reduced, device_gathered) in zip(hosts, theirs, strict=True):
        assert torch.equal(reduced, device_reduced)
        assert torch.equal(gathered, device_gathered)
    assert all(torch.equal(gathered, hosts[0][1]) for _, gathered in hosts)
    exact = sum(values)[:2000] * 0.5
    if spec == "raw":
        torch.testing.assert_close(hosts[0][0][:2000], exact)


def _refused(rank: int, size: int) -> list[str]:
    model, texts = build(), []
    wrong: list[tuple[dict[str, Any], type[Exception]]] = [({"master": False}, NotImplementedError)]
    wrong.append(({"topology": parse_topology("ring")}, ValueError))
    for given, kind in wrong:
        with pytest.raises(kind) as error:
            _compress(model, "raw", "raw", True, **given)
        texts.append(str(error.value))
    return texts


def test_what_a_device_cannot_do_is_refused() -> None:
    for master, ring in run_ranks(_refused, 2, 2):
        assert "for which a GPU would stop" in master
        assert "is for messages over the host" in ring


def test_a_rank_that_does_not_come_is_an_error() -> None:
    layout = sharded_layout([[Shard("w", 0, 100, 0, parse("raw"))]] * 2, 100, torch.float32, World(2))
    devices = DeviceLoopbackTransport.world(LoopbackTransport.world(2), CPU, timeout_s=0.3)
    with pytest.raises(TransportError, match="did not come"):
        _halves(devices[0], layout, True, torch.randn(200), 100)
