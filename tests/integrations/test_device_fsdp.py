"""Sharded models on a device: the same bytes as over the host, bit for bit. Here the device is the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import thinwire
from device_cases import PART_NUMEL, sharded_case, shards_through_the_device, shards_through_the_host
from harness import run_ranks, run_threads
from sharded import Net, batch, build, same, train, whole
from thinwire import TransportError
from thinwire.collectives import DeviceLoopbackTransport, LoopbackTransport
from thinwire.integrations.fsdp import ShardedOptions, attach_fsdp
from thinwire.runtime import ShardedWire

CPU = torch.device("cpu")
SPECS = ("minmax(bits=4)", "raw", "ef(minmax(bits=2))", "qsgd(bits=3, bucket=64)", "ef(topk(density=0.1))")


def _compress(model: Any, weights: str, gradients: str, as_device: bool, **options: Any) -> ShardedWire:
    if "replicas" in options:
        options["across"] = "minmax(bits=6)"
    made = ShardedOptions(
        weights=weights, gradients=gradients, skip_if_slower=False, min_numel=64, as_device=as_device, **options
    )
    return attach_fsdp(model, made)


def _trains(rank: int, size: int, pairs: list[tuple[str, str]], as_device: bool) -> list[dict[str, Any]]:
    found = []
    for weights, gradients in pairs:
        model = build(net=lambda: Net(spare=True), reshard_after_forward=not weights.startswith("delta"))
        wire = _compress(model, weights, gradients, as_device)
        losses = train(model, 4, optimizer=torch.optim.SGD(model.parameters(), lr=0.01))
        x, y = batch(6, rank)
        ((model(x) - y).square().mean() * (float("inf") if rank == 1 else 1.0)).backward()
        state, stats = wire.state_dict(), wire.stats
        counts = (stats.steps, stats.gathers, stats.reductions, stats.nonfinite_steps, stats.payload_sent_bytes)
        buffers = stats.buffer_bytes
        wire.detach()
        found.append({"losses": losses, "whole": whole(model), "state": state, "counts": counts, "buffers": buffers})
    return found


PAIRS = {
    2: [
        ("minmax(bits=8, bucket=1024)", "minmax(bits=8, bucket=1024)"),
        ("delta(minmax(bits=4, bucket=64))", "minmax(bits=8, bucket=1024)"),
    ],
    3: [
        ("lattice(bits=6, bucket=128)", "ef(minmax(bits=3, bucket=64))"),
        ("levels(bits=4, bucket=64, learn_at=(0, 2), min_numel=100)", "ef(topk(density=0.2))"),
        ("delta(minmax(bits=4, bucket=64))", "raw"),
    ],
}


@pytest.mark.parametrize("num_ranks", PAIRS)
def test_training_is_the_same_bit_for_bit(num_ranks: int) -> None:
    there, here = (run_ranks(_trains, num_ranks, num_ranks, PAIRS[num_ranks], device) for device in (True, False))
    for ours, hosts in ((a, b) for pair in zip(there, here, strict=True) for a, b in zip(*pair, strict=True)):
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
    return {"losses": train(model, 3), "whole": whole(model)}


def test_replicas_are_the_same_bit_for_bit() -> None:
    there, here = (run_ranks(_replicas, 4, 4, device) for device in (True, False))
    assert [answer["losses"] for answer in there] == [answer["losses"] for answer in here]
    assert same([answer["whole"] for answer in (*there, *here)])


@pytest.mark.parametrize(
    ("num_ranks", "spec"), [(1, "minmax(bits=4)"), (2, "raw"), *((3, spec) for spec in SPECS)], ids=str
)
def test_both_halves_end_as_over_the_host(num_ranks: int, spec: str) -> None:
    layout = sharded_case(spec, num_ranks)
    values = [_values(rank, num_ranks) for rank in range(num_ranks)]
    hosts = run_threads(lambda t: shards_through_the_host(t, layout, values[t.rank]), num_ranks)
    devices = DeviceLoopbackTransport.world(LoopbackTransport.world(num_ranks), CPU)
    theirs = run_threads(lambda t: shards_through_the_device(devices[t.rank], layout, values[t.rank]), num_ranks)
    for (reduced, gathered), (device_reduced, device_gathered) in zip(hosts, theirs, strict=True):
        assert torch.equal(reduced, device_reduced)
        assert torch.equal(gathered, device_gathered)
        assert torch.equal(gathered, hosts[0][1])
    if spec == "raw":
        torch.testing.assert_close(hosts[0][0][:2000], torch.stack(values).sum(0)[:2000] * 0.5)


def _values(rank: int, num_ranks: int) -> torch.Tensor:
    return torch.randn(num_ranks * PART_NUMEL, generator=torch.Generator().manual_seed(rank))


def _refused(rank: int, size: int) -> list[str]:
    model, texts = build(), []
    for given in ({"master": False}, {"network": thinwire.Network(algorithm="ring")}):
        with pytest.raises((NotImplementedError, ValueError)) as error:
            _compress(model, "raw", "raw", True, **given)
        texts.append(str(error.value))
    return texts


def test_what_a_device_cannot_do_is_refused() -> None:
    for master, ring in run_ranks(_refused, 2, 2):
        assert "for which a GPU would stop" in master
        assert "is for messages over the host" in ring


def test_a_rank_that_does_not_come_is_an_error() -> None:
    devices = DeviceLoopbackTransport.world(LoopbackTransport.world(2), CPU, timeout_s=0.3)
    with pytest.raises(TransportError, match="did not come"):
        shards_through_the_device(devices[0], sharded_case("raw", 2), _values(0, 2))
