"""``python -m experiments qsdp``: methods, how FSDP2 runs, every judgement."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from experiments.framework.claims import judge
from experiments.papers.qsdp import errors, measurements, regression
from experiments.papers.qsdp.measurements import curve, lost_row
from experiments.papers.qsdp.methods import (
    FP16,
    FP32,
    NOTHING,
    RAW,
    UNBUCKETED,
    W4G4,
    W8G8,
    Method,
    learned,
    shortened,
    uniform,
)
from experiments.papers.qsdp.paper import PAPER
from experiments.papers.qsdp.sharding import backward, shard
from experiments.papers.qsdp.sizes import SIZES, TIMED_SMOKE
from experiments.papers.qsdp.trainings import Trained
from harness import run_ranks
from thinwire import parse

# --- methods


def test_methods_are_specs_and_survive_json() -> None:
    methods = [FP16, FP32, RAW, NOTHING, W8G8, W4G4, learned(6, 4, (3, 9)), shortened(2, 8), uniform(3, 32)]
    for method in methods:
        assert Method(**json.loads(json.dumps(dataclasses.asdict(method)))) == method
    assert W8G8.weights == W8G8.gradients == "minmax(bits=8, bucket=1024)"
    assert (uniform(3, 32).weights, uniform(3, 32).gradients) == ("minmax(bits=3, bucket=1024)", "raw")
    assert uniform(8, 3, rounding="nearest").gradients == "minmax(bits=3, bucket=1024, rounding=nearest)"
    assert parse(uniform(4, 4, bucket=UNBUCKETED).weights).wire_bytes((64, 1024)) < 65536 // 2 + 128
    # Levels of more than 6 bits are not learned.
    assert learned(8, 2, (3, 9)).weights == W8G8.weights
    assert parse(learned(8, 2, (3, 9)).gradients) == parse("levels(bits=2, bucket=1024, learn_at=(3, 9), min_numel=0)")
    assert [method.exact for method in (FP32, shortened(1, 1), shortened(2, 1), NOTHING)] == [True, True, False, False]


# --- under FSDP2


def _gradients(rank: int, method: Method, num_micro: int) -> tuple[list[torch.Tensor], dict[str, float], float]:
    torch.set_num_threads(1)
    model = shard(TIMED_SMOKE, init_device_mesh("cpu", (2,)), 0, half=method.half)
    wire = method.attach(model)
    loss = backward(TIMED_SMOKE, model, next(iter(TIMED_SMOKE.batches(0, rank, 2))), num_micro)
    found = [p.grad.full_tensor() for p in model.parameters()]  # pyright: ignore
    return found, wire.stats.to_dict() if wire else {}, loss


def test_micro_batches_make_the_gradient_of_the_whole_batch() -> None:
    (whole, once, loss), _ = run_ranks(_gradients, 2, RAW, 1)
    (parts, counted, loss_of_parts), _ = run_ranks(_gradients, 2, RAW, 4)
    (stock, _, _), _ = run_ranks(_gradients, 2, FP32, 4)
    for a, b, c in zip(whole, parts, stock, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-6)
        torch.testing.assert_close(b, c, rtol=1e-5, atol=1e-7)
    assert loss == pytest.approx(loss_of_parts, rel=1e-4)
    num_modules = TIMED_SMOKE.model.layers + 1
    assert (counted["gathers"], counted["reductions"]) == (5 * num_modules, num_modules)
    assert once["reductions"] == num_modules


# --- judgements


def _trained(perplexity: float, probes: tuple[float, ...] = (250.0, 20.0, 10.0)) -> Trained:
    return Trained((4, 8), probes, (0.5,) * 8, perplexity, perplexity, 0.1)


def test_a_curve_is_the_mean_of_probes() -> None:
    run = _trained(9.0)
    assert run.learn_share == pytest.approx(0.1 / 4)
    assert curve([run, _trained(9.0, (250.0, 30.0, math.inf))]) == ([0, 4], [250.0, 25.0])


BASE = [_trained(10.0), _trained(11.0), _trained(12.0)]
SAME = [_trained(10.01), _trained(10.99), _trained(12.02)]
WORSE = [_trained(10.5), _trained(11.6), _trained(12.6)]


@pytest.mark.parametrize(
    ("runs", "control", "expected"),
    [
        (SAME, WORSE, True),
        (WORSE, WORSE, False),
        ([_trained(math.inf)] * 3, WORSE, False),
        # The control does not fail, so that this training forgives everything.
        (SAME, SAME, None),
    ],
)
def test_quality_is_judged_by_perplexity_where_the_control_fails(
    runs: list[Trained], control: list[Trained], expected: bool | None
) -> None:
    pytest.importorskip("scipy")
    rows = [measurements.recovered_row(SIZES[0], 2, runs, BASE), lost_row("table 5.1", "control", control, BASE)]
    judged = judge(PAPER.claims, rows, emulated=True)[0]
    assert judged.holds is expected
    assert ("says nothing" in judged.why) == (control is SAME)
    if runs is WORSE:
        assert judged.text.startswith("+5.15 % (")


# --- levels and regression


def test_uniform_levels_code_as_the_nearest_of_min_max() -> None:
    values = torch.randn(3000, generator=torch.Generator().manual_seed(0))
    levels = torch.linspace(0.0, 1.0, 16)
    nearest = parse("minmax(bits=4, bucket=1024, rounding=nearest)").roundtrip(values)
    torch.testing.assert_close(errors.with_levels(values, levels, 4), nearest, rtol=1e-3, atol=1e-3)
    assert errors.relative_error(values, values) == 0
    assert errors.relative_error(values, torch.zeros_like(values)) == pytest.approx(1)


def test_descents_reach_the_optimum_and_quantised_ones_hover_above_it() -> None:
    pytest.importorskip("sklearn")
    problem = regression.made(200)
    exact, shifted, again = (
        list(regression.descend(problem, how, 0, 300, batches=False)) for how in ("exact", "shift", "shift")
    )
    assert shifted == again
    assert problem.least < problem.loss(torch.zeros(90))
    assert 0 <= regression.tail(exact) < regression.tail(shifted) < 0.01 * exact[0] + regression.tail(exact)
    patients = regression.diabetes()
    assert patients.least == pytest.approx(0.2038, abs=1e-3)
    assert patients.loss(torch.zeros(65)) == pytest.approx(0.5, rel=1e-3)
