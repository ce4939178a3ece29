"""``python -m experiments aqsgd``: how a GPT is cut, and the weights that trainings start from."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from experiments.papers.aqsgd.stages import Part
from experiments.papers.aqsgd.study import MORE_STAGES
from experiments.papers.aqsgd.tasks import SMALL_SMOKE
from experiments.papers.aqsgd.trainings import FirstTraining


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
