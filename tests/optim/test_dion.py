"""Dion: Muon at full rank, the momentum as its own feedback, two ranks alike, checkpoints, bytes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import thinwire
from harness import run_ranks
from nets import Net, assert_replicas_identical, batch, fingerprint, loss_of, make, trained
from thinwire.optim import Dion
from thinwire.optim.dion import orthonormal

pytestmark = pytest.mark.timeout(700)
RANK = 4
MATRICES, ROWS = 4, 96
RULES = {"layers.*": f"powersgd(rank={RANK})"}


def test_the_polar_factor_of_a_low_rank_matrix_has_its_rank() -> None:
    torch.manual_seed(0)
    left, right = torch.linalg.qr(torch.randn(40, 3)).Q, torch.linalg.qr(torch.randn(60, 3)).Q
    matrix = left @ torch.diag(torch.tensor([3.0, 1.0, 0.2])) @ right.T
    for given in (matrix, matrix.T):
        found = torch.linalg.svdvals(orthonormal(given))
        assert bool(((found[:3] > 0.6) & (found[:3] < 1.35)).all())
        assert float(found[3:].max()) < 1e-3
        polar = left @ right.T if given is matrix else right @ left.T
        assert float(nn.functional.cosine_similarity(orthonormal(given).flatten(), polar.flatten(), 0)) > 0.98


def test_the_polar_factor_from_a_basis_is_that_of_the_whole_matrix() -> None:
    torch.manual_seed(0)
    for rows, columns in ((80, 30), (30, 80)):
        low = torch.randn(rows, 4) @ torch.diag(torch.tensor([1.0, 0.5, 0.1, 0.02])) @ torch.randn(4, columns)
        for expected_rank in (4, 7):
            torch.testing.assert_close(orthonormal(low, expected_rank), orthonormal(low), rtol=1e-3, atol=1e-4)
        full = torch.randn(rows, columns)  # sent raw, where low rank was expected
        assert torch.equal(orthonormal(full, 4), orthonormal(full))
    assert not orthonormal(torch.zeros(40, 40), 4).any()
    assert orthonormal(torch.full((40, 40), torch.nan), 4).isnan().all()


@pytest.mark.parametrize("rank", [2, 16, 96])
def test_a_step_is_of_the_size_of_adamws_at_any_rank(rank: int) -> None:
    torch.manual_seed(0)
    model = Net()
    optimizer = Dion(model, lr=1e-2, weight_decay=0.0)
    weight = model.layers[0].weight
    before = weight.detach().clone()
    weight.grad = torch.randn(96, rank) @ torch.randn(rank, 96)
    optimizer.step()
    assert float((weight.detach() - before).square().mean().sqrt()) == pytest.approx(0.2 * 1e-2, rel=1e-3)


def test_at_full_rank_its_steps_have_the_direction_of_muon() -> None:
    """Where nothing is left out of the momentum: without compression."""
    torch.manual_seed(0)
    ours, theirs = Net(), Net()
    theirs.load_state_dict(ours.state_dict())
    options: dict[str, Any] = {"lr": 2e-3, "weight_decay": 0.0, "momentum": 0.9}
    dion = Dion(ours, **options)
    muon = torch.optim.Muon(
        [layer.weight for layer in theirs.layers], nesterov=False, adjust_lr_fn="match_rms_adamw", **options
    )
    generator = torch.Generator().manual_seed(1)
    for _ in range(2):
        before = [layer.weight.detach().clone() for layer in ours.layers]
        for mine, other in zip(ours.layers, theirs.layers, strict=True):
            gradient = torch.randn(mine.weight.shape, generator=generator)
            mine.weight.grad, other.weight.grad = gradient.clone(), gradient.clone()
            other.weight.data.copy_(mine.weight)
        dion.step()
        muon.step()
        for mine, other, was in zip(ours.layers, theirs.layers, before, strict=True):
            step, expected = ((of.weight.detach() - was).flatten() for of in (mine, other))
            assert float(nn.functional.cosine_similarity(step, expected, 0)) > 0.95
            # Muon's is a few per cent smaller: its iterations leave singular values between 0.7 and 1.2.
            assert float(step.norm() / expected.norm()) == pytest.approx(1.0, abs=0.2)


def _attach(rank: int, **options: Any) -> tuple[nn.Module, Dion, Any]:
    model = make(rank)
    optimizer = Dion(model.module, lr=3e-3)
    wire = thinwire.compress(model, RULES, optimizer=optimizer, skip_if_slower=False, **options)
    return model, optimizer, wire


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: range) -> list[float]:
    losses = []
    for step in steps:
        optimizer.zero_grad()
        loss = loss_of(model, batch(rank, step))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def _mean(tensor: Tensor) -> Tensor:
    total = tensor.detach().clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()


def _kept(rank: int, size: int) -> None:
    """What the factors have not brought of the momentum is in it still, on average over ranks."""
    model, optimizer, wire = _attach(rank)
    matrix = model.module.layers[1].weight  # pyright: ignore[reportAttributeAccessIssue, reportIndexIssue]
    lone = make(rank)
    momentum = torch.zeros_like(matrix)
    for step in range(4):
        lone.load_state_dict(model.state_dict())
        lone.zero_grad()
        with lone.no_sync():
            loss_of(lone, batch(rank, step)).backward()
        gradient = _mean(lone.module.layers[1].weight.grad)  # pyright: ignore[reportAttributeAccessIssue, reportIndexIssue]
        optimizer.zero_grad()
        loss_of(model, batch(rank, step)).backward()
        arrived = matrix.grad.clone()
        assert int(torch.linalg.matrix_rank(arrived, rtol=1e-4)) <= RANK
        optimizer.step()
        momentum = momentum + gradient - 0.5 * arrived
        held = _mean(optimizer.local_state(matrix)["momentum_buffer"]).view_as(matrix)
        torch.testing.assert_close(held, momentum, rtol=1e-4, atol=1e-6)
    assert str(wire.plan["layers.1.weight"]).startswith("powersgd(rank=4")
    assert_replicas_identical(model)


def test_the_momentum_keeps_what_was_not_sent() -> None:
    run_ranks(_kept, 2, 2, timeout_s=300.0)


def _losses(rank: int, size: int) -> tuple[list[float], int, int]:
    model, optimizer, wire = _attach(rank, exclude=["embed.*"])
    losses = _train(model, optimizer, rank, range(1))
    sent = wire.stats.payload_sent_bytes
    losses += _train(model, optimizer, rank, range(1, 30))
    assert_replicas_identical(model)
    raw = sum(p.numel() for p in trained(model) if not optimizer.is_matrix(p))
    return losses, sent, 4 * (MATRICES * 2 * ROWS * RANK + raw)


def test_it_trains_and_sends_two_factors_of_each_matrix() -> None:
    for losses, sent, expected in run_ranks(_losses, 2, 2, timeout_s=300.0):
        assert sum(losses[-5:]) < 0.9 * sum(losses[:5])
        assert expected <= sent < 1.1 * expected  # a ring of two ranks sends each value once; messages have headers


def _resumed(rank: int, size: int) -> None:
    model, optimizer, wire = _attach(rank)
    _train(model, optimizer, rank, range(3))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), wire.gather_state_dict()))
    _train(model, optimizer, rank, range(3, 6))
    resumed = _attach(rank)
    for part, state in zip(resumed, saved, strict=True):
        part.load_state_dict(state)
    _train(resumed[0], resumed[1], rank, range(3, 6))
    assert fingerprint(resumed[0]) == fingerprint(model)


def test_a_run_goes_on_from_its_checkpoint_bit_for_bit() -> None:
    run_ranks(_resumed, 2, 2, timeout_s=300.0)


def _refused(rank: int, size: int) -> list[str]:
    found = []
    for rules, options in (("minmax(bits=4)", {}), (RULES, {"adapt": "lgreco"})):
        model = make(rank)
        try:
            thinwire.compress(model, rules, optimizer=Dion(model.module), skip_if_slower=False, **options)
        except ValueError as error:
            found.append(str(error))
    return found


def test_momenta_are_sent_as_low_rank_factors_only() -> None:
    for coded, adapted in run_ranks(_refused, 2, 2, timeout_s=300.0):
        assert "powersgd" in coded
        assert "adapt=" in adapted


def test_a_model_without_hidden_matrices_and_a_wrong_momentum_are_refused() -> None:
    with pytest.raises(ValueError, match="no hidden matrix"):
        Dion(nn.Sequential(nn.Embedding(4, 2), nn.LayerNorm(2)))
    with pytest.raises(ValueError, match="momentum"):
        Dion(Net(), momentum=1.0)
