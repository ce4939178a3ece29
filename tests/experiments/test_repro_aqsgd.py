"""``python -m experiments aqsgd``: the small version from end to end, and how a GPT is cut."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from experiments.__main__ import main as experiments_main
from experiments.framework.pages import BENCHMARKS
from experiments.papers.aqsgd import throughput
from experiments.papers.aqsgd.methods import aqsgd, direct
from experiments.papers.aqsgd.paper import PAPER
from experiments.papers.aqsgd.stages import Part
from experiments.papers.aqsgd.study import MORE_STAGES, SMOKE
from experiments.papers.aqsgd.tasks import SMALL_SMOKE
from experiments.papers.aqsgd.trainings import FirstTraining
from small_versions import small_version


@pytest.mark.timeout(400)
def test_the_small_version_makes_every_part_and_judges_every_claim(tmp_path: Path) -> None:
    for needed in ("matplotlib", "scipy"):
        pytest.importorskip(needed)
    small = small_version("aqsgd", tmp_path)
    assert small.code == 0, small.shown
    missing = {f"{claim.figure}/{claim.row}" for claim in PAPER.claims} - small.rows.keys()
    assert missing == {"figure 4/sooner/500mbit", "links/faster", "links/loss/aq-sgd by link"}
    for row in small.rows.values():
        # One seed shows no quality, one round no speed.
        assert row["holds"] is None or row["figure"] not in ("figure 3", "figure 7", "figure 8", "table 2"), row
    drawn, recorded = ({path.name for path in one.glob("*.svg")} for one in (tmp_path, BENCHMARKS / "aqsgd"))
    assert drawn == recorded - {"links.svg"}
    sent, task = small.rows["table 2/throughput"]["step_bytes"], SMOKE.timed
    # The first stage sends activations; each message has a header.
    assert sent["fp32"] == task.num_micro * (64 + 4 * task.message_values)
    for method, bits in ((aqsgd(3, 6), 3), (aqsgd(4, 8), 4), (direct(3, 6), 3)):
        assert sent[method.name] == task.num_micro * throughput.message_bytes(task, f"maxabs(bits={bits})")
    # Times to a loss take the step times of table 2, here or of an earlier run.
    timed = small.rows["table 2/throughput"]["by_round"]["100mbit"]
    again = ["--parts", "4", "--times", str(small.out / "aqsgd.json"), "--json", str(tmp_path / "again.json")]
    assert experiments_main(["aqsgd", "--smoke", *again, "--out", str(tmp_path / "again")]) == 0
    (later,) = json.loads((tmp_path / "again.json").read_text())["results"]
    for row in (small.rows["figure 4/sooner/100mbit"], later):
        assert row["rounds"] == {name: timed[name] for name in ("fp32", "direct fw4 bw8", "aq-sgd fw4 bw8")}


def test_stages_together_compute_what_the_gpt_does_and_half_precision_crosses_in_bf16() -> None:
    tokens, _ = SMALL_SMOKE.tuned_on(torch.arange(4))
    expected = SMALL_SMOKE.build(3)(tokens)
    for num_stages in (1, 2, MORE_STAGES):
        x = tokens
        for index in range(num_stages):
            x = Part(SMALL_SMOKE.build(3), index, num_stages, half="")(x)
        assert torch.equal(x, expected)
    crossed = Part(SMALL_SMOKE.build(3), 0, 2, half="bf16")(tokens)
    assert crossed.dtype == torch.bfloat16
    logits = Part(SMALL_SMOKE.build(3), 1, 2, half="bf16")(crossed)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, expected, atol=0.1, rtol=0.1)


def test_first_weights_are_made_once_and_for_all_tasks_that_share_them(tmp_path: Path) -> None:
    first, steps = FirstTraining(tmp_path), []
    path = first.weights(SMALL_SMOKE, lambda step, _: steps.append(step))
    assert first.weights(replace(SMALL_SMOKE, half="bf16", steps=10), lambda step, _: steps.append(step)) == path
    assert steps == list(range(1, SMALL_SMOKE.first_steps + 1))
    assert first.weights(replace(SMALL_SMOKE, first_steps=0), lambda *_: None) is None
