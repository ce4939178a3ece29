"""Modules that are skipped, frozen, shared or used in turn train as under FSDP2 alone, and resume bit for bit."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from harness import run_ranks
from sharded import Block, Net, batch, build, compress


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


def _beside_stock(rank: int, size: int) -> dict[str, Any]:
    found = {}
    for name, case in CASES.items():
        (stock, of_stock, _), (ours, of_ours, _) = _made(case, None), _made(case, "raw")
        without = [
            (_step(stock, of_stock, rank, step, case), _step(ours, of_ours, rank, step, case)) for step in range(6)
        ]
        alike = [torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(_local(stock), _local(ours), strict=True)]
        found[name] = without, all(alike)
    return found


def test_raw_messages_leave_no_gradient_where_stock_fsdp_leaves_none() -> None:
    for found in run_ranks(_beside_stock, 2, 2):
        for name, (without, alike) in found.items():
            assert [ours for _, ours in without] == [stock for stock, _ in without], name
            assert alike, name
        assert any(stock for stock, _ in found["heads in turn"][0])


def _resumed(rank: int, size: int) -> dict[tuple[str, str], list[bool]]:
    cases = [
        ("frozen", "raw"),
        *((name, COARSE) for name in ("skipped in turn", "heads in turn", "used twice", "frozen")),
    ]
    return {(name, spec): [_resumed_at(at, rank, CASES[name], spec) for at in (1, 3)] for name, spec in cases}


def _resumed_at(at: int, rank: int, case: dict[str, Any], spec: str) -> bool:
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
    return all(torch.equal(a, b) for a, b in zip(_local(model), _local(again), strict=True))


def test_a_resumed_run_is_the_run_bit_for_bit() -> None:
    for found in run_ranks(_resumed, 2, 2):
        for case, alike in found.items():
            assert alike == [True, True], case


def _residuals(rank: int, size: int) -> tuple[Tensor, Tensor]:
    model, optimizer, wire = _made({}, "ef(minmax(bits=2, bucket=128))")
    key = f"rank{rank}/residual/gradients/heads.0.weight"
    _step(model, optimizer, rank, 0, {})
    before = wire.state_dict()[key].clone()
    _step(model, optimizer, rank, 1, {"task": [1] * 6})
    return before, wire.state_dict()[key]


def test_a_residual_waits_for_the_next_gradient() -> None:
    for before, after in run_ranks(_residuals, 2, 2):
        assert float(before.abs().max()) > 0
        assert torch.equal(after, before)


def _on_one_rank(rank: int, size: int, replicas: bool) -> list[tuple[bool, Tensor | None]]:
    """One rank uses a head that the others do not; PyTorch's own replicas, too."""
    mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicate", "shard")) if replicas else None
    model = build(mesh, net=InTurn)
    wire = compress(model)
    found = []
    for task in (int(rank == size - 1), 0):
        model.task = task
        x, y = batch(0, rank)
        (model(x) - y).square().mean().backward()
        grad = model.heads[1].weight.grad
        found.append((grad is None, None if grad is None else grad.full_tensor()))
        model.zero_grad()
    wire.detach()
    model.task = 0
    model(batch(0, rank)[0]).sum().backward()
    found.append((model.heads[1].weight.grad is None, None))
    return found


@pytest.mark.parametrize(("num_ranks", "replicas"), [(2, False), (4, True)])
def test_a_gradient_that_any_rank_has_stays_on_all(num_ranks: int, replicas: bool) -> None:
    answers = run_ranks(_on_one_rank, num_ranks, num_ranks, replicas)
    for (none, grad), (later, _), (detached, _) in answers:
        assert not none
        assert grad is not None
        assert float(grad.abs().max()) > 0
        assert torch.equal(grad, answers[0][0][1])
        assert later
        assert detached


def _asked_for_zeros(rank: int, size: int) -> bool:
    model = build(net=InTurn)
    model.set_reduce_scatter_unused_params(True)
    wire = compress(model)
    for _ in range(2):
        model(batch(0, rank)[0]).sum().backward()
    wire.detach()
    assert isinstance(model, FSDPModule)
    return model.heads[1].weight.grad is None  # pyright: ignore[reportAttributeAccessIssue]


def test_who_asked_for_zeros_has_them() -> None:
    assert run_ranks(_asked_for_zeros, 2, 2) == [False, False]
