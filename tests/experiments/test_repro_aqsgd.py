"""``python -m experiments aqsgd``: the small version from end to end, how a GPT is cut, how rows are judged."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from captions import CAPTIONS

from experiments.__main__ import main as experiments_main
from experiments.framework.claims import Row, judge
from experiments.papers.aqsgd import curves, throughput
from experiments.papers.aqsgd.methods import FP32, aqsgd, direct
from experiments.papers.aqsgd.paper import PAPER
from experiments.papers.aqsgd.stages import Part
from experiments.papers.aqsgd.study import MORE_STAGES, NUM_STAGES, SMOKE, AQSGDScale, AQSGDStudy
from experiments.papers.aqsgd.tasks import SMALL, SMALL_SMOKE, TIMED
from experiments.papers.aqsgd.timing import Computed
from experiments.papers.aqsgd.trainings import FirstTraining
from made_up import run
from small_versions import small_version

# --- the command


@pytest.mark.timeout(400)
def test_the_small_version_makes_every_part_and_judges_every_claim(tmp_path: Path) -> None:
    for needed in ("matplotlib", "scipy"):
        pytest.importorskip(needed)
    small = small_version("aqsgd", AQSGDStudy, tmp_path)
    assert small.code == 0, small.shown
    missing = {f"{claim.figure}/{claim.row}" for claim in PAPER.claims} - small.rows.keys()
    assert missing == {"table 3/wire/200mbit", "table 3/wire/300mbit", "figure 4/sooner/500mbit"}
    for name, part in PAPER.parts.items():
        # A pipeline that is killed may take the news of its last step along; what is trained already is not again.
        assert 0 < small.steps[name] <= part.steps(SMOKE), name
    for row in small.rows.values():
        # One seed shows no quality, one round no speed.
        assert row["holds"] is None or row["figure"] not in ("figure 3", "figure 7", "figure 8", "table 2"), row
    assert {path.stem for path in small.out.glob("*.svg")} == set(CAPTIONS["aqsgd"])
    # Both sides keep the same, and a killed pipeline goes on.
    row = small.rows["section 3.2/same_messages"]
    assert row["value"] == row["trainings"]
    for store in ("memory", "disk"):
        row = small.rows[f"resume/bit_identical/{store}"]
        assert row["value"] == len(row["kills"]) == len(row["starts"]) == SMOKE.kills, row
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


# --- what is trained


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


def test_every_sample_is_visited_once_an_epoch() -> None:
    for epoch in range(2):
        ids = torch.cat(SMALL.order(1, epoch))
        assert ids.sort().values.tolist() == list(range(SMALL.samples))
    assert SMALL.order(1, 0)[0].tolist() != SMALL.order(1, 1)[0].tolist()
    assert SMALL.order(1, 0)[0].tolist() != SMALL.order(2, 0)[0].tolist()
    with pytest.raises(ValueError, match="must fill batches"):
        replace(SMALL, samples=SMALL.samples + 1)


def test_first_weights_are_made_once_and_for_all_tasks_that_share_them(tmp_path: Path) -> None:
    first, steps = FirstTraining(tmp_path), []
    path = first.weights(SMALL_SMOKE, lambda step, _: steps.append(step))
    assert first.weights(replace(SMALL_SMOKE, half="bf16", steps=10), lambda step, _: steps.append(step)) == path
    assert steps == list(range(1, SMALL_SMOKE.first_steps + 1))
    assert first.weights(replace(SMALL_SMOKE, first_steps=0), lambda *_: None) is None


# --- rows


def _verdicts(rows: Sequence[Row], *, emulated: bool = True) -> dict[str, bool | None]:
    figures = {row.figure for row in rows}
    claims = [claim for claim in PAPER.claims if claim.figure in figures]
    return {row.name: row.holds for row in judge(claims, rows, emulated=emulated) if row.claim}


def test_a_loss_that_is_kept_says_something_where_the_control_fails() -> None:
    pytest.importorskip("scipy")
    names = (FP32, curves.DIRECT[3, 6], curves.AQSGD[3, 6])
    losses = zip(names, ((2.0, 2.1), (2.2, 2.31), (2.001, 2.101)), strict=True)
    found = {method.name: [run([loss]) for loss in of] for method, of in losses}
    key = curves.key_of("small", NUM_STAGES, (3, 6))
    for control, kept in (((0.2, 0.21), True), ((0.0, 0.001), None)):
        rows = curves.pair(AQSGDScale(), "figure 3", "small", NUM_STAGES, (3, 6), found, control)
        assert _verdicts(rows) == {f"aqsgd/{key}": kept, f"direct/{key}": True}


def test_throughput_is_judged_round_by_round_and_only_over_slow_links() -> None:
    slow, fast = ({m.name: (seconds,) * 6 for m in throughput.METHODS} for seconds in (1.0, 0.9))
    slow["fp32"] = (7.0,) * 6
    slow[throughput.DISK[3, 6].name] = (2.0,) * 6
    links = {"100mbit": "10mbit", "10gbit": "1gbit"}
    data: dict[str, Any] = {"links": links, "by_round": {"100mbit": slow, "10gbit": fast}}
    more = {"compute_s": 0.1, "message_values": 4, "slowdown": 10.0}
    rows = [Row("table 2", "throughput", 1.0, "sequences/s", data | more)]
    found = _verdicts(rows)
    # Half as fast over one of the links; as fast, but from one run, within what runs differ by.
    assert found.pop("as_direct/aq-sgd fw3 bw6, disk") is False
    assert {name for name, holds in found.items() if holds} == {"kept/aq-sgd fw4 bw8"}
    assert set(found.values()) == {True, None}
    assert set(_verdicts(rows, emulated=False).values()) == {None}


def test_rates_are_scaled_to_the_papers_proportion(tmp_path: Path) -> None:
    study = AQSGDStudy(AQSGDScale(), tmp_path, None, True)  # type: ignore[arg-type]
    study._computed = Computed(0.015, 0.03)
    values_per_s = TIMED.message_values / 0.045
    assert study.slowdown == pytest.approx((1024 * 1600 / 0.18) / values_per_s)
    assert study.scaled("100mbit") == "8mbit"
    study.emulated = False
    assert study.scaled("100mbit") is None
