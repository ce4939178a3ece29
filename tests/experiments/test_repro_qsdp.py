"""``python -m experiments qsdp``: the small version from end to end, its page, how FSDP2 runs, every judgement."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import replace

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from experiments.framework.claims import judge
from experiments.papers.qsdp import errors, measurements, regression
from experiments.papers.qsdp.measurements import MORE_RANKS, QSDPStudy, curve, lost_row
from experiments.papers.qsdp.methods import (
    BLOCKWISE,
    FP16,
    FP32,
    LGRECO,
    NAIVE,
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
from experiments.papers.qsdp.sizes import SIZES, SIZES_SMOKE, TIMED_SMOKE
from experiments.papers.qsdp.trainings import Trained
from harness import run_ranks
from small_versions import Small, small_version
from thinwire import parse
from thinwire_tools import lab

SMOKE = PAPER.smoke
PICTURES = ("5.1", "5.7.1", "5.2", "5.3", "C.2-C.3", "C.4", "C.5", "5.3-bandwidth", "5.2-time", "C.1")


# --- the command


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Small:
    for needed in ("sklearn", "matplotlib", "scipy"):
        pytest.importorskip(needed)
    return small_version("qsdp", QSDPStudy, tmp_path_factory.mktemp("qsdp"))


@pytest.mark.timeout(400)
def test_the_small_version_makes_every_part_and_judges_every_claim(small: Small) -> None:
    assert small.code == 0, small.shown
    # What one part has trained another does not train again.
    assert all(0 < small.steps[part] <= made.steps(SMOKE) for part, made in PAPER.parts.items())
    emulated = lab.unavailable() is None
    judged = {f"{claim.figure}/{claim.row}" for claim in PAPER.claims}
    assert not emulated or judged <= small.rows.keys()
    for name, row in small.rows.items():
        assert bool(row["found"]) == (name in judged), name
        # One seed shows no quality, one round no speed.
        undecided = (
            "table 5.1",
            "table 5.2",
            "table 5.3",
            "figure C.4",
            "figure 5.3",
            "table C.2",
            "figure C.1",
            "L-GreCo",
        )
        assert row["holds"] is None or row["figure"] not in undecided, row
    for name in PICTURES:
        assert (small.out / f"qsdp-{name}.svg").read_text().startswith("<?xml")


@pytest.mark.timeout(400)
@pytest.mark.network
@pytest.mark.skipif(lab.unavailable() is not None, reason=str(lab.unavailable()))
def test_rows_say_what_was_sent(small: Small) -> None:
    sent = small.rows["figure 5.3/step_s"]["payload_bytes"]
    # Of so small a network some is raw.
    assert 3.2 < sent["raw"] / sent["W8G8"] < 4
    assert 5 < sent["raw"] / sent["W4G4"] < 8
    flat = small.rows["section 5.6.1/hierarchical_over_flat"]
    assert set(flat["step_s"]) == {"fp32", "flat", "hierarchical", "nothing"}


@pytest.mark.timeout(400)
def test_perplexities_are_kept_by_seed(small: Small) -> None:
    for size in SIZES_SMOKE:
        row = small.rows[f"table 5.1/lost/{size.name}/2 ranks"]
        assert len(row["perplexities"]) == len(row["baseline_perplexities"]) == SMOKE.seeds
        # Of 8 bits so little is lost that no training can miss it by far.
        assert row["perplexities"][0] == pytest.approx(row["baseline_perplexities"][0], rel=0.05)
        assert row["of_weights_as_kept"][0] == pytest.approx(row["perplexities"][0], rel=0.01)
    assert f"table 5.1/lost/small/{MORE_RANKS} ranks" in small.rows
    assert len([name for name in small.rows if name.startswith("table 5.2/perplexity/")]) == 9
    cost = small.rows["section C.3/learning_cost"]
    assert cost["learn_at"] == list(SIZES_SMOKE[0].learn_at)
    assert cost["learn_s"][0] > 0


@pytest.mark.timeout(400)
def test_lgreco_gives_layers_bits_of_their_own(small: Small) -> None:
    row = small.rows["L-GreCo/lost/reference"]
    (plan,), (ours,), (reference,) = row["plans"], row["step_bytes"], row["reference_bytes"]
    # Evaluations gather weights, too, which the policy counts: of so short a training that is a large part.
    assert ours < 1.05 * reference
    compressed = {spec for spec in plan.values() if spec.startswith("minmax")}
    assert len({spec.partition(",")[0] for spec in compressed}) > 1
    assert all(spec.startswith("minmax") or spec == "raw()" for spec in plan.values())
    assert small.rows["L-GreCo/lost/W2G2"]["step_bytes"][0] < reference


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


def test_levels_are_learned_as_far_into_a_training_as_in_the_thesis() -> None:
    steps = replace(SIZES[0], task=replace(SIZES[0].task, steps=4800)).learn_at
    assert steps == (400, 1900, 3800)
    assert all(0 < step < size.task.steps for size in SIZES for step in size.learn_at)


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


def test_with_nothing_sent_a_rank_has_its_own_gradient_twice() -> None:
    found = run_ranks(_gradients, 2, NOTHING, 2)
    for values, counted, loss in found:
        assert math.isfinite(loss)
        assert not counted
        assert all(torch.isfinite(value).all() for value in values)
    # A ratio of one is stock; a large one leaves most of what there was.
    (whole, _, loss), _ = run_ranks(_gradients, 2, replace(shortened(1.5, 1.5), name="some"), 2)
    assert math.isfinite(loss)
    assert all(torch.isfinite(value).all() for value in whole)


def test_the_more_one_scale_serves_the_more_is_lost() -> None:
    exact = torch.cat([g.flatten() for g in run_ranks(_gradients, 2, FP32, 1)[0][0]])
    errors_of = {}
    for method in (W8G8, NAIVE[8], BLOCKWISE):
        (found, _, _), (others, _, _) = run_ranks(_gradients, 2, method, 1)
        assert all(map(torch.equal, found, others))
        errors_of[method.name] = float((torch.cat([g.flatten() for g in found]) - exact).norm() / exact.norm())
    assert errors_of[W8G8.name] < errors_of[NAIVE[8].name] < errors_of[BLOCKWISE.name] < 0.5


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
        assert "11.567 against 11.000" in judged.text


@pytest.mark.parametrize(
    ("runs", "sent", "control", "expected"),
    [(SAME, 90, WORSE, True), (SAME, 100, WORSE, False), (WORSE, 90, WORSE, False), (SAME, 90, SAME, None)],
)
def test_lgreco_is_judged_by_bytes_and_perplexity_where_the_control_fails(
    runs: list[Trained], sent: int, control: list[Trained], expected: bool | None
) -> None:
    pytest.importorskip("scipy")
    plain = [replace(run, step_bytes=(100,)) for run in BASE]
    ours = [replace(run, step_bytes=(sent,)) for run in runs]
    rows = [
        measurements.lgreco_row(ours, plain),
        lost_row("L-GreCo", f"lost/{LGRECO.name}", runs, BASE),
        lost_row("L-GreCo", "control", control, BASE),
    ]
    assert judge(PAPER.claims, rows, emulated=True)[0].holds is expected


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
    exact = list(regression.descend(problem, "exact", 0, 300, batches=False))
    shifted = list(regression.descend(problem, "shift", 0, 300, batches=False))
    again = list(regression.descend(problem, "shift", 0, 300, batches=False))
    other = list(regression.descend(problem, "shift", 1, 300, batches=False))
    assert shifted == again != other
    assert problem.least < problem.loss(torch.zeros(90))
    assert 0 <= regression.tail(exact) < regression.tail(shifted) < 0.01 * exact[0] + regression.tail(exact)
    patients = regression.diabetes()
    assert patients.least == pytest.approx(0.2038, abs=1e-3)
    assert patients.features.shape == (442, 65)
    assert patients.loss(torch.zeros(65)) == pytest.approx(0.5, rel=1e-3)
    assert regression.thinned(list(range(120)))[:3] == [0, 2, 4]
