"""The state of a sharded model's compressors: learned levels, residuals, checkpoints, policies."""

from __future__ import annotations

import math
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import thinwire
from harness import run_ranks
from sharded import Net, batch, build, compress, same, train, train_and_resume, whole
from thinwire.compressors import RESIDUAL
from thinwire.runtime.placement import Placement, ShardedLayer
from thinwire.runtime.sharded_slots import reshard_residual

COARSE = "ef(minmax(bits=2, bucket=128))"
LEVELS = "levels(bits=3, bucket=64, learn_at=(0, 3), min_numel=100)"
MANY = {"weights": LEVELS, "gradients": {"*up*": LEVELS, "*": COARSE}}


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


def test_its_memory_is_reported_before_training() -> None:
    for message in run_ranks(_log_line, 2, 2):
        assert "MiB on each rank: error feedback keeps a residual of the whole model" in message


def _log_line(rank: int, size: int) -> str:
    model = build(net=lambda: Net(width=400, depth=1))
    with pytest.warns(UserWarning, match="the compressors' state") as told:
        compress(model, "raw", COARSE)
    return str(told[0].message)


def _not_finite(rank: int, size: int) -> dict[str, Any]:
    model = build()
    wire = compress(model, "raw", COARSE)
    train(model, 3)
    before = {key: value.clone() for key, value in wire.state_dict().items() if "residual" in key}
    x, y = batch(3, rank)
    loss = (model(x) - y).square().mean()
    (loss * (float("inf") if rank == 1 else 1.0)).backward()
    after = {key: value for key, value in wire.state_dict().items() if "residual" in key}
    return {"kept": same([before, after]), "count": wire.stats.nonfinite_steps}


def test_a_step_that_is_not_finite_on_one_rank_leaves_no_residual_on_any() -> None:
    for answer in run_ranks(_not_finite, 2, 2):
        assert answer == {"kept": True, "count": 1}


def _resumes(rank: int, size: int, folder: str) -> dict[str, Any]:
    """Stopped after three steps, saved with the model and the optimizer, and loaded into fresh ones."""

    def fresh() -> tuple[Any, torch.optim.Optimizer, thinwire.ShardedWire]:
        model = build(seed=0)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        return model, optimizer, thinwire.compress(model, skip_if_slower=False, min_numel=64, **MANY)

    going_on, after, wire = train_and_resume(fresh, folder)
    return {"going on": going_on, "resumed": after, "learn_s": wire.stats.learn_s}


def test_a_run_that_resumes_from_a_distributed_checkpoint_goes_on_bit_for_bit() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for answer in run_ranks(_resumes, 2, 2, str(Path(folder) / "saved")):
            assert answer["resumed"] == answer["going on"]


def _saves(rank: int, size: int, folder: str) -> Any:
    model = build()
    wire = compress(model, "raw", COARSE)
    train(model, 3)
    state = wire.state_dict()
    dcp.save({"wire": state}, checkpoint_id=folder)
    return {key: value for key, value in state.items() if "residual" in key}


def _loads(rank: int, size: int, folder: str, old_size: int) -> Any:
    model = build()
    wire = compress(model, "raw", COARSE)
    state = {"wire": wire.state_dict_of(old_size)}
    dcp.load(state, checkpoint_id=folder)
    wire.load_state_dict(state["wire"])
    now = {key: value for key, value in wire.state_dict().items() if "residual" in key}
    return now, train(model, 2, first=3), wire.step


@pytest.mark.parametrize(("old", "new"), [(2, 3), (3, 2)])
def test_another_world_size_has_the_same_residual(old: int, new: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        saved = run_ranks(_saves, old, old, folder)
        answers = run_ranks(_loads, new, new, folder, old)
    name = "residual/gradients/blocks.0.up.weight"
    before = sum(saved[rank][f"rank{rank}/{name}"] for rank in range(old)) / old
    after = sum(answers[rank][0][f"rank{rank}/{name}"] for rank in range(new)) / new
    torch.testing.assert_close(after, before, rtol=1e-5, atol=1e-7)
    assert all(step == 4 for _, _, step in answers)


def test_no_rank_has_a_residual_of_its_own_shard() -> None:
    layer = ShardedLayer("w", (5, 3), 4)
    placement = Placement([layer], 4)
    saved = {rank: torch.randn(15) for rank in range(2)}
    mine = [reshard_residual(saved, RESIDUAL, "w", rank, placement).view(5, 3) for rank in range(4)]
    torch.testing.assert_close(sum(mine) / 4, (sum(saved.values()) / 2).view(5, 3))
    assert layer.rows == (2, 2, 1, 0)
    assert not mine[0][:2].any()
    assert not mine[2][4:].any()


def _bad_state(rank: int, size: int) -> list[str]:
    model, other = build(), build(net=lambda: Net(depth=1))
    wire, another = compress(model, "raw", COARSE), compress(other, "raw", COARSE)
    texts = []
    state = wire.state_dict()
    lacking = {key: value for key, value in state.items() if key != f"rank{rank}/residual/gradients/stem.weight"}
    for wrong in (another.state_dict(), lacking, {"step": torch.tensor(1)}):
        with pytest.raises(ValueError) as error:
            wire.load_state_dict(wrong)
        texts.append(str(error.value))
    return texts


def test_states_that_do_not_fit_are_refused() -> None:
    for other, lacking, nothing in run_ranks(_bad_state, 2, 2):
        assert "shard its modules as they were" in other
        assert "the state lacks rank" in lacking
        assert "shard its modules as they were" in nothing


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


def _adapts(rank: int, size: int, spec: str, policy: str) -> dict[str, Any]:
    model = build(net=lambda: Net(width=64, depth=3))
    wire = compress(model, spec, spec, adapt=policy)
    before, sent_before = wire.plan.layers, wire.gather_bytes() * 2 + wire.reduce_bytes()
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
        "before": {name: str(c) for name, c in before.items()},
        "sent": wire.gather_bytes() * 2 + wire.reduce_bytes(),
        "sent_before": sent_before,
        "whole": whole(model),
    }


def test_lgreco_chooses_for_weights_and_gradients_together() -> None:
    answers = run_ranks(_adapts, 2, 2, "minmax(bits=4, bucket=64)", "lgreco(every=6, window=3, lag=1)")
    deciding = answers[0]
    assert deciding["steps"] == [6, 12]
    assert deciding["changes"] >= 1, deciding["note"]
    assert 0 < deciding["errors"] <= deciding["reference"] * (1 + 1e-6)
    assert all(answer["specs"] == deciding["specs"] for answer in answers)
    sites = {
        site: {spec for name, spec in deciding["specs"].items() if name.startswith(site) and spec != "raw()"}
        for site in ("weights", "gradients")
    }
    assert len(sites["weights"] | sites["gradients"]) > 1
    assert same([answer["whole"] for answer in answers])
    assert deciding["losses"][-1] < deciding["losses"][0]


def test_lgreco_saves_bytes_beside_eight_bits() -> None:
    """Of which there are no more: what errs less has smaller buckets, or is not compressed."""
    answers = run_ranks(_adapts, 2, 2, "minmax(bits=8, bucket=1024)", "lgreco(every=6, window=3, lag=1)")
    deciding = answers[0]
    assert deciding["changes"] >= 1, deciding["note"]
    assert deciding["sent"] < deciding["sent_before"]
    assert deciding["errors"] <= deciding["reference"] * (1 + 1e-6)
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
    return going_on, train(model, 6, first=7, optimizer=optimizer), dist.get_rank()


def test_a_policy_goes_on_where_it_stopped() -> None:
    for going_on, resumed, _ in run_ranks(_adapts_and_resumes, 2, 2):
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
