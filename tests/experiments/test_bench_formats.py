"""``python -m experiments bench formats``: rotations keep norms, spikes narrow the grid, bytes are the same for all."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import pytest
import torch

from experiments.__main__ import main as experiments_main
from experiments.bench.formats import BITS, FORMATS, KINDS, TREATMENTS, error_of, rotated


@pytest.mark.parametrize("block", [32, 128])
def test_a_rotation_keeps_norms_and_spreads_an_outlier(block: int) -> None:
    x = torch.randn(8 * block, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    y = rotated(x, block, seed=0)
    assert torch.allclose(y.view(-1, block).norm(dim=1), x.view(-1, block).norm(dim=1))
    assert not torch.equal(y, rotated(x, block, seed=1))
    alone = torch.zeros(block, dtype=torch.float64)
    alone[3] = 1.0
    assert torch.allclose(rotated(alone, block, seed=0).abs(), torch.full((block,), block**-0.5, dtype=torch.float64))


def test_what_a_rotation_and_spikes_are_for_is_what_they_gain() -> None:
    """A few elements a hundred times as large as the others are what both were made for."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64 * 1120, generator=generator)
    x[:: 1120 // 2] *= 100.0
    found = {
        way: error_of([x], FORMATS["minmax"], 4, block=block, spikes=spikes)
        for way, (block, spikes) in TREATMENTS.items()
    }
    assert found["spikes"] < 0.25 * found["as it is"]
    assert found["rotate 128"] < 0.7 * found["as it is"]


def test_values_of_two_levels_are_exact_in_min_max() -> None:
    x = torch.tensor([-1.5, 4.0]).repeat(1000)
    assert error_of([x], FORMATS["minmax"], 2, block=0, spikes=False) < 1e-6


def test_the_command_measures_every_format_in_every_way(tmp_path: Path) -> None:
    path = tmp_path / "formats.json"
    assert experiments_main(["bench", "formats", "--smoke", "--json", str(path)]) == 0
    found = {row["name"]: row["value"] for row in json.loads(path.read_text())["results"]}
    assert set(found) == {"/".join(map(str, at)) for at in product(KINDS, BITS, FORMATS, TREATMENTS)}
    for kind, name, way in product(KINDS, FORMATS, TREATMENTS):
        two, three, four = (found[f"{kind}/{bits}/{name}/{way}"] for bits in BITS)
        assert 0 < four < three < two < 1
