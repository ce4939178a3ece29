"""The pages of the experiments, made of recorded runs."""

from __future__ import annotations

import json
from pathlib import Path

import experiment_pages
import pytest
from figures import BENCHMARKS, HOLDS

from experiments.framework.catalogue import CATALOGUE


@pytest.mark.parametrize("name", [entry.name for entry in CATALOGUE])
def test_a_page_has_every_claim_and_every_table_of_its_paper(name: str, tmp_path: Path) -> None:
    assert experiment_pages.experiment(name, tmp_path) == f"Not measured yet: `python -m experiments {name}`."
    page = experiment_pages.experiment(name)
    measured = experiment_pages.Measured(name, BENCHMARKS)
    for row in measured.rows:
        claim, found, why = (str(row.get(key) or "").replace("|", "\\|") for key in ("claim", "found", "why"))
        found = f"{found}; {why}" if why else found
        assert not claim or f"| {row['figure']} | {claim} | {found} | {HOLDS[row['holds']]} |" in page
    for make in experiment_pages.TABLES.get(name, ()):
        tables = list(make(measured))
        assert tables
        assert all(text in page for text in tables)
    assert "\n\n\n" not in page.split("![")[0]


def test_a_later_run_of_a_part_takes_the_place_of_its_figure(tmp_path: Path) -> None:
    def written(name: str, *rows: tuple[str, float]) -> None:
        results = [{"name": f"{figure}/a", "figure": figure, "value": value} for figure, value in rows]
        machine = {"cores": 2, "cpu": "abacus", "memory_bytes": 2**30, "system": "Linux"}
        record = {"results": results, "about": {}, "machine": machine, "versions": {"torch": "2", "python": "3"}}
        (tmp_path / name).write_text(json.dumps(record))

    written("repro-fft.json", ("1", 1.0), ("2", 2.0))
    written("repro-fft-more.json", ("2", 3.0))
    measured = experiment_pages.Measured("fft", tmp_path)
    assert {row["figure"]: row["value"] for row in measured.rows} == {"1": 1.0, "2": 3.0}
