"""State that would make every further step non-finite starts anew, on all ranks alike."""

from __future__ import annotations

import math

import pytest
import torch

import sharded
from harness import on_ranks, run_threads
from thinwire import Plan, Wire
from thinwire.plan import Filter
from thinwire.runtime import BucketEngine, WireSettings
from thinwire.runtime.checkpoint import sealed

SHAPES = {"w": (64, 48)}
LAYERS = tuple(SHAPES.items())
STEPS = 14
LARGE_AT = 2
RESET = "large gradient has left residuals"


def trained(spec: str, large: float, *, nan_from: int = STEPS, simulated: bool = False) -> tuple[list[bool], int]:
    """Which means were finite, and how often the state was reset, on all ranks; one gradient is ``large``
    throughout."""

    def run(transport) -> tuple[list[bool], int]:
        plan = Plan.build(SHAPES, spec, Filter(min_numel=0))
        wire = Wire(BucketEngine(plan, SHAPES, transport, WireSettings(seed=1), simulated=simulated))
        generator = torch.Generator().manual_seed(7 + transport.rank)
        finite: list[bool] = []
        for step in range(STEPS):
            wire.engine.begin_step()
            flat = torch.randn(64 * 48, generator=generator)
            if step == LARGE_AT:
                flat.fill_(large)
            if step >= nan_from and transport.rank == 1:
                flat[5] = math.nan
            finite.append(bool(torch.isfinite(wire.engine.reduce(flat, LAYERS).wait()).all()))
        resets = wire.stats.state_resets
        wire.detach()
        return finite, resets

    first, second = run_threads(run, 2)
    assert first == second
    return first


@pytest.mark.parametrize("simulated", [False, True])
def test_state_with_which_every_sum_overflows_starts_anew_with_a_warning(simulated: bool) -> None:
    with pytest.warns(UserWarning, match=RESET):
        finite, resets = trained("dgc(topk(density=0.05))", 1e38 if not simulated else 3e38, simulated=simulated)
    assert resets == 1
    assert finite[-5:] == [True] * 5
    assert finite.count(False) <= 4


@pytest.mark.parametrize("spec", ["ef(minmax(bits=2))", "dgc(topk(density=0.05))"])
def test_gradients_that_are_not_finite_reset_nothing(spec: str) -> None:
    assert trained(spec, 1.0, nan_from=4) == ([True] * 4 + [False] * (STEPS - 4), 0)


@on_ranks(2)
def test_the_state_of_a_sharded_model_starts_anew_too(rank: int) -> None:
    """A sharded training whose residuals are finite, and further apart than the largest number."""
    model = sharded.build()
    wire = sharded.compress(model, "raw", "ef(minmax(bits=2, bucket=128))")
    state = wire.state_dict()
    residuals = {name: value for name, value in state.items() if "residual" in name}
    slots = {name: 3e38 * torch.ones_like(value).cumsum(0).cos().sign() for name, value in residuals.items()}
    wire.load_state_dict({**state, **sealed(slots, f"rank{rank}/checksums")})
    finite = []
    for step in range(8):
        x, y = sharded.batch(step, rank)
        (model(x) - y).square().mean().backward()
        finite.append(all(bool(p.grad.full_tensor().isfinite().all()) for p in model.parameters()))
        model.zero_grad()
    wire.state_dict()
    assert finite == [False] * 3 + [True] * 5
    assert wire.stats.state_resets == 1
