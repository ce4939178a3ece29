"""``python -m experiments bench bursts``: the busiest second."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from experiments.bench.bursts import bursts, busiest_second


def test_the_busiest_second_is_the_most_between_samples_a_second_apart() -> None:
    even = [(0.1 * i, 10 * i) for i in range(30)]
    assert busiest_second(even) in (90, 100)  # of times that are not exact
    assert busiest_second([(0.0, 0), (0.5, 5), (2.0, 500), (2.5, 600), (3.25, 601)]) == 100
    assert busiest_second([(0.0, 7)]) == 0


@pytest.mark.network
def test_it_counts_both_ways(tmp_path: Path) -> None:
    path = tmp_path / "bursts.json"
    assert bursts(size_mb=4.2, every=12, step_ms=20, rounds=1, json=path) == 0
    values = {row["name"]: row["value"] for row in json.loads(path.read_text())["results"]}
    # A million weights in 2 bits, with scales and headers.
    assert values["sent_bytes/at once"] > 1.05e6 * 2 / 8
    assert values["sent_bytes/streaming"] > 1.05e6 * 2 / 8
    assert values["step_s/streaming"] >= 0.02
