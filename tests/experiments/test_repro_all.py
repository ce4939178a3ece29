"""`python -m experiments all`: what it runs, what becomes of what fails, the pages of all claims and of each paper."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from experiments.__main__ import main as experiments_main
from experiments.framework import everything, pages
from experiments.framework.pages import BENCHMARKS
from experiments.framework.results_page import CATALOG, read
from experiments.framework.verdicts import outcome

# Stands in for a repetition: writes what one writes, or fails.
STUB = """
import json, os, sys
name, out = sys.argv[3], sys.argv[sys.argv.index("--out") + 1]
if name == "cgx":
    sys.exit(3)
os.makedirs(out, exist_ok=True)
machine = {"cpu": "abacus", "cores": 2, "memory_bytes": 2**34, "system": "Linux"}
rows = [{"name": "f/a", "value": 1.0, "unit": "", "figure": "1", "claim": "a | b", "found": "so", "holds": True},
        {"name": "f/b", "value": 1.0, "unit": "", "figure": "2", "claim": "c", "found": "not so", "holds": False},
        {"name": "f/c", "value": 1.0, "unit": "", "figure": "2", "claim": None, "found": "aside", "holds": None}]
about = {"smoke": "--smoke" in sys.argv, "failures": {"part 9": "it broke"} if name == "fft" else {}}
json.dump({"command": name, "versions": {"python": "3", "torch": "2"}, "machine": machine, "about": about,
           "results": rows}, open(out + "/all.json", "w"))
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
    assert [argv[3] for argv in stubbed] == [entry.name for entry in CATALOG]
    assert all("--smoke" in argv for argv in stubbed)
    shown = " ".join(capsys.readouterr().out.split())
    assert "Failed: cgx." in shown
    written = (out / "results.md").read_text()
    assert written.count("**does not hold**") == len(CATALOG) - 1
    assert "part 9: it broke" in written
    assert "Not measured yet: `python -m experiments cgx`" in written
    assert json.loads(path.read_text())["about"]["exit_codes"]["cgx"] == 3


def test_only_some_run_and_old_figures_of_a_failed_one_do_not_stand_for_it(
    stubbed: list[list[str]], tmp_path: Path
) -> None:
    (tmp_path / "cgx").mkdir()
    (tmp_path / "cgx/all.json").write_text("{}")
    assert experiments_main(["all", "--only", "cgx,fft", "--out", str(tmp_path)]) == 1
    assert [argv[3] for argv in stubbed] == ["cgx", "fft"]
    assert not (tmp_path / "cgx/all.json").exists()


def test_the_page_from_figures_that_are_there(stubbed: list[list[str]], tmp_path: Path) -> None:
    assert experiments_main(["all", "--from", str(BENCHMARKS), "--out", str(tmp_path)]) == 0
    assert not stubbed
    found = {paper.entry.name: paper for paper in read(BENCHMARKS)}
    written = (tmp_path / "results.md").read_text()
    for row in found["cgx"].claims:
        assert " ".join(row["claim"].split()).replace("|", "\\|") in written
    # A later run of one part takes the place of what the whole run found of it.
    again = json.loads((BENCHMARKS / "fft/figure-16.json").read_text())["results"]
    assert [r["claim"] for r in found["fft"].claims if r["figure"] == "16"] == [r["claim"] for r in again if r["claim"]]


def test_figures_that_are_none_are_refused(tmp_path: Path, capsys) -> None:
    (tmp_path / "fft").mkdir()
    for content in ("", "{}", '{"results": [{"figure": "1", "claim": "x"}]}', "[" * 100_000):
        (tmp_path / "fft/all.json").write_text(content)
        with pytest.raises(ValueError, match=r"fft/all\.json is not what"):
            read(tmp_path)
    assert experiments_main(["all", "--from", str(tmp_path), "--out", str(tmp_path)]) == 64
    assert "fft/all.json" in "".join(capsys.readouterr().err.split())


WRONG = [
    ("all", ["--only", "abacus"], "abacus"),
    ("fft", ["--parts", "5", "7"], "choose among 5 12 13"),
    ("fft", ["--seeds", "0"], "at least 1"),
    ("fft", ["--rate", "fast"], "not a rate"),
    ("fft", ["--data", "/nowhere"], "unpack the binary version"),
    ("lgreco", ["--rate", "50mbit"], "the links of this chapter are 100mbit and 1gbit"),
    ("fullstack", ["--rate", "1gbit"], "--rate: links have the paper's rates"),
]


def test_wrong_arguments_are_reported_and_nothing_is_made(tmp_path: Path, capsys) -> None:
    out = tmp_path / "out"
    for name, arguments, message in WRONG:
        assert experiments_main([name, "--smoke", "--out", str(out), *arguments]) == 64
        assert message in " ".join(capsys.readouterr().err.split())
        assert not out.exists()


@pytest.mark.parametrize("name", [entry.name for entry in CATALOG])
def test_a_page_has_every_claim_and_every_picture_of_its_paper(name: str) -> None:
    text = pages.section(f"repro-{name}")
    claims = [row for row in pages.read(f"{name}/*").rows.values() if row.get("claim")]
    for row in claims:
        cells = [row["claim"], outcome(row["found"], row.get("why")), pages.HOLDS[row["holds"]]]
        assert f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |" in text
    assert claims
    drawn = {path.stem for path in (BENCHMARKS / name).glob("*.svg")}
    assert set(re.findall(rf"!\[.+\]\(benchmarks/{name}/(.+)\.svg\)", text)) == drawn
