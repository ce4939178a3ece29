"""``thinwire bench kernels`` measures what it says, and leaves the number of threads alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from thinwire_tools.bench.command import kernels


def test_figures_add_up(tmp_path: Path) -> None:
    before = torch.get_num_threads()
    kernels(size_mb=0.25, threads=1, repeats=3, json=tmp_path / "kernels.json")
    assert torch.get_num_threads() == before
    record = json.loads((tmp_path / "kernels.json").read_text())
    rows = {row["name"]: row for row in record["results"]}
    copy = rows["copy_"]
    even = [row for name, row in rows.items() if name.startswith("break-even")]
    assert len(even) == 8
    assert all(row["unit"] == "Gbit/s" and 0 < row["bits_per_element"] < 9 for row in even)
    for row in rows.values():
        assert row["value"] > 0
        if "numel" in row:
            assert row["value"] == pytest.approx(4 * row["numel"] / row["seconds"] / 1e9)
            assert row["x_copy"] == pytest.approx(row["value"] / copy["value"])
