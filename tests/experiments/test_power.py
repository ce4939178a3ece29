"""How small a difference a task shows, from recorded rows."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import pytest

from experiments.framework.power import TASKS, Task, by_name, cells, differences, measured, power, powers
from thinwire_tools.compare.statistics import estimate

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
TASK = Task("task", "loss", "file", "loss/*", "loss/control*")


def row(values: list[float], baseline: list[float]) -> dict[str, list[float]]:
    return {"losses": values, "fp32_losses": baseline}


def test_the_difference_that_is_visible_is_seen_in_four_of_five_experiments() -> None:
    noise, found = random.Random(3), measured(TASK, {"loss/a": row([1.01, 0.99, 1.0], [1.0, 1.0, 1.0])})
    assert found is not None
    assert found.deviation == pytest.approx(0.01)
    for num_seeds in (3, 5):
        true = found.visible(num_seeds)
        seen = [
            estimate([true + noise.gauss(0, found.deviation) for _ in range(num_seeds)]).lower > 0 for _ in range(4000)
        ]
        # The sum of two quantiles is short of the noncentral t for few seeds.
        assert 0.75 < sum(seen) / len(seen) < 0.9
    assert found.visible(5) < found.visible(3)


def test_the_control_and_the_least_that_is_told_apart() -> None:
    base = [2.0, 2.0, 2.0]
    rows = {
        "loss/same": row([2.02, 1.98, 2.0], base),
        "loss/worse": row([2.04, 2.042, 2.038], base),
        "loss/control": row([2.2, 2.21, 2.19], base),
        "other": row([9.0, 9.0, 9.0], base),
    }
    found = measured(TASK, rows)
    assert found is not None
    assert (found.num_methods, found.num_seeds, found.control_fails) == (3, 3, True)
    assert found.least == pytest.approx(0.02)
    assert found.deviation == pytest.approx((0.01 + 0.001) / 2)
    assert cells(found)[-1].startswith("+10.00 %")
    del rows["loss/worse"]
    rows["loss/control"] = rows["loss/same"]
    blind = measured(TASK, rows)
    assert blind is not None
    assert not blind.control_fails
    assert math.isinf(blind.least)
    assert cells(blind)[-2:] == ["none", "+0.00 % (-1.69 to +1.69): not clearly worse"]


def test_accuracies_are_points_lost_and_one_seed_says_nothing() -> None:
    accuracy = Task("task", "accuracy", "file", "*")
    assert differences(accuracy, {"own": [0.9, 0.8], "fp32": [0.95, 0.9]}, {}) == pytest.approx([0.05, 0.1])
    assert measured(TASK, {"loss/a": row([1.0], [2.0])}) is None
    assert measured(TASK, {}) is None


def test_a_row_of_several_methods_is_a_row_of_each() -> None:
    table = {"name": "table", "loss": {"fp32": [1.0, 2.0], "a": [1.1, 2.4]}, "counts": {"clients": 16}}
    rows = by_name([table])
    assert set(rows) == {"table", "table/loss/fp32", "table/loss/a"}
    task = Task("task", "loss", "file", "table/loss/*", baseline="table/loss/fp32")
    assert differences(task, rows["table/loss/a"], rows) == pytest.approx([0.1, 0.2])


def test_every_task_and_control_is_in_the_recorded_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = powers(BENCHMARKS)
    assert [one.task for one in found] == list(TASKS)
    assert all((one.control is not None) == bool(one.task.control) for one in found)
    assert power(json=tmp_path / "power.json") == 0
    assert "recorded" in capsys.readouterr().out
    assert len(json.loads((tmp_path / "power.json").read_text())["results"]) == len(TASKS)
    assert power(from_=tmp_path / "none") == 2
    assert "no recorded runs" in capsys.readouterr().err
