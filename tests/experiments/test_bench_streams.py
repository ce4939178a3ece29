"""``python -m experiments bench streams``: every number of connections, after a pause and without."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from experiments.bench.streams import streams


@pytest.mark.network
def test_each_number_of_connections_is_set_against_the_first(tmp_path: Path) -> None:
    path = tmp_path / "streams.json"
    assert streams(links=("50mbit/20ms", "50mbit/20ms/0.1%"), size_mb=1, numbers=(1, 3), repeats=2, json=path) == 0
    rows = {row["name"]: row for row in json.loads(path.read_text())["results"]}
    assert len(rows) == 2 * 2 * 2
    for link in ("50mbit/20ms", "50mbit/20ms/0.1%"):
        for pause in ("0 s", "1 s"):
            one, three = (rows[f"{link}/{pause}/{number}"] for number in (1, 3))
            # Two messages, one after the other, of 2.2 Mbit in all.
            assert min(*one["all"], *three["all"]) > 0.02 + 0.8 * 2.2e6 / 2 / 50e6
            assert one["gain"] == 1
            assert three["gain"] == pytest.approx(one["value"] / three["value"])
