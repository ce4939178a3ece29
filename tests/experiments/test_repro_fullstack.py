"""``python -m experiments fullstack``: the small version from end to end, its page, every judgement."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from experiments.__main__ import main as experiments_main
from experiments.framework.timing import Times
from experiments.papers.aqsgd.resume import checkpoint_every, kills
from experiments.papers.fullstack import measurements
from experiments.papers.fullstack.measurements import NUM_RANKS, StackStudy
from experiments.papers.fullstack.methods import (
    ACTIVATIONS,
    ADAM,
    AQSGD,
    DIRECT,
    GRADIENTS,
    ONLY_GRADIENTS,
    QUANTIZED,
    WARMING,
)
from experiments.papers.fullstack.paper import PAPER
from experiments.papers.fullstack.tasks import SMALL, TIMED, Stacked
from made_up import run
from small_versions import Small, small_version

SMOKE = PAPER.smoke
UNDECIDED = ("figure 5/loss", "figure 5/faster", "adam/", "figure 10/loss", "appendix F", "appendix G/loss")


# --- the command


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Small:
    for needed in ("matplotlib", "scipy", "sklearn"):
        pytest.importorskip(needed)
    return small_version("fullstack", StackStudy, tmp_path_factory.mktemp("fullstack"))


@pytest.mark.timeout(400)
def test_the_small_version_makes_every_part_and_judges_every_claim(small: Small) -> None:
    assert small.code == 0, small.shown
    # First trainings are made once, and predicted for every part that takes them.
    assert all(0 < small.steps[part] <= made.steps(SMOKE) for part, made in PAPER.parts.items())
    judged = {f"{claim.figure}/{claim.row}" for claim in PAPER.claims}
    assert judged <= small.rows.keys()
    for name, row in small.rows.items():
        assert bool(row["found"]) == (name in judged), name
        # One seed shows no quality, one round no speed.
        assert row["holds"] is None or not name.startswith(UNDECIDED), row
    for name in ("5-curves", "5-throughput", "5-time", "adam", "10-split"):
        assert (small.out / f"fullstack-{name}.svg").read_text().startswith("<?xml")


@pytest.mark.timeout(400)
def test_replicas_stay_alike_and_a_killed_stack_goes_on(small: Small) -> None:
    assert small.rows["figure 5/alike"]["value"] == int(small.rows["figure 5/alike"]["found"].split()[-2])
    for figure in ("figure 10", "appendix G"):
        assert all(small.rows[f"{figure}/table"]["alike"])
    row = small.rows["resume/bit_identical"]
    assert row["value"] == len(row["kills"]), row
    assert len(row["starts"]) == SMOKE.kills
    assert all(start > SMOKE.small.exact_steps - 1 for start in row["starts"])


@pytest.mark.timeout(400)
def test_either_part_switched_off_sends_more(small: Small) -> None:
    sent = small.rows["figure 5/throughput"]["step_bytes"]
    both, task = sent[AQSGD.name], SMOKE.timed
    assert both < min(sent[ACTIVATIONS.name], sent[ONLY_GRADIENTS.name])
    assert sent["fp32"] > max(sent[ACTIVATIONS.name], sent[ONLY_GRADIENTS.name])
    # A header a message, activations in 32 bits, and the first stage's gradient once around two ranks.
    activations = task.num_micro * (64 + 4 * task.message_values)
    config = task.model
    block = 12 * config.width**2 + 13 * config.width
    gradient = 4 * (config.vocabulary * config.width + config.layers // 2 * block)
    assert sent["fp32"] == activations + gradient


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


def test_methods_compress_what_they_say() -> None:
    assert AQSGD.forward == "delta(maxabs(bits=3, midrise=True, rounding=nearest))"
    assert AQSGD.gradients == DIRECT.gradients == GRADIENTS
    assert DIRECT.forward == "direct(maxabs(bits=3, midrise=True, rounding=nearest))"
    assert ACTIVATIONS.gradients == ""
    assert ONLY_GRADIENTS.forward == "raw"


def test_kills_come_when_momenta_are_sent() -> None:
    every = checkpoint_every(SMALL)
    for kill in kills(SMALL, 4, NUM_RANKS, SMALL.exact_steps):
        assert kill.step // every * every >= SMALL.exact_steps
        assert kill.step % every


# --- judgements


def test_exact_steps_take_their_own_time() -> None:
    times = Times({ADAM.name: (4.0,), QUANTIZED.name: (1.0,), WARMING.name: (5.0,)}, {})
    assert measurements.at_steps(run([3.0, 2.0, 1.0]), QUANTIZED, times, 1).step_s == (5.0, 1.0, 1.0)
    assert measurements.at_steps(run([3.0, 2.0, 1.0]), ADAM, times, 1).step_s == (4.0, 4.0, 4.0)


def test_times_are_compared_at_the_same_loss() -> None:
    ours, other = run([3.0, 2.0, 1.0]), run([3.0, 2.0, 1.0], step_s=(4.0, 4.0, 4.0))
    assert measurements.relative_times([ours], [other], [2.0]) == [pytest.approx(-0.75)]
    assert measurements.relative_times([ours], [other], [0.5]) == [math.inf]
    assert measurements.steps_within(other, 10.0) == pytest.approx(2.5)


def test_rates_are_the_papers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert experiments_main(["fullstack", "--rate", "1gbit", "--out", str(tmp_path / "out")]) == 64
    assert "--rate: links have the paper's rates" in " ".join(capsys.readouterr().err.split())
    assert experiments_main(["fullstack", "--data", "nowhere", "--out", str(tmp_path / "out")]) == 64
    assert "is missing" in " ".join(capsys.readouterr().err.split())
