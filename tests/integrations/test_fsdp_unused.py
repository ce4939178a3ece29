"""Modules that are skipped, frozen, shared or used in turn train as under FSDP2 alone, and resume bit for bit."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from harness import on_ranks
from ranks import alike, assert_alike
from sharded import Block, Net, batch, build, compress
from thinwire.compat import fill_unused


class Spare(Block):
    """Has a layer that it uses only when it is told to."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.spare = nn.Linear(width, width)
        self.uses_spare = False

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.spare(x) if self.uses_spare else x)


class InTurn(Net):
    """Uses, in each step, the blocks and the head that it is told to."""

    def __init__(self) -> None:
        super().__init__(depth=3)
        self.heads = nn.ModuleList(nn.Linear(35, 7) for _ in range(2))
        self.blocks[1] = Spare(35)
        self.uses: tuple[int, ...] = (0, 1, 2)
        self.task = 0

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for index in self.uses:
            x = self.blocks[index](x)
        return self.head(x) + self.heads[self.task](x)


ALL = (0, 1, 2)
COARSE = "ef(minmax(bits=3, bucket=64))"
CASES: dict[str, dict[str, Any]] = {
    "skipped in turn": {"uses": [(1, 2), (0, 2), (0, 1), ALL, (0, 1), ALL]},
    "skipped from the start": {"uses": [(0, 1), (0, 1), (0, 1), ALL, (0, 1), (0, 1)]},
    "heads in turn": {"task": [0, 1, 1, 0, 1, 0]},
    "used twice": {"uses": [(0, 0, 1, 2), (1, 1), ALL, (0, 0, 1, 2), (2, 2), ALL]},
    "spare in some": {"spares": [False, True, False, True, False, False]},
    "frozen": {"frozen": [False, False, True, True, False, False], "uses": [ALL, (0, 2), ALL, ALL, (0, 1), ALL]},
    "kept": {"keep": True, "uses": [ALL, (0, 2), (0, 1), ALL, (0, 1), ALL], "task": [0, 1, 0, 1, 0, 0]},
    "accumulated": {"accumulate": 2, "uses": [(0, 1), ALL, (0, 2), (0, 2), ALL, (1, 2)], "task": [0, 1, 0, 0, 1, 1]},
    "zeroed": {"set_to_none": False, "task": [0, 1, 0, 1, 0, 0]},
    "one unit": {"single": True, "task": [0, 0, 1, 1, 0, 1]},
}


def _made(case: dict[str, Any], spec: str | None, seed: int = 0) -> tuple[Any, torch.optim.Optimizer, Any]:
    if case.get("single"):
        torch.manual_seed(seed)
        model: Any = InTurn()
        fully_shard(model)
    else:
        model = build(net=InTurn, seed=seed, reshard_after_forward=not case.get("keep", False))
    wire = None if spec is None else compress(model, "qsgd(bits=4, bucket=64)" if spec != "raw" else "raw", spec)
    # Whose moments and decay move the weights of whatever has a gradient, of zeros, too.
    return model, torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1), wire


def _step(model: Any, optimizer: torch.optim.Optimizer, rank: int, step: int, case: dict[str, Any]) -> list[str]:
    for p in model.blocks[1].parameters():
        p.requires_grad_(not case.get("frozen", [False] * 6)[step])
    accumulate = case.get("accumulate", 1)
    for part in range(accumulate):
        turn = (step + part) % 6
        model.uses = case.get("uses", [ALL] * 6)[turn]
        model.task = case.get("task", [0] * 6)[turn]
        model.blocks[1].uses_spare = case.get("spares", [False] * 6)[turn]
        model.set_requires_gradient_sync(part == accumulate - 1)
        x, y = batch(2 * step + part, rank)
        (model(x) - y).square().mean().backward()
    without = [name for name, p in model.named_parameters() if p.grad is None]
    optimizer.step()
    optimizer.zero_grad(set_to_none=case.get("set_to_none", True))
    return without


def _local(model: nn.Module) -> list[Tensor]:
    return [p.to_local().detach().clone() for p in model.parameters()]  # pyright: ignore[reportAttributeAccessIssue]


@on_ranks(2)
def test_raw_messages_leave_no_gradient_where_stock_fsdp_leaves_none(rank: int, size: int) -> None:
    for name, case in CASES.items():
        (stock, of_stock, _), (ours, of_ours, _) = _made(case, None), _made(case, "raw")
        without = []
        for step in range(6):
            without += (expected := _step(stock, of_stock, rank, step, case))
            assert _step(ours, of_ours, rank, step, case) == expected, name
        torch.testing.assert_close(_local(ours), _local(stock), rtol=1e-5, atol=1e-6)
        assert without or name != "heads in turn"


@on_ranks(2)
def test_a_resumed_run_is_the_run_bit_for_bit(rank: int, size: int) -> None:
    coarse = [(name, COARSE) for name in ("skipped in turn", "heads in turn", "used twice", "frozen")]
    for name, spec in [("frozen", "raw"), *coarse]:
        for at in (1, 3):
            _resumed_at(at, rank, CASES[name], spec)


def _resumed_at(at: int, rank: int, case: dict[str, Any], spec: str) -> None:
    model, optimizer, wire = _made(case, spec)
    for step in range(at):
        _step(model, optimizer, rank, step, case)
    saved = _local(model), copy.deepcopy(optimizer.state_dict()), wire.gather_state_dict()
    for step in range(at, 6):
        _step(model, optimizer, rank, step, case)
    again, other, resumed = _made(case, spec, seed=9)
    with torch.no_grad():
        for p, value in zip(again.parameters(), saved[0], strict=True):
            p.to_local().copy_(value)
    other.load_state_dict(saved[1])
    resumed.load_state_dict(saved[2])
    if at == 3:
        with torch.no_grad():
            again(batch(50, rank)[0])  # an evaluation, before anything was reduced
    for step in range(at, 6):
        _step(again, other, rank, step, case)
    wire.detach()
    resumed.detach()
    assert alike(_local(model), _local(again)), (case, spec)


@on_ranks(2)
def test_a_residual_waits_for_the_next_gradient(rank: int, size: int) -> None:
    model, optimizer, wire = _made({}, "ef(minmax(bits=2, bucket=128))")
    key = f"rank{rank}/residual/gradients/heads.0.weight"
    _step(model, optimizer, rank, 0, {})
    before = wire.state_dict()[key].clone()
    _step(model, optimizer, rank, 1, {"task": [1] * 6})
    assert before.any()
    assert torch.equal(wire.state_dict()[key], before)


@pytest.mark.parametrize(("size", "replicas"), [(2, False), (4, True)])
@on_ranks()
def test_a_gradient_that_any_rank_has_stays_on_all(rank: int, size: int, replicas: bool) -> None:
    """One rank uses a head that the others do not; PyTorch's own replicas, too."""
    mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicate", "shard")) if replicas else None
    model = build(mesh, net=InTurn)
    wire = compress(model)
    x, y = batch(0, rank)
    for used in (True, False):
        model.task = int(used and rank == size - 1)
        (model(x) - y).square().mean().backward()
        grad = model.heads[1].weight.grad
        assert (grad is not None) == used
        if grad is not None:
            assert grad.full_tensor().any()
            assert_alike(grad.full_tensor())
        model.zero_grad()
    wire.detach()
    model(x).sum().backward()
    assert model.heads[1].weight.grad is None


@on_ranks(2)
def test_who_asked_for_zeros_has_them(rank: int, size: int) -> None:
    model = build(net=InTurn)
    for module in (model, *model.blocks):
        fill_unused(module, True)
    wire = compress(model)
    for _ in range(2):
        model(batch(0, rank)[0]).sum().backward()
    wire.detach()
    assert model.heads[1].weight.grad is not None
