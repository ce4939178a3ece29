"""The search for messages that break decoders finds what breaks one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from torch import Tensor

from experiments.validation.fuzz import Tally, Target, attack, damaged, fuzz

WHOLE = np.arange(200, dtype=np.uint8)


def test_damage_is_of_all_kinds_and_repeats_with_its_seed() -> None:
    rows = damaged(WHOLE, 400, np.random.default_rng(3))
    assert (rows == damaged(WHOLE, 400, np.random.default_rng(3))).all()
    changed = (rows != WHOLE).sum(1)
    assert (changed > 0).mean() > 0.9
    assert set(np.flatnonzero(changed > 100) // 100) == {0}, "a quarter is noise, and no more"


def against(take: Callable[[Tensor], None], check: Callable[[], None] = lambda: None) -> Tally:
    tally = Tally()
    attack(Target(WHOLE, take, check), 320, np.random.default_rng(0), tally)
    return tally


def test_what_is_promised_is_counted_and_anything_else_is_an_error() -> None:
    def refuse(message: Tensor) -> None:
        if message.numel() < WHOLE.size:
            raise ValueError("too short")

    tally = against(refuse)
    assert tally.inputs == 320
    assert 5 <= tally.refused["ValueError"] <= 20
    assert tally.decoded == 320 - tally.refused.total()

    def raises(error: Exception) -> Callable[[Tensor], None]:
        def take(message: Tensor) -> None:
            raise error

        return take

    with pytest.raises(IndexError):
        against(raises(IndexError("out of range")))
    with pytest.raises(AssertionError, match="without a word"):
        against(raises(ValueError()))


def test_a_small_search(tmp_path: Path) -> None:
    assert fuzz(inputs=9000, seed=1, json=tmp_path / "fuzz.json") == 0
    rows = {row["name"]: row["value"] for row in json.loads((tmp_path / "fuzz.json").read_text())["results"]}
    assert rows["inputs"] == 9000
    assert 0 < rows["refused/ValueError"] < rows["decoded"]
