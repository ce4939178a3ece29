"""``python -m experiments bench pipelines``: what ranks record, and the picture of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from experiments.bench.pipelines import CHUNKS, METHODS, RANKS, _predict, _rows, _times, draw, run
from thinwire_tools.planner import Link, Schedule

STAGES = [[[0.002, 0.004, 0.002]]] * RANKS


@pytest.mark.parametrize(("name", "schedule"), [("PyTorch", "1f1b"), ("fw3 bw6", "zero-bubble")])
def test_ranks_record_every_task_and_every_message(name: str, schedule: Any, tmp_path: Path) -> None:
    ran = run(METHODS[name], schedule, STAGES, 1, None)
    listed = Schedule.build(schedule, RANKS, CHUNKS)
    assert [[tuple(task[:3]) for task in of] for of in ran["tasks"]] == [list(of) for of in listed.ranks]
    # The first stage computes all of its gradients with those of the weights.
    expected = {"forward": 0.002, "backward": 0.002 if listed.splits_backward else 0.004, "weights": 0.002}
    for kind, stage, _, begin, end in (task for of in ran["tasks"] for task in of):
        assert end - begin >= (expected[kind] if stage else 0.0)
    times = _times(ran["tasks"])
    assert all(of.forward_s >= 0.002 and of.backward_s >= 0.004 for of in times)
    arrived = sorted(tuple(of[:3]) for rank in ran["arrivals"] for of in rank)
    sources = {"forward": range(RANKS - 1), "backward": range(1, RANKS)}
    assert arrived == sorted((kind, s, c) for kind, of in sources.items() for s in of for c in range(CHUNKS))
    for _, bars in _rows(ran["tasks"], ran["arrivals"]):
        assert all(begin <= end for _, _, begin, end in bars)
    path = tmp_path / "steps.svg"
    draw({"PyTorch/1f1b/100mbit": {"tasks": ran["tasks"], "arrivals": ran["arrivals"]}}, path)
    assert path.read_text().startswith("<?xml")


def test_predictions_follow_the_link() -> None:
    costs = {"fw3 bw6": [0.001, 0.001], "raw": [0.0, 0.0], "PyTorch": [0.0, 0.0]}
    costs["1f1b"] = _times([[("forward", s, 0, 0.0, 0.02), ("backward", s, 0, 0.0, 0.04)] for s in range(RANKS)])  # pyright: ignore[reportArgumentType]
    steps = [_predict(costs, name, "1f1b", Link(12.5e6)).step_s for name in ("PyTorch", "raw", "fw3 bw6")]
    assert steps == sorted(steps, reverse=True)
    assert _predict(costs, "PyTorch", "1f1b", Link(12.5e15)).exposed_s == pytest.approx(0, abs=1e-6)
