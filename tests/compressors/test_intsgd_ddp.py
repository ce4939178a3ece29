"""IntSGD through compress() on DDP models over gloo: it trains, survives an overflow, and counts its bytes."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire
from harness import run_ranks
from nets import assert_replicas_identical, batch, loss_of, make, resume, train, trained

SPECS = {"intsgd(bits=32)": 2, "intsgd(bits=8, block=global)": 4, "heuristic_intsgd(bits=32, rounding=random)": 2}
"""And on how many ranks."""


def _trains(rank: int, spec: str, num_ranks: int) -> None:
    model, is_profiled = make(rank), "heuristic" in spec
    wire = thinwire.compress(model, spec, skip_if_slower=False, checks=thinwire.Checks(1))
    losses, stats = train(model, rank, 30, lr=0.03), wire.stats
    assert_replicas_identical(model)
    assert sum(losses[-5:]) < 0.3 * sum(losses[:5])
    sizes = [p.numel() for p in trained(model)]
    assert stats.compressed_steps == stats.parity_checks == 30
    assert stats.encoded == (30 if is_profiled else 29) * sum(sizes)
    # A quarter of fp32's, or all of it, and for each layer what fills up 64 bytes, and the flag or a round of maxima.
    width, flag = 4 if "32" in spec else 1, 0 if is_profiled else 25
    padded = sum(-(-(numel + flag) * width // 64) * 64 for numel in sizes) + 4 * len(sizes) * is_profiled
    per_step = wire.sent_bytes()
    assert per_step == pytest.approx(2 * (num_ranks - 1) / num_ranks * padded, abs=8)
    first = per_step if is_profiled else stats.dense_bytes / 30
    assert stats.payload_sent_bytes - 29 * per_step == pytest.approx(first, abs=8)
    assert is_profiled or stats.clipped < 0.01


@pytest.mark.parametrize(("spec", "num_ranks"), SPECS.items())
def test_it_trains_and_replicas_stay_identical(spec: str, num_ranks: int) -> None:
    run_ranks(_trains, num_ranks, spec, num_ranks)


def _first_steps(rank: int) -> list[list[torch.Tensor]]:
    """Gradients of some steps: uncompressed, from step 0 and from step 2 on compressed, and simulated."""
    found, counts = [], []
    for start, options in ((4, {}), (0, {}), (2, {}), (0, {"simulate": True})):
        model = make(rank)
        wire = thinwire.compress(model, "intsgd(bits=8)", skip_if_slower=False, start=start, **options)
        found.append([])
        for step in range(4):
            model.zero_grad()
            loss_of(model, batch(rank, step)).backward()
            found[-1].append(torch.cat([p.grad.reshape(-1) for p in trained(model)]))
        counts.append((wire.stats.encoded, wire.stats.payload_sent_bytes))
    assert counts[1] == counts[3]
    return found


def test_the_first_compressed_step_is_exact_and_no_other_and_a_simulation_is_alike() -> None:
    exact, *compressed, simulated = run_ranks(_first_steps, 3)[1]
    for start, got in zip((0, 2), compressed, strict=True):
        same = [torch.allclose(a, b, rtol=1e-5, atol=1e-8) for a, b in zip(got, exact, strict=True)]
        assert same == [step <= start for step in range(4)]
        assert all(float((a - b).norm()) < 1.2 * float(b.norm()) for a, b in zip(got, exact, strict=True))
    # The same integers and scales: only the order of additions differs.
    assert torch.allclose(compressed[0][-1], simulated[-1], rtol=1e-5, atol=1e-8)


PARAMS = "intsgd(bits=8, scale=params)"


def _groups(model, lr: float = 0.03, **options) -> torch.optim.SGD:
    """Two parameter groups at two learning rates."""
    parameters = trained(model)
    return torch.optim.SGD(
        [{"params": parameters[:4], "lr": lr}, {"params": parameters[4:], "lr": lr / 2}], lr=lr, **options
    )


def _scales(rank: int, spec: str, lr: float) -> dict[str, float]:
    model = make(rank)
    optimizer = torch.optim.SGD(trained(model), lr=lr)
    wire = thinwire.compress(model, spec, skip_if_slower=False, optimizer=optimizer)
    train(model, rank, 6, optimizer=optimizer)
    state = wire.state_dict()
    return {key.split("/")[2]: float(value) for key, value in state.items() if "/r/" in key}


def test_the_two_forms_are_equal_for_plain_sgd_at_a_constant_learning_rate() -> None:
    lr, options = 0.05, "bits=8, rounding=determ"
    of_gradients = run_ranks(_scales, 2, f"intsgd({options})", lr)[0]
    of_steps, elsewhere = run_ranks(_scales, 2, f"intsgd({options}, scale=params)", lr)
    assert of_steps == elsewhere
    for name, scale in of_gradients.items():
        assert of_steps[name] / lr**2 == pytest.approx(scale, rel=1e-3), name


def _schedules(rank: int) -> None:
    model, spec = make(rank), "intsgd(bits=8, scale=params, block=global)"
    optimizer = _groups(model, momentum=0.9, weight_decay=1e-4)
    warm_up = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 3) * (step < 28))
    wire = thinwire.compress(model, spec, skip_if_slower=False, optimizer=optimizer)
    losses, encoded = [], []
    for step in range(30):
        losses += train(model, rank, 1, first=step, optimizer=optimizer, scheduler=warm_up)
        encoded.append(wire.stats.encoded)
    assert_replicas_identical(model)
    assert all(bool(torch.isfinite(p).all()) for p in model.parameters())
    # The first step is at a learning rate of 0 and says nothing: the second is exact, too.
    assert encoded[:3] == [0, 0, sum(p.numel() for p in trained(model))]
    assert sum(losses[-5:]) < 0.4 * sum(losses[:5])
    assert wire.stats.clipped < 0.01


def test_groups_momentum_and_schedules_that_begin_and_end_at_zero() -> None:
    run_ranks(_schedules, 2)


def _resumes(rank: int) -> None:
    def attach(model: DDP, **options: int) -> tuple[torch.optim.Optimizer, thinwire.Wire]:
        optimizer = _groups(model, momentum=0.9)
        return optimizer, thinwire.compress(model, PARAMS, skip_if_slower=False, optimizer=optimizer, **options)

    straight, resumed, _ = resume(rank, partial(attach, seed=5), attach, at=3, steps=6)
    assert straight == resumed


def _skips(rank: int) -> None:
    """Of a layer, r after each step; step 3 overflows, and the scaler leaves the optimizer's step out."""
    model = make(rank)
    optimizer = torch.optim.SGD(trained(model), lr=0.03)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    wire = thinwire.compress(model, PARAMS, skip_if_slower=False, optimizer=optimizer, grad_scaler=scaler)
    found = []
    for step in range(6):
        optimizer.zero_grad()
        loss = loss_of(model, batch(rank, step)) * (float("inf") if step == 3 and rank == 0 else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        found.append(float(wire.state_dict()[f"rank{rank}/r/layers.0.weight"]))
    assert found[3] == found[2], "the step was left out"
    assert len({*found}) == 5


def _refuses_and_takes_its_hooks_away(rank: int) -> None:
    model = make(rank)
    optimizer, some = torch.optim.SGD(trained(model), lr=0.1), torch.optim.SGD(trained(model)[:2], lr=0.1)
    for wrong, says in (
        (None, r"compress\(\.\.\., optimizer=\.\.\.\)"),
        (torch.optim.Adam(trained(model)), "Adam.*scale=gradient|scale=gradient.*Adam"),
        (some, "does not hold it"),
    ):
        with pytest.raises((TypeError, ValueError), match=says):
            thinwire.compress(model, PARAMS, skip_if_slower=False, optimizer=wrong)
    wire, hooks = thinwire.compress(model, PARAMS, skip_if_slower=False, optimizer=optimizer), []
    for first in (0, 2):
        train(model, rank, 2, first=first, optimizer=optimizer)
        hooks.append(len(optimizer._optimizer_step_pre_hooks))
        if not first:
            wire.detach()
    assert hooks == [1, 0]


def _all_of_it(rank: int) -> None:
    _resumes(rank)
    _skips(rank)
    _refuses_and_takes_its_hooks_away(rank)


def test_it_resumes_skips_steps_refuses_other_optimizers_and_takes_its_hooks_away() -> None:
    run_ranks(_all_of_it, 2)
