"""compress() on real DDP models over gloo, from iteration 0 through DDP's bucket rebuild."""

from __future__ import annotations

import re
import warnings
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire
from harness import on_ranks
from nets import Net, assert_replicas_identical, batch, fingerprint, loss_of, make, train, trained
from ranks import alike, assert_alike


def _trained(rank: int, cap_mb: float, seed: int) -> bytes:
    torch.manual_seed(rank)
    model = make(rank, bucket_cap_mb=cap_mb)
    wire = thinwire.compress(model, "minmax(bits=2)", seed=seed, skip_if_slower=False)
    train(model, rank, 4)
    wire.detach()
    return fingerprint(model)


@on_ranks(3)
def test_the_seed_decides_every_bit_and_how_ddp_forms_its_buckets_none(rank: int) -> None:
    first, smaller, single, other = (
        _trained(rank, *options) for options in ((0.05, 1), (0.02, 1), (10.0, 1), (0.05, 2))
    )
    assert first == smaller == single != other


@on_ranks(4)
def test_models_over_parts_of_the_world_come_and_go(rank: int) -> None:
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
    assert len(set(sent)) == 1
    assert_alike(sent[0])


def _backward(model: DDP, tokens: torch.Tensor) -> None:
    loss_of(model, tokens).backward()


@on_ranks(2)
def test_where_ddp_reduces_in_python_every_bit_is_the_same_also_with_compiled_autograd(rank: int) -> None:
    found = []
    for reducer, compiled in (True, False), ("python_reducer", False), ("python_reducer", True):
        torch._dynamo.config.optimize_ddp, torch._dynamo.config.compiled_autograd = reducer, compiled
        model = make(rank)
        wire = thinwire.compress(model, "ef(minmax(bits=2))", skip_if_slower=False)
        optimizer = torch.optim.SGD(trained(model), lr=0.05)
        backward = torch.compile(_backward, backend="aot_eager") if compiled else _backward
        for step in range(8):
            with model.no_sync() if step % 2 == 0 else nullcontext():
                backward(model, batch(rank, step))
            if step % 2:
                optimizer.step()
                optimizer.zero_grad()
        assert_replicas_identical(model)
        found.append((fingerprint(model), wire.state_dict(), wire.stats.steps, wire.stats.dense_bytes))
    assert torch._dynamo.utils.counters["compiled_autograd"]["captures"] > 0
    assert alike(found, [found[0]] * 3)


@on_ranks(2)
def test_a_model_in_one_bucket_gets_a_warning_with_the_cap_to_set(rank: int) -> None:
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(1024, 1024), nn.Linear(1024, 1024)), bucket_cap_mb=100)
    thinwire.compress(model, skip_if_slower=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(6):
            model(torch.randn(2, 1024)).sum().backward()
    assert ["bucket_cap_mb=2" in str(w.message) for w in caught if "bucket_cap_mb" in str(w.message)] == [True]


@on_ranks(2)
def test_models_that_cannot_be_compressed_are_refused_on_every_rank(rank: int) -> None:
    twice, hooked, plain = (make(rank) for _ in range(3))
    wire = thinwire.compress(twice, skip_if_slower=False)
    hooked.register_comm_hook(None, lambda state, bucket: torch.futures.Future())
    foreign = torch.optim.AdamW(make(rank).parameters())
    double = make(rank, dtype=torch.float64)
    for model, options, error, says in (
        (Net(), {}, TypeError, "takes a DistributedDataParallel model, or one under fully_shard()"),
        (twice, {}, RuntimeError, "this model is compressed already: call detach()"),
        (hooked, {}, RuntimeError, "this DDP model has a communication hook already"),
        (plain, {"optimizer": foreign}, ValueError, "holds no parameter of this model: pass the one that trains it, A"),
        (
            double,
            {"compressor": {"*": "4bit", "embed.weight": "8bit"}},
            TypeError,
            "its dtype is torch.float64, and compressors take",
        ),
    ):
        with pytest.raises(error, match=re.escape(says)):
            thinwire.compress(model, skip_if_slower=False, **options)
    train(twice, rank, 1)
    assert wire.stats.steps == 1
