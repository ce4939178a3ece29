"""How claims are judged: by intervals, against margins, and what is inconclusive."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from pathlib import Path
from statistics import median, variance

import pytest

from experiments.framework.verdicts import (
    RUN_SCATTER,
    Judgement,
    all_hold,
    exceeds,
    faster,
    if_seen,
    larger,
    matches,
    outcome,
)
from thinwire_tools.compare.statistics import estimate


@pytest.mark.parametrize(
    ("lost", "margin", "expected"),
    [
        ([0.001, 0.0, -0.001], 0.005, True),
        ([0.05, 0.051, 0.049], 0.005, False),
        ([0.05, -0.05, 0.0], 0.005, None),
        # Wider than the margin, whatever the upper bound.
        ([-0.05, -0.03, -0.04], 0.005, None),
        ([0.004, 0.005, 0.006], 0.005, None),
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
    assert "15 %" in close.why
    assert faster([3.0, 0.5] * 4).holds is None
    assert faster([3.0]).holds is None
    # No clock took part: what differs between runs has no say.
    assert larger([1.1] * 8).holds is True


def test_recorded_reasons_are_shown_in_plain_words() -> None:
    assert outcome("0.9x", faster([1.1] * 8).why) == "0.9x; the interval (±15 %) contains the bound"
    assert outcome("+0 %", matches(estimate([0.05, -0.05, 0.0]), 0.005).why).startswith(
        "+0 %; half of the interval (8.4 %) is wider"
    )
    assert outcome("+0 %", exceeds(estimate([0.01, -0.01, 0.0])).why) == "+0 %; the interval (±1.7 %) contains zero"
    assert outcome("+0 %", if_seen(False, Judgement(True)).why) == "+0 %; the control was not clearly worse"
    assert outcome("+0 %", matches(estimate([0.0]), 0.005).why) == "+0 %; one training, so there is no interval"
    assert outcome("+0 %", "") == outcome("+0 %", None) == "+0 %"


def test_a_claim_of_parts_fails_with_any_of_them() -> None:
    yes, no, unknown = Judgement(True, detectable=0.1), Judgement(False), Judgement(None, "why")
    assert all_hold([yes, Judgement(True, detectable=0.2)]) == Judgement(True, detectable=0.2)
    assert all_hold([yes, unknown]) is unknown
    assert all_hold([unknown, no]) is no


def test_a_task_whose_control_does_not_fail_says_nothing() -> None:
    assert if_seen(True, Judgement(True)).holds is True
    assert if_seen(False, Judgement(True)).holds is None
    assert "control" in if_seen(False, Judgement(False)).why


_TWICE = {
    "aqsgd": (
        "table 2/throughput",
        ("aqsgd-earlier", "aqsgd-earlier-timed", "aqsgd-earlier-links", "repro-aqsgd-wire"),
        (0, -1),
    ),
    "fullstack": ("figure 5/throughput", ("repro-fullstack", "fullstack-earlier-timed"), (0, -1)),
    "qsdp": ("figure 5.3/step_s", ("repro-qsdp", "repro-qsdp-links"), (0, 1, 2, 3)),
}
"""By paper: the row that several files hold, the files, and which of its links."""


def test_what_runs_differ_by_is_that_of_the_runs_recorded_more_than_once() -> None:
    """Medians over rounds of fp32's time over a method's, run by run."""
    folder = Path(__file__).parents[2] / "benchmarks"
    found = defaultdict(list)
    for paper, (name, files, links) in _TWICE.items():
        for file in files:
            record = json.loads((folder / f"{file}.json").read_text())
            by_round = next(row["by_round"] for row in record["results"] if row["name"] == name)
            for at in links:
                rounds = list(by_round.values())[at]
                for method in rounds.keys() - {"fp32"}:
                    pairs = zip(rounds["fp32"], rounds[method], strict=True)
                    found[paper, at, method].append(median(math.log(base / own) for base, own in pairs))
    rows = json.loads((folder / "cgx-earlier.json").read_text())["results"]
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
