"""``python -m experiments bench first-epoch``: tiles have the bits that they should, and every method is trained."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from experiments.__main__ import main as experiments_main
from experiments.bench.first_epoch import AQSGD, CONTROL, FP32, SPECS, TILE, Ranking, entropy, tiled
from experiments.bench.formats import rotated


def test_a_rotation_is_undone() -> None:
    x = torch.randn(8 * TILE, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(rotated(rotated(x, TILE, seed=3), TILE, seed=3, back=True), x, atol=1e-5)


def test_entropy_is_that_of_the_histogram() -> None:
    even = torch.arange(64.0)
    two = torch.tensor([-1.0, 5.0]).repeat(32)
    found = entropy(torch.stack((even, two, torch.full((64,), 3.0))))
    assert torch.allclose(found, torch.tensor([4.0, 1.0, 0.0]), atol=1e-5)


@pytest.mark.parametrize("by", ["entropy", "range"])
def test_half_of_the_tiles_of_each_sample_have_4_bits(by: Ranking) -> None:
    x = torch.randn(3, 8, 2 * TILE, generator=torch.Generator().manual_seed(0))
    levels = [[len(tile.unique()) for tile in sample.view(-1, TILE)] for sample in tiled(x, by, rotate=False)]
    for sample in levels:
        assert sum(8 < n <= 16 for n in sample) <= 8
        assert sum(n <= 8 for n in sample) >= 8


def test_wide_tiles_have_more_bits_by_range() -> None:
    x = torch.randn(1, 16, TILE, generator=torch.Generator().manual_seed(0))
    x[:, ::2] *= 100.0
    off = (tiled(x, "range", rotate=False) - x).norm(dim=-1) / x.norm(dim=-1)
    assert float(off[:, ::2].max()) < float(off[:, 1::2].min())


def test_the_command_trains_every_method(tmp_path: Path) -> None:
    path = tmp_path / "first-epoch.json"
    assert experiments_main(["bench", "first-epoch", "--smoke", "--seeds", "1", "--json", str(path)]) == 0
    found = {row["name"]: row["value"] for row in json.loads(path.read_text())["results"]}
    assert {name.partition("/")[2] for name in found} >= {FP32, AQSGD, *SPECS}
    assert found[f"above_fp32/{FP32}"] == found[f"error/{FP32}"] == 0
    assert found[f"error/{CONTROL}"] > 2 * found["error/gaussian(bits=4)"] > 0
