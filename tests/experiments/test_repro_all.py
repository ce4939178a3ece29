"""`python -m experiments all`: what it runs, what becomes of what fails, and the page of all claims."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from experiments.__main__ import main as experiments_main
from experiments.framework import everything
from experiments.framework.catalogue import CATALOGUE
from experiments.framework.results_page import page, read

# Stands in for a repetition: writes what one writes, or fails.
STUB = """
import json, sys
name, path = sys.argv[3], sys.argv[sys.argv.index("--json") + 1]
if name == "cgx":
    sys.exit(3)
machine = {"cpu": "abacus", "cores": 2, "memory_bytes": 2**34, "system": "Linux"}
rows = [{"name": "f/a", "value": 1.0, "unit": "", "figure": "1", "claim": "a | b", "found": "so", "holds": True},
        {"name": "f/b", "value": 1.0, "unit": "", "figure": "2", "claim": "c", "found": "not so", "holds": False},
        {"name": "f/c", "value": 1.0, "unit": "", "figure": "2", "claim": None, "found": "aside", "holds": None}]
about = {"smoke": "--smoke" in sys.argv, "failures": {"part 9": "it broke"} if name == "fft" else {}}
json.dump({"command": name, "versions": {"python": "3", "torch": "2"}, "machine": machine, "about": about,
           "results": rows}, open(path, "w"))
"""


@pytest.fixture
def stubbed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[list[str]]:
    """Repetitions are stubs; the command lines that they were started with."""
    script = tmp_path / "stub.py"
    script.write_text(STUB)
    started: list[list[str]] = []
    start = everything.subprocess.Popen

    def instead(argv: list[str], **options):
        if argv[1:3] != ["-m", "experiments"]:
            return start(argv, **options)
        started.append(argv)
        return start([sys.executable, str(script), *argv[1:]])

    monkeypatch.setattr(everything.subprocess, "Popen", instead)
    return started


def test_all_run_and_one_that_fails_costs_its_own_rows(stubbed: list[list[str]], tmp_path: Path, capsys) -> None:
    out, path = tmp_path / "out", tmp_path / "all.json"
    assert experiments_main(["all", "--smoke", "--out", str(out), "--json", str(path)]) == 1
    assert [argv[3] for argv in stubbed] == [entry.name for entry in CATALOGUE]
    assert all("--smoke" in argv for argv in stubbed)
    shown = " ".join(capsys.readouterr().out.split())
    assert "Failed: cgx." in shown
    written = (out / "results.md").read_text()
    assert written.count("**does not hold**") == len(CATALOGUE) - 1
    assert "a \\| b" in written
    assert "part 9: it broke" in written
    assert "Not measured yet: `python -m experiments cgx`" in written
    record = json.loads(path.read_text())
    assert record["about"]["exit_codes"]["cgx"] == 3
    assert {row["name"]: row["value"] for row in record["results"]}["claims/fft/holds"] == 1


def test_only_some_run_and_old_figures_of_a_failed_one_do_not_stand_for_it(
    stubbed: list[list[str]], tmp_path: Path
) -> None:
    (tmp_path / "repro-cgx.json").write_text("{}")
    assert experiments_main(["all", "--only", "cgx,fft", "--out", str(tmp_path)]) == 1
    assert [argv[3] for argv in stubbed] == ["cgx", "fft"]
    assert not (tmp_path / "repro-cgx.json").exists()


def test_the_page_from_figures_that_are_there(stubbed: list[list[str]], tmp_path: Path) -> None:
    benchmarks = Path(__file__).parents[2] / "benchmarks"
    assert experiments_main(["all", "--from", str(benchmarks), "--out", str(tmp_path)]) == 0
    assert not stubbed
    found = {paper.entry.name: paper for paper in read(benchmarks)}
    written = (tmp_path / "results.md").read_text()
    for claim in found["cgx"].claims:
        assert " ".join(claim.claim.split()).replace("|", "\\|") in written
    # A later run of one part takes the place of what the whole run found of it.
    again = json.loads((benchmarks / "repro-fft-16.json").read_text())["results"]
    assert [c.claim for c in found["fft"].claims if c.figure == "16"] == [row["claim"] for row in again if row["claim"]]


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"results": [{"figure": "1", "claim": "x"}]}', "[" * 100_000])
def test_figures_that_are_none_are_refused(content: str, tmp_path: Path, capsys) -> None:
    (tmp_path / "repro-fft.json").write_text(content)
    with pytest.raises(ValueError, match=r"repro-fft\.json is not what"):
        read(tmp_path)
    assert experiments_main(["all", "--from", str(tmp_path), "--out", str(tmp_path)]) == 64
    assert "repro-fft.json" in "".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("arguments", [["--only", "abacus"], ["--from", "/nowhere"]])
def test_what_makes_no_sense_is_refused(arguments: list[str], tmp_path: Path, capsys) -> None:
    assert experiments_main(["all", "--out", str(tmp_path / "out"), *arguments]) == 64
    assert arguments[1] in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_page_without_figures_says_so(tmp_path: Path) -> None:
    shown = page(read(tmp_path), pages=None)
    assert shown.count("Not measured yet") == len(CATALOGUE)
    assert "What is left out" in shown
