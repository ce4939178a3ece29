"""``python -m experiments bench stores``: pipelines that keep messages in memory or on disk."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from experiments.bench.stores import DIRECT, METHODS, SCHEDULES, stores


@pytest.mark.network
def test_every_store_is_compared_with_none(tmp_path: Path) -> None:
    path = tmp_path / "stores.json"
    assert stores(rates=("1gbit",), steps=1, rounds=2, json=path) == 0
    rows = {row["name"]: row for row in json.loads(path.read_text())["results"]}
    for schedule in SCHEDULES:
        for name in METHODS:
            # Eight micro-batches of 30 ms, and three more of them before the last rank has the first one.
            assert rows[f"step_s/{name}/{schedule}/1gbit"]["value"] > 8 * 0.03
            difference = rows.get(f"difference/{name}/{schedule}/1gbit")
            assert (difference is None) == (name == DIRECT)
            assert difference is None or difference["lower"] < difference["value"] < difference["upper"]
