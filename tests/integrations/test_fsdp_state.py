"""The state of a sharded model's compressors: learned levels, residuals, checkpoints, policies."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch

import thinwire
from harness import run_ranks
from sharded import Net, batch, build, compress, same, train, whole

COARSE = "ef(minmax(bits=2, bucket=128))"
LEVELS = "levels(bits=3, bucket=64, learn_at=(0, 3), min_numel=100)"


def _train(rank: int, size: int, steps: int) -> dict[str, Any]:
    """What each rank's gradient was, what was received, and the residual in the end."""
    model = build()
    wire = compress(model, "raw", COARSE)
    sent: dict[str, torch.Tensor] = {}
    received: dict[str, torch.Tensor] = {}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for step in range(steps):
        x, y = batch(step, rank)
        plain = build(seed=0)
        (plain(x) - y).square().mean().backward()
        (model(x) - y).square().mean().backward()
        for name, parameter in model.named_parameters():
            received[name] = received.get(name, 0) + parameter.grad.full_tensor()
        for name, parameter in plain.named_parameters():
            sent[name] = sent.get(name, 0) + parameter.grad.full_tensor()
        optimizer.zero_grad()
    state = wire.state_dict()
    return {"sent": sent, "received": received, "state": state, "memory": wire.memory, "slots": wire.stats.slot_bytes}


def test_error_feedback_loses_nothing() -> None:
    answers = run_ranks(_train, 3, 3, 5)
    for name in answers[0]["sent"]:
        if name.endswith("weight") and "norm" not in name:
            keys = [f"rank{rank}/residual/gradients/{name}" for rank in range(3)]
            unsent = sum(answer["state"][key] for answer, key in zip(answers, keys, strict=True)) / 3
            assert float(unsent.abs().max()) > 0
            total = answers[0]["received"][name] + unsent
            torch.testing.assert_close(total, answers[0]["sent"][name], rtol=1e-4, atol=1e-5)
    for answer in answers:
        # Twice four bytes for each element of the whole model's buffers, and known before.
        assert answer["memory"] == answer["slots"] >= 8 * sum(v.numel() for v in answer["sent"].values())


def _learns(rank: int, size: int) -> dict[str, Any]:
    model = build()
    wire = thinwire.compress(model, weights=LEVELS, gradients=LEVELS, skip_if_slower=False, min_numel=64)
    uniform = torch.arange(8, dtype=torch.float32) / 7
    found = [wire.state_dict()]
    for step in range(5):
        train(model, 1, first=step)
        found.append(wire.state_dict())
    moved = {}
    for site in ("weights", "gradients"):
        values = [state[f"rank{rank}/levels/{site}/blocks.0.up.weight"] for state in found]
        moved[site] = [not torch.equal(a, b) for a, b in pairwise(values)]
        assert torch.equal(values[0], uniform)
        assert bool((values[-1][1:] >= values[-1][:-1]).all())
    return {"moved": moved, "learn_s": wire.stats.learn_s, "whole": whole(model)}


def test_levels_are_learned_for_weights_and_gradients_at_their_steps() -> None:
    answers = run_ranks(_learns, 2, 2)
    for answer in answers:
        assert answer["moved"] == {"weights": [True, False, False, True, False]} | {
            "gradients": [True, False, False, True, False]
        }
        assert answer["learn_s"] > 0
    assert same([answer["whole"] for answer in answers])


def _adapts(rank: int, size: int, bits: str) -> dict[str, Any]:
    model = build(net=lambda: Net(width=64, depth=3))
    wire = compress(model, bits, bits, adapt="lgreco(every=6, window=3, lag=1)")
    before = wire.gather_bytes() * 2 + wire.reduce_bytes()
    losses = train(model, 13, optimizer=torch.optim.SGD(model.parameters(), lr=0.002))
    last = wire.decisions[-1]
    return {
        "losses": losses,
        "changes": wire.stats.plan_changes,
        "steps": [decision.step for decision in wire.decisions],
        "note": last.note,
        "errors": sum(math.sqrt(error) for error in last.errors.values()),
        "reference": sum(math.sqrt(error) for error in last.reference_errors.values()),
        "specs": {name: str(c) for name, c in wire.plan.layers.items()},
        "saved": before - wire.gather_bytes() * 2 - wire.reduce_bytes(),
        "whole": whole(model),
    }


@pytest.mark.parametrize("bits", ["minmax(bits=4, bucket=64)", "minmax(bits=8, bucket=1024)"])
def test_lgreco_chooses_for_weights_and_gradients_together(bits: str) -> None:
    answers = run_ranks(_adapts, 2, 2, bits)
    deciding = answers[0]
    assert deciding["steps"] == [6, 12]
    assert deciding["changes"] >= 1, deciding["note"]
    assert 0 < deciding["errors"] <= deciding["reference"] * (1 + 1e-6)
    assert len(set(deciding["specs"].values()) - {"raw()"}) > 1
    # Of which there are no more: what errs less has smaller buckets, or is not compressed.
    assert deciding["saved"] > 0 or "bits=4" in bits
    assert all(answer["specs"] == deciding["specs"] for answer in answers)
    assert same([answer["whole"] for answer in answers])
    assert deciding["losses"][-1] < deciding["losses"][0]


def _adapts_and_resumes(rank: int, size: int) -> Any:
    def fresh() -> Any:
        model = build(net=lambda: Net(width=64))
        wire = compress(model, "minmax(bits=4, bucket=64)", COARSE, adapt="lgreco(every=4, window=2, lag=1)")
        return model, wire, torch.optim.SGD(model.parameters(), lr=0.005)

    model, wire, optimizer = fresh()
    train(model, 7, optimizer=optimizer)
    state = wire.state_dict()
    weights = {name: p.detach().clone() for name, p in model.state_dict().items()}
    going_on = train(model, 6, first=7, optimizer=optimizer)
    model, wire, optimizer = fresh()
    model.load_state_dict(weights)
    wire.load_state_dict(state)
    return going_on, train(model, 6, first=7, optimizer=optimizer)


def test_a_policy_goes_on_where_it_stopped() -> None:
    for going_on, resumed in run_ranks(_adapts_and_resumes, 2, 2):
        assert resumed == going_on
        assert max(resumed) < 100


def _thaws(rank: int, size: int) -> dict[str, Any]:
    model = build()
    model.blocks[1].up.weight.requires_grad_(False)
    wire = compress(model, "raw", COARSE)
    train(model, 3)
    key = f"rank{rank}/residual/gradients/blocks.1.down.weight"
    before = wire.state_dict()[key]
    model.blocks[1].up.weight.requires_grad_(True)
    x, y = batch(3, rank)
    loss = (model(x) - y).square().mean() * float("inf")
    loss.backward()  # leaves no residual of its own
    return {"before": before, "after": wire.state_dict()[key]}


def test_the_residual_stays_when_a_layer_is_thawed() -> None:
    for answer in run_ranks(_thaws, 2, 2):
        assert bool(answer["before"].any())
        assert torch.equal(answer["before"], answer["after"])


def _declines(rank: int, size: int) -> dict[str, Any]:
    model = build(net=lambda: Net(width=64))
    wire = thinwire.compress(model)
    losses = train(model, 3, optimizer=torch.optim.SGD(model.parameters(), lr=0.002))
    return {"declined": wire.declined, "count": wire.stats.declined_layers, "losses": losses, "whole": whole(model)}


def test_what_would_not_pay_is_declined_alike_on_all_ranks() -> None:
    answers = run_ranks(_declines, 2, 2)
    for answer in answers:
        assert answer["declined"] == answers[0]["declined"]
        assert answer["count"] == len(answer["declined"])
        assert all(name.startswith(("weights/", "gradients/")) for name in answer["declined"])
    assert same([answer["whole"] for answer in answers])
