"""``python -m experiments lgreco``: the small version from end to end, what is compared, and how rows are judged."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import thinwire
from experiments.__main__ import main as experiments_main
from experiments.framework.claims import Row, judge
from experiments.papers.lgreco import buckets, equal_bytes, methods, policies, quality, speed
from experiments.papers.lgreco.judging import bytes_from, first_plan, gains, kept, lost
from experiments.papers.lgreco.methods import FAMILIES, TOPK
from experiments.papers.lgreco.paper import PAPER
from experiments.papers.lgreco.study import NAMES, SMOKE, LGrecoScale, LGrecoStudy
from small_versions import Small, small_version
from thinwire.policies import LGreco, Sync, parse_policy
from thinwire.policies.lgreco import seconds_per_byte
from thinwire_tools.compare.comparison import Run, Side
from thinwire_tools.compare.variants import Variant

PICTURES = ("4.2-4.3", "B.2", "3.7", "3.8", "4.5a", "4.3-4.4", "B.3", "4.2", "4.5b-B.1-B.6b", "B.6a", "equal-bytes")

# --- the command


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Small:
    for needed in ("sklearn", "matplotlib", "scipy"):
        pytest.importorskip(needed)
    return small_version("lgreco", LGrecoStudy, tmp_path_factory.mktemp("lgreco"))


@pytest.mark.timeout(400)
def test_the_small_version_makes_every_part_and_judges_every_claim(small: Small) -> None:
    assert small.code == 0, small.shown
    emulated = small.record["about"]["emulated"]
    missing = {f"{claim.figure}/{claim.row}" for claim in PAPER.claims} - small.rows.keys()
    # Without slow links there is one link, and too few plans predict no times.
    assert all(
        ("1gbit" in name and not emulated) or name.startswith(("figure B.6b", "section 4.6.5")) for name in missing
    )
    assert all(steps <= PAPER.parts[part].steps(SMOKE) for part, steps in small.steps.items())
    for name, row in small.rows.items():
        # One seed shows no quality, one round no speed.
        assert row["holds"] is None or not any(part in name for part in ("/lost/", "_over_uniform/", "/speed_"))
    for name in PICTURES:
        assert (small.out / f"lgreco-{name}.svg").read_text().startswith("<?xml")


@pytest.mark.timeout(400)
def test_rows_say_what_plans_were_chosen_and_what_they_send(small: Small) -> None:
    for name in NAMES:
        for family in FAMILIES:
            row = small.rows[f"{quality.TABLES[name]}/gain/{name}/{family.name}"]
            (plans,) = row["plans"]
            assert [plan["step"] for plan in plans] == [4, 8]
            assert row["from_step"] == 4
            assert row["ratio"]["lgreco"] / row["ratio"]["uniform"] == pytest.approx(row["value"], rel=1e-4)
            assert all(plan["error"] <= plan["reference_error"] * (1 + 1e-9) for plan in plans)
    row = small.rows["figure B.1/priority_slower"]
    sent = [layer["sent_bytes"] for layer in row["layers"]["powersgd"]]
    assert sum(sent) == pytest.approx(sum(row["bytes_per_bucket"]["uniform"]))


def test_links_are_the_chapters_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert experiments_main(["lgreco", "--smoke", "--out", str(tmp_path / "out"), "--rate", "50mbit"]) == 64
    assert "the links of this chapter are 100mbit and 1gbit" in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "out").exists()


# --- what is compared


def test_the_embedding_is_by_far_the_largest_layer() -> None:
    model = LGrecoScale().gpt.build(0)
    sizes = sorted((parameter.numel() for parameter in model.parameters()), reverse=True)
    assert model.get_parameter("embedding.weight").numel() == sizes[0]
    assert sizes[0] > 5 * sizes[1]
    assert sizes[0] > sum(sizes) / 2


def test_every_method_and_every_variant_can_be_made() -> None:
    for scale in (LGrecoScale(), SMOKE):
        for timed in (speed.methods(scale), buckets.methods(scale), [buckets.time_aware(scale)]):
            assert len({method.name for method in timed}) == len(timed)
            for method in timed:
                policy = method.policy
                assert policy is None or method.warm_up_steps > policy.warmup
                thinwire.parse(method.spec)
        tables = (policies.bit_methods, policies.rank_methods, policies.density_methods, policies.hybrid_methods)
        for rows in (table(scale) for table in tables):
            assert len({row.name for row in rows}) == len(rows)
            for row in rows:
                assert row.variant == str(Variant.parse(row.variant or ""))
        # Decisions come at least twice in a training.
        for name in NAMES:
            assert 2 * scale.every(name) < scale.task(name).steps


def test_l_greco_with_accordion_has_its_choice_for_reference() -> None:
    both = next(row for row in policies.rank_methods(LGrecoScale()) if row.name == "both")
    policy = parse_policy(Variant.parse(both.variant or "").policy or "")
    assert isinstance(policy, LGreco)
    assert policy.reference is not None
    assert "powersgd(rank=8)" in str(policy.reference)
    assert "powersgd(rank=32)" in str(policy.reference)
    assert policy.bounds == (4, 64)
    mixed = parse_policy(methods.hybrid(20, "gpt"))
    assert isinstance(mixed, LGreco)
    assert mixed.families == tuple(family.spec("gpt") for family in FAMILIES)


# --- rows


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


def test_quality_is_accuracy_where_it_is_counted_else_the_loss() -> None:
    pytest.importorskip("scipy")
    losses = [_run("a", loss) for loss in (2.0, 2.1, 2.05)]
    worse = [_run("b", loss) for loss in (2.2, 2.3, 2.25)]
    assert kept(lost(losses, losses, 0.01)).holds is True
    assert kept(lost(worse, losses, 0.01)).holds is False
    assert kept(lost(worse[:1], losses[:1], 0.01)).holds is None
    assert kept(lost([replace(worse[0], val_loss=math.nan), *worse[1:]], losses, 0.01)).holds is False
    right = [replace(run, accuracy=accuracy) for run, accuracy in zip(losses, (0.95, 0.96, 0.955), strict=True)]
    # As a share of the baseline's: 0.95 points of 95.5 %.
    barely = [replace(run, accuracy=accuracy) for run, accuracy in zip(worse, (0.941, 0.951, 0.946), strict=True)]
    assert kept(lost(barely, right, 0.01)).holds is True
    assert kept(lost([replace(run, accuracy=0.94) for run in worse], right, 0.01)).holds is None


def test_the_gain_and_the_overhead_of_a_family() -> None:
    plans = [_plan(10, 50.0), _plan(20, 50.0)]
    spec = TOPK.adapted("gpt", 20)
    adapted = Side(spec, 1.0, (_run(spec, payload=(0, 1000, 1500, 2000, 2500), plans=plans),) * 2)
    uniform = Side(TOPK.spec("gpt"), 1.0, (_run("uniform"),) * 2)
    dense = Side("fp32", 1.0, (_run("fp32", payload=(0, 4000, 8000, 12000, 16000)),) * 2)
    row = quality.gain("gpt", TOPK, adapted, uniform, dense)
    assert row.value == 2.0
    assert row.data["ratio"] == {"uniform": 4.0, "lgreco": 8.0}
    # Of 500 steps of 0.1 s: 10 ms of errors, 2 ms of solving, and 50 windows' steps of (0.5 − 0.002) / 20 s.
    assert quality.overhead("gpt", TOPK, adapted).data["share"] == {
        "errors": pytest.approx(0.01 / 50),
        "solving": pytest.approx(0.002 / 50),
        "summing": pytest.approx(0.498 / 20 * 50 / 50),
    }
    assert math.isnan(quality.overhead("gpt", TOPK, uniform).value)


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
    per_byte = seconds_per_byte(syncs)
    assert per_byte == pytest.approx(costs, rel=1e-3)
    assert buckets.fit_quality(buckets.medians(syncs, len(costs)), costs) == pytest.approx(1)
    # Other costs of a byte predict other times.
    assert buckets.fit_quality(buckets.medians(syncs, len(costs)), costs[::-1]) < 0.9


def test_a_fit_counts_if_it_predicts_other_runs() -> None:
    pytest.importorskip("scipy")

    def found(fits: list[float], spreads: list[float], weighed: list[float]) -> list[bool | None]:
        rows = [
            Row("section 4.6.5", "fit", 0.0, "", {"by_run": fits}),
            Row("figure B.6b", "coefficients_alike", 0.0, "", {"ns_per_byte": [[1.0, 2.0]], "by_run": spreads}),
            Row("section 4.6.5", "time_plan_alike", 1.0, "x", {"by_run": weighed}),
        ]
        return [row.holds for row in judge(PAPER.claims, rows, emulated=True)]

    assert found([0.98, 0.97, 0.99], [0.05, 0.06, 0.04], [1.001, 1.0, 1.002]) == [True, True, True]
    assert found([0.98, 0.5, 0.99], [0.5, 0.55, 0.52], [1.2, 1.21, 1.19]) == [None, False, False]
    assert found([0.98], [0.05], [1.001]) == [None, None, None]


# --- equal bytes


def _equal(by_seed: list[float], half: float = 0.02, alone: float = 0.1, fewer: float = 1.0) -> tuple[bool | None, str]:
    name = equal_bytes.PAIRS[0].name
    spread = [-0.001, 0.0, 0.001]
    data = {
        "by_seed": by_seed,
        "half_loses": [half + x for x in spread],
        "alone_loses": [alone + x for x in spread],
        "fewer_bytes": [fewer] * 3,
    }
    kinds = [
        Row(equal_bytes.FIGURE, f"lost/{name}/{kind}", 0.0, "", {"lost": [0.0] * 3}) for kind in ("uniform", "lgreco")
    ]
    rows = [*kinds, Row(equal_bytes.FIGURE, f"lower_loss/{name}", 0.0, "", data)]
    (found,) = (found for found in judge(equal_bytes.claims(), rows, emulated=False) if found.claim)
    return found.holds, found.why


def test_at_equal_bytes_a_verdict_takes_equal_bytes_and_a_training_that_tells_half_of_them() -> None:
    pytest.importorskip("scipy")
    better, worse, unclear = [0.01, 0.011, 0.012], [-0.01, -0.011, -0.012], [-0.02, 0.0, 0.03]
    assert _equal(better)[0] is True
    assert _equal(worse)[0] is False
    assert _equal(unclear)[0] is None
    assert _equal(better, fewer=1.1)[0] is True
    assert _equal(better, fewer=0.9) == (None, "L-GreCo sent more than uniform compression")
    assert _equal(better, half=0.0)[0] is None
    assert _equal(better, alone=0.0) == (None, "uniform compression is not shown to be better than sending nothing")


# --- table 3.3


def _profiles(**shares: tuple[float, float]) -> dict[str, bool | None]:
    """Verdicts of two runs over two links, in which a step takes a second if nothing is sent, and by PowerSGD two."""
    rows = [
        Row(
            "figure B.3",
            f"profile/{rate}",
            0.0,
            "",
            {
                "stages_s": {
                    family: {"encode_s": list(by_run), "wire_s": [9.0, 9.0]} for family, by_run in shares.items()
                },
                "step_s": {"nothing": [1.0, 1.0], "fp32": [4.0, 4.0], "powersgd": [2.0, 2.0]},
            },
        )
        for rate in ("100mbit", "1gbit")
    ]
    return {row.name: row.holds for row in judge(PAPER.claims, rows, emulated=True) if row.claim}


def test_an_overhead_is_that_of_compressing_and_not_of_the_wire() -> None:
    pytest.importorskip("scipy")
    found = _profiles(bits=(0.27, 0.28), topk=(0.05, 0.051), powersgd=(0.19, 0.21))
    assert found["overhead/bits"] is False
    assert found["overhead/topk"] is True
    assert found["overhead/powersgd"] is None
    assert found["profile/100mbit"] is found["profile/1gbit"] is None
    assert _profiles(bits=(0.1, 0.1), topk=(0.1, 0.1), powersgd=(0.15, 0.151))["profile/1gbit"] is True
