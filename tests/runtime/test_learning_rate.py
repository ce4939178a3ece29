"""Which falls of a learning rate are drops of a schedule."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from thinwire.runtime.adapt import LearningRates

STEPS = 200


def drops(schedule: Callable[[int], float], steps: int = STEPS) -> list[int]:
    """The steps in which a schedule drops."""
    rates, dropped = LearningRates(), []
    for step in range(steps):
        rates = LearningRates.from_tensor(rates.to_tensor())
        rates.observe(schedule(step))
        if rates.dropped:
            dropped.append(step)
        rates.dropped = False
    return dropped


def test_a_schedule_in_steps_drops() -> None:
    assert drops(lambda step: 0.1 * 0.1 ** (step // 50)) == [50, 100, 150]
    assert drops(lambda step: 0.1 * 0.5 ** (step // 100)) == [100]


def test_smooth_schedules_do_not() -> None:
    for schedule in (
        lambda step: 0.05 * (1 + math.cos(math.pi * step / STEPS)),
        lambda step: 0.05 * (1 + math.cos(math.pi * step / (STEPS - 1))),
        lambda step: 0.1 * (1 - step / (STEPS - 1)),
        lambda step: 0.1 * min(1.0, step / 20) * 0.98**step,
        lambda step: 0.1 / math.sqrt(1 + step),
        lambda step: 0.1,
    ):
        assert drops(schedule) == []


def test_a_drop_is_known_until_it_was_used() -> None:
    rates = LearningRates()
    for rate in (0.1, 0.01, 0.01, None, 0.01):
        rates.observe(rate)
    assert rates.dropped
    assert LearningRates.from_tensor(rates.to_tensor()).dropped


def test_a_state_that_is_none() -> None:
    assert not LearningRates.from_tensor(None).dropped
    with pytest.raises(ValueError, match="three float64"):
        LearningRates.from_tensor(torch.zeros(2, dtype=torch.float64))
