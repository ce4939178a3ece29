"""Muon for whole models: which parameter is trained by what, schedules, checkpoints, ranks that divide its work."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from harness import on_ranks, run_ranks
from ranks import assert_alike
from thinwire.optim import Muon
from thinwire.optim.muon import iteration_dtype, newton_schulz, polar_factors
from thinwire.optim.shards import as_whole


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(16, 8)
        self.up, self.down = nn.Linear(8, 24), nn.Linear(24, 8)
        self.norm = nn.LayerNorm(8)
        self.lm_head = nn.Linear(8, 16, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        return self.lm_head(self.norm(x + self.down(torch.relu(self.up(x)))))


HIDDEN = {"up.weight", "down.weight"}


def _backward(model: nn.Module, step: int) -> float:
    model.zero_grad()
    tokens = torch.randint(0, 16, (8, 5), generator=torch.Generator().manual_seed(step))
    loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), (tokens.flatten() + 1) % 16)
    loss.backward()
    return loss.item()


def test_each_parameter_is_trained_by_its_optimizer_at_the_rate_of_a_schedule() -> None:
    model, other = Net(), Net()
    both = Muon(model, lr=2e-3, weight_decay=0.05)
    named = dict(other.named_parameters())
    rest = [named[n] for n in named if n not in HIDDEN]
    adamw = torch.optim.AdamW(rest, 2e-3, (0.9, 0.99), weight_decay=0.05)
    first = last = 0.0
    for step in range(60):
        last = _backward(model, step)
        first = first or last
        _backward(other, step)
        both.step()
        adamw.step()
        for name, p in model.named_parameters():
            assert step > 0 or name in HIDDEN or torch.equal(p, named[name])
    assert last < 0.8 * first
    torch.optim.lr_scheduler.LambdaLR(both, lambda step: 0.5 ** (step + 1))
    assert [group["lr"] for group in both.param_groups] == [1e-3, 1e-3]
    with pytest.raises(ValueError, match="make another Muon"):
        both.add_param_group({"params": [torch.zeros(2, requires_grad=True)]})


def test_a_matrix_steps_by_the_polar_factor_of_its_momentum() -> None:
    model = Net()
    matrices = [model.up.weight, model.down.weight]
    optimizer = Muon(model, lr=2e-3, weight_decay=0.05, momentum=0.8)
    momenta = [torch.zeros_like(p) for p in matrices]
    for step in range(3):
        _backward(model, step)
        gradients = [p.grad.clone() for p in matrices if p.grad is not None]
        momenta = [m.lerp(g, 1 - 0.8) for m, g in zip(momenta, gradients, strict=True)]
        factors = polar_factors([g.lerp(m, 0.8) for m, g in zip(momenta, gradients, strict=True)])
        expected = [
            (1 - 2e-3 * 0.05) * p.detach() - 2e-3 * 0.2 * math.sqrt(24) * factor
            for p, factor in zip(matrices, factors, strict=True)
        ]
        optimizer.step()
        torch.testing.assert_close([p.detach() for p in matrices], expected)


def _stepped(rank: int, how: str) -> dict[str, torch.Tensor]:
    """Parameters after five steps: alone, with ranks that divide the work, or of a sharded model."""
    model = Net()
    if how == "sharded":
        fully_shard(model)
    optimizer = Muon(model, lr=2e-3, group=dist.group.WORLD if how == "divided" else None)
    for step in range(5):
        _backward(model, step)
        optimizer.step()
    return {name: as_whole(p.detach()).clone() for name, p in model.named_parameters()}


@on_ranks(3)
def test_ranks_that_divide_the_work_or_the_model_step_as_one(rank: int) -> None:
    alone = _stepped(rank, "alone")
    for how in ("divided", "sharded"):
        found = _stepped(rank, how)
        assert_alike(found)
        for name, expected in alone.items():
            # One matrix of a shape or several in a product: they round differently in bfloat16.
            torch.testing.assert_close(found[name], expected, rtol=0, atol=3e-4 if name in HIDDEN else 1e-6)


def test_matrices_are_divided_by_their_work() -> None:
    run_ranks(_factors, 3)
    assert polar_factors([]) == []


CPUS: dict[str, tuple[dict[str, bool] | str, torch.dtype]] = {
    "Cascade Lake": ({"avx512_f": True, "avx512_bf16": False, "amx_bf16": False}, torch.float32),
    "Cooper Lake": ({"avx512_f": True, "avx512_bf16": True, "amx_bf16": False}, torch.bfloat16),
    "Graviton3": ({"neon": True, "bf16": True}, torch.bfloat16),
    "Graviton2": ({"neon": True, "bf16": False}, torch.float32),
    "older PyTorch, AVX2": ("AVX2", torch.float32),
    "older PyTorch, AVX512": ("AVX512", torch.bfloat16),
}


def test_a_cpu_iterates_in_the_dtype_that_it_is_fast_in(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = torch.randn(24, 40, generator=torch.Generator().manual_seed(0))
    exact = newton_schulz(matrix[None])[0]
    for name, (capabilities, dtype) in CPUS.items():
        if isinstance(capabilities, str):
            monkeypatch.delattr(torch.cpu, "get_capabilities", raising=False)
            monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda found=capabilities: found)
        else:
            monkeypatch.setattr(torch.cpu, "get_capabilities", lambda found=capabilities: found, raising=False)
        assert iteration_dtype(torch.device("cpu")) is dtype, name
        assert iteration_dtype(torch.device("cuda")) is torch.bfloat16
        (factor,) = polar_factors([matrix])
        assert factor.dtype is torch.bfloat16
        assert float(nn.functional.cosine_similarity(factor.float().flatten(), exact.flatten(), 0)) > 0.98


def _factors(rank: int) -> None:
    torch.manual_seed(0)
    matrices = [torch.randn(*shape) for shape in ((64, 8), (8, 8), (8, 8), (8, 64), (16, 8), (8, 16))]
    together = polar_factors(matrices)
    for part, factor, matrix in zip(polar_factors(matrices, dist.group.WORLD), together, matrices, strict=True):
        assert part.shape == matrix.shape
        torch.testing.assert_close(part, factor, rtol=0, atol=2e-2)


@pytest.mark.parametrize(("dtype", "room"), [(torch.float32, 0.0), (torch.bfloat16, 0.2)])
def test_singular_values_end_near_one(dtype: torch.dtype, room: float) -> None:
    values = torch.logspace(0, -2.2, 48, dtype=torch.float64)
    left, right = (torch.linalg.qr(torch.randn(n, 48, dtype=torch.float64)).Q for n in (48, 80))
    matrix = 7.0 * left @ torch.diag(values) @ right.T
    assert float((values / torch.linalg.vector_norm(values)).min()) > 0.002
    factor = newton_schulz(matrix.to(dtype)[None])[0].double()
    found = torch.linalg.svdvals(factor)
    assert 0.67 - room < float(found.min()) < float(found.max()) < 1.33 + room
    assert float(nn.functional.cosine_similarity(factor.flatten(), (left @ right.T).flatten(), 0)) > 0.95
    assert not newton_schulz(torch.zeros(1, 4, 6, dtype=dtype)).any()
