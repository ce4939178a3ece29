"""``python -m experiments bench masks``: full masks change nothing, and those that are compared cost the same bytes."""

from __future__ import annotations

import pytest

from experiments.bench.masks import METHODS, REFERENCE, Layers, Method, sent_bytes, train
from thinwire_tools.compare.gpt import GPTConfig
from thinwire_tools.compare.tasks import GPTTask

TASK = GPTTask(model=GPTConfig(width=32, layers=1, context=16), steps=4, batch=2, held_out_windows=8)
BY_NAME = {method.name: method for method in METHODS}


def _loss(method: Method, workers: int) -> float:
    return train(method, TASK, workers, seed=0, rate=1e-2)["loss"]


@pytest.mark.parametrize("masks", ["own", "mean", "owners", "known"])
def test_updates_of_one_worker_that_are_sent_whole_are_those_of_adamw(masks: str) -> None:
    whole = _loss(Method("whole", "updates", masks=masks), workers=1)
    assert whole == pytest.approx(_loss(BY_NAME[REFERENCE], workers=1), rel=1e-6)
    assert _loss(Method("sparse", "updates", masks=masks, density=0.01), workers=1) != pytest.approx(whole, rel=1e-4)


def test_momenta_that_are_sent_whole_are_those_of_the_mean_gradient() -> None:
    whole = _loss(Method("whole", "momenta", "AdamS", "owners", late=True), workers=2)
    assert whole == pytest.approx(_loss(BY_NAME["AdamS, fp32"], workers=2), rel=1e-6)


def test_masks_of_workers_and_of_all_cost_the_same_bytes() -> None:
    layers = Layers(GPTTask(model=GPTConfig(width=64, layers=2, context=64)).build(0))
    own = sent_bytes(BY_NAME["updates, each worker's own mask"], layers, 2)
    compared = [method for method in METHODS if method.masks and method.density < 0.1]
    assert len(compared) == 6
    for method in compared:
        assert sent_bytes(method, layers, 2) == pytest.approx(own, rel=0.02)
    assert sent_bytes(BY_NAME[REFERENCE], layers, 2) == 4 * layers.numel
    assert sent_bytes(BY_NAME["alone"], layers, 1) == 0
