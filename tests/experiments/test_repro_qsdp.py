"""``python -m experiments qsdp``: methods, how FSDP2 runs, every judgement."""

from __future__ import annotations

import math

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from experiments.framework.claims import judge
from experiments.papers.qsdp import measurements, regression
from experiments.papers.qsdp.measurements import lost_row
from experiments.papers.qsdp.methods import FP32, RAW
from experiments.papers.qsdp.paper import PAPER
from experiments.papers.qsdp.sharding import backward, shard
from experiments.papers.qsdp.sizes import SIZES, TIMED_SMOKE
from experiments.papers.qsdp.trainings import Trained
from harness import run_ranks

# --- methods


# --- under FSDP2


def _gradients(rank: int) -> None:
    torch.set_num_threads(1)
    found = []
    for method, num_micro in ((RAW, 1), (RAW, 4), (FP32, 4)):
        model = shard(TIMED_SMOKE, init_device_mesh("cpu", (2,)), 0, half=method.half)
        wire = method.attach(model)
        loss = backward(TIMED_SMOKE, model, next(iter(TIMED_SMOKE.batches(0, rank, 2))), num_micro)
        gradients = [p.grad.full_tensor() for p in model.parameters()]  # pyright: ignore
        found.append((gradients, wire.stats if wire else None, loss))
    (whole, once, loss), (parts, counted, loss_of_parts), (stock, _, _) = found
    for a, b, c in zip(whole, parts, stock, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-6)
        torch.testing.assert_close(b, c, rtol=1e-5, atol=1e-7)
    assert loss == pytest.approx(loss_of_parts, rel=1e-4)
    num_modules = TIMED_SMOKE.model.layers + 1
    assert (counted.gathers, counted.reductions, once.reductions) == (5 * num_modules, num_modules, num_modules)


def test_micro_batches_make_the_gradient_of_the_whole_batch() -> None:
    run_ranks(_gradients, 2)


# --- judgements


def _trained(perplexity: float, probes: tuple[float, ...] = (250.0, 20.0, 10.0)) -> Trained:
    return Trained((4, 8), probes, (0.5,) * 8, perplexity, perplexity, 0.1)


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
        assert "11.567 against 11.000" in judged.text


# --- levels and regression


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
