"""Claims as data: recorded runs are judged as they were, rules, rows and the cache of runs."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from experiments.__main__ import main as experiments_main
from experiments.framework.claims import (
    NO_LINK,
    Claim,
    Finding,
    Row,
    Rule,
    beyond,
    faster_than_all,
    judge,
    plain,
    recorded,
    results_of,
    within,
)
from experiments.framework.paper import Paper
from experiments.framework.ranks import RunCache
from experiments.framework.verdicts import counted
from experiments.papers.aqsgd.paper import PAPER as AQSGD
from experiments.papers.aqsgd.stack_paper import PAPER as FULLSTACK
from experiments.papers.cgx.paper import PAPER as CGX
from experiments.papers.fft.paper import PAPER as FFT
from experiments.papers.intsgd.paper import PAPER as INTSGD
from experiments.papers.lgreco.paper import PAPER as LGRECO
from experiments.papers.qsdp.paper import PAPER as QSDP

PAPERS: tuple[Paper[Any], ...] = (FFT, CGX, INTSGD, LGRECO, QSDP, AQSGD, FULLSTACK)
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def _files(paper: Paper[Any]) -> list[Path]:
    """The whole run, and later ones of some parts."""
    return sorted((BENCHMARKS / paper.name).glob("*.json"))


@pytest.mark.parametrize("paper", PAPERS, ids=lambda paper: paper.name)
def test_recorded_runs_are_judged_as_they_were_and_have_a_row_for_every_claim(paper: Paper[Any]) -> None:
    runs = [json.loads(path.read_text()) for path in _files(paper)]
    names = set()
    for at, written in enumerate(runs):
        names |= {row["name"] for row in written["results"]}
        judged = {f"{finding.figure}/{finding.name}": finding for finding in paper.judge(written)}
        assert len(judged) == len(written["results"])
        # What a later run has measured again does not stand.
        again = {row["name"] for later in runs[at + 1 :] for row in later["results"]}
        for row in (row for row in written["results"] if row["name"] not in again):
            finding = judged[row["name"]]
            assert finding.claim == (row["claim"] or ""), row["name"]
            assert finding.holds is row["holds"], row["name"]
            assert finding.text == row["found"], row["name"]
    rows = [f"{claim.figure}/{claim.row}" for claim in paper.claims]
    assert len(set(rows)) == len(rows)
    assert set(rows) <= names


def _subtrees(tree: Any, at: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Paths to everything measured, the widest first: a row, the seconds of one method in it, one number."""
    if isinstance(tree, dict):
        for key in tree:
            yield from ((*at, key), ("*", key))
        for key, part in tree.items():
            yield from _subtrees(part, (*at, key))
    elif isinstance(tree, list) and tree:
        yield from _subtrees(tree[0], at)  # of every seed alike


def _changed(tree: Any, path: tuple[str, ...], change: Callable[[float], float] | None) -> Any:
    """``tree`` with every number below ``path`` changed, or every list turned round; ``*`` is any number of keys."""
    if isinstance(tree, dict):
        if path[:1] == ("*",):
            return {key: _changed(part, () if key == path[1] else path, change) for key, part in tree.items()}
        chosen = path[:1] or tuple(tree)
        return {key: _changed(part, path[1:], change) if key in chosen else part for key, part in tree.items()}
    if path[:1] == ("*",):
        return tree
    if isinstance(tree, list):
        return [_changed(part, path, change) for part in (tree if change or path else reversed(tree))]
    return change(tree) if change and isinstance(tree, int | float) else tree


_CHANGES: tuple[Callable[[float], float] | None, ...] = (
    lambda x: x / 64,
    lambda x: 64 * x,
    lambda x: -x,
    lambda x: x + 1,
    lambda x: 0,
    None,
)


def _verdicts(claim: Claim, rows: dict[str, Any]) -> Iterator[bool | None]:
    """What the claim's rule makes of other measurements."""
    for path, change in product(_subtrees(rows), _CHANGES):
        # What makes no sense, such as a negative number of bytes, may be an error.
        with suppress(ArithmeticError, ValueError, LookupError, TypeError, AssertionError):
            yield claim.rule(_changed(rows, path, change)).holds


@pytest.mark.parametrize("paper", PAPERS, ids=lambda paper: paper.name)
def test_no_claim_is_true_by_construction(paper: Paper[Any]) -> None:
    """Other measurements would refute it."""
    figures: dict[str, dict[str, Any]] = {}
    for path in _files(paper):
        for row in recorded(json.loads(path.read_text())):
            figures.setdefault(row.figure, {})[row.name] = plain({"value": row.value, "unit": row.unit, **row.data})
    for claim in paper.claims:
        rows = figures[claim.figure]
        if claim.rule(rows).holds:
            assert False in _verdicts(claim, rows), f"{claim.figure}/{claim.row}"


def _rows(**values: float) -> list[Row]:
    return [Row("1", name, value, "x") for name, value in values.items()]


def _least(row: str) -> Rule:
    return lambda rows: counted(rows[row]["value"] <= min(other["value"] for other in rows.values()))


def _claim(row: str, **options: Any) -> Claim:
    return Claim("1", row, "it is least", _least(row), text=lambda rows: f"{rows[row]['value']:.1f}", **options)


def test_a_claim_is_judged_by_the_rows_of_its_figure() -> None:
    rows = [Row("1", "a/b", 1.0, "x", {"seen": [1]}), Row("1", "a/c", 2.0, "x"), Row("2", "a/d", 0.5, "x")]
    found = judge([_claim("a/b")], rows, emulated=True)
    assert found[0] == Finding("1", "a/b", 1.0, "x", "it is least", "1.0", True, {"seen": [1]})
    assert found[1] == Finding("1", "a/c", 2.0, "x", "", "", None)
    assert found[2] == Finding("2", "a/d", 0.5, "x", "", "", None)
    # What rests on a link is open without one.
    (found,) = judge([_claim("a", over_link=True)], _rows(a=1.0), emulated=False)
    assert (found.text, found.holds, found.claim) == (NO_LINK, None, "it is least")
    with pytest.raises(ValueError, match="two claims"):
        judge([_claim("a"), _claim("a")], _rows(a=1.0), emulated=True)
    # What was not measured has none.
    assert [row.claim for row in judge([_claim("b")], _rows(a=1.0), emulated=True)] == [""]
    made = _claim("c/b", value=lambda rows: rows["c/a"]["value"])
    assert [row.value for row in judge([made], [Row("1", "c/a", 2.0, "x")], emulated=True)] == [2.0, 2.0]


def test_rules_look_at_differences_and_times_by_seed() -> None:
    rows: dict[str, Any] = {"a": {"lost": [0.05, 0.051, 0.049], "step_s": [1.0, 1.1]}, "b": {"step_s": [2.0, 2.1]}}
    assert within("a", "lost", 0.01)(rows).holds is False
    assert within("a", "lost", 0.1)(rows).holds is True
    assert beyond("a", "lost")(rows).holds is True
    assert beyond("a", "lost", effect=0.2)(rows).holds is False
    assert faster_than_all("a", ["b"])(rows).holds is True
    assert faster_than_all("b", ["a"])(rows).holds is False
    # JSON keeps what diverged as null.
    rows["a"]["lost"][0] = None
    assert within("a", "lost", 0.1)(rows).holds is False


def test_a_recorded_run_that_is_judged_again_keeps_its_machine_and_its_first_verdict(tmp_path: Path) -> None:
    source = json.loads((BENCHMARKS / "fft/all.json").read_text())
    row = next(row for row in source["results"] if row["name"] == "14/speedup/topk")
    row.pop("judged_before", None)
    row["holds"] = not row["holds"]
    source["machine"]["cpu"] = "abacus"
    path = tmp_path / "run.json"
    path.write_text(json.dumps(source))
    assert experiments_main(["fft", "--from", str(path), "--out", str(tmp_path), "--json", str(path)]) == 0
    again = json.loads(path.read_text())
    assert again["machine"] == source["machine"]
    judged = next(row for row in again["results"] if row["name"] == "14/speedup/topk")
    assert judged["judged_before"] == {"claim": row["claim"], "holds": row["holds"]}
    assert judged["holds"] is (not row["holds"])


def test_rows_carry_claim_and_verdict_and_no_value_that_is_not_json() -> None:
    rows = [
        Finding("10", "ratio", math.inf, "x", "a ratio of 2 is enough", "none is", False, {"curve": [1.0, math.nan]}),
        Finding("10", "more", 1.0, "x", "", "as it is", None),
    ]
    written = results_of(rows, "python -m experiments fft", {}).to_dict()
    first = written["results"][0]
    assert (first["name"], first["value"], first["found"], first["holds"]) == ("10/ratio", None, "none is", False)
    again = recorded(json.loads(json.dumps(written)))
    assert [(row.figure, row.name, row.unit) for row in again] == [("10", name, "x") for name in ("ratio", "more")]
    assert again[0].data == {"curve": [1.0, None]}


def test_a_run_is_found_again_by_what_determines_it_and_the_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = {"task": {"steps": 3}, "method": {"spec": "raw"}, "seed": 0, "link": None}
    RunCache(tmp_path).put(key, {"losses": [1.0, math.nan]})
    again = RunCache(tmp_path)
    found = again.get(dict(reversed(key.items())))
    assert found is not None
    assert str(found["losses"]) == "[1.0, nan]"
    for name, other in (("seed", 1), ("link", "100mbit"), ("task", {"steps": 4})):
        assert again.get({**key, name: other}) is None
    assert RunCache().get(key) is None
    (path,) = tmp_path.glob("*.json")
    whole = path.read_text()
    for content in ("", "{}", "\x00\xff"):
        path.write_text(content, encoding="latin-1")
        assert RunCache(tmp_path).get(key) is None
    path.write_text(whole)
    assert RunCache(tmp_path).get(key) is not None
    monkeypatch.setattr("experiments.framework.ranks.code_version", lambda: "another")
    assert RunCache(tmp_path).get(key) is None
