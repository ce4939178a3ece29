"""``python -m experiments bench deltas``: every method is trained, and changes cost the bytes of weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from experiments.__main__ import main as experiments_main
from experiments.bench.deltas import METHODS


@pytest.mark.slow
def test_the_command_trains_every_method(tmp_path: Path) -> None:
    path = tmp_path / "deltas.json"
    assert experiments_main(["bench", "deltas", "--smoke", "--seeds", "2", "--json", str(path)]) == 0
    found = {row["name"]: row["value"] for row in json.loads(path.read_text())["results"]}
    assert {name.removeprefix("loss/") for name in found if name.startswith("loss/")} == {m.name for m in METHODS}
    assert found["sent_bytes/W4 as changes, G8"] == found["sent_bytes/W4 G8"] < found["sent_bytes/fp32"] / 4
    assert found["sent_bytes/alone"] == 0
    assert found["difference/W2 G8"] > 0.02 > abs(found["difference/W4 as changes, G8"])
