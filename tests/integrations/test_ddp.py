"""compress() on real DDP models over gloo, from iteration 0 through DDP's bucket rebuild."""

from __future__ import annotations

import time
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire
from harness import run_ranks
from nets import DDP_OPTIONS, Net, assert_replicas_identical, batch, fingerprint, loss_of, make, train


def _trains(rank: int) -> dict[str, tuple[list[float], list[float], dict, int]]:
    """By DDP's options, losses without and with compression, of which bytes are counted."""
    found = {}
    for name, options in DDP_OPTIONS.items():
        exact = train(make(rank, **options), rank, 7, lr=0.03)
        model = make(rank, **options)
        wire = thinwire.compress(model, skip_if_slower=False)
        losses = train(model, rank, 7, lr=0.03)
        assert_replicas_identical(model)
        found[name] = exact, losses, wire.stats.to_dict(), wire.wire_bytes_per_step()
        wire.detach()
    return found


def test_it_trains_and_replicas_stay_identical() -> None:
    for found in run_ranks(_trains, 3):
        for name, (exact, losses, stats, per_step) in found.items():
            assert losses == pytest.approx(exact, rel=0.03), name
            assert losses != exact, name
            assert stats["steps"] == stats["compressed_steps"] == 7
            assert 0 < stats["payload_sent_bytes"] < 0.45 * stats["dense_bytes"]
            assert stats["payload_sent_bytes"] == pytest.approx(7 * per_step, rel=0.1)


def _gradients(rank: int, spec: str | None) -> list[torch.Tensor]:
    model = make(rank)
    if spec:
        thinwire.compress(model, spec, min_numel=0, skip_if_slower=False)
    for step in range(3):
        model.zero_grad()
        loss_of(model, batch(rank, step)).backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


BOUNDS = {"minmax(bits=8, bucket=128)": 0.02, "minmax(bits=4, bucket=128)": 0.35, "raw": 0.0}


def _errors(rank: int) -> dict[str, list[float]]:
    """By compressor, of each layer, how far the mean of its gradients is from DDP's own."""
    exact = _gradients(rank, None)
    return {
        spec: [
            float((got - mean).norm() / mean.norm()) for got, mean in zip(_gradients(rank, spec), exact, strict=True)
        ]
        for spec in BOUNDS
    }


def test_gradients_are_close_to_the_exact_mean_and_those_that_are_raw_are_it() -> None:
    for errors in run_ranks(_errors, 2):
        assert all(max(errors[spec]) <= bound for spec, bound in BOUNDS.items()), errors


def _accumulates(rank: int) -> tuple[int, float]:
    model = make(rank)
    wire = thinwire.compress(model, "minmax(bits=8)", skip_if_slower=False)
    for step in range(4):
        model.zero_grad()
        with model.no_sync():
            loss_of(model, batch(rank, 2 * step)).backward()
        loss_of(model, batch(rank, 2 * step + 1)).backward()
    got = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    exact = make(rank)
    with exact.no_sync():
        loss_of(exact, batch(rank, 6)).backward()
    loss_of(exact, batch(rank, 7)).backward()
    want = [p.grad for p in exact.parameters() if p.grad is not None]
    off = sum(float((a - b).norm() ** 2) for a, b in zip(got, want, strict=True)) ** 0.5
    return wire.stats.steps, off / sum(float(b.norm() ** 2) for b in want) ** 0.5


def test_no_sync_accumulation() -> None:
    for steps, relative in run_ranks(_accumulates, 2):
        assert steps == 4
        assert relative < 0.02


def _start(rank: int) -> tuple[list[bool], dict]:
    stock, model = make(rank), make(rank)
    wire = thinwire.compress(model, start=3, skip_if_slower=False)
    same = []
    for step in range(5):
        for m in (stock, model):
            m.zero_grad()
            loss_of(m, batch(rank, step)).backward()
        pairs = zip(stock.parameters(), model.parameters(), strict=True)
        same.append(all(torch.equal(a.grad, b.grad) for a, b in pairs if a.grad is not None and b.grad is not None))
    return same, wire.stats.to_dict()


def test_start_keeps_the_first_steps_dense() -> None:
    for same, stats in run_ranks(_start, 2):
        assert same == [True, True, True, False, False]
        assert (stats["steps"], stats["compressed_steps"]) == (5, 2)


def _scaler_and_clipping(rank: int) -> tuple[list[float], list[float], float]:
    model = make(rank)
    thinwire.compress(model, skip_if_slower=False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.03)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scales, losses, norm = [], [], 0.0
    for step in range(8):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_of(model, batch(rank, step))
        if step == 4 and rank == 1:
            loss = loss * float("inf")
        before = fingerprint(model)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = float(nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        scaler.step(optimizer)
        scaler.update()
        assert (fingerprint(model) == before) == (step == 4)
        scales.append(scaler.get_scale())
        losses.append(loss.item())
    assert_replicas_identical(model)
    return scales, losses, norm


def test_grad_scaler_sees_an_overflow_of_one_rank_on_every_rank() -> None:
    for scales, _, norm in run_ranks(_scaler_and_clipping, 2):
        assert scales == [1024.0] * 4 + [512.0] * 4
        assert 0 < norm < 100


def _trained(rank: int, cap_mb: float, seed: int) -> bytes:
    torch.manual_seed(rank)
    model = make(rank, bucket_cap_mb=cap_mb)
    wire = thinwire.compress(model, "minmax(bits=2)", seed=seed, skip_if_slower=False)
    train(model, rank, 4)
    wire.detach()
    return fingerprint(model)


def _seeds_and_buckets(rank: int) -> list[bytes]:
    return [_trained(rank, *options) for options in ((0.05, 1), (0.02, 1), (10.0, 1), (0.05, 2))]


def test_the_seed_decides_every_bit_and_how_ddp_forms_its_buckets_none() -> None:
    first, smaller, single, other = run_ranks(_seeds_and_buckets, 3)[0]
    assert first == smaller == single
    assert first != other


def _in_a_subgroup(rank: int) -> list[int]:
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    sent = []
    for _ in range(1 + 2 * (rank < 2)):
        torch.manual_seed(0)
        model = DDP(Net(), process_group=groups[rank // 2], bucket_cap_mb=0.05)
        wire = thinwire.compress(model, skip_if_slower=False)
        train(model, rank, 3)
        assert_replicas_identical(model, groups[rank // 2])
        sent.append(wire.stats.payload_sent_bytes)
        wire.detach()
    return sent


def test_models_over_parts_of_the_world_come_and_go() -> None:
    first, second, third, _ = run_ranks(_in_a_subgroup, 4)
    assert first == second == third * 3


def _alone(rank: int) -> tuple[int, int]:
    model = make(rank)
    wire = thinwire.compress(model, skip_if_slower=False)
    train(model, rank, 3)
    return wire.stats.steps, wire.stats.payload_sent_bytes


def test_one_rank_sends_nothing() -> None:
    assert run_ranks(_alone, 1)[0][1] == 0


def _one_bucket(rank: int) -> list[str]:
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(1024, 1024), nn.Linear(1024, 1024)), bucket_cap_mb=100)
    thinwire.compress(model, skip_if_slower=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(6):
            model(torch.randn(2, 1024)).sum().backward()
    return [str(w.message) for w in caught if "bucket_cap_mb" in str(w.message)]


def test_a_model_in_one_bucket_gets_a_warning_with_the_cap_to_set() -> None:
    for messages in run_ranks(_one_bucket, 2):
        assert len(messages) == 1
        assert "bucket_cap_mb=2" in messages[0]


def _other_hook(state, bucket):
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def _refused(rank: int) -> dict[str, str]:
    twice, hooked = make(rank), make(rank)
    wire = thinwire.compress(twice, skip_if_slower=False)
    hooked.register_comm_hook(None, _other_hook)
    double = {"compressor": {"*": "4bit", "embed.weight": "8bit"}}
    calls: dict[str, tuple[nn.Module, dict]] = {
        "not DDP": (Net(), {}),
        "twice": (twice, {}),
        "another hook": (hooked, {}),
        "optimizer": (make(rank), {"optimizer": torch.optim.AdamW(make(rank).parameters())}),
        "dtype": (make(rank, dtype=torch.float64), double),
    }
    texts = {}
    for name, (model, options) in calls.items():
        with pytest.raises((TypeError, ValueError, RuntimeError)) as error:
            thinwire.compress(model, skip_if_slower=False, **options)
        texts[name] = f"{type(error.value).__name__}: {error.value}"
    train(twice, rank, 1)
    assert wire.stats.steps == 1
    return texts


def test_models_that_cannot_be_compressed_are_refused_on_every_rank() -> None:
    wanted = {
        "not DDP": "TypeError: thinwire.compress() takes a DistributedDataParallel model, or one under fully_shard()",
        "twice": "RuntimeError: this model is compressed already: call detach()",
        "another hook": "RuntimeError: this DDP model has a communication hook already",
        "optimizer": "ValueError: optimizer holds no parameter of this model: pass the one that trains it, AdamW(mod",
        "dtype": "TypeError: embed.weight: its dtype is torch.float64, and compressors take",
    }
    for texts in run_ranks(_refused, 2):
        for name, text in wanted.items():
            assert texts[name].startswith(text), texts[name]


_TIMEOUT_S = 1.5


def _is_stuck(rank: int) -> tuple[str, float]:
    model = make(rank)
    thinwire.compress(model, skip_if_slower=False)
    train(model, rank, 3)
    if rank == 1:
        time.sleep(_TIMEOUT_S + 4.0)
        return "", 0.0
    started = time.monotonic()
    with pytest.raises(thinwire.TransportError) as error:
        loss_of(model, batch(rank, 3)).backward()
    return str(error.value), time.monotonic() - started


def test_a_rank_that_is_stuck_is_an_error_within_the_timeout() -> None:
    text, waited = run_ranks(_is_stuck, 2, group_timeout_s=_TIMEOUT_S)[0]
    assert "rank 1" in text
    assert waited < _TIMEOUT_S + 6.0
