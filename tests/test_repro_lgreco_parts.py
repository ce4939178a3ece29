"""``thinwire repro lgreco``: what is compared, and every judgement, on figures that are made up."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch

import thinwire
from thinwire.plan import LGreco, Proposal, Sync, parse_policy
from thinwire.repro.cgx.contest import Times
from thinwire.repro.comparison import Side
from thinwire.repro.findings import Finding
from thinwire.repro.lgreco import methods, of_buckets, of_policies, of_quality, of_ranks, of_solver, of_speed
from thinwire.repro.lgreco.gradients import Chosen
from thinwire.repro.lgreco.judged import at_least, bytes_from, first_plan, gains, kept_within, lost
from thinwire.repro.lgreco.methods import BITS, FAMILIES, TOPK
from thinwire.repro.lgreco.study import NAMES, SMOKE, Scale, Study
from thinwire.repro.report import Run
from thinwire.repro.variants import Variant

# --- what is compared


def test_the_embedding_is_by_far_the_largest_layer() -> None:
    model = Scale().gpt.build(0)
    sizes = sorted((parameter.numel() for parameter in model.parameters()), reverse=True)
    assert model.get_parameter("embedding.weight").numel() == sizes[0]
    assert sizes[0] > 5 * sizes[1]
    assert sizes[0] > sum(sizes) / 2


def test_every_way_and_every_variant_can_be_made() -> None:
    for scale in (Scale(), SMOKE):
        for ways in (of_speed.ways(scale), of_buckets.ways(scale), [of_buckets.time_aware(scale)]):
            assert len({way.name for way in ways}) == len(ways)
            for way in ways:
                policy = way.policy
                assert policy is None or way.warm_up_steps > policy.warmup
                thinwire.parse(way.spec)
        tables = (of_policies.of_bits, of_policies.of_ranks, of_policies.of_densities, of_policies.of_hybrid)
        for rows in (table(scale) for table in tables):
            assert len({row.name for row in rows}) == len(rows)
            for row in rows:
                assert row.variant == str(Variant.parse(row.variant or ""))
        # Decisions come at least twice in a training.
        for name in NAMES:
            assert 2 * scale.every(name) < scale.task(name).steps


def test_l_greco_with_accordion_has_its_choice_for_reference() -> None:
    both = next(row for row in of_policies.of_ranks(Scale()) if row.name == "both")
    policy = parse_policy(Variant.parse(both.variant or "").policy or "")
    assert isinstance(policy, LGreco)
    assert policy.reference is not None
    assert "powersgd(rank=8)" in str(policy.reference)
    assert "powersgd(rank=32)" in str(policy.reference)
    assert policy.bounds == (4, 64)
    mixed = parse_policy(methods.hybrid(20, "gpt"))
    assert isinstance(mixed, LGreco)
    assert mixed.families == tuple(family.spec("gpt") for family in FAMILIES)


# --- judging


def _plan(step: int, sent: float, error: float | None = 1.0) -> dict[str, Any]:
    return {
        "step": step,
        "wire_bytes": sent,
        "reference_wire_bytes": 100.0,
        "error": error,
        "reference_error": None if error is None else 1.0,
        "errors_s": 0.01,
        "solve_s": 0.002,
        "waited_s": 0.001,
        "note": "",
    }


def _run(
    name: str, loss: float = 2.0, payload: Sequence[float] = (0, 1000, 2000, 3000, 4000), plans: Sequence[Any] = ()
) -> Run:
    return Run(
        name,
        step_s=[0.1] * 40,
        probe_steps=[10, 20, 30, 40],
        losses=[5.0, 4.0, 3.0, 2.5, loss],
        payload_bytes=list(payload),
        val_loss=loss,
        plans=list(plans),
        adapt_s=0.5,
    )


def test_bytes_count_from_the_first_plan_on() -> None:
    adapted = _run("adapted", payload=(0, 1000, 1500, 2000, 2500), plans=[_plan(10, 50.0), _plan(20, 50.0)])
    assert first_plan([adapted]) == 10
    assert first_plan([_run("uniform")]) == 0
    assert bytes_from(adapted, 10) == 50
    assert bytes_from(adapted, 0) == 62.5
    # A plan after the last probe but one: what is left is that probe's stretch.
    assert bytes_from(adapted, 35) == 50
    assert gains([adapted, adapted], [_run("uniform")] * 2) == [2.0, 2.0]


def test_bounds_hold_where_all_seeds_say_so() -> None:
    assert at_least([1.2, 1.3], 1.1) is True
    assert at_least([1.0, 1.3], 1.1) is None
    assert at_least([1.0, 1.05], 1.1) is False


def test_errors_are_held_against_the_references() -> None:
    runs = [_run("a", plans=[_plan(10, 50.0, 1.0), _plan(20, 50.0, None)]), _run("b", plans=[_plan(10, 50.0, 1.2)])]
    assert kept_within(runs) == (2, 1, pytest.approx(1.2))
    known, kept, largest = kept_within([])
    assert (known, kept) == (0, 0)
    assert math.isnan(largest)


def test_quality_is_accuracy_where_it_is_counted_else_the_loss() -> None:
    pytest.importorskip("scipy")
    losses = [_run("a", loss) for loss in (2.0, 2.1, 2.05)]
    worse = [_run("b", loss) for loss in (2.2, 2.3, 2.25)]
    assert lost(losses, losses, 0.01).within is True
    assert lost(worse, losses, 0.01).within is False
    assert "perplexity" in lost(worse, losses, 0.01).text
    assert lost(worse[:1], losses[:1], 0.01).within is None
    right = [replace(run, accuracy=accuracy) for run, accuracy in zip(losses, (0.95, 0.96, 0.955), strict=True)]
    # As a share of the baseline's: 0.95 points of 95.5 %.
    barely = [replace(run, accuracy=accuracy) for run, accuracy in zip(worse, (0.941, 0.951, 0.946), strict=True)]
    assert lost(barely, right, 0.01).within is True
    assert lost([replace(run, accuracy=0.94) for run in worse], right, 0.01).within is None


def test_the_gain_and_the_overhead_of_a_family() -> None:
    plans = [_plan(10, 50.0), _plan(20, 50.0)]
    spec = TOPK.adapted("gpt", 20)
    adapted = Side(spec, 1.0, (_run(spec, payload=(0, 1000, 1500, 2000, 2500), plans=plans),) * 2)
    uniform = Side(TOPK.spec("gpt"), 1.0, (_run("uniform"),) * 2)
    dense = Side("fp32", 1.0, (_run("fp32", payload=(0, 4000, 8000, 12000, 16000)),) * 2)
    row = of_quality.gain("gpt", TOPK, adapted, uniform, dense)
    assert (row.value, row.holds) == (2.0, True)
    assert row.more["ratio"] == {"uniform": 4.0, "lgreco": 8.0}
    assert of_quality.gain("gpt", TOPK, uniform, uniform, dense).holds is False
    row = of_quality.overhead("gpt", TOPK, adapted)
    # Of 500 steps of 0.1 s: 10 ms of errors, 2 ms of solving, and 50 windows' steps of (0.5 − 0.002) / 20 s.
    assert row.more["share"] == {
        "errors": pytest.approx(0.01 / 50),
        "solving": pytest.approx(0.002 / 50),
        "summing": pytest.approx(0.498 / 20 * 50 / 50),
    }
    assert row.holds is False
    light = replace(adapted, runs=tuple(replace(run, adapt_s=0.01) for run in adapted.runs))
    assert of_quality.overhead("gpt", TOPK, light).holds is True
    assert of_quality.overhead("gpt", TOPK, uniform).holds is None


def _verdicts(rows: Sequence[Finding]) -> dict[str, bool | None]:
    return {row.name: row.holds for row in rows if row.claim}


def _trained(**sent: float) -> dict[str, list[Run]]:
    """Runs by policy that send so many bytes in every ten steps."""
    names = {"fp32": 4000.0, "uniform": 1000.0, **sent}
    return {name: [_run(name, payload=[ten * k for k in range(5)])] for name, ten in names.items()}


def _chosen(gain: float, relative_error: float) -> list[Chosen]:
    return [Chosen(10, {}, 100.0 / gain, 100.0, relative_error**2, 1.0, Proposal({}))]


def test_policies_are_judged_by_bytes_and_error() -> None:
    found = _trained(kmeans=700, bayes=750, linear=900, accordion=850, lgreco=600)
    chosen = {
        "kmeans": _chosen(1.4, 0.8),
        "bayes": _chosen(1.3, 0.9),
        "linear": _chosen(1.1, 0.95),
        "accordion": _chosen(1.2, 2.0),
        "lgreco": _chosen(1.6, 1.0),
    }
    rows = of_policies.bits_claims(found, chosen)
    assert set(_verdicts(rows).values()) == {True}
    assert rows[0].value == pytest.approx(1000 / 700)
    assert rows[2].value == pytest.approx(1.6)
    rows = of_policies.bits_claims(
        {**found, "bayes": found["lgreco"]}, {**chosen, "linear": _chosen(1.1, 0.7), "kmeans": _chosen(1.7, 0.8)}
    )
    assert set(_verdicts(rows).values()) == {False}
    found = _trained(lgreco=600, accordion=650, kmeans=700, both=400)
    assert _verdicts(of_policies.ranks_claims(found))["lgreco_is_stable"] is None
    found["lgreco"][0].plans = [_plan(10, 60.0), _plan(20, 58.0)]
    assert set(_verdicts(of_policies.ranks_claims(found)).values()) == {True}
    found = _trained(lgreco=600, accordion=300, kmeans=500, both=400)
    found["lgreco"][0].plans = [_plan(10, 60.0), _plan(20, 90.0)]
    assert set(_verdicts(of_policies.ranks_claims(found)).values()) == {False}


def test_densities_are_judged_by_bytes_and_quality() -> None:
    pytest.importorskip("scipy")
    found = _trained(threshold=200, accordion=400, lgreco=150, strong=50)
    three = {name: runs * 3 for name, runs in found.items()}
    rows = of_policies.densities_claims(three, 0.01)
    assert _verdicts(rows) == {
        "lgreco_over_threshold": True,
        "lgreco_over_accordion": True,
        "lgreco_no_worse_than_threshold": True,
    }
    worse = {**three, "lgreco": [_run("lgreco", 3.0, payload=[0, 900, 1800, 2700, 3600])] * 3}
    assert set(_verdicts(of_policies.densities_claims(worse, 0.01)).values()) == {False}


def _times(**seconds: float) -> Times:
    noise = (1.0, 1.02, 0.99, 1.01, 1.0, 0.98)
    return Times(
        {name: tuple(value * n for n in noise) for name, value in seconds.items()}, dict.fromkeys(seconds, 1e3)
    )


def test_ranks_are_judged_by_step_time() -> None:
    runs = [_run("uniform", 2.0), _run("adapted", 2.01)]
    times = _times(**{"rank 4": 0.2, "rank 4 lgreco": 0.15, "rank 8": 0.3, "rank 8 lgreco": 0.25})
    points = [of_ranks.point(rank, runs[0], runs[1], times) for rank in (4, 8)]
    rows = of_ranks.rows(points, times, "over 100 Mbit/s", timed=True)
    assert rows[0].holds is True
    assert rows[1].value == pytest.approx(0.005)
    assert of_ranks.rows(points, times, "over loopback", timed=False)[0].holds is None
    slow = _times(**{"rank 4": 0.2, "rank 4 lgreco": 0.15, "rank 8": 0.3, "rank 8 lgreco": 0.4})
    assert of_ranks.rows(points, slow, "", timed=True)[0].holds is False


def test_a_profile_is_shares_of_a_step() -> None:
    times = replace(_times(powersgd=0.2), stages={"powersgd": {"encode_s": 0.01, "decode_s": 0.02, "wire_s": 0.1}})
    assert of_speed.profile(times, "powersgd") == pytest.approx({"encode_s": 0.05, "decode_s": 0.1, "wire_s": 0.5})


def test_buckets_are_judged_by_what_is_sent_in_them() -> None:
    found = {
        "uniform": [100.0, 100.0, 400.0, 100.0],
        "lgreco": [90.0, 80.0, 200.0, 40.0],
        "kmeans": [50.0, 50.0, 300.0, 60.0],
        "priority": [110.0, 100.0, 180.0, 30.0],
    }
    assert set(_verdicts(of_buckets.bucket_rows(found)).values()) == {True}
    other = {**found, "lgreco": [10.0, 20.0, 300.0, 90.0], "priority": [5.0, 10.0, 310.0, 95.0]}
    assert set(_verdicts(of_buckets.bucket_rows(other)).values()) == {False}
    times = _times(**{"powersgd lgreco": 0.1, "priority": 0.12})
    assert of_buckets.priority_row(times, "", timed=True).holds is True
    assert of_buckets.priority_row(times, "", timed=False).holds is None


def test_times_of_buckets_are_fitted_by_their_bytes() -> None:
    pytest.importorskip("scipy")
    generator = torch.Generator().manual_seed(0)
    plans = torch.randint(1000, 9000, (8, 3), generator=generator).tolist()
    costs = (1e-6, 2e-6, 3e-6)
    syncs = [
        Sync(tuple(plan), 0.01 + sum(size * cost for size, cost in zip(plan, costs, strict=True)))
        for plan in plans
        for _ in range(6)
    ]
    per_byte, quality = of_buckets.fitted(syncs)
    assert per_byte == pytest.approx(costs, rel=1e-3)
    assert quality == pytest.approx(1)
    rows = of_buckets.time_rows(per_byte, quality, 1.05, timed=True)
    assert _verdicts(rows) == {"fit": True, "coefficients_alike": False, "time_plan_alike": True}
    assert set(_verdicts(of_buckets.time_rows(per_byte, quality, 1.05, timed=False)).values()) == {None}
    assert of_buckets.fitted(syncs[:6])[0] is None
    assert _verdicts(of_buckets.time_rows(None, math.nan, 1.0, timed=True)) == {"fit": None}


def _one(sent: float, error: float = 1.0) -> list[Chosen]:
    return [Chosen(10, {}, sent, 100.0, error, 1.0, Proposal({}))]


def test_the_solver_is_judged_by_optimum_bound_and_mixture() -> None:
    case = of_solver.Case("gpt", BITS, _one(80.5), _one(80.0), _one(60.0), _one(59.0), {"topk": _one(70.0)})
    assert case.hybrid_gain(0) == pytest.approx(70 / 59)
    assert set(_verdicts(of_solver.rows([case])).values()) == {True}
    # What errs too much is not the best of a single family.
    case = replace(case, others={"topk": _one(30.0, error=2.0)})
    assert case.hybrid_gain(0) == pytest.approx(80 / 59)
    bad = replace(case, dp=_one(85.0, error=1.1), hybrid=_one(90.0), hybrid_exact=_one(90.0))
    assert set(_verdicts(of_solver.rows([bad])).values()) == {False}


def test_what_is_timed_is_judged_where_links_are_slow(tmp_path: Path) -> None:
    study = Study(Scale(), tmp_path, cast("Any", None), emulated=True)
    assert study.rates == ("100mbit", "1gbit")
    assert study.verdict(True) is True
    assert replace(study, rate="50mbit").rates == ("50mbit",)
    alone = replace(study, emulated=False)
    assert alone.rates == (None,)
    assert alone.verdict(True) is None
