"""When a step begins and ends, for modules used twice, replicas, and whoever reads gradients early."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from harness import run_ranks
from sharded import Net, batch, build, compress, same, train, whole
from thinwire.integrations.fsdp import QuantisedAllGather

W4 = "minmax(bits=4, bucket=64)"
COARSE = "ef(minmax(bits=2, bucket=128))"


class Shared(Net):
    """Its first block is used twice."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        first, second = self.blocks
        return self.head(second(first(first(x))))


def _used_twice(rank: int, size: int) -> dict[str, Any]:
    model = build(net=Shared)
    wire = compress(model, W4, COARSE)
    seen: list[Tensor] = []
    original = QuantisedAllGather.__call__

    def gather(self: Any, output_tensor: Tensor, **rest: Any) -> Any:
        work = original(self, output_tensor, **rest)
        work.wait()
        if self.attached.unit.name == "blocks.0":
            seen.append(output_tensor.clone())
        return work

    QuantisedAllGather.__call__ = gather  # type: ignore[method-assign] # pyright: ignore[reportAttributeAccessIssue]
    found, count = [], 0
    for step in range(3):
        train(model, 1, first=step, optimizer=torch.optim.SGD(model.parameters(), lr=0.005))
        found.append(all(torch.equal(seen[0], other) for other in seen))
        count = len(seen)
        seen.clear()
    return {"alike": found, "gathers": count, "step": wire.step, "whole": whole(model)}


def test_a_module_that_is_used_twice_has_the_same_weights_throughout() -> None:
    answers = run_ranks(_used_twice, 2, 2)
    for answer in answers:
        assert answer["alike"] == [True, True, True]
        assert answer["gathers"] >= 3
        assert answer["step"] == 2
    assert same([answer["whole"] for answer in answers])


def _two_passes(rank: int, size: int) -> dict[str, Any]:
    """What two uses in one pass leave owing, with what was received, is what there was."""
    model, plain = build(net=Shared), build(net=Shared)
    wire = compress(model, "raw", COARSE)
    name = "blocks.0.up.weight"
    sent = received = torch.zeros(())
    for step in range(3):
        for of in (model, plain):
            of.zero_grad()
            x, y = batch(step, rank)
            (of(x) - y).square().mean().backward()
        received = received + model.get_parameter(name).grad.full_tensor()
        sent = sent + plain.get_parameter(name).grad.full_tensor()
    return {"unsent": wire.state_dict()[f"rank{rank}/residual/gradients/{name}"], "sent": sent, "received": received}


def test_its_residual_is_what_both_uses_left() -> None:
    answers = run_ranks(_two_passes, 2, 2)
    unsent = sum(answer["unsent"] for answer in answers) / 2
    assert float(unsent.abs().max()) > 0
    torch.testing.assert_close(answers[0]["received"] + unsent, answers[0]["sent"], rtol=1e-4, atol=1e-5)


def _mesh(replicas: int, shards: int) -> Any:
    return init_device_mesh("cpu", (replicas, shards), mesh_dim_names=("replicate", "shard"))


def _started_late(rank: int, size: int) -> list[Tensor]:
    mesh, found = _mesh(2, size // 2), []
    for across in ("raw", W4):
        model = build(mesh["shard"], net=Shared)
        wire = compress(model, "raw", "raw", replicas=mesh["replicate"].get_group(), across=across, start=2)
        train(model, 2, optimizer=torch.optim.SGD(model.parameters(), lr=0.005))
        assert (wire.step, wire.stats.steps) == (1, 2)
        found.append(torch.cat([values.reshape(-1) for values in whole(model).values()]))
    return found


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_means_over_replicas_are_exact_before_the_start_in_modules_that_are_used_twice(num_ranks: int) -> None:
    for exact, coarse in run_ranks(_started_late, num_ranks, num_ranks):
        assert torch.equal(coarse, exact)


def _loaded_between_steps(rank: int, size: int) -> tuple[int, int]:
    mesh = _mesh(2, 1)
    replicas = mesh["replicate"].get_group()
    saved = compress(build(mesh["shard"]), "raw", "raw", replicas=replicas, across=W4).gather_state_dict()
    model = build(mesh["shard"])
    wire = compress(model, "raw", "raw", replicas=replicas, across="raw")
    optimizer, sent = torch.optim.SGD(model.parameters(), lr=0.005), [0]
    for step in range(2):
        train(model, 1, first=step, optimizer=optimizer)
        sent.append(wire.stats.payload_sent_bytes)
        if step == 0:
            with pytest.warns(UserWarning, match="compressors of the checkpoint"):
                wire.load_state_dict(saved)
    return sent[1], sent[2] - sent[1]


def test_a_plan_that_is_loaded_between_steps_holds_for_means_over_replicas() -> None:
    for raw, coded in run_ranks(_loaded_between_steps, 2, 2):
        assert coded < raw / 2


def _draws(rank: int, size: int) -> Any:
    """Replicas with the same gradients: each quantises them by itself, so that errors average out."""
    mesh = _mesh(2, 2)
    model = build(mesh["shard"])
    compress(model, W4, W4)
    x, y = batch(0, rank % 2)
    (model(x) - y).square().mean().backward()
    weights = model.blocks[0].up.weight
    return weights.grad.to_local().clone(), weights.to_local().detach().clone()


def test_replicas_draw_by_themselves_for_gradients_and_alike_for_weights() -> None:
    answers = run_ranks(_draws, 4, 4)
    for shard in (0, 1):
        (one, weights), (other, same_weights) = answers[shard], answers[shard + 2]
        assert torch.equal(weights, same_weights)
        assert not torch.equal(one, other)
        torch.testing.assert_close(one, other, rtol=0.5, atol=0.2)


HOOKS = {"module": 2, "overlap": 0, "nothing": 3}
"""Units whose reduction goes on while backward does, by what stands in the way."""


def _reads(rank: int, size: int) -> dict[str, Any]:
    """Gradients as they are seen inside backward."""
    found = {}
    for how in HOOKS:
        grads, overlapped = [], 0
        for ours in (False, True):
            model = build()
            wire = compress(model, overlap=how != "overlap") if ours else None
            if how == "module":
                # Behind FSDP2's own hooks, which reduce when a block's input has its gradient.
                model.blocks[1].register_full_backward_hook(lambda *_: None)
            x, y = batch(0, rank)
            (model(x) - y).square().mean().backward()
            grads.append([p.grad.full_tensor() for p in model.parameters()])
            overlapped = wire.stats.overlapped if wire is not None else 0
        found[how] = grads, overlapped
    return found


def test_overlap_is_left_where_gradients_may_be_read() -> None:
    for found in run_ranks(_reads, 2, 2):
        for how, ((stock, ours), overlapped) in found.items():
            torch.testing.assert_close(ours, stock, rtol=1e-5, atol=1e-6)
            assert overlapped == HOOKS[how]


def _foreign_hook(rank: int, size: int) -> str:
    mesh = _mesh(2, 1)
    model = build(mesh["shard"])
    model.set_all_reduce_hook(lambda gradient: None)
    with pytest.raises(RuntimeError) as error:
        compress(model, W4, W4, replicas=mesh["replicate"].get_group())
    dist.barrier()
    return str(error.value)


def test_a_hook_of_somebody_else_is_not_overwritten() -> None:
    for text in run_ranks(_foreign_hook, 2, 2):
        assert "has an all-reduce hook already" in text
