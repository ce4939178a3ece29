"""``thinwire repro fullstack``: the small version from end to end, its page, what is trained, every judgement."""

from __future__ import annotations

import importlib
import json
import math
from pathlib import Path

import pytest
import torch

from made_up import run
from small_versions import Small, small_version
from thinwire import cli
from thinwire.repro.aqsgd.of_resume import checkpoint_every, kills
from thinwire.repro.cgx.contest import Times
from thinwire.repro.fullstack import command, of_adam, of_figure5
from thinwire.repro.fullstack.study import NUM_RANKS, SMOKE, Scale, Study
from thinwire.repro.fullstack.tasks import SMALL, TIMED, Stacked
from thinwire.repro.fullstack.ways import ADAM, FP32, GRADIENTS, QUANTIZED, WARMING, aqsgd, direct

ROOT = Path(__file__).resolve().parent.parent
PARTS = tuple(command._PARTS)
UNDECIDED = ("figure 5/loss", "figure 5/faster", "adam/", "figure 10/loss", "appendix F", "appendix G/loss")
WORDS = {True: "yes", False: "no", None: "open"}


# --- the command


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Small:
    for needed in ("matplotlib", "scipy", "sklearn"):
        pytest.importorskip(needed)
    return small_version("fullstack", Study, tmp_path_factory.mktemp("fullstack"))


@pytest.mark.timeout(400)
def test_the_small_version_makes_every_part_and_judges_every_claim(small: Small) -> None:
    assert small.code == 0, small.shown
    assert set(small.steps) == set(PARTS)
    for row in small.record["results"]:
        assert row["found"]
        assert row["holds"] in (True, False, None)
        # One seed shows no quality, one round no speed.
        assert row["holds"] is None or not row["name"].startswith(UNDECIDED), row
    for figure in ("figure 5", "adam", "figure 10", "appendix G", "appendix F", "resume"):
        assert any(row["claim"] for row in small.record["results"] if row["figure"] == figure), figure
    for name in ("5-curves", "5-throughput", "5-time", "adam", "10-split"):
        assert (small.out / f"fullstack-{name}.svg").read_text().startswith("<?xml")


@pytest.mark.timeout(400)
def test_the_steps_that_are_foretold_are_those_of_a_part(small: Small) -> None:
    assert dict(small.steps) == {part: steps for part, (_, steps, _) in command._phases(PARTS, SMOKE).items()}


@pytest.mark.timeout(400)
def test_replicas_stay_alike_and_a_killed_stack_goes_on(small: Small) -> None:
    for figure in ("figure 5", "figure 10", "appendix G"):
        assert small.rows[f"{figure}/alike"]["holds"] is True
    row = small.rows["resume/bit_identical"]
    assert row["holds"] is True, row
    assert len(row["starts"]) == SMOKE.kills
    assert all(start > SMOKE.small.exact_steps - 1 for start in row["starts"])


@pytest.mark.timeout(400)
def test_either_part_switched_off_sends_more(small: Small) -> None:
    sent = small.rows["figure 5/throughput"]["step_bytes"]
    both, task = sent[of_figure5.AQSGD.name], SMOKE.timed
    assert both < min(sent[of_figure5.ACTIVATIONS.name], sent[of_figure5.ONLY_GRADIENTS.name])
    assert sent["fp32"] > max(sent[of_figure5.ACTIVATIONS.name], sent[of_figure5.ONLY_GRADIENTS.name])
    # A header a message, activations in 32 bits, and the first stage's gradient once around two ranks.
    activations = task.num_micro * (64 + 4 * task.message_values)
    config = task.model
    block = 12 * config.width**2 + 13 * config.width
    gradient = 4 * (config.vocabulary * config.width + config.layers // 2 * block)
    assert sent["fp32"] == activations + gradient


@pytest.mark.timeout(400)
@pytest.mark.skipif(not (ROOT / "tools" / "fullstack_page.py").exists(), reason="not in a source tree")
def test_the_page_is_made_of_the_figures(small: Small, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    page_of = importlib.import_module("fullstack_page").repro_fullstack
    assert "Not measured yet" in page_of(tmp_path)
    (tmp_path / "repro-fullstack.json").write_text(json.dumps(small.record))
    page = page_of(tmp_path)
    for row in small.record["results"]:
        told = f"| {row['figure']} | {row['claim']} | {row['found']} | {WORDS[row['holds']]} |"
        assert not row["claim"] or told in page
    for text in ("| gradients only (4 bits) |", "| DirectQ fw3 bw6 + QuantizedAdam 4 |", "| QuantizedAdam, 4 bits |"):
        assert text in page
    for text in ("| AQ-SGD fw2 bw8[0.2] |", "| 256 centres fw2 bw6 |", "| delta compensation, 3 bits |"):
        assert text in page


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--parts", "5", "7"], "choose among 5"),
        (["--seeds", "0"], "at least 1"),
        (["--rounds", "0"], "at least 1"),
        (["--cifar", "nowhere"], "is missing"),
    ],
)
def test_wrong_arguments_are_told_and_nothing_is_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    out = tmp_path / "out"
    assert cli.main(["repro", "fullstack", "--smoke", "--out", str(out), *arguments]) == 64
    assert message in " ".join(capsys.readouterr().err.split())
    assert not out.exists()


def test_a_full_run_is_foretold_under_half_an_hour() -> None:
    seconds = sum(seconds for _, _, seconds in command._phases(PARTS, Scale()).values())
    assert 300 < seconds < 1800


# --- what is trained


def test_replicas_visit_their_own_samples_once_an_epoch() -> None:
    shares = [[torch.cat(SMALL.share(1, epoch, replica)) for epoch in range(2)] for replica in range(2)]
    for replica in range(2):
        first, second = shares[replica]
        assert first.tolist() != second.tolist()
        assert sorted(first.tolist()) == sorted(second.tolist())
        assert len(SMALL.share(1, 0, replica)) == SMALL.steps_per_epoch
    assert sorted(torch.cat([share[0] for share in shares]).tolist()) == list(range(SMALL.samples))


def test_a_task_must_fill_the_batches_of_all_replicas() -> None:
    with pytest.raises(ValueError, match="in each of 2 pipelines"):
        Stacked(samples=24, batch=8, held_out_windows=8, num_micro=4)


def test_a_stages_gradient_has_about_as_many_values_as_its_activations() -> None:
    stage = sum(p.numel() for p in TIMED.build(0).parameters()) / 2
    assert 0.4 < TIMED.batch * TIMED.model.context * TIMED.model.width / stage < 2.5


def test_ways_compress_what_they_say() -> None:
    assert aqsgd(3, 6).forward == "delta(maxabs(bits=3))"
    assert aqsgd(3, 6).gradients == direct(3, 6).gradients == GRADIENTS
    assert direct(3, 6).forward == "direct(maxabs(bits=3))"
    assert of_figure5.ACTIVATIONS.gradients == ""
    assert of_figure5.ONLY_GRADIENTS.forward == "raw"


def test_kills_come_when_momenta_travel() -> None:
    every = checkpoint_every(SMALL)
    for kill in kills(SMALL, 4, NUM_RANKS, SMALL.exact_steps):
        assert kill.step // every * every >= SMALL.exact_steps
        assert kill.step % every


# --- judgements


def test_exact_steps_take_their_own_time() -> None:
    times = Times({ADAM.name: (4.0,), QUANTIZED.name: (1.0,), WARMING.name: (5.0,)}, {})
    assert of_adam.at_steps(run([3.0, 2.0, 1.0]), QUANTIZED, times, 1).step_s == (5.0, 1.0, 1.0)
    assert of_adam.at_steps(run([3.0, 2.0, 1.0]), ADAM, times, 1).step_s == (4.0, 4.0, 4.0)


def test_times_are_compared_at_the_same_loss() -> None:
    ours, other = run([3.0, 2.0, 1.0]), run([3.0, 2.0, 1.0], step_s=(4.0, 4.0, 4.0))
    assert of_adam.relative_times([ours], [other], [2.0]) == [pytest.approx(-0.75)]
    assert of_adam.relative_times([ours], [other], [0.5]) == [math.inf]
    assert of_adam._steps_to(other, 10.0) == pytest.approx(2.5)


def test_the_ceiling_is_the_fastest_step_of_all() -> None:
    seconds = {way.name: (1.0,) for way in of_figure5.TIMED}
    found = {"slow": Times({**seconds, FP32.name: (8.0,)}, {}), "fast": Times({**seconds, FP32.name: (0.5,)}, {})}
    assert of_figure5.ceiling(found, "slow") == 16.0
