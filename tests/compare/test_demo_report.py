"""What a comparison from one seed shows, and what the demo concludes from it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from rich.console import Console

from thinwire_tools.compare.comparison import Run
from thinwire_tools.compare.demo import Demonstration, Outcome, conclude
from thinwire_tools.compare.statistics import median_interval

TURNS = 8


def _run(name: str, step_s: float, last_loss: float, *, wire_bytes: int = 0, payload: float = 0.0) -> Run:
    # Whoever slows the machine slows every variant: turn by turn, all steps take longer alike.
    slowdowns = [3.0, 1.0, 1.0, 2.0, 1.0, 1.5, 1.0, 1.0]
    return Run(
        name,
        step_s=[step_s * slowdown for slowdown in slowdowns for _ in range(5)],
        losses=[3.0, 2.9, 2.8, 2.7, 2.6, 2.5, last_loss, last_loss, last_loss],
        probe_steps=list(range(5, 41, 5)),
        payload_bytes=[5 * turn * payload for turn in range(TURNS + 1)],
        formula_bytes=payload,
        wire_bytes=wire_bytes,
        val_loss=last_loss,
        replicas_identical=name != "alone",
    )


def _runs() -> dict[str, Run]:
    """A demo in which everything is as it should be."""
    return {
        "fp32": _run("fp32", 0.45, 2.0, wire_bytes=7_100, payload=350.0),
        "bf16": _run("bf16", 0.23, 2.001, wire_bytes=3_550, payload=175.0),
        "powersgd": _run("powersgd", 0.04, 2.03, wire_bytes=300, payload=14.0),
        "low-rank": _run("low-rank", 0.038, 2.029, wire_bytes=300, payload=14.0),
        "thinwire": _run("thinwire", 0.07, 2.002, wire_bytes=1_000, payload=50.0),
        "local": _run("local", 0.06, 2.004, payload=1.0),
        "muloco": _run("muloco", 0.065, 1.95, payload=1.0),
        "muon": _run("muon", 0.03, 1.92, payload=350.0),
        "alone": _run("alone", 0.02, 2.04),
        "control": _run("control", 0.03, 2.09),
    }


def _shown(runs: dict[str, Run], *, judged: bool = True) -> Demonstration:
    about = {"rate": "100mbit", "ranks": 2, "parameters": 1_200_000, "task": {"seed": 0}}
    return Demonstration.of(runs, about, judged=judged, shaped=True)


def _with(name: str, **changes: object) -> dict[str, Run]:
    runs = _runs()
    return runs | {name: dataclasses.replace(runs[name], **changes)}  # type: ignore[arg-type]


def test_a_speedup_is_the_median_of_paired_turns_with_an_interval() -> None:
    ratio = _shown(_runs()).speedup("thinwire")
    assert ratio is not None
    # Slowdowns that both share leave no trace.
    assert (ratio.lower, ratio.median, ratio.upper) == pytest.approx((0.45 / 0.07,) * 3)
    noisy = _with("thinwire", step_s=[0.07 * (1 + turn) for turn in range(TURNS) for _ in range(5)])
    wide = _shown(noisy).speedup("thinwire")
    assert wide is not None
    assert wide.lower < wide.median < wide.upper


def test_the_interval_of_a_median_is_that_of_the_sign_test() -> None:
    """The depths are those of the usual tables (Conover, Practical Nonparametric Statistics, table of the median)."""
    for count, kth in {1: 1, 5: 1, 6: 1, 8: 1, 9: 2, 12: 3, 20: 6, 100: 40}.items():
        values = [float(value) for value in range(count, 0, -1)]
        assert median_interval(values) == (kth, count + 1 - kth)


def test_all_checks_are_shown_where_everything_is_as_it_should_be() -> None:
    checks = list(_shown(_runs()).checks())
    assert len(checks) == 13
    assert {check.outcome for check in checks} == {Outcome.SHOWN}


@pytest.mark.parametrize(
    ("broken", "check"),
    [
        (_with("thinwire", val_loss=2.021), "at most 1 % above fp32's"),
        (_with("alone", val_loss=2.0), "and so does training alone"),
        (_with("control", val_loss=2.05), "at least 3 % above"),
        (_with("thinwire", payload_bytes=[250.0 * turn + (turn == 8) for turn in range(9)]), "its format's formula"),
        (_with("thinwire", replicas_identical=False), "bit for bit"),
        (_with("powersgd", replicas_identical=False), "bit for bit"),
        (_with("local", val_loss=2.021), "local updates"),
        (_with("muloco", val_loss=2.0), "Muon's own fp32"),
        (_with("low-rank", val_loss=2.051), "at most 1 % above PyTorch's"),
    ],
)
def test_a_wrong_result_fails_the_demo(broken: dict[str, Run], check: str, tmp_path: Path) -> None:
    wrong = [found.text for found in _shown(broken).checks() if found.outcome is Outcome.WRONG]
    assert any(check in text for text in wrong), wrong
    code, text = _conclude(_shown(broken), tmp_path)
    assert code == 1
    assert "not the result that it should be" in text


@pytest.mark.parametrize(
    ("slow", "check"),
    [
        (_with("thinwire", step_s=[0.25] * 40), "3x the steps/s of DDP with fp32"),
        (_with("bf16", step_s=[0.09] * 40), "1.5x those with bf16"),
        (_with("low-rank", step_s=[0.3] * 40), "PowerSGD makes 0.8x"),
        (_with("thinwire", wire_bytes=1_070), "bytes on the interface"),
        (_with("thinwire", wire_bytes=930), "bytes on the interface"),
    ],
)
def test_a_speed_that_is_not_reached_is_no_error(slow: dict[str, Run], check: str, tmp_path: Path) -> None:
    outcomes = {found.text: found.outcome for found in _shown(slow).checks()}
    assert Outcome.WRONG not in outcomes.values()
    assert any(check in text and outcome is Outcome.NOT_SHOWN for text, outcome in outcomes.items())
    code, text = _conclude(_shown(slow), tmp_path)
    assert code == 0
    assert "not shown" in text


def test_limits_are_not_applied_to_another_task_but_bytes_and_replicas_are() -> None:
    bad = _with("thinwire", val_loss=2.5, replicas_identical=False)
    assert [check.outcome for check in _shown(bad, judged=False).checks()] == [Outcome.SHOWN, Outcome.WRONG]


def _conclude(shown: Demonstration, tmp_path: Path) -> tuple[int, str]:
    console = Console(width=200, record=True, highlight=False, file=(tmp_path / "screen").open("w"))
    code = conclude(console, shown, tmp_path, tmp_path / "demo.json")
    console.file.close()
    return code, console.export_text()
