"""Small versions of ``python -m experiments bench ...``: each trains or measures all that it compares."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from experiments.__main__ import main as experiments_main
from experiments.bench import families, pipelines
from experiments.bench.optimizer import optimizer
from thinwire.compressors import parse
from thinwire_tools import lab
from thinwire_tools.doctor.settings_sharded import SHARDED_SETTINGS

Rows = dict[str, dict[str, Any]]


def of_compressors(rows: Rows) -> None:
    for spec in families.SMOKE:
        name = str(parse(spec))
        assert 0 < rows[f"relative_error/{name}"]["value"] < 4
        assert 0 < rows[f"bytes_per_element/{name}"]["value"] < 4.2


def of_optimizer(rows: Rows) -> None:
    copy, pre = rows["cpu_seconds/copy_"], rows["cpu_seconds/CompressedAdamW, pre"]
    assert pre["of_copy"] == pytest.approx(9 / 2 * copy["value"] / pre["value"])


class Bench(NamedTuple):
    run: Callable[[Path], int]
    check: Callable[[Rows], None]


def _command(*words: str) -> Callable[[Path], int]:
    return lambda path: experiments_main(["bench", *words, "--smoke", "--json", str(path)])


BENCHES = {
    "compressors": Bench(_command("compressors"), of_compressors),
    "optimizer": Bench(lambda path: optimizer(size_mb=4, turns=1, json=path), of_optimizer),
}


def _check(bench: Bench, path: Path) -> None:
    assert bench.run(path) == 0
    bench.check({row["name"]: row for row in json.loads(path.read_text())["results"]})


@pytest.mark.timeout(200)
@pytest.mark.parametrize("name", BENCHES)
def test_the_small_version_measures_what_it_should(name: str, tmp_path: Path) -> None:
    _check(BENCHES[name], tmp_path / "figures.json")


@pytest.mark.parametrize(("name", "schedule"), [("PyTorch", "1f1b"), ("fw3 bw6", "zero-bubble")])
def test_steps_of_pipelines_take_what_stages_compute(name: str, schedule: str) -> None:
    computed = [[[0.002, 0.004, 0.002]]] * pipelines.RANKS
    (taken,) = pipelines.run(pipelines.METHODS[name], schedule, computed, 1, None)
    assert taken >= pipelines.CHUNKS * 0.006


@pytest.mark.network
@pytest.mark.skipif(lab.unavailable() is not None, reason=str(lab.unavailable()))
def test_bench_doctor_sharded(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    cell = ["--rates", "300mbit", "--rtts", "0ms", "--batch", "1", "--watched", "6", "--rounds", "1", "--steps", "1"]
    assert experiments_main(["bench", "doctor", "--sharded", *cell, "--json", str(path)]) == 0
    found = json.loads(path.read_text())
    assert found["about"]["sharded"] is True
    values = {row["name"]: row["value"] for row in found["results"]}
    titles = [title for title in (c.title for c in SHARDED_SETTINGS if c.times == 1) if title not in ("W8G4", "W4G4")]
    for name in ("predicted_step_s", "step_s"):
        steps = {title: values[f"{name}/{title}/300mbit/0ms"] for title in [*titles, "nothing sent"]}
        # 19 MB of weights twice, and of gradients: a second and more at 300 Mbit/s, of which 8 bits leave a quarter.
        assert steps["as it is"] > 1.0
        assert steps["W8G8"] < steps["as it is"]
    assert len(found["about"]["cells"]["300mbit/0ms"]["bytes"]) == len(
        found["about"]["cells"]["300mbit/0ms"]["bucket_s"]
    )
