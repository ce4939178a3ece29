"""What the demo makes of its figures."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from rich.console import Console

from thinwire.repro.conclude import conclude
from thinwire.repro.report import SAME_LOSS, Report, Run
from thinwire.repro.train import Task

TASK = Task(steps=20, probe_every=10)


def _run(name: str, step_s: float, last_loss: float, *, wire_bytes: int = 0, payload: float = 0.0) -> Run:
    return Run(
        name,
        step_s=[9.0] * 5 + [step_s] * 15,
        losses=[3.0, 2.5, last_loss],
        probe_steps=TASK.probe_steps,
        payload_bytes=[0.0, 10 * payload, 20 * payload],
        formula_bytes=payload,
        wire_bytes=wire_bytes,
        val_loss=last_loss,
        replicas_identical=True,
    )


def _runs() -> dict[str, Run]:
    """A demo in which everything is as it should be."""
    return {
        "fp32": _run("fp32", 1.8, 2.0, wire_bytes=7_100, payload=350.0),
        "bf16": _run("bf16", 0.95, 2.001, wire_bytes=3_550, payload=175.0),
        "powersgd": _run("powersgd", 0.16, 2.03, wire_bytes=300, payload=14.0),
        "low-rank": _run("low-rank", 0.15, 2.029, wire_bytes=300, payload=14.0),
        "thinwire": _run("thinwire", 0.28, 2.002, wire_bytes=1_000, payload=50.0),
        "noop": _run("noop", 0.08, 2.1),
        "control": _run("control", 0.1, 2.09),
    }


def _report(runs: dict[str, Run], *, judged: bool = True, on_interface: bool = True) -> Report:
    return Report(list(runs.values()), TASK, judged=judged, on_interface=on_interface)


def _with(name: str, **changes: object) -> dict[str, Run]:
    runs = _runs()
    return runs | {name: dataclasses.replace(runs[name], **changes)}  # type: ignore[arg-type]


def test_steps_per_second_leave_the_first_steps_out_and_seconds_do_not() -> None:
    run = _runs()["fp32"]
    assert run.steps_per_s == pytest.approx(1 / 1.8)
    assert run.probe_s == pytest.approx([0, 45 + 5 * 1.8, 45 + 15 * 1.8])


def test_time_to_a_loss_is_interpolated_between_probes() -> None:
    run = Run("fp32", step_s=[1.0] * 20, losses=[3.0, 2.0, 1.5], probe_steps=[10, 20])
    assert run.seconds_to(2.5) == pytest.approx(5.0)
    assert run.seconds_to(2.0) == pytest.approx(10.0)
    assert run.seconds_to(1.6) == pytest.approx(18.0)
    assert run.seconds_to(1.4) is None
    # A curve that rises first reaches a loss only where it comes down to it.
    humped = Run("fp32", step_s=[1.0] * 20, losses=[2.0, 3.0, 1.0], probe_steps=[10, 20])
    assert humped.seconds_to(2.0) == 0.0
    assert humped.seconds_to(1.5) == pytest.approx(17.5)


def test_all_checks_pass_where_everything_is_as_it_should_be() -> None:
    assert [check.passed for check in _report(_runs()).checks()] == [True] * 9


@pytest.mark.parametrize(
    ("broken", "check"),
    [
        (_with("thinwire", step_s=[0.37] * 20) | {"bf16": _run("bf16", 1.2, 2.001)}, "5x the steps/s of DDP fp32"),
        (_with("bf16", step_s=[0.8] * 20), "3x those of bf16"),
        (_with("thinwire", val_loss=2.021), "at most 1 % above"),
        (_with("control", val_loss=2.05), "at least 3 % above"),
        (_with("thinwire", wire_bytes=1_050), "within 2 % of the formula"),
        (_with("thinwire", wire_bytes=950), "within 2 % of the formula"),
        (_with("thinwire", payload_bytes=[0.0, 500.0, 1001.0]), "size that the formula says"),
        (_with("thinwire", replicas_identical=False), "bit-identical"),
        (_with("low-rank", step_s=[0.18] * 20), "0.9x the steps/s of PyTorch's"),
        (_with("low-rank", val_loss=2.041), "at most 0.5 % above its"),
    ],
)
def test_each_check_fails_alone(broken: dict[str, Run], check: str) -> None:
    failed = [found for found in _report(broken).checks() if found.passed is False]
    assert len(failed) == 1
    assert check in failed[0].text


def test_better_than_fp32_is_no_failure() -> None:
    assert all(check.passed for check in _report(_with("thinwire", val_loss=1.9)).checks())


def test_order_is_by_time_to_the_same_loss_then_what_does_not_reach_it() -> None:
    report = _report(_runs())
    assert report.target == pytest.approx(2.0 * SAME_LOSS)
    assert [run.name for run in report.ordered()] == [
        "thinwire",
        "bf16",
        "fp32",
        "low-rank",
        "powersgd",
        "control",
        "noop",
    ]
    faster = _report(_with("powersgd", losses=[3.0, 2.5, 2.01]))
    assert faster.ordered()[0].name == "powersgd"


def _conclude(report: Report, tmp_path: Path, *, strict: bool = True) -> tuple[int, str]:
    console = Console(width=200, record=True, highlight=False, file=(tmp_path / "screen").open("w"))
    about = {"rate": "100mbit", "ranks": 2, "parameters": 4_800_000}
    code = conclude(console, report, about, out=tmp_path, json=None, strict=strict)
    console.file.close()
    return code, console.export_text()


def test_it_says_plainly_where_powersgd_is_faster(tmp_path: Path) -> None:
    code, text = _conclude(_report(_runs()), tmp_path)
    assert code == 0
    assert "PowerSGD is faster here, 1.75x the steps/s of thinwire; PowerSGD does not reach the same loss" in text
    assert "+1.50% against fp32's, thinwire's +0.10%" in text
    assert (
        "over 100 Mbit/s, thinwire trains 6.4x as fast as DDP with fp32 gradients and ends at the same loss (+0.10%)"
        in text
    )


def test_it_says_where_powersgd_is_slower(tmp_path: Path) -> None:
    _, text = _conclude(_report(_with("powersgd", step_s=[0.56] * 20)), tmp_path)
    assert "thinwire makes 2.00x the steps/s of PowerSGD here" in text


def test_a_bad_result_is_said_and_fails_only_if_strict(tmp_path: Path) -> None:
    report = _report(_with("thinwire", val_loss=2.2))
    code, text = _conclude(report, tmp_path)
    assert code == 1
    assert "FAIL  its held-out loss is at most 1 % above fp32's: +10.00%" in text
    assert "not the result it should be: failed checks: 1" in text
    assert "What this shows" not in text
    assert _conclude(report, tmp_path, strict=False)[0] == 0


def test_without_fp32_nothing_is_claimed(tmp_path: Path) -> None:
    runs = _runs() | {"fp32": Run("fp32", failure="rank 1: ended by signal 6")}
    code, text = _conclude(_report(runs), tmp_path)
    assert code == 1
    assert "What this shows" not in text
    assert "not measured" in text
    assert "pass  thinwire makes" not in text
