"""FSDP2 with ``weights="delta(...)"``: what is sent of weights is how they differ from what has arrived before."""

from __future__ import annotations

import math
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.fsdp import MixedPrecisionPolicy

from harness import on_ranks, run_ranks
from ranks import alike, assert_alike
from sharded import Net, batch, build, compress, train
from thinwire.compressors import parse
from thinwire.integrations.fsdp import QuantizedAllGather
from thinwire.runtime.placement import Placement

CHANGES = "delta(minmax(bits=4, bucket=64))"
ONE_LAYER = "blocks.0.up.weight"


def kept(**options: Any) -> Any:
    return build(reshard_after_forward=False, **options)


def _gathers(rank: int, size: int, spec: str, policy: dict[str, torch.dtype], steps: int) -> list[dict[str, Any]]:
    """By gather of the first block: this rank's weights, and as they arrived. All weights arrive alike on all ranks."""
    model = kept(mp_policy=MixedPrecisionPolicy(**policy))
    wire = compress(model, spec, "raw")
    seen: list[dict[str, Any]] = []
    arrived: list[torch.Tensor] = []
    original = QuantizedAllGather.__call__

    def gather(self: Any, output_tensor: torch.Tensor, input_tensor: torch.Tensor, **rest: Any) -> Any:
        mine, sent = input_tensor.clone(), wire.stats.payload_sent_bytes
        work = original(self, output_tensor, input_tensor, **rest)
        work.wait()
        arrived.append(output_tensor.clone())
        if self.attached.unit.name == "blocks.0":
            placement = Placement(self.attached.unit.layers, size)
            part = placement.shard(output_tensor, ONE_LAYER, rank).clone()
            bytes_now = wire.stats.payload_sent_bytes - sent
            seen.append({"mine": placement.local(mine, ONE_LAYER, rank), "arrived": part, "bytes": bytes_now})
        return work

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(QuantizedAllGather, "__call__", gather)
        train(model, steps)
    assert_alike(arrived)
    return seen


@on_ranks(3)
def test_what_arrives_is_what_had_arrived_and_the_quantized_change(rank: int, size: int) -> None:
    coder = parse("minmax(bits=4, bucket=64, rounding=nearest)")
    gathers = _gathers(rank, size, CHANGES, {}, 6)
    assert len(gathers) == 6, "once a step"
    assert torch.equal(gathers[0]["arrived"], gathers[0]["mine"]), "the first time weights are sent whole"
    for before, now in pairwise(gathers):
        change = (now["mine"] - before["arrived"]).reshape(-1)
        expected = before["arrived"].reshape(-1) + coder.roundtrip(change)
        assert torch.equal(now["arrived"].reshape(-1), expected)
        assert 4 * now["bytes"] < gathers[0]["bytes"], "norms and biases are sent whole"


@on_ranks(2)
def test_changes_cost_a_tenth_of_the_error_of_quantized_weights_and_go_with_16_bits(rank: int, size: int) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        last = _gathers(rank, size, CHANGES, {"param_dtype": dtype}, 8)[-1]
        assert float((last["arrived"].float() - last["mine"].float()).abs().max()) < 0.02
    change, itself = (
        sum(float((g["arrived"] - g["mine"]).norm()) for g in _gathers(rank, size, spec, {}, 8)[4:])
        for spec in (CHANGES, "minmax(bits=4, bucket=64)")
    )
    assert rank or change < 0.1 * itself


@on_ranks(2)
def test_weights_that_rest_arrive_ever_closer_also_after_they_were_not_finite(rank: int, size: int) -> None:
    """Evaluations without a step between them, the last one with weights in full precision; and those while one layer
    is not a number, and once it is mended."""
    model = kept()
    wire = compress(model, CHANGES, "raw")
    train(model, 4)
    x, y = batch(9, 0)
    weights = model.blocks[0].up.weight.to_local().detach()

    def loss() -> float:
        with torch.no_grad():
            value = float((model(x) - y).square().mean())
        model.reshard()
        for block in model.blocks:
            block.reshard()
        return value

    resting, held = [loss() for _ in range(8)], weights.clone()
    weights.fill_(float("nan"))
    assert math.isnan(loss())
    weights.copy_(held)
    mended = [loss() for _ in range(8)][-1]
    wire.detach()
    exact = loss()
    assert abs(resting[0] - exact) > 1e-5
    assert resting[-1] == pytest.approx(exact, rel=1e-5)
    assert mended == pytest.approx(exact, rel=0.02)


@on_ranks(2)
def test_its_memory_is_told_before_training(rank: int, size: int) -> None:
    model = kept(net=lambda: Net(width=400, depth=1))
    with pytest.warns(UserWarning, match=r"all weights; leave them out") as told:
        wire = compress(model, CHANGES, "raw")
    assert "MiB on each rank" in str(told[0].message)
    before, needed = wire.memory, 4 * sum(p.numel() for p in model.parameters())
    train(model, 1)
    assert needed <= before == wire.stats.slot_bytes < 1.02 * needed


COARSE = "ef(minmax(bits=2, bucket=128))"


def _saves(rank: int, size: int, folder: str) -> dict[str, torch.Tensor]:
    wire = compress(model := kept(), CHANGES, COARSE)
    train(model, 3)
    dcp.save({"wire": wire.state_dict()}, checkpoint_id=folder)
    return wire.gather_state_dict()


def _loads(rank: int, size: int, folder: str, old_size: int, gathered: dict[str, torch.Tensor]) -> torch.Tensor:
    whole, parts = (compress(kept(), CHANGES, COARSE) for _ in range(2))
    whole.load_state_dict(gathered)
    state = {"wire": parts.state_dict_template(old_size)}
    dcp.load(state, checkpoint_id=folder)
    parts.load_state_dict(state["wire"])
    assert alike(whole.state_dict(), parts.state_dict())
    return parts.state_dict()[f"rank{rank}/residual/gradients/{ONE_LAYER}"]


@pytest.mark.parametrize(("old", "new"), [(2, 3), (3, 2)])
def test_another_number_of_ranks_takes_a_distributed_checkpoint(old: int, new: int, tmp_path: Path) -> None:
    gathered = run_ranks(_saves, old, old, str(tmp_path))[0]
    after = torch.stack(run_ranks(_loads, new, new, str(tmp_path), old, gathered)).mean(0)
    before = torch.stack([gathered[f"rank{rank}/residual/gradients/{ONE_LAYER}"] for rank in range(old)]).mean(0)
    assert before.any()
    torch.testing.assert_close(after, before, rtol=1e-5, atol=1e-7)


def _only_blocks() -> Net:
    model = Net()
    del model.stem, model.head
    return model


@on_ranks(4)
def test_what_it_does_not_go_with_is_refused(rank: int, size: int) -> None:
    freed = "blocks.0 frees its weights after forward, and delta(...) keeps a copy of all weights"
    # Of one the root has no parameters of its own.
    for text, model, *specs, options in (
        (freed, build(), CHANGES, "raw", {}),
        ("reshard_after_forward=False", build(net=_only_blocks), CHANGES, "raw", {}),
        ("leave out master=False", kept(), CHANGES, "raw", {"master": False}),
        ("adapt= weighs what is lost of weights", kept(), CHANGES, "raw", {"adapt": "lgreco(every=5)"}),
        ("gradients of stem.weight: delta(", kept(), "raw", CHANGES, {}),
        ("loses 2.58 of the norm of a Gaussian change", kept(), "delta(minmax(bits=1, bucket=1024))", "raw", {}),
    ):
        with pytest.raises(ValueError, match=re.escape(text)):
            compress(model, *specs, **options)
    compress(build(reshard_after_forward=2), CHANGES, "raw")
