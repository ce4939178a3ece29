"""``thinwire compare``: its statistics, its verdicts, and paired runs through the whole path."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st
from scipy import stats

from commands import shown_by
from thinwire import parse
from thinwire.compressors import registered
from thinwire_tools import lab
from thinwire_tools.compare import command, compare, paired, statistics, tasks, variants
from thinwire_tools.compare.comparison import Comparison, Run, Side
from thinwire_tools.compare.statistics import Verdict, estimate, judge, relative_differences, seeds_needed
from thinwire_tools.compare.tasks import probe_steps
from thinwire_tools.compare.train import learning_rate
from thinwire_tools.results import Results

MINMAX = "minmax(bits=4, bucket=128)"
SMOKE = tasks.SIZES["smoke"]
UNAVAILABLE = lab.unavailable()


def test_bounds_are_those_of_the_paired_t_test() -> None:
    baseline, losses = [2.0, 2.1, 1.9, 2.05], [2.01, 2.09, 1.93, 2.06]
    differences = relative_differences(losses, baseline)
    found = estimate(differences)
    test = stats.ttest_1samp(differences, 0.0)
    interval = test.confidence_interval(0.9)
    assert found.mean == pytest.approx(np.mean(differences))
    assert (found.lower, found.upper) == pytest.approx((interval.low, interval.high))


@given(st.floats(-0.02, 0.05), st.floats(1e-4, 0.02), st.floats(0.005, 0.03))
def test_the_number_of_seeds_is_the_least_that_is_enough(mean: float, deviation: float, margin: float) -> None:
    found = statistics.Estimate(mean, deviation, -1.0, 1.0, 3)
    count = seeds_needed(found, margin)

    def half(pairs: int) -> float:
        return (stats.t.ppf(0.95, pairs - 1) + stats.t.ppf(0.8, pairs - 1)) * deviation / math.sqrt(pairs)

    if count is None:
        assert half(1000) > abs(margin - mean) or margin == mean
    else:
        assert half(count) <= abs(margin - mean)
        assert count == 2 or half(count - 1) > abs(margin - mean)


def test_one_seed_decides_nothing_none_is_an_error_and_a_run_that_diverged_is_beyond() -> None:
    found = estimate([-0.5])
    assert judge(found, 0.01) is Verdict.UNDECIDED
    assert seeds_needed(found, 0.01) is None
    with pytest.raises(ValueError, match="at least one seed"):
        estimate([])
    assert judge(estimate(relative_differences([2.0, math.nan], [2.0, 2.0])), 0.01) is Verdict.BEYOND
    with pytest.raises(ValueError, match=r"diverged.*tune"):
        relative_differences([2.0], [math.nan])


def side(name: str, probes: Sequence[Sequence[float]], losses: Sequence[float] | None = None) -> Side:
    """One run for each row of ``probes``, ten steps of 0.1 s before each probe but the first."""
    runs = []
    for at, row in enumerate(probes):
        steps = 10 * (len(row) - 1)
        runs.append(
            Run(
                name,
                step_s=[0.1] * steps,
                losses=list(row),
                probe_steps=list(range(10, steps + 1, 10)),
                payload_bytes=[1000.0 * step for step in range(0, steps + 1, 10)],
                val_loss=losses[at] if losses else row[-1],
            )
        )
    return Side(name, 1e-3, tuple(runs))


def comparison(variant: Side, control: Side | None, baseline: Side, *, shaped: bool = True) -> Comparison:
    return Comparison(tuple(range(len(baseline.runs))), 0.01, shaped, baseline, (variant,), control, about={})


FP32 = side("fp32", [[5, 3, 2, 2, 2], [5, 3, 2, 2, 2]])


def test_a_control_within_the_margin_makes_everything_insensitive() -> None:
    same = side("same", [[5, 3, 2, 2, 2]] * 2, [2.0, 2.001])
    broken = side("broken", [[5, 4, 3, 3, 3]] * 2, [3.0, 3.001])
    good, blind = comparison(same, broken, FP32), comparison(same, same, FP32)
    assert good.sensitive
    assert not blind.sensitive
    unsure = side("unsure", [[5, 4, 3, 3, 3]] * 2, [2.0, 2.1])
    assert comparison(FP32, unsure, FP32).control_verdict is Verdict.UNDECIDED


def test_time_to_the_same_loss() -> None:
    # The baseline ends at 2 (mean of the last three probes), so the same loss is 2.02; smoothed, `late` has
    # 5, 4.5, 4, 3, 2: it crosses 2.02 at 0.98 of the last stretch.
    late = side("late", [[5, 4, 3, 2, 1], [5, 4, 4, 4, 4]])
    found = comparison(late, None, FP32)
    assert found.to_same_loss(late) == [pytest.approx(3.98), None]
    steps = replace(found, shaped=False)
    assert steps.to_same_loss(late) == [pytest.approx(39.8), None]
    assert found.to_same_loss(FP32)[0] == pytest.approx(4.0 - 0.02 / (7 / 3 - 2), rel=1e-6)


def test_a_variant_that_diverged_is_reported_in_json_without_nan() -> None:
    lost = side("lost", [[5, math.nan, math.nan, math.nan, math.nan]] * 2)
    found = comparison(lost, replace(lost, name="control"), FP32)
    results = Results("thinwire compare")
    found.record(results)
    json.dumps(results.results, allow_nan=False)
    assert results.value("within/lost") == 0.0


def test_ranks_share_the_held_out_set_and_draw_batches_of_their_own() -> None:
    model = SMOKE.build(3)
    whole, halves = SMOKE.evaluate(model, 0, 1, probe=True), [SMOKE.evaluate(model, r, 2, probe=True) for r in (0, 1)]
    assert sum(total for total, _ in halves) == pytest.approx(whole[0], rel=1e-5)
    assert sum(count for _, count in halves) == whole[1] == SMOKE.probe_windows * SMOKE.model.context
    draws = [next(SMOKE.batches(seed, rank, 2))[0].tolist() for seed, rank in ((0, 0), (0, 0), (0, 1), (1, 0))]
    assert draws[0] == draws[1]
    assert draws[0] != draws[2]
    assert draws[0] != draws[3]
    assert len(list(SMOKE.batches(0, 0, 2))) == SMOKE.steps


@given(st.integers(2, 2000))
def test_the_schedule_rises_to_its_highest_and_decays_to_the_end(steps: int) -> None:
    rates = [learning_rate(0.3, step, steps) for step in range(steps)]
    top = math.ceil(steps * 0.1) - 1
    assert rates[top] == pytest.approx(0.3)
    assert rates == [*sorted(rates[: top + 1]), *sorted(rates[top + 1 :], reverse=True)]
    assert 0 < rates[-1] < 0.3 * (2.5 / steps if steps > 3 else 1)
    assert probe_steps(replace(SMOKE, steps=steps))[-1] == steps


def test_exit_codes_and_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    assert compare.parse_share("1%") == compare.parse_share("0.01") == 0.01
    assert compare.parse_share("0.5 %") == 0.005
    same, broken = side("same", [[5, 3, 2, 2, 2]] * 2), side("broken", [[5, 4, 3, 3, 3]] * 2)
    for control, code in ((broken, 0), (side("s", [[2, 2]] * 2), 1)):
        found = comparison(same, control, FP32)
        monkeypatch.setattr(compare, "compare_training", lambda *_, found=found, **__: found)
        assert command.compare() == code


def rows(record: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in record["results"]}


def test_runs_are_paired_and_a_variant_that_changes_nothing_ends_at_the_same_loss_to_the_bit(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    shown_by(["compare", "raw", MINMAX, "--smoke", "--seeds", "2", "--json", str(path)])
    record = json.loads(path.read_text())
    found = rows(record)
    assert found["difference/mean/raw()"]["by_seed"] == [0.0, 0.0]
    assert found["within/raw()"]["value"] == 1.0
    fp32 = found["held_out_loss/fp32"]["by_seed"]
    assert found["held_out_loss/raw()"]["by_seed"] == fp32
    assert len(set(fp32)) == 2
    assert found["held_out_loss/fp32"]["value"] < 0.8 * math.log(256)
    assert found[f"difference/mean/control/{paired.CONTROL}"]["verdict"] == "no"
    assert record["about"]["sensitive"] is True
    fp32, ours = found["bytes_per_step/fp32"], found[f"bytes_per_step/{MINMAX}"]
    assert fp32["value"] == found["bytes_per_step/raw()"]["value"] == fp32["formula"]
    # The buckets of DDP's first steps have other headers than those of all later ones.
    assert ours["value"] == pytest.approx(ours["formula"], rel=0.01)
    assert ours["value"] < fp32["value"] / 6


@pytest.mark.network
@pytest.mark.skipif(UNAVAILABLE is not None, reason=str(UNAVAILABLE))
def test_over_a_slow_link_time_counts_and_bytes_are_seen_on_the_interface(tmp_path: Path) -> None:
    task = replace(SMOKE, steps=8, probe_every=4, held_out_windows=16, probe_windows=8)
    found = paired.compare_training(task, [MINMAX], seeds=[0], rate="20mbit", control=None)
    (ours,) = found.variants
    assert found.shaped
    for one in (found.baseline, ours):
        assert one.wire_bytes_per_step is not None
        assert one.bytes_per_step < one.wire_bytes_per_step < 1.5 * one.bytes_per_step + 10_000
    # 466 kB a step in each direction at 20 Mbit/s take 0.19 s.
    assert found.baseline.steps_per_s < 5.4
    assert ours.steps_per_s > found.baseline.steps_per_s
    assert found.about["link"]["rate_bps"] == [20_000_000] * 2


def test_every_compressor_with_its_error_feedback_and_without(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    shown_by(["compare", "every", "--smoke", "--json", str(path)])
    found = rows(json.loads(path.read_text()))
    for name in ("topk(density=0.01)", "topk(density=0.01, feedback=False)", MINMAX, "onebit(bucket=512)"):
        assert found[f"held_out_loss/{name}"]["value"] < 1.1 * math.log(256)
        assert found[f"alpha/{name}"]["value"] > 0
        # What measuring sends does not count.
        size = found[f"bytes_per_step/{name}"]
        assert size["value"] == pytest.approx(size["formula"], rel=0.05)
    assert "alpha/fp32" not in found
    assert found["bytes_per_step/alone"]["value"] == 0
    assert found["held_out_loss/alone"]["by_seed"] != found["held_out_loss/fp32"]["by_seed"]
    assert found["alpha/topk(density=0.01, feedback=False)"]["value"] < 1


def test_measuring_changes_no_bit_of_the_training() -> None:
    task = replace(SMOKE, steps=4, probe_every=2, held_out_windows=16, probe_windows=8)
    topk = "topk(density=0.05)"
    with_it, without = (
        paired.compare_training(task, [topk, "raw"], seeds=[0], control=None, measure=every_so_many)
        for every_so_many in (1, 0)
    )
    for measured, plain in zip(with_it.variants, without.variants, strict=True):
        assert measured.losses == plain.losses
        assert measured.bytes_per_step == pytest.approx(plain.bytes_per_step, rel=1e-3)
        assert plain.alpha is None
    assert with_it.variants[0].alpha is not None
    assert with_it.variants[1].alpha is None


def test_the_list_has_every_compressor() -> None:
    specs = [str(parse(spec)) for spec in variants.EVERY]
    assert len(set(specs)) == len(specs)
    # raw is the baseline itself; delta and direct are for activations.
    names = [name for name in registered() if name not in ("raw", "delta", "direct")]
    assert not [name for name in names if not any(name in spec for spec in specs)]
    for spec, bare in variants.WITHOUT.items():
        assert spec in variants.EVERY
        assert parse(spec).traits.wants_feedback
        assert replace(parse(spec), feedback=False) == parse(bare)  # pyright: ignore[reportCallIssue]
