"""IntSGD through compress() on DDP models over gloo: it trains, resumes, survives an overflow, and counts its bytes."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire
from harness import run_ranks
from nets import assert_replicas_identical, batch, fingerprint, loss_of, make, resume, train, trained

SPECS = ["intsgd(bits=8)", "intsgd(bits=32)", "intsgd(bits=8, block=global)", "intsgd(bits=8, rounding=determ)"]
HEURISTIC = ["heuristic_intsgd(bits=8)", "heuristic_intsgd(bits=32, rounding=random)"]


def _trains(rank: int, spec: str) -> tuple[list[float], dict, int, dict[str, int]]:
    model = make(rank)
    wire = thinwire.compress(model, spec, skip_if_slower=False, checks=thinwire.Checks(1))
    losses = train(model, rank, 30, lr=0.03)
    assert_replicas_identical(model)
    sizes = {name: p.numel() for name, p in model.module.named_parameters() if p.requires_grad}
    return losses, wire.stats.to_dict(), wire.wire_bytes_per_step(), sizes


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("spec", SPECS)
def test_it_trains_and_replicas_stay_identical(spec: str, num_ranks: int) -> None:
    width = 4 if "32" in spec else 1
    for losses, stats, per_step, sizes in run_ranks(_trains, num_ranks, spec):
        assert sum(losses[-5:]) < 0.3 * sum(losses[:5])
        assert stats["compressed_steps"] == stats["parity_checks"] == 30
        assert stats["encoded"] == 29 * sum(sizes.values())
        assert stats["clipped"] < 0.01
        # A quarter of fp32's, or all of it, and for each layer the flag and what fills up 64 bytes.
        padded = sum(-(-(numel + 25) * width // 64) * 64 for numel in sizes.values())
        assert per_step == pytest.approx(2 * (num_ranks - 1) / num_ranks * padded, abs=8)
        first = stats["payload_sent_bytes"] - 29 * per_step
        assert first == pytest.approx(stats["dense_bytes"] / 30, abs=8)


def _first_steps(rank: int, spec: str | None, start: int) -> list[torch.Tensor]:
    model = make(rank)
    if spec:
        thinwire.compress(model, spec, skip_if_slower=False, start=start)
    found = []
    for step in range(4):
        model.zero_grad()
        loss_of(model, batch(rank, step)).backward()
        found.append(torch.cat([p.grad.reshape(-1) for p in trained(model)]))
    return found


@pytest.mark.parametrize("start", [0, 2])
def test_the_first_compressed_step_is_exact_and_no_other(start: int) -> None:
    exact = run_ranks(_first_steps, 2, None, 0)[0]
    got = run_ranks(_first_steps, 2, "intsgd(bits=8)", start)[0]
    same = [torch.allclose(a, b, rtol=1e-5, atol=1e-9) for a, b in zip(got, exact, strict=True)]
    assert same == [step <= start for step in range(4)]
    for a, b in zip(got, exact, strict=True):
        assert float((a - b).norm()) < 1.2 * float(b.norm())


def _resumes(rank: int, spec: str, steps: int) -> tuple[bytes, bytes, int]:
    def attach(model: DDP, **options: int) -> tuple[torch.optim.Optimizer, thinwire.Wire]:
        optimizer = torch.optim.SGD(trained(model), lr=0.03, momentum=0.9)
        return optimizer, thinwire.compress(model, spec, skip_if_slower=False, **options)

    straight, resumed, wire = resume(rank, partial(attach, seed=9), attach, at=steps, steps=9)
    return straight, resumed, wire.stats.encoded


@pytest.mark.parametrize("spec", [SPECS[0], SPECS[2]])
@pytest.mark.parametrize("steps", [1, 5])
def test_resume_is_bit_identical_and_repeats_no_exact_step(spec: str, steps: int) -> None:
    for straight, resumed, encoded in run_ranks(_resumes, 2, spec, steps):
        assert straight == resumed
        assert encoded == (9 - steps) * 43584


def _scaled(rank: int) -> tuple[list[float], list[int], list[float]]:
    model = make(rank)
    wire = thinwire.compress(model, "intsgd(bits=8)", skip_if_slower=False)
    optimizer = torch.optim.SGD(trained(model), lr=0.03)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scales, encoded, losses = [], [], []
    for step in range(16):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_of(model, batch(rank, step))
        losses.append(loss.item())
        if step in (0, 1, 6) and rank == 1:
            loss = loss * float("inf")
        before = fingerprint(model)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        assert (fingerprint(model) == before) == (step in (0, 1, 6))
        scales.append(scaler.get_scale())
        encoded.append(wire.stats.encoded)
    assert_replicas_identical(model)
    return scales, encoded, losses


def test_a_scaler_sees_overflows_and_the_exact_step_is_the_first_finite_one() -> None:
    numel = 43584
    for scales, encoded, losses in run_ranks(_scaled, 2):
        assert scales == [512.0] + [256.0] * 5 + [128.0] * 10
        # Steps 0 and 1 overflowed: step 2 is the exact one.
        assert encoded == [0, 0, 0] + [numel * i for i in range(1, 14)]
        assert sum(losses[-3:]) < 0.8 * sum(losses[:3])


def _unscaled(rank: int, scale: float, steps: int) -> bytes:
    model = make(rank)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale) if scale != 1.0 else None
    thinwire.compress(model, "intsgd(bits=8, rounding=determ)", skip_if_slower=False, grad_scaler=scaler)
    for step in range(steps):
        model.zero_grad()
        loss = loss_of(model, batch(rank, step))
        (scaler.scale(loss) if scaler else loss).backward()
    return torch.cat([p.grad.reshape(-1) / scale for p in trained(model)]).numpy().tobytes()


def test_the_loss_scale_changes_no_bit() -> None:
    """Powers of two are exact, so scales in unscaled units give the same integers."""
    assert run_ranks(_unscaled, 2, 1.0, 4)[0] == run_ranks(_unscaled, 2, 4096.0, 4)[0]


def _simulated(rank: int, simulate: bool) -> tuple[torch.Tensor, dict]:
    model = make(rank)
    wire = thinwire.compress(model, "intsgd(bits=8)", skip_if_slower=False, simulate=simulate)
    for step in range(4):
        model.zero_grad()
        loss_of(model, batch(rank, step)).backward()
    return torch.cat([p.grad.reshape(-1) for p in trained(model)]), wire.stats.to_dict()


def test_simulation_gives_what_integers_would() -> None:
    """The same integers and scales: only the order of additions differs."""
    (real, sent), (simulated, counted) = (run_ranks(_simulated, 3, simulate)[1] for simulate in (False, True))
    assert torch.allclose(real, simulated, rtol=1e-5, atol=1e-8)
    assert sent["encoded"] == counted["encoded"]
    assert sent["payload_sent_bytes"] == counted["payload_sent_bytes"]


@pytest.mark.parametrize("spec", HEURISTIC)
def test_a_profiled_scale_costs_a_round_of_maxima(spec: str) -> None:
    width = 4 if "32" in spec else 1
    for losses, stats, per_step, sizes in run_ranks(_trains, 2, spec):
        assert sum(losses[-5:]) < 0.3 * sum(losses[:5])
        assert stats["encoded"] == 30 * sum(sizes.values())
        padded = sum(-(-numel * width // 64) * 64 for numel in sizes.values())
        assert per_step == padded + len(sizes) * width
        assert stats["payload_sent_bytes"] == 30 * per_step
