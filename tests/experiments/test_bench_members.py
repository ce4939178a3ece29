"""What ``python -m experiments bench members`` makes of its workers' notes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from experiments.bench.members import (
    TASK,
    Run,
    _add,
    _add_comparisons,
    _digest,
    _evaluate,
    _loss_at,
    _shares,
    _table,
    _whole_lines,
)
from thinwire_tools.results import Results


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
    goodput = {"of_all_workers": 0.9, "of_present_workers": 0.9}
    whole = Run(goodput, {"kept_steps": 0.9}, 400.0, curve, 9, 0, 0, 1e6, "")
    half = Run(goodput, {"kept_steps": 0.5}, 200.0, [(50.0, 4.0), (200.0, 2.6)], 5, 0, 6, 1e6, "")
    _add(results, "undisturbed", 0, whole, 0)
    _add(results, "members", 0, half, 2)
    _add(results, "members", 1, half, 2)  # has no undisturbed run to compare it with
    for _ in range(2):  # anew after each way, without leaving the former ones
        _add_comparisons(results)
    assert results.value("members/0/loss_excess") == pytest.approx(2.6 / 2.5 - 1)
    assert results.value("members/0/kept_of_undisturbed") == 0.5
    assert sum(row["name"].endswith("/loss_excess") for row in results.results) == 1
    assert _table(results).row_count == 3


def test_the_time_of_workers_adds_up() -> None:
    notes = [{"seconds": {"starting": 4.0, "exchanging": 1.0}}, {"seconds": {"starting": 0.0, "exchanging": 2.0}}]
    shares = _shares(notes, kept_s=10.0, present_s=20.0)
    assert shares == pytest.approx({"kept_steps": 0.5, "starting": 0.2, "exchanging": 0.15, "lost": 0.15})


def test_saved_weights_are_evaluated_after_the_run(tmp_path: Path) -> None:
    model = TASK.build(seed=3)
    torch.save(torch.cat([p.detach().flatten() for p in model.parameters()]), tmp_path / "abc.pt")
    notes = [{"weights": "abc", "kept": kept} for kept in (0, 100, 100)] + [{"weights": "not saved", "kept": 100}]
    _evaluate(notes, tmp_path)
    total, count = TASK.evaluate(model, 0, 1, probe=True)
    assert [note.get("loss") for note in notes] == [None, pytest.approx(total / count), None, None]


def test_a_line_that_a_killed_worker_has_not_finished_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "worker1.0.jsonl"
    path.write_text('{"step": 25}\n{"st')
    assert _whole_lines(path) == ['{"step": 25}']
