"""How claims are judged: by intervals, against margins, by times to a loss, and what is inconclusive."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from pathlib import Path
from statistics import median, variance

import pytest

from experiments.framework.power import TASKS, Task, measured, powers
from experiments.framework.verdicts import (
    RUN_SCATTER,
    Course,
    Judgment,
    all_hold,
    exceeds,
    faster,
    faster_in_runs,
    if_seen,
    larger,
    matches,
    sooner,
)
from thinwire_tools.compare.statistics import estimate, reached

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
TASK = Task("task", "loss", "file", "loss/", "control*")


@pytest.mark.parametrize(
    ("lost", "margin", "expected"),
    [
        ([0.001, 0.0, -0.001], 0.005, True),
        ([0.05, 0.051, 0.049], 0.005, False),
        ([0.05, -0.05, 0.0], 0.005, None),
        # Better by more than the margin: the baseline is not what it should be.
        ([-0.05, -0.051, -0.049], 0.005, None),
        ([0.0], 0.005, None),
        ([math.inf, 0.0], 0.005, False),
    ],
)
def test_two_methods_match_within_a_margin(lost: list[float], margin: float, expected: bool | None) -> None:
    found = matches(estimate(lost), margin)
    assert found.holds is expected
    assert found.why or expected is not None


@pytest.mark.parametrize(
    ("gained", "effect", "expected"),
    [
        ([0.010, 0.011, 0.012], None, True),
        ([0.010, 0.011, 0.012], 0.012, True),
        # Surely better, and surely by less than half of what the paper has.
        ([0.010, 0.011, 0.012], 0.1, False),
        ([-0.010, -0.011, -0.012], None, False),
        ([0.01, -0.01, 0.0], None, None),
        ([0.01, -0.01, 0.0], 0.1, False),
        ([0.01], 0.01, None),
        ([math.inf, 0.0], None, True),
    ],
)
def test_one_method_is_better_by_an_effect(gained: list[float], effect: float | None, expected: bool | None) -> None:
    assert exceeds(estimate(gained), effect).holds is expected


def test_times_of_one_run_are_judged_with_what_runs_differ_by() -> None:
    assert faster([1.5] * 8).holds is True
    assert faster([0.6] * 8).holds is False
    assert faster([1.5] * 8, 2.0).holds is False
    close = faster([1.1] * 8)
    assert close.holds is None
    assert close.detectable == pytest.approx(math.expm1(1.67 * RUN_SCATTER), abs=0.001)
    assert faster([3.0, 0.5] * 4).holds is None
    assert faster([3.0]).holds is None
    # No clock took part: what differs between runs has no say.
    assert larger([1.1] * 8).holds is True
    # Separate runs show themselves what they differ by.
    assert faster_in_runs([1.02, 1.03, 1.025]).holds is True
    assert faster_in_runs([1.02, 1.03, 1.025], 1.1).holds is False
    assert faster_in_runs([1.02, 0.97, 1.025]).holds is faster_in_runs([3.0]).holds is None


def test_a_claim_of_parts_fails_with_any_of_them() -> None:
    yes, no, unknown = Judgment(True, detectable=0.1), Judgment(False), Judgment(None, "why")
    assert all_hold([yes, Judgment(True, detectable=0.2)]) == Judgment(True, detectable=0.2)
    assert all_hold([yes, unknown]) == unknown
    assert all_hold([unknown, no]) == no


def test_a_task_whose_control_does_not_fail_says_nothing() -> None:
    assert if_seen(True, Judgment(True)).holds is True
    assert if_seen(False, Judgment(True)).holds is None
    assert "control" in if_seen(False, Judgment(False)).why


_AQSGD = tuple(f"aqsgd/again/{i}" for i in (1, 2, 3, 4))
_TWICE = {
    "aqsgd": ("table 2/throughput", _AQSGD, (0, -1)),
    "fullstack": ("figure 5/throughput", ("fullstack/again/1", "fullstack/again/2"), (0, -1)),
    "qsdp": ("figure 5.3/step_s", ("qsdp/again/0", "qsdp/again/1"), (0, 1, 2, 3)),
}


def test_what_runs_differ_by_is_that_of_the_runs_recorded_more_than_once() -> None:
    """Medians over rounds of fp32's time over a method's, run by run."""
    found = defaultdict(list)
    for paper, (name, files, links) in _TWICE.items():
        for file in files:
            record = json.loads((BENCHMARKS / f"{file}.json").read_text())
            by_round = next(row["by_round"] for row in record["results"] if row["name"] == name)
            for at in links:
                rounds = list(by_round.values())[at]
                for method in rounds.keys() - {"fp32"}:
                    pairs = zip(rounds["fp32"], rounds[method], strict=True)
                    found[paper, at, method].append(median(math.log(base / own) for base, own in pairs))
    rows = json.loads((BENCHMARKS / "cgx/again/1.json").read_text())["results"]
    timed = {tuple(row["name"].split("/")): row["step_s"] for row in rows if "/items_per_s/" in row["name"]}
    for (figure, kind, model, method), own in timed.items():
        base = timed.get((figure, kind, model, "fp32"))
        if base and method != "fp32" and figure in ("3.1", "3.6", "3.7", "blob"):
            found[model, method].append(median(math.log(b / o) for b, o in zip(base, own, strict=True)))
    several = [values for values in found.values() if len(values) > 1]
    freedom = sum(len(values) - 1 for values in several)
    pooled = math.sqrt(sum(variance(values) * (len(values) - 1) for values in several) / freedom)
    assert pooled == pytest.approx(RUN_SCATTER, abs=0.001)
    assert freedom == 72


_BASE = Course([2, 4, 6], [[4.0, 3.0, 2.0], [4.0, 3.0, 2.2]], [(6, "slow")])
_OURS = Course([2, 4, 6], [[4.0, 3.0, 2.5], [4.0, 3.0, 2.2]], [(2, "slow"), (4, "fast")])
_ROUNDS = {"slow": (10.0,) * 6, "fast": (1.0,) * 6}


def test_first_steps_may_take_as_long_as_those_of_another_method_and_losses_lie_between_known_ones() -> None:
    step_s = {"slow": 10.0, "fast": 1.0}
    assert _OURS.seconds(1.5, step_s) == 15.0
    assert _OURS.seconds(5.0, step_s) == 23.0
    assert _BASE.seconds(5.0, step_s) == 50.0
    assert reached([0, 10, 20], [5.0, 3.0, 2.0], 4.0) == pytest.approx(5.0)
    assert reached([0, 10, 20], [5.0, 6.0, 2.0], 5.0) == 0
    assert reached([0, 10, 20], [5.0, 3.0, 2.0], 1.0) is None


def test_methods_are_compared_at_the_worse_end_seed_by_seed() -> None:
    found = sooner(_OURS, _BASE, _ROUNDS)
    assert found.ratios == ((pytest.approx(50 / 24),) * 6, (60 / 24,) * 6)
    assert found.loss == pytest.approx((2.5 + 2.2) / 2)
    assert found.times == pytest.approx(math.sqrt(50 / 24 * 60 / 24))
    diverged = Course([2, 4, 6], [[4.0, math.inf, math.inf]] * 2, _OURS.pace)
    with pytest.raises(ValueError, match="diverged"):
        sooner(diverged, _BASE, _ROUNDS)


def test_the_interval_contains_what_seeds_differ_by_and_what_rounds_do() -> None:
    alike = sooner(_OURS, Course(_BASE.steps, _OURS.losses, _BASE.pace), _ROUNDS)
    assert alike.above(2.0).holds is True
    assert alike.above(3.0).holds is False
    assert alike.above(2.5).holds is None
    seeds = sooner(_OURS, Course([1, 2, 6], [[4.0, 2.4, 2.0], [4.0, 3.0, 2.2]], _BASE.pace), _ROUNDS)
    rounds = sooner(_OURS, _BASE, {**_ROUNDS, "slow": (1.0, 10.0) * 3})
    for uncertain in (seeds, rounds):
        assert (uncertain.above(1.0).detectable or 0.0) > 2 * (alike.above(1.0).detectable or 0.0)


def _row(values: list[float], baseline: list[float]) -> dict[str, list[float]]:
    return {"losses": values, "fp32_losses": baseline}


def test_the_control_and_the_least_that_is_told_apart() -> None:
    base = [2.0, 2.0, 2.0]
    rows = {
        "loss/same": _row([2.02, 1.98, 2.0], base),
        "loss/worse": _row([2.04, 2.042, 2.038], base),
        "loss/control": _row([2.2, 2.21, 2.19], base),
        "other": _row([9.0, 9.0, 9.0], base),
    }
    found = measured(TASK, rows)
    assert found.control is not None
    assert found.control.lower > 0
    assert (found.num_methods, found.num_seeds) == (3, 3)
    assert found.least == pytest.approx(0.02)
    assert found.deviation == pytest.approx((0.01 + 0.001) / 2)
    del rows["loss/worse"]
    rows["loss/control"] = rows["loss/same"]
    blind = measured(TASK, rows)
    assert blind.control is None or blind.control.lower <= 0
    assert math.isinf(blind.least)


def test_every_task_and_control_is_in_the_recorded_runs() -> None:
    found = powers(BENCHMARKS)
    assert [one.task for one in found] == list(TASKS)
    assert all((one.control is not None) == bool(one.task.control) for one in found)
