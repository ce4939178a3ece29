"""CompressedAdamW alone: its formulas, its state, what it refuses."""

from __future__ import annotations

import copy
import math
import pickle
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from thinwire.optim import CompressedAdamW

OPTIONS: dict[str, Any] = {"lr": 0.02, "betas": (0.9, 0.99), "weight_decay": 0.1}


def _problem(seed: int = 0) -> tuple[list[Tensor], list[list[Tensor]]]:
    generator = torch.Generator().manual_seed(seed)
    parameters = [torch.randn(shape, generator=generator).requires_grad_() for shape in ((5, 3), (4,))]
    return parameters, [[torch.randn(p.shape, generator=generator) for p in parameters] for _ in range(12)]


def _train(optimizer: torch.optim.Optimizer, parameters: list[Tensor], gradients: list[list[Tensor]]) -> None:
    for step in gradients:
        for parameter, gradient in zip(parameters, step, strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()


def test_the_order_update_is_adamw_where_nothing_is_sent() -> None:
    (ours, gradients), (theirs, _) = _problem(), _problem()
    _train(CompressedAdamW(ours, order="update", **OPTIONS), ours, gradients)
    _train(torch.optim.AdamW(theirs, foreach=False, **OPTIONS), theirs, gradients)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_the_order_pre_normalizes_before_the_momentum() -> None:
    parameters, gradients = _problem()
    lr, (beta1, beta2), decay, eps = OPTIONS["lr"], OPTIONS["betas"], OPTIONS["weight_decay"], 1e-8
    expected = [p.detach().double().clone() for p in parameters]
    first, second = ([torch.zeros_like(e) for e in expected] for _ in range(2))
    optimizer = CompressedAdamW(parameters, **OPTIONS)
    _train(optimizer, parameters, gradients)
    for t, step in enumerate(gradients, 1):
        for i, gradient in enumerate(step):
            g = gradient.double()
            second[i] = beta2 * second[i] + (1 - beta2) * g * g
            first[i] = beta1 * first[i] + (1 - beta1) * lr * g / ((second[i] / (1 - beta2**t)).sqrt() + eps)
            expected[i] = (1 - lr * decay) * expected[i] - first[i] / (1 - beta1**t)
    for parameter, wanted in zip(parameters, expected, strict=True):
        torch.testing.assert_close(parameter.detach().double(), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("order", ["pre", "update"])
@pytest.mark.parametrize("count", [1, 2])
def test_the_mean_of_what_one_rank_sends_is_the_step_without_sending(order: Any, count: int) -> None:
    """Whether all parameters are sent or only the first."""
    (sent, gradients), (alone, _) = _problem(), _problem()
    first, second = CompressedAdamW(sent, order=order, **OPTIONS), CompressedAdamW(alone, order=order, **OPTIONS)
    for step in gradients:
        updates = [gradient.clone() for gradient in step]
        for parameter, update in zip(sent, updates, strict=True):
            parameter.grad = update
        first.outgoing(list(zip(sent, updates, strict=True))[:count], 1.0)
        first.step()
    _train(second, alone, gradients)
    assert all(torch.equal(a, b) for a, b in zip(sent, alone, strict=True))


def test_a_loss_scale_cancels() -> None:
    (scaled, gradients), (plain, _) = _problem(), _problem()
    found = []
    for parameters, scale in ((scaled, 1024.0), (plain, 1.0)):
        gradient = gradients[0][0] * scale
        CompressedAdamW(parameters, **OPTIONS).outgoing([(parameters[0], gradient)], scale)
        found.append(gradient / scale)
    torch.testing.assert_close(found[0], found[1])


def test_updates_that_a_loop_shortens_are_said_and_groups_may_be_changed() -> None:
    """As `clip_grad_norm_` does, and a `GradScaler` that thinwire does not know; once in a training."""
    parameters, gradients = _problem()
    optimizer = CompressedAdamW(parameters, lr=1.0, weight_decay=0.0)
    lengths = []
    for step in range(6):
        update = gradients[step][0].clone()
        optimizer.outgoing([(parameters[0], update)], 1.0)
        optimizer.note_arrived([(parameters[0], update)], 1.0)
        lengths.append(float(update.norm()))
        parameters[0].grad = update / (1000 if step in (2, 4) else 1)
        with nullcontext() if step != 2 else pytest.warns(UserWarning, match="1e[+]03 times smaller .* grad_scaler="):
            optimizer.step()
        if step == 3:
            group = optimizer.param_groups[0]
            group["params"] = group["params"][1:]
            optimizer.add_param_group({"params": parameters[:1], "lr": 1e-3})
    assert max(lengths[4:]) < 0.01 * min(lengths[:4])


@pytest.mark.parametrize("order", ["pre", "update"])
def test_a_step_that_is_skipped_leaves_no_trace(order: Any) -> None:
    (parameters, gradients), (undisturbed, _) = _problem(), _problem()
    optimizer = CompressedAdamW(parameters, order=order, **OPTIONS)
    _train(optimizer, parameters, gradients[:3])
    infinite = torch.full_like(gradients[3][0], math.inf)
    optimizer.outgoing([(parameters[0], infinite)], 1.0)  # GradScaler finds infinity and does not step
    updates = [gradient.clone() for gradient in gradients[3]]
    optimizer.outgoing(list(zip(parameters, updates, strict=True)), 1.0)
    for parameter, update in zip(parameters, updates, strict=True):
        parameter.grad = update
    optimizer.step()
    _train(CompressedAdamW(undisturbed, order=order, **OPTIONS), undisturbed, gradients[:4])
    assert all(torch.equal(a, b) for a, b in zip(parameters, undisturbed, strict=True))


def test_clip_limits_the_root_mean_square_of_what_is_sent_and_of_steps() -> None:
    parameters, gradients = _problem()
    optimizer = CompressedAdamW(parameters, clip=0.5, **OPTIONS)
    for size in (1.0, 1e6):  # the second one is a spike: 1e6 times what the second moment has seen
        gradient = gradients[0][0] * size
        optimizer.outgoing([(parameters[0], gradient)], 1.0)
        assert float(gradient.square().mean().sqrt()) == pytest.approx(0.5 * OPTIONS["lr"], rel=1e-4)
    scalar = torch.nn.Parameter(torch.ones(()))
    scalar.square().backward()
    CompressedAdamW([scalar], lr=0.1, weight_decay=0.0, clip=0.5).step()
    assert scalar.item() == pytest.approx(1.0 - 0.5 * 0.1)


@pytest.mark.parametrize("order", [("own", "file"), ("file", "own")])
def test_moments_of_a_rank_stay_its_own_whichever_state_is_loaded_first(order: tuple[str, str]) -> None:
    """``optimizer.state_dict()`` is rank 0's in most checkpoints."""
    (mine, gradients), (of_rank_0, _) = _problem(0), _problem(1)
    own, other = CompressedAdamW(mine, **OPTIONS), CompressedAdamW(of_rank_0, **OPTIONS)
    _train(own, mine, gradients[:4])
    _train(other, of_rank_0, _problem(1)[1][:4])
    kept = own.local_state(mine[0])
    for what in order:
        if what == "own":
            own.load_local_state(mine[0], kept)
        else:
            own.load_state_dict(other.state_dict())
    assert torch.equal(own.local_state(mine[0])["exp_avg_sq"], kept["exp_avg_sq"])
    assert torch.equal(own.local_state(mine[1])["exp_avg_sq"], other.local_state(of_rank_0[1])["exp_avg_sq"])


@pytest.mark.parametrize("order", ["pre", "update"])
def test_copies_and_what_has_loaded_its_state_step_alike(order: Any) -> None:
    parameters, gradients = _problem()
    optimizer = CompressedAdamW(parameters, order=order, **OPTIONS)
    _train(optimizer, parameters, gradients[:6])
    loaded = CompressedAdamW([p.detach().clone().requires_grad_() for p in parameters], lr=1.0)
    loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    others = [copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer)), loaded]
    _train(optimizer, parameters, gradients[6:])
    for other in others:
        its = other.param_groups[0]["params"]
        _train(other, its, gradients[6:])
        assert all(torch.equal(a, b) for a, b in zip(parameters, its, strict=True))
