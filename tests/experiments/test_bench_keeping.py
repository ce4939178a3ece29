"""``bench keeping``, ``sums`` and ``crops``: every method is trained, and keeps and sends what it should."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from experiments.__main__ import main as experiments_main
from experiments.bench import crops, sums
from experiments.bench.keeping import FP32, METHODS


def test_centres_are_compared_with_messages_and_with_nothing(tmp_path: Path) -> None:
    path = tmp_path / "keeping.json"
    assert experiments_main(["bench", "keeping", "--smoke", "--seeds", "1", "--json", str(path)]) == 0
    found = {row["name"]: row["value"] for row in json.loads(path.read_text())["results"]}
    for title in ("five epochs", "one epoch"):
        assert {name.partition("/")[2].partition("/")[2] for name in found} == set(METHODS)
        assert found[f"{title}/loss/{FP32}"] == found[f"{title}/kept_bytes/{FP32}"] == 0
        assert found[f"{title}/kept_bytes/16 centres, 2 bits"] < found[f"{title}/kept_bytes/256 centres, 2 bits"]
        assert (
            found[f"{title}/kept_bytes/direct, 2 bits"] == 0 < found[f"{title}/kept_bytes/messages of samples, 2 bits"]
        )
        assert found[f"{title}/fewer/direct, 2 bits"] > found[f"{title}/fewer/16 centres, 2 bits"] > 1


def test_sums_are_compared(tmp_path: Path) -> None:
    path = tmp_path / "sums.json"
    assert experiments_main(["bench", "sums", "--smoke", "--seeds", "1", "--num-ranks", "2", "--json", str(path)]) == 0
    found = {row["name"]: row["value"] for row in json.loads(path.read_text())["results"]}
    assert {name.partition("/")[2] for name in found} == set(sums.METHODS)
    assert found[f"loss/{sums.FP32}"] == 0
    assert found[f"fewer/{sums.CONTROL}"] > found["fewer/direct(maxabs(bits=4))"] > found["fewer/delta(maxabs(bits=4))"]
    assert found[f"loss/{sums.CONTROL}"] != 0


def test_crops_are_compared(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    path = tmp_path / "crops.json"
    assert experiments_main(["bench", "crops", "--smoke", "--seeds", "1", "--json", str(path)]) == 0
    found = {row["name"]: row["value"] for row in json.loads(path.read_text())["results"]}
    assert {name.partition("/")[2] for name in found} == set(crops.METHODS)
    assert found[f"fewer/{crops.FP32}"] < 1 < found[f"fewer/{crops.AWARE}"] < found["fewer/nothing kept"]
