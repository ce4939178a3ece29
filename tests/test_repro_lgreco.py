"""``thinwire repro lgreco``: the small version from end to end, its page, and what goes wrong."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

from small_versions import Small, small_version
from thinwire import cli, lab
from thinwire.repro.crew import Crew
from thinwire.repro.lgreco import command, of_quality
from thinwire.repro.lgreco.methods import FAMILIES
from thinwire.repro.lgreco.study import NAMES, SMOKE, Study

ROOT = Path(__file__).resolve().parent.parent
PARTS = ("quality", "policies", "speed", "ranks", "buckets", "metric", "solver")
PICTURES = ("4.2-4.3", "B.2", "3.7", "3.8", "4.5a", "4.3-4.4", "B.3", "4.2", "4.5b-B.1-B.6b", "B.6a", "solver")


# --- the command


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Small:
    for needed in ("sklearn", "matplotlib", "scipy"):
        pytest.importorskip(needed)
    return small_version("lgreco", Study, tmp_path_factory.mktemp("lgreco"))


@pytest.mark.timeout(400)
def test_the_small_version_makes_every_part_and_judges_every_claim(small: Small) -> None:
    assert small.code == 0, small.shown
    assert small.seconds < 180
    assert set(small.steps) == set(PARTS)
    for row in small.record["results"]:
        assert row["found"]
        assert row["holds"] in (True, False, None)
        # One seed shows no quality, one round no speed.
        assert row["holds"] is None or not any(part in row["name"] for part in ("/lost/", "_over_uniform/", "/speed_"))
    for figure in ("table 3.8", "table 4.1", "table 4.2", "table 4.3", "table 4.4", "table 4.5", "figure 3.8a"):
        assert any(row["claim"] for row in small.record["results"] if row["figure"] == figure), figure
    for figure in ("figure 4.2", "figure 4.3", "figure 4.5b", "figure B.1", "figure B.2", "figure B.3", "figure B.6a"):
        assert any(row["claim"] for row in small.record["results"] if row["figure"] == figure), figure
    for name in PICTURES:
        assert (small.out / f"lgreco-{name}.svg").read_text().startswith("<?xml")
    assert small.record["about"]["smoke"] is True
    assert "This takes about a minute." in small.shown


@pytest.mark.timeout(400)
def test_the_steps_that_are_foretold_are_those_of_a_part(small: Small) -> None:
    foretold = {part: steps for part, (_, steps, _) in command._phases(PARTS, SMOKE).items()}
    assert dict(small.steps) == foretold
    # What an earlier part has trained is not trained again.
    alone = {part: command._phases([part], SMOKE)[part][1] for part in PARTS}
    assert {part for part in PARTS if alone[part] > foretold[part]} == {"policies", "ranks", "buckets", "solver"}


@pytest.mark.timeout(400)
def test_rows_say_what_plans_were_chosen_and_what_they_send(small: Small) -> None:
    for name in NAMES:
        for family in FAMILIES:
            row = small.rows[f"{of_quality.TABLES[name]}/gain/{name}/{family.name}"]
            (plans,) = row["plans"]
            assert [plan["step"] for plan in plans] == [4, 8]
            assert row["from_step"] == 4
            assert row["ratio"]["lgreco"] / row["ratio"]["uniform"] == pytest.approx(row["value"], rel=1e-4)
            assert all(plan["error"] <= plan["reference_error"] * (1 + 1e-9) for plan in plans)
            assert row["value"] >= 1 - 1e-3
    # 10 % of the words' embedding are far more than its error asks for.
    assert small.rows["table 4.3/gain/gpt/topk"]["value"] > 1.1
    accuracies = small.rows["table 4.2/lost/cnn/bits/uniform"]["accuracies"]
    assert all(0 < accuracy < 1 for accuracy in accuracies)
    assert small.rows["section 4.4/error_within_reference/trainings"]["holds"] is True
    assert small.rows["section 4.4/error_within_reference/policies"]["holds"] is True
    assert small.rows["section 4.4/error_within_reference/solver"]["holds"] is True
    assert small.rows["section 4.5/dp_within_optimum"]["value"] <= 0.01


@pytest.mark.timeout(400)
def test_every_bucket_has_its_bytes(small: Small) -> None:
    found = small.rows["figure 4.5b/largest_and_last_compressed_most"]["bytes_per_bucket"]
    assert set(found) == {"uniform", "lgreco", "kmeans", "priority"}
    assert len({len(values) for values in found.values()}) == 1
    assert len(found["uniform"]) >= 2
    layers = small.rows["figure B.1/priority_slower"]["layers"]["powersgd"]
    assert sum(row["sent_bytes"] for row in layers) == pytest.approx(sum(found["uniform"]))
    assert [row["bucket"] for row in layers] == sorted(row["bucket"] for row in layers)


@pytest.mark.timeout(400)
@pytest.mark.skipif(not (ROOT / "tools" / "lgreco_page.py").exists(), reason="not in a source tree")
def test_the_page_is_made_of_the_figures(small: Small, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    page_of = importlib.import_module("lgreco_page").repro_lgreco
    assert "Not measured yet" in page_of(tmp_path)
    (tmp_path / "repro-lgreco.json").write_text(json.dumps(small.record))
    page = page_of(tmp_path)
    words = {True: "yes", False: "no", None: "open"}
    for row in small.record["results"]:
        told = f"| {row['figure']} | {row['claim']} | {row['found']} | {words[row['holds']]} |"
        assert not row["claim"] or told in page
    assert page.count("| L-GreCo |") >= 3
    assert "| GPT of words, top-k |" in page
    assert "| nothing sent |" in page
    assert "| 1.47x |" in page


def test_a_rank_that_fails_costs_its_part_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for needed in ("sklearn", "matplotlib", "scipy"):
        pytest.importorskip(needed)
    run, killed = Crew.run, []

    def run_and_kill(crew: Crew, told: dict[str, Any], *args: Any) -> list[dict[str, Any]]:
        if not killed:
            killed.append(crew._members[1].process)
            killed[0].kill()
        return run(crew, told, *args)

    monkeypatch.setattr(Crew, "run", run_and_kill)
    monkeypatch.setattr(lab, "unavailable", lambda: "no right to make namespaces")
    path = tmp_path / "out.json"
    told = ["--smoke", "--parts", "ranks", "metric", "--out", str(tmp_path), "--json", str(path)]
    assert cli.main(["repro", "lgreco", *told]) == 1
    record = json.loads(path.read_text())
    assert {row["figure"] for row in record["results"]} == {"figure B.6a"}
    assert "signal 9" in record["about"]["failures"]["ranks"]
    assert "not judged: no right to make namespaces" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--parts", "quality", "4.2"], "choose among quality policies speed"),
        (["--parts", ","], "choose among"),
        (["--seeds", "0"], "at least 1"),
        (["--rounds", "0"], "at least 1"),
        (["--rate", "fast"], "not a rate"),
    ],
)
def test_wrong_arguments_are_told_and_nothing_is_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    out = tmp_path / "out"
    assert cli.main(["repro", "lgreco", "--smoke", "--out", str(out), *arguments]) == 64
    assert message in " ".join(capsys.readouterr().err.split())
    assert not out.exists()
