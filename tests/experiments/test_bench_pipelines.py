"""``python -m experiments bench pipelines``: steps of PyTorch's stages and of compressed ones."""

from __future__ import annotations

import pytest

from experiments.bench.pipelines import CHUNKS, METHODS, RANKS, run

STAGES = [[[0.002, 0.004, 0.002]]] * RANKS


@pytest.mark.parametrize(("name", "schedule"), [("PyTorch", "1f1b"), ("fw3 bw6", "zero-bubble")])
def test_steps_take_what_stages_compute_and_more(name: str, schedule: str) -> None:
    (taken,) = run(METHODS[name], schedule, STAGES, 1, None)
    assert taken >= CHUNKS * 0.006
