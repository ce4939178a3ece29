"""``thinwire repro qsdp``: the small version from end to end, its page, how FSDP2 runs, every judgement."""

from __future__ import annotations

import dataclasses
import importlib
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from harness import run_ranks
from small_versions import Small, small_version
from thinwire import cli, lab, parse
from thinwire.repro.cgx.contest import Times
from thinwire.repro.crew import Crew
from thinwire.repro.findings import Finding
from thinwire.repro.qsdp import command, of_bandwidth, of_errors, of_levels, of_quality, of_ratios, of_regression
from thinwire.repro.qsdp.judged import curve, lost
from thinwire.repro.qsdp.sharding import backward, shard
from thinwire.repro.qsdp.sizes import SIZES, SIZES_SMOKE, TIMED_SMOKE
from thinwire.repro.qsdp.study import MORE_RANKS, SMOKE, Scale, Study
from thinwire.repro.qsdp.trainings import Trained
from thinwire.repro.qsdp.ways import (
    FP16,
    FP32,
    NOTHING,
    RAW,
    UNBUCKETED,
    W4G4,
    W8G8,
    Way,
    learned,
    shortened,
    uniform,
)

ROOT = Path(__file__).resolve().parent.parent
PARTS = ("5.1", "5.2", "5.3", "C.2", "C.4", "C.5", "bandwidth", "5.2fig", "C.1", "bytes")
PICTURES = ("5.1", "5.2", "5.3", "C.2-C.3", "C.4", "C.5", "5.3-bandwidth", "5.2-time", "C.1")
WORDS = {True: "yes", False: "no", None: "open"}


# --- the command


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Small:
    for needed in ("sklearn", "matplotlib", "scipy"):
        pytest.importorskip(needed)
    return small_version("qsdp", Study, tmp_path_factory.mktemp("qsdp"))


@pytest.mark.timeout(400)
def test_the_small_version_makes_every_part_and_judges_every_claim(small: Small) -> None:
    assert small.code == 0, small.shown
    assert small.seconds < 180
    assert set(small.steps) == set(PARTS)
    for row in small.record["results"]:
        assert row["found"]
        assert row["holds"] in (True, False, None)
        # One seed shows no quality, one round no speed.
        judged = ("table 5.1", "table 5.2", "table 5.3", "figure C.4", "figure 5.3", "table C.2")
        assert row["holds"] is None or row["figure"] not in judged, row
    figures = ("table 5.1", "table 5.2", "table 5.3", "table C.3", "table C.2", "figure C.1", "figure C.2")
    figures += ("figure C.3", "figure C.4", "figure C.5", "figure 5.2", "figure 5.3", "section C.3", "section 5.6")
    for figure in (*figures, "section 5.6.1", "section 5.7.1"):
        if lab.unavailable() is None or figure != "figure 5.3":
            assert any(row["claim"] for row in small.record["results"] if row["figure"] == figure), figure
    for name in PICTURES:
        assert (small.out / f"qsdp-{name}.svg").read_text().startswith("<?xml")
    assert small.record["about"]["smoke"] is True
    assert "This takes about a minute." in small.shown


@pytest.mark.timeout(400)
@pytest.mark.network
@pytest.mark.skipif(lab.unavailable() is not None, reason=str(lab.unavailable()))
def test_the_steps_that_are_foretold_are_those_of_a_part(small: Small) -> None:
    foretold = {part: steps for part, (_, steps, _) in command._phases(PARTS, SMOKE).items()}
    assert dict(small.steps) == foretold
    # What an earlier part has trained is not trained again.
    alone = {part: command._phases([part], SMOKE)[part][1] for part in PARTS}
    assert {part for part in PARTS if alone[part] > foretold[part]} == {"5.2", "5.3", "C.4"}


@pytest.mark.timeout(400)
@pytest.mark.network
@pytest.mark.skipif(lab.unavailable() is not None, reason=str(lab.unavailable()))
def test_rows_say_what_travelled(small: Small) -> None:
    sent = small.rows["figure 5.3/step_s"]["payload_bytes"]
    # Of so small a network some is raw.
    assert 3.2 < sent["raw"] / sent["W8G8"] < 4
    assert 5 < sent["raw"] / sent["W4G4"] < 8
    for way in ("W8G8", "W4G4", "raw"):
        row = small.rows[f"section 5.6/interface_bytes/{way}"]
        assert row["payload_bytes"] == row["formula_bytes"] * 1
        assert row["gathers"] == SMOKE.num_micro + 1
        assert row["reductions"] == 1
        assert 0.98 < row["value"] < 1.1
    flat = small.rows["section 5.6.1/hierarchical_over_flat"]
    assert set(flat["step_s"]) == {"fp32", "flat", "hierarchical", "nothing"}


@pytest.mark.timeout(400)
def test_perplexities_are_kept_by_seed(small: Small) -> None:
    for size in SIZES_SMOKE:
        row = small.rows[f"table 5.1/lost/{size.name}/2 ranks"]
        assert len(row["perplexities"]) == len(row["baseline_perplexities"]) == SMOKE.seeds
        # Of 8 bits so little is lost that no training can miss it by far.
        assert row["perplexities"][0] == pytest.approx(row["baseline_perplexities"][0], rel=0.05)
        assert row["of_weights_as_kept"][0] == pytest.approx(row["perplexities"][0], rel=0.01)
    assert f"table 5.1/lost/small/{MORE_RANKS} ranks" in small.rows
    assert len([name for name in small.rows if name.startswith("table 5.2/perplexity/")]) == 9
    cost = small.rows["section C.3/learning_cost"]
    assert cost["learn_at"] == list(SIZES_SMOKE[0].learn_at)
    assert cost["learn_s"][0] > 0


@pytest.mark.timeout(400)
@pytest.mark.skipif(not (ROOT / "tools" / "qsdp_page.py").exists(), reason="not in a source tree")
def test_the_page_is_made_of_the_figures(small: Small, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    page_of = importlib.import_module("qsdp_page").repro_qsdp
    assert "Not measured yet" in page_of(tmp_path)
    (tmp_path / "repro-qsdp.json").write_text(json.dumps(small.record))
    page = page_of(tmp_path)
    for row in small.record["results"]:
        told = f"| {row['figure']} | {row['claim']} | {row['found']} | {WORDS[row['holds']]} |"
        assert not row["claim"] or told in page
    for text in (
        "35.81 and 35.58, GPT 125M",
        "| weights of 6 bits |",
        "| W4G4 | ",
        "| nothing sent |",
        "| weights / 8 |",
    ):
        assert text in page


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
    told = ["--smoke", "--parts", "5.2fig", "C.5", "bytes", "--out", str(tmp_path), "--json", str(path)]
    assert cli.main(["repro", "qsdp", *told]) == 1
    record = json.loads(path.read_text())
    assert {row["figure"] for row in record["results"]} == {"figure C.5", "section 5.6"}
    assert all(row["holds"] is None for row in record["results"] if row["figure"] == "section 5.6")
    assert "signal 9" in record["about"]["failures"]["5.2fig"]
    assert "not judged: no right to make namespaces" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--parts", "5.1", "5.4"], "choose among 5.1 5.2 5.3"),
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
    assert cli.main(["repro", "qsdp", "--smoke", "--out", str(out), *arguments]) == 64
    assert message in " ".join(capsys.readouterr().err.split())
    assert not out.exists()


def test_everything_takes_at_most_twenty_minutes() -> None:
    seconds = [seconds for _, _, seconds in command._phases(PARTS, Scale()).values()]
    assert sum(seconds) <= 20 * 60


# --- ways


def test_ways_are_specs_and_survive_json() -> None:
    ways = [FP16, FP32, RAW, NOTHING, W8G8, W4G4, learned(6, 4, (3, 9)), shortened(2, 8), uniform(3, 32)]
    for way in ways:
        assert Way(**json.loads(json.dumps(dataclasses.asdict(way)))) == way
    assert W8G8.weights == W8G8.gradients == "minmax(bits=8, bucket=1024)"
    assert (uniform(3, 32).weights, uniform(3, 32).gradients) == ("minmax(bits=3, bucket=1024)", "raw")
    assert parse(uniform(4, 4, bucket=UNBUCKETED).weights).wire_bytes((64, 1024)) < 65536 // 2 + 128
    # Levels of more than 6 bits are not learned.
    assert learned(8, 2, (3, 9)).weights == W8G8.weights
    assert parse(learned(8, 2, (3, 9)).gradients) == parse("levels(bits=2, bucket=1024, learn_at=(3, 9), min_numel=0)")
    assert [way.exact for way in (FP32, shortened(1, 1), shortened(2, 1), NOTHING)] == [True, True, False, False]


def test_names_of_ways_tell_them_apart() -> None:
    ways = [way for _, _, way, _ in set().union(*(command._PARTS[part].work(SMOKE).trainings for part in PARTS))]
    by_name: dict[str, set[Way]] = {}
    for way in ways:
        by_name.setdefault(way.name, set()).add(way)
    assert all(len(named) == 1 for named in by_name.values())


def test_levels_are_learned_as_far_into_a_training_as_in_the_thesis() -> None:
    steps = replace(SIZES[0], task=replace(SIZES[0].task, steps=4800)).learn_at
    assert steps == (400, 1900, 3800)
    assert all(0 < step < size.task.steps for size in SIZES for step in size.learn_at)


# --- under FSDP2


def _gradients(rank: int, way: Way, num_micro: int) -> tuple[list[torch.Tensor], dict[str, float], float]:
    torch.set_num_threads(1)
    model = shard(TIMED_SMOKE, init_device_mesh("cpu", (2,)), 0, half=way.half)
    wire = way.attach(model)
    loss = backward(TIMED_SMOKE, model, next(iter(TIMED_SMOKE.batches(0, rank, 2))), num_micro)
    found = [p.grad.full_tensor() for p in model.parameters()]  # pyright: ignore
    return found, wire.stats.to_dict() if wire else {}, loss


def test_micro_batches_make_the_gradient_of_the_whole_batch() -> None:
    (whole, once, loss), _ = run_ranks(_gradients, 2, RAW, 1)
    (parts, counted, loss_of_parts), _ = run_ranks(_gradients, 2, RAW, 4)
    (stock, _, _), _ = run_ranks(_gradients, 2, FP32, 4)
    for a, b, c in zip(whole, parts, stock, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-6)
        torch.testing.assert_close(b, c, rtol=1e-5, atol=1e-7)
    assert loss == pytest.approx(loss_of_parts, rel=1e-4)
    num_modules = TIMED_SMOKE.model.layers + 1
    assert (counted["gathers"], counted["reductions"]) == (5 * num_modules, num_modules)
    assert once["reductions"] == num_modules


def test_with_nothing_sent_a_rank_has_its_own_gradient_twice() -> None:
    found = run_ranks(_gradients, 2, NOTHING, 2)
    for values, counted, loss in found:
        assert math.isfinite(loss)
        assert not counted
        assert all(torch.isfinite(value).all() for value in values)
    # A ratio of one is stock; a large one leaves most of what there was.
    (whole, _, loss), _ = run_ranks(_gradients, 2, replace(shortened(1.5, 1.5), name="some"), 2)
    assert math.isfinite(loss)
    assert all(torch.isfinite(value).all() for value in whole)


# --- judgements


def _trained(perplexity: float, probes: tuple[float, ...] = (250.0, 20.0, 10.0)) -> Trained:
    return Trained((4, 8), probes, (0.5,) * 8, perplexity, perplexity, 0.1, None)


def test_quality_is_judged_by_perplexity_seed_by_seed() -> None:
    base = [_trained(10.0), _trained(11.0), _trained(12.0)]
    same = [_trained(10.01), _trained(10.99), _trained(12.02)]
    worse = [_trained(10.5), _trained(11.6), _trained(12.6)]
    assert lost(same, base, 0.01).within is True
    told = lost(worse, base, 0.01)
    assert (told.within, told.beyond) == (False, True)
    assert "11.567 against 11.000" in told.text
    assert lost(same[:1], base[:1], 0.01).beyond is None
    assert lost([_trained(math.inf)] * 3, base, 0.01).beyond is True


def test_quality_says_nothing_where_the_control_does_not_fail() -> None:
    base = [_trained(10.0), _trained(11.0)]
    found = {FP16.name: base, W8G8.name: base}
    judged = of_quality._recovered(SIZES[0], 2, found, 0.01, sensitive=True)
    assert judged.holds is True
    blind = of_quality._recovered(SIZES[0], 2, found, 0.01, sensitive=False)
    assert blind.holds is None
    assert "says nothing" in blind.found


def test_learned_levels_hold_where_they_are_no_worse() -> None:
    base, plain = [_trained(10.0), _trained(11.0)], [_trained(12.0), _trained(13.0)]
    better = [_trained(11.5), _trained(12.4)]
    pair = of_levels.PAIRS[2]
    assert of_levels._better(pair, plain, better, base).holds is True
    assert of_levels._better(pair, better, plain, base).holds is False
    assert of_levels._better(pair, plain[:1], better[:1], base[:1]).holds is None


def test_a_curve_and_the_time_to_a_perplexity() -> None:
    run = _trained(9.0)
    assert run.seconds == [0.0, 2.0, 4.0]
    assert run.seconds_to(15.0) == pytest.approx(3.0)
    assert run.seconds_to(5.0) is None
    assert run.learn_share == pytest.approx(0.1 / 4)
    assert curve([run, _trained(9.0, (250.0, 30.0, math.inf))]) == ([0, 4], [250.0, 25.0])


class _Emulated:
    """What judgements of times ask of a study."""

    scale = Scale()
    rates = ("100mbit", "1gbit")

    def verdict(self, holds: bool | None) -> bool | None:
        return holds


def _times(seconds: dict[str, float], rounds: int = 8) -> Times:
    return Times({name: (value,) * rounds for name, value in seconds.items()}, {})


def test_speed_is_judged_over_the_slowest_link_and_constancy_over_the_fastest() -> None:
    study: Any = _Emulated()
    slow = {"fp32": 5.0, "fp16": 4.0, "raw": 3.4, "W8G8": 1.0, "nothing": 0.2}
    fast = {"fp32": 0.4, "fp16": 0.4, "raw": 0.4, "W8G8": 0.9, "nothing": 0.2}
    found = {"100mbit": _times(slow), "1gbit": _times(fast)}
    rows = {way.name: of_bandwidth._faster(study, found, way) for way in (FP32, FP16, RAW)}
    assert {name: row.holds for name, row in rows.items()} == {"fp32": True, "fp16": True, "raw": False}
    assert "2.25x" in rows["fp16"].claim
    assert rows["raw"].claim.startswith("not in the thesis")
    (constant,) = of_bandwidth._constant(study, found)
    assert constant.holds is True
    assert constant.value == pytest.approx(1 / 0.9 - 1)
    found["1gbit"] = _times({**fast, "W8G8": 0.8})
    assert of_bandwidth._constant(study, found)[0].holds is False


def test_the_table_of_ratios_is_the_thesiss() -> None:
    assert set(of_ratios.THESIS) == {(w, g) for w in of_ratios.RATIOS for g in of_ratios.RATIOS}
    assert set(of_quality.THESIS_GRID) == {(w, g) for w in of_quality.BITS for g in of_quality.BITS}


# --- levels and regression


def test_uniform_levels_code_as_the_nearest_of_min_max() -> None:
    values = torch.randn(3000, generator=torch.Generator().manual_seed(0))
    levels = torch.linspace(0.0, 1.0, 16)
    nearest = parse("minmax(bits=4, bucket=1024, rounding=nearest)").roundtrip(values)
    torch.testing.assert_close(of_errors.with_levels(values, levels, 4), nearest, rtol=1e-3, atol=1e-3)
    assert of_errors.relative_error(values, values) == 0
    assert of_errors.relative_error(values, torch.zeros_like(values)) == pytest.approx(1)


def _curves(gains: dict[str, float]) -> list[of_errors.Curve]:
    steps = [0, 10, 20, 30, 40, 50, 60]
    return [
        of_errors.Curve("embedding.weight", what, steps, [gain] * 7, [1.0] * 7, [1.01] * 7)
        for what, gain in gains.items()
    ]


def test_errors_are_judged_from_the_first_learning_on() -> None:
    size = replace(SIZES[0], task=replace(SIZES[0].task, steps=60))

    def judged(gains: dict[str, float]) -> list[bool | None]:
        rows: list[Finding] = of_errors._rows(size, "embedding.weight", _curves(gains))
        return [row.holds for row in rows]

    assert judged({"weights": 1.1, "gradients": 1.3}) == [True, True, True]
    assert judged({"weights": 1.3, "gradients": 1.1}) == [True, False, True]
    assert judged({"weights": 0.9, "gradients": 1.1})[0] is False


def test_descents_reach_the_optimum_and_quantised_ones_hover_above_it() -> None:
    pytest.importorskip("sklearn")
    problem = of_regression.made(200)
    exact = list(of_regression.descend(problem, "exact", 0, 300, batches=False))
    shifted = list(of_regression.descend(problem, "shift", 0, 300, batches=False))
    again = list(of_regression.descend(problem, "shift", 0, 300, batches=False))
    other = list(of_regression.descend(problem, "shift", 1, 300, batches=False))
    assert shifted == again != other
    assert problem.least < problem.loss(torch.zeros(90))
    assert 0 <= of_regression.tail(exact) < of_regression.tail(shifted) < 0.01 * exact[0] + of_regression.tail(exact)
    patients = of_regression.diabetes()
    assert patients.least == pytest.approx(0.2038, abs=1e-3)
    assert patients.features.shape == (442, 65)
    assert patients.loss(torch.zeros(65)) == pytest.approx(0.5, rel=1e-3)
    assert of_regression.thinned(list(range(120)))[:3] == [0, 2, 4]
