"""``python -m experiments bench optimizer``: its rows and its file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from experiments.bench.optimizer import optimizer


def test_it_times_both_orders_beside_the_fused_optimizer_and_a_copy(tmp_path: Path) -> None:
    assert optimizer(size_mb=4, turns=1, json=tmp_path / "o.json") == 0
    rows = {row["name"]: row for row in json.loads((tmp_path / "o.json").read_text())["results"]}
    assert {"copy_", "CompressedAdamW, pre", "CompressedAdamW, update"} <= {
        n.removeprefix("cpu_seconds/") for n in rows
    }
    assert all(row["value"] > 0 for row in rows.values())
    assert rows["cpu_seconds/torch.optim.AdamW(fused=True)"]["over_fused"] == 1.0
    copy, pre = rows["cpu_seconds/copy_"], rows["cpu_seconds/CompressedAdamW, pre"]
    assert copy["of_copy"] == 1.0
    assert pre["of_copy"] == pytest.approx(9 / 2 * copy["value"] / pre["value"])
