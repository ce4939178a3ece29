"""`thinwire plan pipeline`: table, picture, figures, and files that are none."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from thinwire_tools import cli

MEASURED: dict[str, Any] = {
    "micro_batches": 4,
    "layers": [
        {"name": "embedding", "forward_ms": 1, "backward_ms": 1, "activation_bytes": 524288},
        {"name": "block", "repeat": 5, "forward_ms": 4, "backward_ms": 8, "activation_bytes": 524288},
    ],
    "machines": ["a", {"name": "b", "speed": 2}, "c"],
    "links": [{"between": ["a", "c"], "rate": "10mbit", "latency": "20ms"}, {"rate": "100mbit"}],
}


def written(tmp_path: Path, **changes: Any) -> str:
    path = tmp_path / "pipeline.json"
    path.write_text(json.dumps(MEASURED | changes))
    return str(path)


def test_a_plan_is_shown_drawn_and_written(tmp_path: Path, capsys) -> None:
    svg, out = tmp_path / "plan.svg", tmp_path / "plan.json"
    assert cli.main(["plan", "pipeline", written(tmp_path), "--svg", str(svg), "--json", str(out)]) == 0
    shown = capsys.readouterr().out
    assert "times as fast as even cuts" in " ".join(shown.replace("│", " ").split())
    assert "thinwire.compress_stage(stage, forward=" in shown
    assert "gpipe" in shown
    assert "zero-bubble" in shown
    record = json.loads(out.read_text())
    about, rows = record["about"], {row["name"]: row["value"] for row in record["results"]}
    assert record["command"] == "thinwire plan pipeline"
    assert sorted(about["machines"]) == ["a", "b", "c"]
    assert about["machines"][1] == "b"  # nobody's neighbour over the slow link
    assert about["cuts"][0] == 0
    assert about["cuts"][-1] == 6
    best = [rows[f"step_s/{name}"] for name in ("gpipe", "1f1b", "zero-bubble")]
    assert rows["step_s/planned"] == min(best)
    assert rows["step_s/planned"] < rows["step_s/even"]
    assert svg.read_text().startswith("<?xml")
    assert "rank 2" in svg.read_text() or "<use" in svg.read_text()


def test_the_example_of_the_page_is_planned(tmp_path: Path, capsys) -> None:
    page = (Path(__file__).parents[2] / "docs" / "pipeline-plans.md").read_text()
    (text,) = re.findall(r"```text\n(.*?)```", page, flags=re.DOTALL)
    path, out = tmp_path / "pipeline.json", tmp_path / "plan.json"
    path.write_text(text)
    assert cli.main(["plan", "pipeline", str(path), "--schedules", "1f1b", "--json", str(out)]) == 0
    about = json.loads(out.read_text())["about"]
    # Nothing crosses the slow link, and the slow machine has fewer layers.
    names = about["machines"]
    assert abs(names.index("oslo") - names.index("bern")) > 1
    counts = {name: b - a for name, a, b in zip(names, about["cuts"], about["cuts"][1:], strict=False)}
    assert counts["lima"] == min(counts.values())
    capsys.readouterr()


def test_schedules_and_choices_may_be_given(tmp_path: Path, capsys) -> None:
    out = tmp_path / "plan.json"
    given = ["--schedules", "1f1b", "--forward", "gaussian(bits=4)", "--error-forward", "gaussian(bits=4)"]
    assert cli.main(["plan", "pipeline", written(tmp_path), *given, "--json", str(out)]) == 0
    about = json.loads(out.read_text())["about"]
    assert about["schedule"] == "1f1b"
    assert set(about["forward"]) == {"gaussian(bits=4, bucket=128)"}
    assert "interleaved" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": []}, "layers must be a list of 1 to 512"),
        ({"layers": [{"name": "x", "repeat": 1e9, "forward_ms": 1, "backward_ms": 1, "activation_bytes": 1}]}, "up to"),
        ({"layers": [{"name": "x", "backward_ms": 1, "activation_bytes": 1}]}, "forward_ms must be a number"),
        ({"micro_batches": 2.5}, "whole number"),
        ({"micro_batches": "8"}, "micro_batches must be a number"),
        ({"machines": ["a", "a"], "links": [{"rate": "1gbit"}]}, "of different names"),
        ({"machines": [{"name": "a", "speed": -1}, "b"]}, "speed must be a number"),
        ({"machines": [{"name": "a", "line": 100}, "b"]}, "has no line, which is a text"),
        ({"links": [{"between": ["a", "b"], "rate": "1gbit"}]}, "is not given"),
        ({"links": [{"between": ["a", "z"], "rate": "1gbit"}]}, "two of the machines a, b, c"),
        ({"links": [{"rate": "fast"}]}, "is not a rate"),
        ({"links": [3]}, "a link is an object"),
    ],
)
def test_files_that_hold_no_pipeline(changes: dict[str, Any], message: str, tmp_path: Path, capsys) -> None:
    assert cli.main(["plan", "pipeline", written(tmp_path, **changes)]) == 64
    assert message in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("text", ["", "[]", "[" * 100_000, "null", '{"layers": NaN}'])
def test_files_that_are_something_else(text: str, tmp_path: Path, capsys) -> None:
    path = tmp_path / "pipeline.json"
    path.write_text(text)
    assert cli.main(["plan", "pipeline", str(path)]) == 64
    assert "thinwire plan pipeline: " in capsys.readouterr().err
