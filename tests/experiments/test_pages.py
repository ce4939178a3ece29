"""The pages of the experiments, made of recorded runs."""

from __future__ import annotations

import json
from pathlib import Path

import experiment_pages
import pytest
from captions import CAPTIONS
from figures import BENCHMARKS, HOLDS

from experiments.framework.catalogue import CATALOGUE
from experiments.framework.verdicts import outcome


@pytest.mark.parametrize("name", [entry.name for entry in CATALOGUE])
def test_a_page_has_every_claim_and_every_table_of_its_paper(name: str, tmp_path: Path) -> None:
    assert experiment_pages.experiment(name, tmp_path) == f"Not measured yet: `python -m experiments {name}`."
    page = experiment_pages.experiment(name)
    measured = experiment_pages.Measured(name, BENCHMARKS)
    for row in measured.rows:
        if claim := row.get("claim"):
            shown = outcome(row["found"], row.get("why"))
            part = experiment_pages.PARTS.get(name, {}).get(row["figure"], row["figure"])
            cells = [cell.replace("|", "\\|") for cell in (part, claim, shown, HOLDS[row["holds"]])]
            assert f"| {' | '.join(cells)} |" in page
    for make in experiment_pages.TABLES.get(name, ()):
        tables = list(make(measured))
        assert tables
        assert all(text in page for text in tables)
    assert "\n\n\n" not in page


@pytest.mark.parametrize("name", [entry.name for entry in CATALOGUE])
def test_every_picture_has_a_caption_and_follows_its_table(name: str) -> None:
    captions, page = CAPTIONS[name], experiment_pages.experiment(name)
    assert set(captions) == {path.stem for path in (BENCHMARKS / f"repro-{name}").glob("*.svg")}
    tables = [
        text
        for make in experiment_pages.TABLES.get(name, ())
        for text in make(experiment_pages.Measured(name, BENCHMARKS))
    ]
    for stem, caption in captions.items():
        assert f"![{caption.text}](../benchmarks/repro-{name}/{stem}.svg)\n\n*{caption.text}.*" in page
        assert not caption.under or any(text.startswith(caption.under) for text in tables)


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
