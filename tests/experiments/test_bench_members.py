"""What ``python -m experiments bench members`` makes of its workers' notes."""

from __future__ import annotations

from pathlib import Path

import pytest

from experiments.bench.members import Run, _add, _add_comparisons, _digest, _loss_at, _table, _whole_lines
from thinwire.results import Results


def test_tokens_add_up_over_workers_and_weights_are_compared() -> None:
    notes = [
        {"step": 25, "kept": 100, "weights": "a", "loss": 3.0},
        {"step": 25, "kept": 100, "weights": "a"},
        {"step": 50, "kept": 100, "weights": "b", "loss": 2.0},
        {"step": 50, "kept": 0, "weights": "left out"},
        {"step": 75, "kept": 200, "weights": "c"},
        {"step": 75, "kept": 100, "weights": "other", "loss": 1.5},
    ]
    assert _digest(notes) == ([(200, 3.0), (300, 2.0), (600, 1.5)], 2, 1)


def test_losses_are_compared_at_equal_tokens() -> None:
    curve = [(100.0, 3.0), (300.0, 2.0)]
    assert _loss_at(curve, 200.0) == pytest.approx(2.5)
    assert _loss_at(curve, 301.0) is None
    results = Results("test")
    whole = Run({"of_all_workers": 0.9, "of_present_workers": 0.9}, 400.0, curve, 9, 0, 0, 1e6, "")
    half = Run({"of_all_workers": 0.5, "of_present_workers": 0.7}, 200.0, [(50.0, 4.0), (200.0, 2.6)], 5, 0, 6, 1e6, "")
    _add(results, "undisturbed", whole, 0)
    _add(results, "members", half, 2)
    for _ in range(2):  # anew after each way, without leaving the former ones
        _add_comparisons(results)
    assert results.value("both/loss_excess") == pytest.approx(2.6 / 2.5 - 1)
    assert results.value("members/kept_of_undisturbed") == 0.5
    assert [row["name"] for row in results.results].count("both/loss_excess") == 1
    assert _table(results).row_count == 2


def test_a_line_that_a_killed_worker_has_not_finished_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "worker1.0.jsonl"
    path.write_text('{"step": 25}\n{"st')
    assert _whole_lines(path) == ['{"step": 25}']
