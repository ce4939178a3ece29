"""QuantizedAdam: AdamW in the warm-up, then a frozen variance and momenta that travel compressed."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn

import thinwire
from harness import on_ranks
from nets import DDP_OPTIONS, assert_replicas_identical, batch as batch_of, loss_of, make, train, trained
from ranks import of_ranks
from thinwire.collectives import owned_parts
from thinwire.compressors import parse
from thinwire.integrations.momentum import Momentum
from thinwire.optim import QuantizedAdam

FOUR_BITS = "minmax(bits=4, bucket=128)"


def _problem(seed: int = 0) -> tuple[list[Tensor], list[list[Tensor]]]:
    generator = torch.Generator().manual_seed(seed)
    parameters = [torch.randn(shape, generator=generator).requires_grad_() for shape in ((5, 3), (4,))]
    return parameters, [[torch.randn(p.shape, generator=generator) for p in parameters] for _ in range(12)]


@settings(max_examples=25, deadline=None)
@given(
    lr=st.floats(1e-4, 0.1),
    beta1=st.floats(0.0, 0.95),
    beta2=st.floats(0.5, 0.999),
    weight_decay=st.floats(0.0, 0.1),
    eps=st.sampled_from([1e-8, 1e-3]),
)
def test_the_warm_up_is_adamw(lr: float, beta1: float, beta2: float, weight_decay: float, eps: float) -> None:
    options: dict[str, Any] = {"lr": lr, "betas": (beta1, beta2), "weight_decay": weight_decay, "eps": eps}
    (ours, gradients), (theirs, _) = _problem(), _problem()
    optimizers = QuantizedAdam(ours, warmup=None, **options), torch.optim.AdamW(theirs, foreach=False, **options)
    for step in gradients:
        for parameters, optimizer in zip((ours, theirs), optimizers, strict=True):
            for parameter, gradient in zip(parameters, step, strict=True):
                parameter.grad = gradient.clone()
            optimizer.step()
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    assert not optimizers[0].frozen


def test_afterwards_the_bias_corrected_variance_is_frozen() -> None:
    parameters, gradients = _problem()
    lr, (beta1, beta2), eps, decay, frozen_at = 0.01, (0.9, 0.99), 1e-8, 0.1, 4
    expected = [p.detach().double().clone() for p in parameters]
    first = [torch.zeros_like(e) for e in expected]
    second = [torch.zeros_like(e) for e in expected]
    options: dict[str, Any] = {"betas": (beta1, beta2), "eps": eps, "weight_decay": decay}
    optimizer = QuantizedAdam(parameters, lr=lr, warmup=frozen_at, floor=0.0, **options)
    for t, step in enumerate(gradients, 1):
        for parameter, gradient in zip(parameters, step, strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()
        for i, gradient in enumerate(step):
            g = gradient.double()
            first[i] = beta1 * first[i] + (1 - beta1) * g
            if t <= frozen_at:
                second[i] = beta2 * second[i] + (1 - beta2) * g * g
            corrected = second[i] / (1 - beta2 ** min(t, frozen_at))
            update = first[i] / (1 - beta1**t) / (corrected.sqrt() + eps)
            expected[i] -= lr * (update + decay * expected[i])
        assert optimizer.frozen == (t >= frozen_at)
    assert optimizer.frozen_at == frozen_at
    for parameter, wanted in zip(parameters, expected, strict=True):
        torch.testing.assert_close(parameter.detach().double(), wanted, rtol=1e-5, atol=1e-6)


def test_what_had_no_gradient_in_the_warm_up_is_not_divided_by_nothing() -> None:
    moved = {}
    for floor in (0.0, 0.03):
        parameter = torch.zeros(64, requires_grad=True)
        optimizer = QuantizedAdam([parameter], lr=1e-3, warmup=3, floor=floor)
        for step in range(5):
            parameter.grad = torch.ones(64)
            parameter.grad[:8] = 0.0 if step < 3 else 1e-3
            optimizer.step()
        moved[floor] = float(parameter.detach()[:8].abs().max())
    assert moved[0.0] > 1.0
    assert moved[0.03] < 1e-3


def test_a_stable_variance_is_frozen_by_itself() -> None:
    generator = torch.Generator().manual_seed(0)
    parameter = torch.zeros(5000, requires_grad=True)
    optimizer = QuantizedAdam([parameter], lr=1e-3, betas=(0.9, 0.95))
    for step in range(1, 201):
        scale = 10.0 * math.exp(-step / 10) + 1.0
        parameter.grad = scale * torch.randn(5000, generator=generator)
        optimizer.step()
    # The squares of what gradients were at first take a hundred steps to be forgotten.
    assert optimizer.frozen_at is not None
    assert 100 < optimizer.frozen_at < 200
    assert optimizer.frozen_at % 20 == 0


def _options(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"optimizer": optimizer, "skip_if_slower": False}


SPECS = {FOUR_BITS: 0.03, "maxabs(bits=4, bucket=128)": 0.03, "onebit(bucket=512)": 0.15, "topk(density=0.1)": 0.15}
"""By how much losses may be larger than those of momenta that are not compressed."""


@on_ranks(2)
def test_momenta_are_sent_compressed_after_the_warm_up(rank: int) -> None:
    exact: list[float] = []
    for spec, margin in {"raw": 0.0, **SPECS}.items():
        model = make(rank)
        optimizer = QuantizedAdam(trained(model), lr=3e-3, betas=(0.9, 0.99), warmup=4)
        wire = thinwire.compress(model, spec, **_options(optimizer)) if exact else None
        losses, sent = [], [0]
        for step in range(60):
            losses += train(model, rank, 1, first=step, optimizer=optimizer)
            sent.append(wire.stats.payload_sent_bytes if wire else 0)
        if wire is None:
            exact = losses
            continue
        dense, steps = wire.stats.dense_bytes / 60, [after - before for before, after in pairwise(sent)]
        assert losses[:5] == pytest.approx(exact[:5], rel=1e-5)
        assert sum(losses[-8:]) < (1 + margin) * sum(exact[-8:])
        assert all(each == pytest.approx(dense, rel=0.01) for each in steps[:4])
        assert max(steps[4:]) < dense / 2
        assert any(str(c).startswith("ef(") for c in wire.plan.layers.values())
        assert_replicas_identical(model)


def _unsent(rank: int, name: str, residual: Tensor) -> Tensor:
    """The mean residual of a layer: all of what its owner keeps, half of what the other rank does."""
    share = torch.full((residual.numel(),), 0.5)
    for owner, begin, end in owned_parts(name, parse("ef(minmax(bits=3, bucket=128))"), residual.numel(), [1, 1]):
        share[begin:end] = 1.0 if rank == owner else 0.5
    return sum(of_ranks(residual.reshape(-1) * share))


class _Recorded:
    """A model trained with clipping, beside the gradients that ranks would have averaged exactly."""

    def __init__(self, rank: int, spec: str, max_norm: float, steps: int, ddp: str = "default") -> None:
        model, plain = make(rank, **DDP_OPTIONS[ddp]), make(rank, **DDP_OPTIONS[ddp])
        self.parameters = {n: p for n, p in model.module.named_parameters() if p.requires_grad}
        optimizer = QuantizedAdam(self.parameters.values(), lr=0.0, betas=(0.9, 0.99), warmup=1)
        wire = thinwire.compress(model, spec, **_options(optimizer))
        self.norms: list[tuple[float, float]] = []
        self.mine: list[dict[str, Tensor]] = []
        self.momenta: list[dict[str, Tensor]] = []
        for step in range(steps):
            plain.zero_grad()
            loss_of(plain, batch_of(rank, step)).backward()
            gradients = {n: p.grad for n, p in plain.module.named_parameters() if p.requires_grad}
            self.mine.append({n: torch.zeros(0) if g is None else g.clone() for n, g in gradients.items()})
            optimizer.zero_grad()
            loss_of(model, batch_of(rank, step)).backward()
            seen = float(nn.utils.clip_grad_norm_(trained(model), max_norm))
            self.norms.append((seen, math.sqrt(sum(float(g.square().sum()) for g in self.mine[-1].values()))))
            optimizer.step()
            momenta = {n: optimizer.momentum(p) for n, p in self.parameters.items()}
            self.momenta.append({n: m.clone() for n, m in momenta.items() if m is not None})
        self.state = {key: value for key, value in wire.state_dict().items() if "residual" in key}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_a_gradient_becomes_a_momentum_and_itself_again(dtype: torch.dtype) -> None:
    """Also one that is larger than (1 − β1) times the largest of its dtype."""
    parameter = torch.zeros(64, dtype=dtype).requires_grad_()
    optimizer = QuantizedAdam([parameter], lr=0.0, warmup=1)
    gradient = torch.linspace(20_000, 30_000, 64).to(dtype)
    for _ in range(30):
        parameter.grad = gradient.clone()
        optimizer.step()
    sender, layers, bucket = Momentum(optimizer, {"w": parameter}), (("w", (64,)),), gradient.clone()
    sender.make(bucket, layers, 1.0)
    mixed = 0.9 * optimizer.momentum(parameter).double() + 0.1 * gradient.double()
    torch.testing.assert_close(bucket.double(), mixed, rtol=4 * torch.finfo(dtype).eps, atol=0.0)
    sender.undo(bucket, layers, 1.0)
    torch.testing.assert_close(bucket, gradient, rtol=20 * torch.finfo(dtype).eps, atol=0.0)


CLIPPED = [(FOUR_BITS, "default"), *(("minmax(bits=2, bucket=128)", d) for d in DDP_OPTIONS if d != "bf16 model")]


@on_ranks(4)
def test_clipping_sees_the_norm_of_the_mean_gradient(rank: int) -> None:
    # A layer's length errs by 8 to 12 %. Without lengths all norms are too long: 12 % in sum in 4 bits, threefold in 2.
    for case in CLIPPED:
        norms = _Recorded(rank, case[0], 1e9, 6, case[1]).norms[1:]
        assert all(seen == pytest.approx(true, rel=0.2) for seen, true in norms), case
        assert sum(seen for seen, _ in norms) == pytest.approx(sum(true for _, true in norms), rel=0.05), case


@on_ranks(2)
def test_the_residual_is_all_that_is_missing_whether_gradients_are_clipped_or_not(rank: int) -> None:
    """Clipping discards none of the momentum that error feedback sent."""
    name = "layers.0.weight"
    for max_norm in (1e9, 0.2):
        recorded = _Recorded(rank, "minmax(bits=3, bucket=128)", max_norm, 6)
        total = torch.zeros_like(recorded.momenta[0][name])
        for step in range(1, 6):
            kept = min(1.0, max_norm / (recorded.norms[step][0] + 1e-6))
            assert kept < 0.9 or max_norm > 1.0
            total += 0.9 * recorded.momenta[step - 1][name] + 0.1 * kept * recorded.mine[step][name]
            total -= recorded.momenta[step][name]
        unsent = _unsent(rank, name, recorded.state[f"rank{rank}/residual/{name}"])
        assert float(unsent.abs().max()) > 1e-5
        torch.testing.assert_close(total.reshape(-1), unsent, rtol=1e-3, atol=1e-6)


@on_ranks(2)
def test_gradients_of_two_backward_passes_add_up_in_one_step(rank: int) -> None:
    """In ``eval()``, too."""
    answers = []
    for spec, mode in (("minmax(bits=2, bucket=128)", True), ("minmax(bits=2, bucket=128)", False), ("raw", True)):
        model = make(rank).train(mode)
        optimizer = QuantizedAdam(trained(model), lr=0.0, warmup=1)
        thinwire.compress(model, spec, **_options(optimizer))
        for step in range(3):
            loss_of(model, batch_of(rank, step)).backward()
            if step == 0:
                optimizer.step()
                optimizer.zero_grad()
        optimizer.step()
        answers.append(torch.cat([optimizer.momentum(p).reshape(-1) for p in trained(model)]))
    for coded in answers[:2]:
        assert float(coded.dot(answers[2]) / answers[2].dot(answers[2])) == pytest.approx(1.0, abs=0.03)


@on_ranks(2)
def test_clipping_schedules_groups_and_scalers(rank: int) -> None:
    model = make(rank)
    matrices, vectors = ([p for p in trained(model) if (p.ndim == 2) == two] for two in (True, False))
    optimizer = QuantizedAdam(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "lr": 1e-3}], lr=3e-3, warmup=3
    )
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=4)
    wire = thinwire.compress(model, FOUR_BITS, grad_scaler=scaler, **_options(optimizer))
    losses = []
    for step in range(14):
        optimizer.zero_grad()
        loss = loss_of(model, batch_of(rank, step))
        scaler.scale(loss * (float("inf") if step == 9 and rank == 1 else 1.0)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(trained(model), 0.5)
        scaler.step(optimizer)
        scaler.update()
        schedule.step()
        losses.append(float(loss.detach()))
    assert (optimizer.frozen_at, wire.stats.nonfinite_steps) == (3, 1)
    assert losses[-1] < losses[0]
    assert_replicas_identical(model)


@on_ranks(2)
def test_an_optimizer_of_some_parameters_or_of_one_rank_alone_is_refused(rank: int) -> None:
    model = make(rank)
    with pytest.raises(ValueError, match="give it all trained parameters of the model"):
        thinwire.compress(model, **_options(QuantizedAdam(trained(model)[:2], lr=1e-3)))
    mine = QuantizedAdam(trained(model)) if rank == 0 else torch.optim.AdamW(trained(model))
    differing = "rank 0 has 'optimizer: QuantizedAdam', rank 1 has 'optimizer: AdamW'"
    with pytest.raises(thinwire.DisagreementError, match=differing):
        thinwire.compress(model, **_options(mine))


def test_a_parameter_that_joins_late_counts_its_own_steps() -> None:
    generator = torch.Generator().manual_seed(0)
    early, late, silent = (torch.zeros(50, requires_grad=True) for _ in range(3))
    reference = torch.zeros(50, requires_grad=True)
    optimizer = QuantizedAdam([early, late, silent], lr=1e-3, warmup=10)
    adamw = torch.optim.AdamW([reference], lr=1e-3, weight_decay=0.0)
    for step in range(30):
        early.grad = torch.randn(50, generator=generator)
        silent.grad = torch.zeros(50) if step < 15 else torch.ones(50)
        if step >= 14:
            late.grad = reference.grad = torch.randn(50, generator=generator)
        optimizer.step()
        if step >= 14:
            adamw.step()
        if step < 24:
            # As under AdamW until it had as many gradients as the others' warm-up took.
            torch.testing.assert_close(late.detach(), reference.detach())
    assert optimizer.frozen_at == 10
    assert [optimizer.state[p]["frozen_at"] for p in (early, late, silent)] == [10, 10, 25]
    assert float(silent.detach().abs().max()) < 0.1


@pytest.mark.parametrize("like", [lambda x: x.t().contiguous().t(), lambda x: torch.stack([x, x], -1)[..., 0]])
def test_momenta_are_sent_in_the_order_of_gradients_in_a_bucket(like: Callable[[Tensor], Tensor]) -> None:
    """That of the parameter in memory, if it has no gaps."""
    parameter = nn.Parameter(like(torch.randn(8, 12)))
    optimizer = QuantizedAdam([parameter], warmup=1)
    parameter.grad = torch.randn(8, 12)
    optimizer.step()
    momentum = optimizer.momentum(parameter)
    assert momentum is not None
    gradient, transposed = torch.randn(8, 12), parameter.t().is_contiguous()
    flat = (gradient.t() if transposed else gradient).flatten().clone()
    sender, layers = Momentum(optimizer, {"p": parameter}), (("p", (8, 12)),)
    sender.make(flat, layers, 1.0)
    sent = flat.view(12, 8).t() if transposed else flat.view(8, 12)
    torch.testing.assert_close(sent, 0.9 * momentum + 0.1 * gradient)
    sender.undo(flat, layers, 1.0)
    torch.testing.assert_close(sent, gradient, rtol=1e-4, atol=1e-5)
