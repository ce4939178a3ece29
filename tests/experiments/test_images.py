"""The digits that experiments train on, and the small residual network that learns them."""

from __future__ import annotations

import pytest
import torch

from experiments.tasks.images import ImageTask

pytest.importorskip("sklearn")
TASK = ImageTask(width=8, steps=10, batch=4, probe_images=2)


def test_the_task_is_a_function_of_seed_and_rank() -> None:
    first, second = (list(TASK.batches(3, rank, 2)) for rank in (0, 1))
    again = list(TASK.batches(3, 0, 2))
    assert all(torch.equal(a[1], b[1]) for a, b in zip(first, again, strict=True))
    assert any(not torch.equal(a[1], b[1]) for a, b in zip(first, second, strict=True))
    # The rate falls to a tenth once.
    assert [TASK.rate(step) for step in range(10)] == pytest.approx([0.02] * 7 + [0.002] * 3)


def test_every_held_out_image_is_scored_once() -> None:
    model = TASK.build(0)
    parts = [TASK.score(model, rank, 2, probe=False) for rank in (0, 1)]
    total, right, count = TASK.score(model, 0, 1, probe=False)
    assert sum(part[2] for part in parts) == count == len(TASK.images.held_out)
    assert sum(part[1] for part in parts) == right
    assert sum(part[0] for part in parts) == pytest.approx(total, rel=1e-5)
    assert TASK.evaluate(model, 0, 1, probe=False) == (total, count)
