"""``thinwire repro aqsgd``: the small version from end to end, its page, how a GPT is cut, every judgement."""

from __future__ import annotations

import importlib
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from made_up import run
from small_versions import Small, small_version
from thinwire import cli, lab, parse
from thinwire.repro.aqsgd import command, of_breakdown, of_curves, of_resume, of_throughput, of_time
from thinwire.repro.aqsgd.contest import Computed
from thinwire.repro.aqsgd.judged import bands, lost
from thinwire.repro.aqsgd.of_completions import common
from thinwire.repro.aqsgd.stages import Part
from thinwire.repro.aqsgd.study import MORE_STAGES, SMOKE, Scale, Study
from thinwire.repro.aqsgd.tasks import SMALL, SMALL_SMOKE, TIMED, FineTuning
from thinwire.repro.aqsgd.trainings import FirstTraining
from thinwire.repro.aqsgd.ways import FP32, aqsgd, direct
from thinwire.repro.cgx.contest import Times
from thinwire.repro.crew import Crew

ROOT = Path(__file__).resolve().parent.parent
PARTS = ("1", "3", "t3", "2", "4", "labels", "8", "fp16", "links", "resume", "completions")
PICTURES = ("1-change", "3-curves", "2-throughput", "4-time", "3ab-labels", "9-stages", "8-fp16", "links")
WORDS = {True: "yes", False: "no", None: "open"}


# --- the command


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Small:
    for needed in ("matplotlib", "scipy"):
        pytest.importorskip(needed)
    return small_version("aqsgd", Study, tmp_path_factory.mktemp("aqsgd"))


@pytest.mark.timeout(400)
def test_the_small_version_makes_every_part_and_judges_every_claim(small: Small) -> None:
    assert small.code == 0, small.shown
    assert small.seconds < 180
    assert set(small.steps) == set(PARTS)
    for row in small.record["results"]:
        assert row["found"]
        assert row["holds"] in (True, False, None)
        # One seed shows no quality, one round no speed.
        assert row["holds"] is None or row["figure"] not in ("figure 3", "figure 7", "figure 8", "table 2"), row
    for figure in ("figure 1", "figure 3", "figure 7", "figure 8", "figure 9", "table 2", "table 3", "figure 4"):
        assert any(row["claim"] for row in small.record["results"] if row["figure"] == figure), figure
    for name in PICTURES:
        assert (small.out / f"aqsgd-{name}.svg").read_text().startswith("<?xml")
    assert small.record["about"]["smoke"] is True


@pytest.mark.timeout(400)
def test_the_steps_that_are_foretold_are_those_of_a_part(small: Small) -> None:
    foretold = {part: steps for part, (_, steps, _) in command._phases(PARTS, SMOKE).items()}
    # A pipeline that is killed may take the news of its last step along, once for each kill and kind of store.
    untold = foretold["resume"] - small.steps["resume"]
    assert 0 <= untold <= 2 * SMOKE.kills
    assert dict(small.steps) == {**foretold, "resume": foretold["resume"] - untold}
    # What an earlier part has trained is not trained again.
    alone = {part: command._phases([part], SMOKE)[part][1] for part in PARTS}
    assert {part for part in PARTS if alone[part] > foretold[part]} == {
        *("3", "labels", "fp16", "links", "resume", "completions")
    }


@pytest.mark.timeout(400)
def test_both_sides_keep_the_same_and_a_killed_pipeline_goes_on(small: Small) -> None:
    assert small.rows["section 3.2/same_messages"]["holds"] is True
    for store in ("memory", "disk"):
        row = small.rows[f"resume/bit_identical/{store}"]
        assert row["holds"] is True, row
        assert len(row["starts"]) == SMOKE.kills


@pytest.mark.timeout(400)
def test_rows_say_what_travelled(small: Small) -> None:
    row = small.rows["table 2/throughput"]
    sent, task = row["step_bytes"], SMOKE.timed
    # The first stage sends activations; each message has a header.
    assert sent["fp32"] == task.num_micro * (64 + 4 * task.message_values)
    for way in (aqsgd(3, 6), aqsgd(4, 8), direct(3, 6), aqsgd(3, 6, store="disk")):
        bits = 3 if "fw3" in way.name else 4
        message = of_breakdown.message_bytes(task, f"maxabs(bits={bits})")
        assert sent[way.name] == task.num_micro * message
    assert set(row["per_s"]) >= {"fp32", "fp32 1f1b", "aq-sgd fw3 bw6 1f1b"}


@pytest.mark.timeout(400)
@pytest.mark.skipif(not (ROOT / "tools" / "aqsgd_page.py").exists(), reason="not in a source tree")
def test_the_page_is_made_of_the_figures(small: Small, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    page_of = importlib.import_module("aqsgd_page").repro_aqsgd
    assert "Not measured yet" in page_of(tmp_path)
    (tmp_path / "repro-aqsgd.json").write_text(json.dumps(small.record))
    page = page_of(tmp_path)
    assert "mean \\|change\\|" in page
    page = page.replace("\\|", "|")
    for row in small.record["results"]:
        told = f"| {row['figure']} | {row['claim']} | {row['found']} | {WORDS[row['holds']]} |"
        assert not row["claim"] or told in page
    for text in ("| AQ-SGD fw3 bw6, disk |", "| DirectQ fw4 bw8 |", "| fine-tuning, 4 stages, fw3 bw6 |", "Table 3"):
        assert text in page


def test_a_rank_that_fails_costs_its_part_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for needed in ("matplotlib", "scipy"):
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
    told = ["--smoke", "--parts", "completions", "t3", "--out", str(tmp_path), "--json", str(path)]
    assert cli.main(["repro", "aqsgd", *told]) == 1
    record = json.loads(path.read_text())
    assert {row["figure"] for row in record["results"]} == {"table 3"}
    assert all(row["holds"] is None for row in record["results"])
    assert "signal 9" in record["about"]["failures"]["completions"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--parts", "1", "7"], "choose among 1 3"),
        (["--seeds", "0"], "at least 1"),
        (["--rounds", "0"], "at least 1"),
    ],
)
def test_wrong_arguments_are_told_and_nothing_is_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    out = tmp_path / "out"
    assert cli.main(["repro", "aqsgd", "--smoke", "--out", str(out), *arguments]) == 64
    assert message in " ".join(capsys.readouterr().err.split())
    assert not out.exists()


def test_a_full_run_is_foretold_under_three_quarters_of_an_hour() -> None:
    seconds = sum(seconds for _, _, seconds in command._phases(PARTS, Scale()).values())
    assert 300 < seconds < 2700


# --- what is trained


@pytest.mark.parametrize("num_stages", [1, 2, MORE_STAGES])
def test_stages_together_compute_what_the_gpt_does(num_stages: int) -> None:
    gpt = SMALL_SMOKE.build(3)
    tokens, _ = SMALL_SMOKE.tuned_on(torch.arange(4))
    expected = gpt(tokens)
    x = tokens
    for index in range(num_stages):
        x = Part(SMALL_SMOKE.build(3), index, num_stages, half="")(x)
    assert torch.equal(x, expected)


def test_half_precision_crosses_in_bf16() -> None:
    tokens, _ = SMALL_SMOKE.tuned_on(torch.arange(4))
    crossed = Part(SMALL_SMOKE.build(3), 0, 2, half="bf16")(tokens)
    assert crossed.dtype == torch.bfloat16
    logits = Part(SMALL_SMOKE.build(3), 1, 2, half="bf16")(crossed)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, SMALL_SMOKE.build(3)(tokens), atol=0.1, rtol=0.1)


def test_every_sample_is_visited_once_an_epoch_and_none_is_held_out() -> None:
    for epoch in range(2):
        ids = torch.cat(SMALL.order(1, epoch))
        assert ids.sort().values.tolist() == list(range(SMALL.samples))
    assert SMALL.order(1, 0)[0].tolist() != SMALL.order(1, 1)[0].tolist()
    assert SMALL.order(1, 0)[0].tolist() != SMALL.order(2, 0)[0].tolist()
    samples = SMALL.tuned_on(torch.arange(SMALL.samples))[0]
    held_out = torch.cat([x for x, _ in SMALL.held_out()])
    assert len(held_out) == SMALL.held_out_windows
    assert samples.shape == (SMALL.samples, SMALL.model.context)


def test_the_learning_rate_rises_and_then_falls_to_zero() -> None:
    rates = [SMALL.rate(step) for step in range(SMALL.steps)]
    assert max(rates) == pytest.approx(SMALL.learning_rate)
    assert rates[0] < rates[1] < max(rates)
    assert 0 < rates[-1] < 0.05 * SMALL.learning_rate
    assert SMALL.epochs * SMALL.steps_per_epoch == SMALL.steps


def test_a_task_must_fill_its_batches_and_comes_back_from_json() -> None:
    import dataclasses

    assert FineTuning.from_json(json.loads(json.dumps(dataclasses.asdict(TIMED)))) == TIMED
    with pytest.raises(ValueError, match="must fill batches"):
        replace(SMALL, samples=SMALL.samples + 1)


def test_first_weights_are_made_once_and_for_all_tasks_that_share_them(tmp_path: Path) -> None:
    first, steps = FirstTraining(tmp_path), []
    path = first.weights(SMALL_SMOKE, lambda step, _: steps.append(step))
    assert first.weights(replace(SMALL_SMOKE, half="bf16", steps=10), lambda step, _: steps.append(step)) == path
    assert steps == list(range(1, SMALL_SMOKE.first_steps + 1))
    assert first.weights(replace(SMALL_SMOKE, first_steps=0), lambda *_: None) is None


@pytest.mark.parametrize("bits", [(2, 4), (3, 6), (4, 8)])
def test_no_way_loses_more_of_a_change_than_there_is(bits: tuple[int, int]) -> None:
    forward = parse(direct(*bits).forward.removeprefix("direct(").removesuffix(")"))
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    error = torch.linalg.vector_norm(forward.roundtrip(x) - x) / torch.linalg.vector_norm(x)
    assert error < math.sqrt(0.5)


# --- judgements


def test_loss_is_lost_where_it_is_beyond_the_margin() -> None:
    base = [run([3.0, 2.0]), run([3.0, 2.1])]
    assert lost([run([3.0, 2.001]), run([3.0, 2.101])], base, 0.01).within is True
    assert lost([run([3.0, 2.2]), run([3.0, 2.31])], base, 0.01).beyond is True
    assert lost(base[:1], base[:1], 0.01).within is None
    assert "diverges" in lost([run([3.0, math.inf]), run([3.0, 2.0])], base, 0.01).text


def test_a_band_ends_where_a_seed_diverges() -> None:
    mean, low, high = bands([run([3.0, 2.0, math.inf]), run([4.0, 2.5, 2.0])])
    assert (mean, low, high) == ([3.5, 2.25], [3.0, 2.0], [4.0, 2.5])


def test_time_to_the_same_loss_is_taken_at_the_worse_end() -> None:
    base, ours = run([4.0, 3.0, 2.0], step_s=(10.0,) * 3), run([4.0, 3.0, 2.5])
    gained, reached = of_time.sooner(base, ours)
    assert reached == 2.5
    assert gained == pytest.approx(25 / 3)
    assert of_time.seconds_to(ours, 1.0) is None
    assert of_time.seconds_to(ours, 5.0) == 1.0


def test_rates_are_scaled_to_the_papers_proportion(tmp_path: Path) -> None:
    study = Study(Scale(), tmp_path, None, True)  # type: ignore[arg-type]
    study._computed = Computed(0.015, 0.03)
    values_per_s = TIMED.message_values / 0.045
    assert study.slowdown == pytest.approx((1024 * 1600 / 0.18) / values_per_s)
    assert study.scaled("100mbit") == "8mbit"
    assert study.wire_s("100mbit") / 0.045 == pytest.approx(64 * 1024 * 1600 / 1e8 / 0.18)
    study.emulated = False
    assert study.scaled("100mbit") is None
    assert study.verdict(True) is None


def test_what_is_kept_is_of_the_fast_link_in_the_same_round() -> None:
    times = {"fast": Times({"a": (1.0, 1.2, 0.8)}, {}), "slow": Times({"a": (2.0, 1.0, 4.0)}, {})}
    assert of_throughput.kept(times, "slow", "fast", "a") == [0.5, 1.2, 0.2]


def test_more_stages_hurt_where_the_distance_grows() -> None:
    ways = (FP32, of_curves.DIRECT[3, 6], of_curves.AQSGD[3, 6])
    few = dict(zip([way.name for way in ways], ([run([2.0])] * 2, [run([2.1])] * 2, [run([2.0])] * 2), strict=True))
    many = dict(few) | {ways[1].name: [run([2.4]), run([2.5])]}
    assert of_curves._stages(few, many).holds is True
    assert of_curves._stages(many, few).holds is False


def test_kills_are_between_checkpoints() -> None:
    every = of_resume.checkpoint_every(SMALL)
    found = of_resume.kills(SMALL, 3, 2)
    assert len(found) == 3
    assert all(every < kill.step < SMALL.steps and kill.step % every for kill in found)
    assert {kill.rank for kill in found} == {0, 1}


def test_completions_are_alike_up_to_where_they_first_differ() -> None:
    base, other = (run([1.0], prompted=1, completions=rows) for rows in ((b"xabcd", b"yabcd"), (b"xabxd", b"yzbcd")))
    assert common(base, base) == 1
    assert common(base, other) == pytest.approx(0.25)
