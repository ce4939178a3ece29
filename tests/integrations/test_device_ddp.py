"""compress() the way of a device, with CPU tensors over gloo: bit for bit what the CPU's own way does."""

from __future__ import annotations

import threading

import pytest
import torch

import thinwire
from harness import on_ranks, run_ranks
from nets import assert_replicas_identical, batch, fingerprint, loss_of, make, train, trained
from ranks import alike, assert_alike
from thinwire.integrations.ddp import Options, attach_ddp
from thinwire.integrations.transports import check_device
from thinwire.runtime.executor import StreamExecutor

MIXED = {
    "embed*": "ef(topk(density=0.1))",
    "layers.0*": "ef(minmax(bits=2))",
    "layers.1*": "cast(bf16)",
    "layers.2*": "rangefloat(bits=8)",
    "layers.3*": "ef(randk(density=0.2))",
    "norm.weight": "maxabs(bits=4)",
}


def attach(model, compressor, as_device: bool = True, **options) -> thinwire.Wire:
    return attach_ddp(model, Options(compressor=compressor, skip_if_slower=False, as_device=as_device, **options))


def assert_same(rank: int, rules, options: dict, **more) -> thinwire.Wire:
    """That all is the same on both ways which must not depend on it; the wire of the device's way."""
    found, wires = [], []
    for as_device in (False, True):
        model = make(rank, **options)
        wires.append(wire := attach(model, rules, as_device, **more))
        train(model, rank, 4)
        with torch.autocast("cpu", torch.bfloat16):  # which does not reach what compresses
            loss_of(model, batch(rank, 4)).backward()
        assert_alike(fingerprint(model))
        assert (wire.engine.device is not None) == as_device
        stats = wire.stats
        counts = stats.steps, stats.compressed_steps, stats.nonfinite_steps, stats.dense_bytes, stats.encoded
        found.append((fingerprint(model), wire.state_dict(), counts, stats.saturated, stats.overflowed))
        wire.detach()
    for here, there in zip(*found, strict=True):
        assert alike(here, there), rules
    return wires[-1]


def _trains(rank: int, names: list[str]) -> None:
    for name in names:
        rules, options, *more = RULES[name]
        stats = assert_same(rank, rules, options, start=1, **dict(*more)).stats
        # What saturates or finds no room is counted.
        assert min(stats.saturated, stats.overflowed) > 0 or name != "saturated"


TIMED = "lgreco(objective=time, every=6, window=3, lag=2)"
LIMITED = {"layers.0*": "rangefloat(bits=8, range=0.0001)", "*": "threshold(lam=1e-4, capacity=0.01)"}
RULES = {
    "minmax": ("minmax(bits=4)", {}),
    "intdiana": ("intdiana(bits=2)", {}),
    "mixed": (MIXED, {}),
    "low rank": ("powersgd(rank=2)", {}),
    "learned by one rank": ("levels(bits=3, learn_at=(0, 2), min_numel=0)", {}),
    "saturated": (LIMITED, {}),
    "bucket view": ("ef(minmax(bits=3))", {"gradient_as_bucket_view": True}),
    "static graph": ("ef(minmax(bits=3))", {"static_graph": True}),
    "unused": ("ef(minmax(bits=3))", {"unused": True}),
    "bf16": ("ef(minmax(bits=3))", {"dtype": torch.bfloat16}),
    "ring": (MIXED, {"dtype": torch.bfloat16}, {"network": thinwire.Network(algorithm="ring")}),
    "tree": ("intsgd(bits=8)", {}, {"network": thinwire.Network(algorithm="tree(root=1)")}),
}


NAMES = {2: [*RULES][:-2], 3: ["mixed", "ring", "tree"], 4: ["mixed"]}


@pytest.mark.parametrize("num_ranks", NAMES)
def test_training_ends_with_the_same_bits(num_ranks: int) -> None:
    run_ranks(_trains, num_ranks, NAMES[num_ranks])


@on_ranks(2)
def test_checks_and_repairs(rank: int) -> None:
    """Parity, resynchronization, measuring; what differs is an error on every rank."""
    model = make(rank)
    wire = attach(model, "minmax(bits=4)", checks=thinwire.Checks(2, resync_every=2, measure_every=3))
    train(model, rank, 5)
    with torch.no_grad():
        next(iter(trained(model))).add_(float(rank == 1))
    train(model, rank, 2, first=5)  # resync repairs it
    assert_replicas_identical(model)
    assert (wire.stats.parity_checks, wire.stats.resyncs) == (4, 3)
    assert [step for step, _ in wire.stats.alpha] == [0, 3]
    model = make(rank)
    attach(model, "minmax(bits=4)", checks=thinwire.Checks(1))
    train(model, rank, 2)
    with torch.no_grad():
        model.module.norm.weight.add_(float(rank == 1))
    with pytest.raises(RuntimeError, match=r"norm\.weight of rank 1 is not that of rank 0"):
        train(model, rank, 1, first=2)
    with pytest.raises(thinwire.DisagreementError, match="rank 1"):
        attach(make(rank), f"minmax(bits={4 + rank})")


@on_ranks(2)
def test_no_thread_communicates(rank: int) -> None:
    model = make(rank)
    wire = attach(model, MIXED)
    train(model, rank, 2)
    assert wire.stats.buffer_bytes > 0
    names = [thread.name for thread in threading.enumerate() if "thinwire" in thread.name]
    assert names == ["thinwire failures"]


@on_ranks(2)
def test_links_and_codecs_are_measured(rank: int) -> None:
    model = make(rank)
    network = thinwire.Network(algorithm="sra(rates=measured)")
    wire = attach_ddp(model, Options(compressor="minmax(bits=4)", as_device=True, network=network))
    train(model, rank, 2)
    assert wire.engine.speeds is not None
    assert wire.engine.speeds.bandwidth > 0
    assert "rates=(" in str(wire.algorithm)
    assert_alike(wire.declined, wire.engine.speeds.bandwidth, str(wire.algorithm))
    for compressor, adapt in (("auto(every=12, warmup=6, window=3, lag=2)", None), ("minmax(bits=4)", TIMED)):
        model = make(rank)
        wire = attach(model, compressor, adapt=adapt)
        train(model, rank, 8)
        assert wire.decisions
        assert "no step was timed" not in wire.decisions[0].note
        assert wire.engine.syncs or adapt is None
        assert_alike([d.plan for d in wire.decisions])


@on_ranks(2)
def test_ways_of_the_host_are_refused(rank: int) -> None:
    for says, options in (
        ("memory of the host", {"network": thinwire.Network(transport="shared")}),
        ("between devices NCCL adds them", {"network": thinwire.Network(aggregator="localhost:1")}),
    ):
        with pytest.raises(ValueError, match=says):
            attach(make(rank), "intsgd" if "network" in options else "minmax", **options)


def test_a_default_device_does_not_reach_the_hosts_own_tensors() -> None:
    seen = []
    with torch.device("meta"):
        StreamExecutor(torch.device("cpu")).call(lambda: seen.append(torch.zeros(1).device.type))
    assert seen == ["cpu"]


GPU, OTHER = torch.device("cuda:0"), torch.device("cuda:1")


def test_a_model_on_one_gpu_over_nccl_is_taken_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("thinwire.integrations.transports.find_spec", lambda name: object())
    for backends in ("cuda:nccl", "cpu:gloo,cuda:nccl"):
        assert check_device({GPU: "w"}, backends) == GPU
    for devices in ({GPU: "a", OTHER: "b"}, {torch.device("cpu"): "a", GPU: "b"}, {torch.device("mps"): "a"}):
        with pytest.raises(NotImplementedError, match="all on one CUDA device"):
            check_device(devices, "cuda:nccl")
    with pytest.raises(RuntimeError, match=r"has cpu:gloo,cuda:gloo: call init_process_group\('nccl'\)"):
        check_device({GPU: "w"}, "cpu:gloo,cuda:gloo")
    monkeypatch.setattr("thinwire.integrations.transports.find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match="pip install triton"):
        check_device({GPU: "w"}, "cuda:nccl")
