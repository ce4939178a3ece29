"""FSDP2 with ``weights="delta(...)"``: what is sent of weights is how they differ from what has arrived before."""

from __future__ import annotations

import os
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.fsdp import MixedPrecisionPolicy

import thinwire
from harness import run_ranks
from sharded import Net, batch, build, compress, same, train, train_and_resume, whole
from thinwire.compressors import parse
from thinwire.integrations.fsdp import QuantisedAllGather
from thinwire.runtime.placement import Placement

CHANGES = "delta(minmax(bits=4, bucket=64))"
ONE_LAYER = "blocks.0.up.weight"


def kept(**options: Any) -> Any:
    return build(reshard_after_forward=False, **options)


def _gathers(rank: int, size: int, spec: str, policy: dict[str, torch.dtype], steps: int) -> list[dict[str, Any]]:
    """By gather of the first block: this rank's weights, and all weights as they arrived."""
    model = kept(mp_policy=MixedPrecisionPolicy(**policy))
    wire = compress(model, spec, "raw")
    seen: list[dict[str, Any]] = []
    original = QuantisedAllGather.__call__

    def gather(self: Any, output_tensor: torch.Tensor, input_tensor: torch.Tensor, **rest: Any) -> Any:
        mine, sent = input_tensor.clone(), wire.stats.payload_sent_bytes
        work = original(self, output_tensor, input_tensor, **rest)
        work.wait()
        if self.attached.unit.name == "blocks.0":
            placement = Placement(self.attached.unit.layers, size)
            shard = placement.local(mine, ONE_LAYER, rank)
            arrived = placement.shard(output_tensor, ONE_LAYER, rank)
            bytes_now = wire.stats.payload_sent_bytes - sent
            seen.append({"mine": shard, "arrived": arrived.clone(), "all": output_tensor.clone(), "bytes": bytes_now})
        return work

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(QuantisedAllGather, "__call__", gather)
        train(model, steps)
    return seen


def test_what_arrives_is_what_had_arrived_and_the_quantised_change() -> None:
    answers = run_ranks(_gathers, 3, 3, CHANGES, {}, 6)
    coder = parse("minmax(bits=4, bucket=64, rounding=nearest)")
    for gathers in answers:
        assert len(gathers) == 6, "once a step"
        assert torch.equal(gathers[0]["arrived"], gathers[0]["mine"]), "the first time weights are sent whole"
        for before, now in pairwise(gathers):
            change = (now["mine"] - before["arrived"]).reshape(-1)
            expected = before["arrived"].reshape(-1) + coder.roundtrip(change)
            assert torch.equal(now["arrived"].reshape(-1), expected)
            assert 4 * now["bytes"] < gathers[0]["bytes"], "norms and biases are sent whole"
    for gather in range(6):
        assert all(torch.equal(a[gather]["all"], answers[0][gather]["all"]) for a in answers), "ranks differ"


def _precisions(rank: int, size: int) -> tuple[list[list[dict[str, Any]]], list[float]]:
    """Weights of 16 bits as they arrive, and the errors of changes and of weights that are sent themselves."""
    policies = [{"param_dtype": dtype} for dtype in (torch.bfloat16, torch.float16)]
    short = [_gathers(rank, size, CHANGES, policy, 8) for policy in policies]
    long = [_gathers(rank, size, spec, {}, 8)[4:] for spec in (CHANGES, "minmax(bits=4, bucket=64)")]
    return short, [float(torch.stack([(g["arrived"] - g["mine"]).norm() for g in seen]).mean()) for seen in long]


def test_changes_cost_a_tenth_of_the_error_of_quantised_weights_and_go_with_16_bits() -> None:
    (short, (change, itself)), (other, _) = run_ranks(_precisions, 2, 2)
    assert change < 0.1 * itself
    for mine, theirs in zip(short, other, strict=True):
        assert all(torch.equal(first["all"], second["all"]) for first, second in zip(mine, theirs, strict=True))
        assert float((mine[-1]["arrived"].float() - mine[-1]["mine"].float()).abs().max()) < 0.02


def _rests(rank: int, size: int) -> tuple[list[float], list[float]]:
    """Losses of evaluations without a step between them, the last one with weights in full precision; and those while
    one layer is not a number, and once it is mended."""
    model = kept()
    wire = compress(model, CHANGES, "raw")
    train(model, 4)
    x, y = batch(9, 0)

    def loss() -> float:
        with torch.no_grad():
            value = float((model(x) - y).square().mean())
        model.reshard()
        for block in model.blocks:
            block.reshard()
        return value

    resting = [loss() for _ in range(8)]
    held = model.blocks[0].up.weight.to_local().detach().clone()
    with torch.no_grad():
        model.blocks[0].up.weight.to_local().fill_(float("nan"))
    damaged = loss()
    with torch.no_grad():
        model.blocks[0].up.weight.to_local().copy_(held)
    mended = [loss() for _ in range(8)]
    wire.detach()
    return [*resting, loss()], [damaged, mended[-1]]


def test_weights_that_rest_arrive_ever_closer_also_after_they_were_not_finite() -> None:
    for (*losses, exact), (damaged, mended) in run_ranks(_rests, 2, 2):
        assert abs(losses[0] - exact) > 1e-5
        assert losses[-1] == pytest.approx(exact, rel=1e-5)
        assert damaged != damaged
        assert mended == pytest.approx(exact, rel=0.02)


def _remembers(rank: int, size: int) -> dict[str, Any]:
    model = kept(net=lambda: Net(width=400, depth=1))
    with pytest.warns(UserWarning, match="all weights; leave them out") as told:
        wire = compress(model, CHANGES, "raw")
    before = wire.memory
    train(model, 1)
    layers = sum(p.numel() for p in model.parameters())
    return {"told": str(told[0].message), "before": before, "held": wire.stats.slot_bytes, "whole": 4 * layers}


def test_its_memory_is_told_before_training() -> None:
    for answer in run_ranks(_remembers, 2, 2):
        assert answer["whole"] <= answer["before"] == answer["held"] < 1.02 * answer["whole"]
        assert "MiB on each rank" in answer["told"]


LEVELS = "levels(bits=3, bucket=64, learn_at=(0, 3), min_numel=100)"


def _resumes(rank: int, size: int, folder: str) -> dict[str, Any]:
    """With residuals, levels that are learned, and changes, by a distributed checkpoint."""

    def fresh() -> tuple[Any, torch.optim.Optimizer, thinwire.ShardedWire]:
        weights = {"blocks.1*": LEVELS, "*": CHANGES}
        gradients = {"*up*": LEVELS, "*": COARSE}
        optimizer = torch.optim.AdamW((model := kept()).parameters(), lr=1e-2)
        return model, optimizer, compress(model, weights, gradients)

    going_on, after, wire = train_and_resume(fresh, folder)
    gathered = wire.gather_state_dict()

    plain = compress(kept(), "minmax(bits=4)", "minmax(bits=8)")
    with pytest.raises(ValueError, match=r"is sent as delta\(.*\) in the state, and as minmax\(bits=4.* here"):
        plain.load_state_dict(gathered)
    damaged = {**gathered, f"arrived/weights/{ONE_LAYER}": gathered[f"arrived/weights/{ONE_LAYER}"] + 1.0}
    with pytest.raises(ValueError, match=f"arrived/weights/{ONE_LAYER} in the state is not what was saved"):
        wire.load_state_dict(damaged)
    return {"going on": going_on, "resumed": after}


def test_a_run_that_resumes_goes_on_bit_for_bit() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for answer in run_ranks(_resumes, 2, 2, str(Path(folder) / "saved")):
            assert answer["resumed"] == answer["going on"]


def _mixed(rank: int, size: int) -> str:
    states = []
    for first in (0, 50):
        model = kept()
        wire = compress(model, CHANGES, "ef(minmax(bits=8))")
        train(model, 3, first=first)
        states.append(wire.state_dict())
    with pytest.raises(thinwire.DisagreementError) as error:
        wire.load_state_dict(states[rank])
    wire.load_state_dict(states[0])
    return str(error.value)


def test_what_had_arrived_in_another_run_is_refused_on_all_ranks() -> None:
    first, second = run_ranks(_mixed, 2, 2)
    assert first == second
    assert "rank 0 has 'arrived/weights/" in first


def _arrived(wire: thinwire.ShardedWire) -> dict[str, torch.Tensor]:
    return {key: value for key, value in wire.state_dict().items() if key.startswith("arrived/weights")}


COARSE = "ef(minmax(bits=2, bucket=128))"


def _saves(rank: int, size: int, folder: str) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    wire = compress(model := kept(), CHANGES, COARSE)
    train(model, 3)
    dcp.save({"wire": wire.state_dict()}, checkpoint_id=folder)
    return _arrived(wire), wire.state_dict()[f"rank{rank}/residual/gradients/{ONE_LAYER}"]


def _loads(rank: int, size: int, folder: str, old_size: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    wire = compress(model := kept(), CHANGES, COARSE)
    state = {"wire": wire.state_dict_of(old_size)}
    dcp.load(state, checkpoint_id=folder)
    wire.load_state_dict(state["wire"])
    found = _arrived(wire), wire.state_dict()[f"rank{rank}/residual/gradients/{ONE_LAYER}"]
    train(model, 2, first=3)
    assert wire.step == 4
    return found


@pytest.mark.parametrize(("old", "new"), [(2, 3), (3, 2)])
def test_another_number_of_ranks_has_the_same_weights_and_mean_residual(old: int, new: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        saved = run_ranks(_saves, old, old, str(Path(folder) / "saved"))
        loaded = run_ranks(_loads, new, new, str(Path(folder) / "saved"), old)
    assert saved[0][0]
    assert same([arrived for arrived, _ in (*saved, *loaded)])
    before, after = (torch.stack([residual for _, residual in found]).mean(0) for found in (saved, loaded))
    assert float(before.abs().max()) > 0
    torch.testing.assert_close(after, before, rtol=1e-5, atol=1e-7)


def _only_blocks() -> Net:
    model = Net()
    del model.stem, model.head
    return model


def _refusals(rank: int, size: int) -> dict[str, str]:
    texts: dict[str, str] = {}

    def refused(about: str, model: Any, *specs: str, **options: Any) -> None:
        with pytest.raises(ValueError) as error:
            compress(model, *specs, **options)
        texts[about] = str(error.value)

    refused("freed", build(), CHANGES, "raw")
    refused("bare root", build(net=_only_blocks), CHANGES, "raw")
    refused("master", kept(), CHANGES, "raw", master=False)
    refused("policy", kept(), CHANGES, "raw", adapt="lgreco(every=5)")
    refused("gradients", kept(), "raw", CHANGES)
    refused("run away", kept(), "delta(minmax(bits=1, bucket=1024))", "raw")
    compress(build(reshard_after_forward=2), CHANGES, "raw")
    return texts


def test_what_it_does_not_go_with_is_refused() -> None:
    for texts in run_ranks(_refusals, 4, 4):
        assert "blocks.0 frees its weights after forward, and delta(...) keeps a copy of all weights" in texts["freed"]
        assert "reshard_after_forward=False" in texts["freed"]
        assert "blocks.0 frees its weights" in texts["bare root"], "the root has no parameters of its own"
        assert "leave out master=False" in texts["master"]
        assert "adapt= weighs what is lost of weights" in texts["policy"]
        assert "gradients of stem.weight: delta(" in texts["gradients"]
        assert "loses 2.58 of the norm of a Gaussian change" in texts["run away"]


def _recipe(rank: int, size: int, recipe: bool) -> dict[str, Any]:
    """SDP4Bit's (Jia et al. 2024), on two nodes of two ranks; else full precision."""
    os.environ["THINWIRE_NODE"] = f"node {rank // 2}"
    model = kept()
    network = thinwire.Network(algorithm="hierarchical(inside=minmax(bits=8, bucket=512))", transport="group")
    specs = ("delta(minmax(bits=4, bucket=128))", "minmax(bits=4, bucket=128)") if recipe else ()
    wire = compress(model, *specs, network=network)
    losses = train(model, 10)
    return {"losses": losses, "whole": whole(model), "sent": wire.stats.payload_sent_bytes}


def test_with_gradients_in_four_bits_between_nodes_and_eight_inside() -> None:
    answers, plain = (run_ranks(_recipe, 4, 4, recipe) for recipe in (True, False))
    assert same([answer["whole"] for answer in answers])
    for answer, full in zip(answers, plain, strict=True):
        assert answer["losses"][-1] == pytest.approx(full["losses"][-1], rel=0.1)
        assert 2 * answer["sent"] < full["sent"]
