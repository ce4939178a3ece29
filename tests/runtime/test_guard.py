"""What keeps a training right and never slower: declining, parity, resync, simulation, checkpoints, GradScaler."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn

import thinwire
from harness import on_ranks, run_threads
from nets import assert_replicas_identical, batch, loss_of, make, train
from thinwire.collectives import LoopbackTransport, ScatterReduceAllGather, World
from thinwire.compressors import Coded, parse
from thinwire.plan import Plan, Speeds, declined
from thinwire.plan.cost import codec_seconds
from thinwire.runtime.probe import codec_passes, measure_speeds

SHAPES = {"big.weight": (512, 512), "other.weight": (64, 64), "bias": (64,)}


def test_the_cost_model_declines_what_does_not_pay() -> None:
    plan, compressor = Plan.build(SHAPES), thinwire.compressors.MinMax()
    for bandwidth, codec_ns, compressed in (
        (12.5e6, 2.0, True),
        (125e6, 2.0, True),
        (1.25e9, 20.0, False),
        (12.5e9, 1.0, False),
        (12.5e6, 500.0, False),
    ):
        after = declined(plan, Speeds({compressor: codec_ns * 1e-9}, bandwidth, 1e-4, 2))
        assert (after["big.weight"] == compressor) == compressed
        assert after["bias"] == thinwire.compressors.Raw()


class Slow(LoopbackTransport):
    """A loopback that takes as long as a link of a given rate, for each direction."""

    bytes_per_s = 2e6

    def _send(self, message, peer, tag):
        time.sleep(message.numel() / self.bytes_per_s)
        return super()._send(message, peer, tag)

    def _start_all_reduce(self, x, lane, op):
        time.sleep(self.all_reduce_bytes(x.numel(), x.dtype) / self.bytes_per_s)
        return super()._start_all_reduce(x, lane, op)


@pytest.mark.alone
def test_declining_measures_the_link() -> None:
    def run(transport):
        transport.__class__ = Slow
        return measure_speeds([parse("minmax")], transport, ScatterReduceAllGather(), World(transport.world_size))

    speeds, others = run_threads(run, 2)
    assert speeds == others
    plan = Plan.build(SHAPES, "minmax")
    assert declined(plan, speeds).layers == plan.layers
    assert speeds.bandwidth == pytest.approx(Slow.bytes_per_s, rel=0.3)
    assert speeds.native == pytest.approx(Slow.bytes_per_s, rel=0.3)


def test_what_there_is_without_compression_and_sums_go_by_the_native_all_reduce() -> None:
    """Beside shared memory, messages inside a node are almost free and the native all-reduce is not."""
    coded, summed = thinwire.compressors.MinMax(), parse("powersgd(rank=4)")
    speeds = Speeds({coded: 1e-9, summed: 1e-9}, bandwidth=1e12, latency_s=0.0, num_ranks=2, native=1e9)
    assert speeds.seconds_per_element(thinwire.compressors.Raw()) == pytest.approx(4e-9)
    assert speeds.seconds_per_element(coded) == pytest.approx(1e-9, rel=0.01)
    assert 1e-9 < speeds.seconds_per_element(summed) < 1.1e-9
    assert not declined(Plan.build(SHAPES, coded), speeds).all_raw


@pytest.mark.alone
@on_ranks(2)
def test_declined_layers_are_sent_as_in_stock_ddp(rank: int) -> None:
    """A codec made slow: everything goes raw, gradients are stock DDP's, and stats say so."""
    encode = thinwire.compressors.MinMax.encode

    def slow(self, *args, **kwargs):
        for _ in range(1000):
            encode(self, *args, **kwargs)

    thinwire.compressors.MinMax.encode = slow
    stock, model = make(rank), make(rank)
    wire = thinwire.compress(model)
    thinwire.compressors.MinMax.encode = encode
    for m in (stock, model):
        loss_of(m, batch(rank, 0)).backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(_with(stock), _with(model), strict=True))
    assert wire.stats.payload_sent_bytes == wire.stats.dense_bytes
    assert wire.stats.declined_layers == len(wire.declined) == 5
    assert wire.declined["layers.0.weight"] == "minmax(bits=4, bucket=128)"


def _with(model: nn.Module) -> list:
    return [p for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize(
    "spec",
    ["topk(density=0.01)", "ef(threshold(lam=2.0))", "powersgd(rank=4)", "fft(theta=0.9)", "levels(bits=4)", "sign"],
)
@pytest.mark.alone
def test_declining_times_every_kind_of_compressor(spec: str) -> None:
    """What is cheap in bytes pays on a slow link, and what is gathered costs more of them with more ranks."""
    compressor = parse(spec)
    seconds = codec_seconds(compressor, 2, codec_passes(compressor, torch.device("cpu")))
    assert 0 < seconds < 1e-6
    plan = Plan.build({"w": (512, 1024)}, spec)
    slow = Speeds({plan["w"]: seconds}, bandwidth=1e6, latency_s=0.0, num_ranks=2)
    assert not declined(plan, slow).all_raw
    crowd = Speeds({plan["w"]: seconds}, bandwidth=1e6, latency_s=0.0, num_ranks=400)
    assert declined(plan, crowd).all_raw == (isinstance(plan["w"], Coded) and plan["w"].gathered)


@on_ranks(3)
def test_a_replica_that_differs_is_named(rank: int) -> None:
    for spec, simulate in (("minmax", False), ("raw", False), ("minmax", True)):
        model, checks = make(rank), thinwire.Checks(parity_every=2)
        wire = thinwire.compress(model, spec, skip_if_slower=False, checks=checks, simulate=simulate)
        train(model, rank, 4)
        assert wire.stats.parity_checks == 2
        if rank == 1:
            with torch.no_grad():
                model.module.layers[2].weight[3, 4] += 1e-6
        with pytest.raises(RuntimeError, match=r"layers\.2\.weight of rank 1 is not that of rank 0"):
            train(model, rank, 4)


@on_ranks(2)
def test_simulation_counts_the_bytes_of_the_real_thing(rank: int) -> None:
    for spec, most in {
        "minmax(bits=8)": 0.02,
        "ef(minmax(bits=4))": 0.4,
        "cast(bf16)": 0.01,
        "topk(density=0.1)": 1e-5,
        "powersgd(rank=2)": 2.0,
        "fft(theta=0.5)": 0.05,
        "levels(bits=6, learn_at=(0,), min_numel=0)": 0.2,
    }.items():
        real, model = make(rank), make(rank)
        sends = thinwire.compress(real, spec, skip_if_slower=False)
        wire = thinwire.compress(model, spec, simulate=True)
        for step in range(3):
            for m in (real, model):
                m.zero_grad()
                loss_of(m, batch(rank, step)).backward()
        assert_replicas_identical(model)
        for name in ("payload_sent_bytes", "dense_bytes", "steps", "buckets"):
            assert getattr(wire.stats, name) == getattr(sends.stats, name), spec
        exact, simulated = (torch.cat([p.grad.flatten() for p in _with(m)]) for m in (real, model))
        assert float((exact - simulated).norm()) < most * float(exact.norm()), spec
