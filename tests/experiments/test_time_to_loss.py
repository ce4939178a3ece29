"""Time to a loss: steps of trainings by seconds a step of turns, and how both are judged."""

from __future__ import annotations

import json
import math

import pytest

from experiments.framework.findings import plain
from experiments.framework.time_to_loss import Course, courses, reached, sooner

pytest.importorskip("scipy")

_BASE = Course([2, 4, 6], [[4.0, 3.0, 2.0], [4.0, 3.0, 2.2]], [(6, "slow")])
_OURS = Course([2, 4, 6], [[4.0, 3.0, 2.5], [4.0, 3.0, 2.2]], [(2, "slow"), (4, "fast")])
_ROUNDS = {"slow": (10.0,) * 6, "fast": (1.0,) * 6}


def test_first_steps_may_take_as_long_as_those_of_another_method() -> None:
    step_s = {"slow": 10.0, "fast": 1.0}
    assert _OURS.seconds(1.5, step_s) == 15.0
    assert _OURS.seconds(5.0, step_s) == 23.0
    assert _BASE.seconds(5.0, step_s) == 50.0


def test_a_loss_is_reached_between_two_that_are_known() -> None:
    assert reached([0, 10, 20], [5.0, 3.0, 2.0], 4.0) == pytest.approx(5.0)
    assert reached([0, 10, 20], [5.0, 6.0, 2.0], 5.0) == 0
    assert reached([0, 10, 20], [5.0, 3.0, 2.0], 1.0) is None


def test_methods_are_compared_at_the_worse_end_seed_by_seed() -> None:
    found = sooner(_OURS, _BASE, _ROUNDS)
    assert found.ratios == ((pytest.approx(50 / 24),) * 6, (60 / 24,) * 6)
    assert found.loss == pytest.approx((2.5 + 2.2) / 2)
    assert found.steps == (6.0, 5.5)
    assert found.times == pytest.approx(math.sqrt(50 / 24 * 60 / 24))
    assert found.text.endswith("after 6.0 steps against 5.5, of 1000 ms against 10000")
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
    one = sooner(Course([2], [[1.0]], [(2, "fast")]), Course([2], [[1.0]], [(2, "slow")]), _ROUNDS)
    assert one.above(1.0).why.startswith("one training")


def test_a_row_keeps_courses() -> None:
    row = json.loads(json.dumps(plain(courses(ours=_OURS))))
    assert sooner(Course.of({"courses": row}, "ours"), _BASE, _ROUNDS) == sooner(_OURS, _BASE, _ROUNDS)
    kept = json.loads(json.dumps(plain(courses(ours=Course([1], [[math.inf]], [(1, "slow")])))))
    assert Course.of({"courses": kept}, "ours").ends == [math.inf]
