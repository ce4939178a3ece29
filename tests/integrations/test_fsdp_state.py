"""The state of a sharded model's compressors: learned levels, residuals, checkpoints, policies."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from test_adapt import Scripted

import thinwire
from harness import on_ranks
from ranks import assert_alike, of_ranks
from sharded import Net, Shared, batch, build, compress, train, whole

COARSE = "ef(minmax(bits=2, bucket=128))"
LEVELS = "levels(bits=3, bucket=64, learn_at=(0, 3), min_numel=100)"


@on_ranks(3)
def test_error_feedback_loses_nothing(rank: int, size: int) -> None:
    for net in (Net, Shared):
        model, plain = build(net=net), build(net=net)
        wire = compress(model, "raw", COARSE)
        sent: dict[str, torch.Tensor] = {}
        received: dict[str, torch.Tensor] = {}
        for step in range(5):
            x, y = batch(step, rank)
            for of, sums in ((plain, sent), (model, received)):
                of.zero_grad()
                (of(x) - y).square().mean().backward()
                for name, parameter in of.named_parameters():
                    sums[name] = sums.get(name, 0) + parameter.grad.full_tensor()
        for name, given in sent.items():
            if name.endswith("weight") and "norm" not in name:
                unsent = sum(of_ranks(wire.state_dict()[f"rank{rank}/residual/gradients/{name}"])) / size
                assert float(unsent.abs().max()) > 0
                torch.testing.assert_close(received[name] + unsent, given, rtol=1e-4, atol=1e-5)
        # Twice four bytes for each element of the whole model's buffers, and known before.
        assert wire.memory == wire.stats.slot_bytes >= 8 * sum(v.numel() for v in sent.values())


@on_ranks(2)
def test_levels_are_learned_for_weights_and_gradients_at_their_steps(rank: int, size: int) -> None:
    model = build()
    wire = thinwire.compress(model, weights=LEVELS, gradients=LEVELS, skip_if_slower=False, min_numel=64)
    found = [wire.state_dict()]
    for step in range(5):
        train(model, 1, first=step)
        found.append(wire.state_dict())
    for site in ("weights", "gradients"):
        values = [state[f"rank{rank}/levels/{site}/blocks.0.up.weight"] for state in found]
        assert [not torch.equal(a, b) for a, b in pairwise(values)] == [True, False, False, True, False]
        assert torch.equal(values[0], torch.arange(8, dtype=torch.float32) / 7)
        assert bool((values[-1][1:] >= values[-1][:-1]).all())
    assert wire.stats.learn_s > 0
    assert_alike(whole(model))


@pytest.mark.parametrize("bits", ["minmax(bits=4, bucket=64)", "minmax(bits=8, bucket=1024)"])
@on_ranks(2)
def test_lgreco_chooses_for_weights_and_gradients_together(rank: int, size: int, bits: str) -> None:
    model = build(net=lambda: Net(width=64, depth=3))
    wire = compress(model, bits, bits, adapt="lgreco(every=6, window=3, lag=1)")
    before = wire.sent_bytes("weights") * 2 + wire.sent_bytes()
    losses = train(model, 13, optimizer=torch.optim.SGD(model.parameters(), lr=0.002))
    specs = {name: str(c) for name, c in wire.plan.layers.items()}
    assert_alike(specs, whole(model))
    assert losses[-1] < losses[0]
    if rank == 0:  # which decides
        last = wire.decisions[-1]
        assert [decision.step for decision in wire.decisions] == [6, 12]
        assert wire.stats.plan_changes >= 1, last.note
        errors, reference = (sum(map(math.sqrt, of.values())) for of in (last.errors, last.reference_errors))
        assert 0 < errors <= reference * (1 + 1e-6)
        assert len(set(specs.values()) - {"raw()"}) > 1
        # Of which there are no more: what errs less has smaller buckets, or is not compressed.
        assert before > wire.sent_bytes("weights") * 2 + wire.sent_bytes() or "bits=4" in bits


@on_ranks(2)
def test_residuals_that_a_policy_gives_up_leave_memory(rank: int, size: int) -> None:
    model, specs = build(), ("ef(minmax(bits=2))", "ef(raw)", "raw")
    wire = compress(model, "raw", specs[0], adapt=Scripted(every=2, window=1, lag=1, specs=specs))
    held = [wire.stats.slot_bytes for step in range(6) for _ in train(model, 1, first=step)]
    assert held[3] >= held[1] > held[5] == 0


@on_ranks(2)
def test_what_would_not_pay_is_declined_alike_on_all_ranks(rank: int, size: int) -> None:
    model = build(net=lambda: Net(width=64))
    wire = thinwire.compress(model)
    train(model, 3, optimizer=torch.optim.SGD(model.parameters(), lr=0.002))
    assert wire.stats.declined_layers == len(wire.declined)
    assert all(name.startswith(("weights/", "gradients/")) for name in wire.declined)
    assert_alike(wire.declined, whole(model))
