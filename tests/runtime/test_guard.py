"""What keeps a training right and never slower: declining, parity, resync, simulation, checkpoints, GradScaler."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

import thinwire
from harness import run_ranks, run_threads
from nets import assert_replicas_identical, batch, fingerprint, loss_of, make, train, trained
from thinwire.collectives import LoopbackTransport, ScatterReduceAllGather, World
from thinwire.compressors import Coded, parse
from thinwire.plan import Plan, Speeds, declined
from thinwire.plan.cost import codec_seconds
from thinwire.runtime.consistency import checksums
from thinwire.runtime.probe import codec_passes, measure_speeds

SHAPES = {"big.weight": (512, 512), "other.weight": (64, 64), "bias": (64,)}


# --- declining -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bandwidth", "codec_ns", "compressed"),
    [(12.5e6, 2.0, True), (125e6, 2.0, True), (1.25e9, 20.0, False), (12.5e9, 1.0, False), (12.5e6, 500.0, False)],
)
def test_the_cost_model_declines_what_does_not_pay(bandwidth: float, codec_ns: float, compressed: bool) -> None:
    plan = Plan.build(SHAPES)
    compressor = thinwire.compressors.MinMax()
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


def _declines(rank: int) -> tuple[bool, dict, int, bool]:
    """A codec made slow: everything goes raw, gradients are stock DDP's, and stats say so."""
    encode = thinwire.compressors.MinMax.encode

    def slow(self, *args, **kwargs):
        for _ in range(200):
            encode(self, *args, **kwargs)

    thinwire.compressors.MinMax.encode = slow
    stock, model = make(rank), make(rank)
    wire = thinwire.compress(model)
    thinwire.compressors.MinMax.encode = encode
    for m in (stock, model):
        loss_of(m, batch(rank, 0)).backward()
    same = all(
        torch.equal(a.grad, b.grad)
        for a, b in zip(trained(stock), trained(model), strict=True)
        if a.grad is not None and b.grad is not None
    )
    return same, wire.declined, wire.stats.declined_layers, wire.stats.payload_sent_bytes == wire.stats.dense_bytes


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


@pytest.mark.alone
def test_declined_layers_are_sent_as_in_stock_ddp() -> None:
    for same, layers, counted, dense in run_ranks(_declines, 2):
        assert same
        assert dense
        assert counted == len(layers) == 5
        assert layers["layers.0.weight"] == "minmax(bits=4, bucket=128)"


# --- parity and resync -----------------------------------------------------------------------------------------------


def _differs(rank: int, spec: str, simulate: bool) -> str:
    model = make(rank)
    wire = thinwire.compress(
        model, spec, skip_if_slower=False, checks=thinwire.Checks(parity_every=2), simulate=simulate
    )
    train(model, rank, 4)
    assert wire.stats.parity_checks == 2
    if rank == 1:
        with torch.no_grad():
            model.module.layers[2].weight[3, 4] += 1e-6
    try:
        train(model, rank, 4)
    except RuntimeError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize(("spec", "simulate"), [("minmax", False), ("raw", False), ("minmax", True)])
def test_a_replica_that_differs_is_named(spec: str, simulate: bool) -> None:
    for message in run_ranks(_differs, 3, spec, simulate):
        assert "layers.2.weight of rank 1 is not that of rank 0" in message


def _resyncs(rank: int) -> tuple[int, int]:
    model = make(rank)
    wire = thinwire.compress(model, skip_if_slower=False, checks=thinwire.Checks(parity_every=1, resync_every=3))
    train(model, rank, 3)
    with torch.no_grad():
        model.module.layers[0].weight += 1e-3 * rank
    train(model, rank, 4)
    model.eval()
    with torch.no_grad():
        if rank == 0:
            loss_of(model.module, batch(rank, 0))
    assert_replicas_identical(model)
    return wire.stats.resyncs, wire.stats.parity_checks


def test_resync_gives_everybody_rank_0s_parameters() -> None:
    for resyncs, checks in run_ranks(_resyncs, 2):
        assert resyncs == 2
        assert checks == 7


def test_three_thousand_steps_of_four_ranks_stay_identical() -> None:
    """Parameters that follow their compressed gradients are the same on all ranks, also at every 300th step.

    `make soak` takes a hundred thousand.
    """
    shapes = {"w": (48, 40), "b": (10,)}
    layers = tuple(shapes.items())

    def run(transport):
        torch.set_num_threads(1)
        plan = Plan.build(shapes, "ef(minmax(bits=2))")
        wire = thinwire.Wire(plan, shapes, transport)
        parameters = {"w": torch.zeros(48, 40), "b": torch.zeros(10)}
        noise = torch.randn(8, 1930, generator=torch.Generator().manual_seed(transport.rank))
        for step in range(3000):
            wire.begin_step()
            if step % 300 == 299:
                wire.check_parity(list(parameters), checksums(parameters.values()))
            flat = noise[step % 8] + torch.cat([parameters["w"].view(-1), parameters["b"]])
            mean = wire.reduce(flat, layers).wait()
            parameters["w"].sub_(mean[:1920].view(48, 40), alpha=0.01)
            parameters["b"].sub_(mean[1920:], alpha=0.01)
        return parameters, wire.stats

    answers = run_threads(run, 4, timeout_s=110.0)
    for parameters, stats in answers:
        assert stats.parity_checks == 10
        assert stats.compressed_steps == 3000
        assert all(torch.equal(parameters[name], answers[0][0][name]) for name in shapes)


# --- simulation ------------------------------------------------------------------------------------------------------


def _simulates(rank: int, spec: str) -> tuple[dict, dict, float]:
    real, model = make(rank), make(rank)
    sends = thinwire.compress(real, spec, skip_if_slower=False)
    wire = thinwire.compress(model, spec, simulate=True)
    for step in range(3):
        for m in (real, model):
            m.zero_grad()
            loss_of(m, batch(rank, step)).backward()
    off = sum(float((a.grad - b.grad).norm() ** 2) for a, b in _pairs(real, model)) ** 0.5
    assert_replicas_identical(model)
    return sends.stats.to_dict(), wire.stats.to_dict(), off / sum(float(a.grad.norm() ** 2) for a in _with(real)) ** 0.5


def _with(model: nn.Module) -> list:
    return [p for p in model.parameters() if p.grad is not None]


def _pairs(a: nn.Module, b: nn.Module):
    return zip(_with(a), _with(b), strict=True)


@pytest.mark.parametrize(
    ("spec", "most"),
    [
        ("minmax(bits=8)", 0.02),
        ("ef(minmax(bits=4))", 0.4),
        ("cast(bf16)", 0.01),
        ("topk(density=0.1)", 1e-5),
        ("powersgd(rank=2)", 2.0),
        ("fft(theta=0.5)", 0.05),
        ("levels(bits=6, learn_at=(0,), min_numel=0)", 0.2),
    ],
)
def test_simulation_counts_the_bytes_of_the_real_thing(spec: str, most: float) -> None:
    for real, simulated, off in run_ranks(_simulates, 2, spec):
        for name in ("payload_sent_bytes", "dense_bytes", "steps", "buckets"):
            assert simulated[name] == real[name]
        assert off < most


# --- checkpoints -----------------------------------------------------------------------------------------------------

RULES = {"embed.weight": "ef(randk(density=0.2))", "*": "ef(minmax(bits=2))"}


def _checkpoint(rank: int, folder: str) -> bytes:
    model = make(rank)
    optimizer = torch.optim.Adam(trained(model))
    wire = thinwire.compress(model, RULES, skip_if_slower=False, seed=3)
    for step in range(8):
        if step == 4:
            dcp.save({"model": model.module.state_dict(), "wire": wire.state_dict()}, checkpoint_id=folder)
            torch.save(optimizer.state_dict(), Path(folder) / f"optimizer{rank}.pt")
        optimizer.zero_grad()
        loss_of(model, batch(rank, step)).backward()
        optimizer.step()
    return fingerprint(model)


def _restore(rank: int, folder: str) -> bytes:
    model = make(rank)
    optimizer = torch.optim.Adam(trained(model))
    wire = thinwire.compress(model, RULES, skip_if_slower=False)
    state = {"model": model.module.state_dict(), "wire": wire.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    model.module.load_state_dict(state["model"])
    wire.load_state_dict(state["wire"])
    optimizer.load_state_dict(torch.load(Path(folder) / f"optimizer{rank}.pt", weights_only=True))
    for step in range(4, 8):
        optimizer.zero_grad()
        loss_of(model, batch(rank, step)).backward()
        optimizer.step()
    return fingerprint(model)


def _restore_in_another_world(rank: int, folder: str, old_size: int) -> float:
    model = make(rank)
    wire = thinwire.compress(model, RULES, skip_if_slower=False)
    state = {"wire": wire.state_dict_of(old_size)}
    dcp.load(state, checkpoint_id=folder)
    wire.load_state_dict(state["wire"])
    train(model, rank, 2, first=4)
    assert_replicas_identical(model)
    return float(wire.stats.steps)


def test_distributed_checkpoint_resumes_bit_for_bit(tmp_path: Path) -> None:
    straight = run_ranks(_checkpoint, 2, str(tmp_path))
    assert run_ranks(_restore, 2, str(tmp_path)) == straight
    assert run_ranks(_restore_in_another_world, 3, str(tmp_path), 2) == [2.0] * 3


# --- GradScaler ------------------------------------------------------------------------------------------------------


def _overflows(rank: int, spec: str) -> list[bool]:
    """With an Inf in step 3 of rank 1: the scaler skips on every rank, no residual moves, step 4 is right."""
    model = make(rank)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
    wire = thinwire.compress(model, spec, skip_if_slower=False, grad_scaler=scaler)
    optimizer = torch.optim.SGD(trained(model), lr=0.03)
    outcome = []
    for step in range(6):
        before = {k: v for k, v in wire.state_dict().items() if "residual" in k}
        weights = fingerprint(model)
        optimizer.zero_grad()
        loss = loss_of(model, batch(rank, step))
        if step == 3 and rank == 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        after = wire.state_dict()
        moved = any(not torch.equal(before[k], after[k]) for k in before)
        assert (fingerprint(model) != weights) == (step != 3)
        assert moved == (step != 3 and bool(before))
        assert all(bool(torch.isfinite(v).all()) for k, v in after.items() if "residual" in k)
        outcome.append(moved)
    assert_replicas_identical(model)
    assert scaler.get_scale() != 256.0
    return outcome


@pytest.mark.parametrize("spec", ["minmax", "ef(minmax(bits=2))", "ef(randk(density=0.1))", "cast(fp16)"])
def test_an_overflow_on_one_rank(spec: str) -> None:
    answers = run_ranks(_overflows, 2, spec)
    assert answers[0] == answers[1]


# --- a rank that is killed -------------------------------------------------------------------------------------------


def _runs_until_killed(rank: int, victim: int, after_s: float) -> str:
    model = make(rank)
    thinwire.compress(model, "ef(minmax(bits=2))", skip_if_slower=False)
    train(model, rank, 2)
    dist.barrier()
    if rank == victim:
        threading.Timer(after_s, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
    try:
        train(model, rank, 100_000)
    except RuntimeError as error:
        return str(error)
    return "nothing"


KILLS = int(os.environ.get("THINWIRE_TEST_KILLS", "5"))


@pytest.mark.timeout(60 + 24 * KILLS)
@pytest.mark.alone
def test_a_rank_killed_at_any_point_is_an_error_for_the_others() -> None:
    """The survivors end with a clear error within the timeout. THINWIRE_TEST_KILLS=50 kills fifty."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(KILLS):
        num_ranks = 2 + int(torch.randint(0, 2, (), generator=generator))
        victim = int(torch.randint(0, num_ranks, (), generator=generator))
        after_s = 0.05 * float(torch.rand((), generator=generator))
        answers = run_ranks(_runs_until_killed, num_ranks, victim, after_s, group_timeout_s=10.0, may_die=True)
        for rank, answer in enumerate(answers):
            if rank != victim:
                assert isinstance(answer, str), answer
                assert "rank" in answer or "failed" in answer, answer
