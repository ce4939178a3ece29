"""Methods timed in turns: who takes turns when, errors of what arrives, and the rate of a link."""

from __future__ import annotations

import pytest

from experiments.framework.claims import Rows, ahead, ratios, times_faster
from experiments.framework.methods import FP32, NOTHING, THINWIRE, Method
from experiments.framework.timing import Times, Timing, rate_text, solve_rate
from experiments.tasks.models import TIMED_SMOKE
from thinwire_tools import lab

CNN = TIMED_SMOKE[1]


def test_turns_are_taken_by_all_and_counted_after_the_first() -> None:
    pytest.importorskip("sklearn")
    turns: list[tuple[int, str]] = []
    with Timing("host", emulated=False) as timing:
        found = timing.times(
            CNN,
            (FP32, THINWIRE, NOTHING),
            rounds=2,
            steps=3,
            rate=None,
            on_turn=lambda steps, title: turns.append((steps, title)),
        )
    assert {name: len(rounds) for name, rounds in found.rounds.items()} == {"fp32": 2, "thinwire": 2, "nothing": 2}
    assert all(seconds > 0 for rounds in found.rounds.values() for seconds in rounds)
    assert [title for _, title in turns] == [
        *("nothing sent", "thinwire", "DDP fp32"),
        *("DDP fp32", "thinwire", "nothing sent"),
        *("nothing sent", "thinwire", "DDP fp32"),
    ]
    assert {steps for steps, _ in turns} == {3}
    assert set(found.payload_bytes) == {"fp32", "thinwire"}
    # Four ranks: 2 · 3/4 of the gradient.
    assert found.payload_bytes["fp32"] == 1.5 * CNN.gradient_bytes


def test_errors_are_those_of_what_arrives() -> None:
    pytest.importorskip("sklearn")
    half = Method("half", "half", "#000000", spec="truncate(gamma=2)")
    with Timing("host", emulated=False) as timing:
        found = timing.errors(CNN, (FP32, THINWIRE, half), steps=3, on_turn=lambda steps, title: None)
    assert {name: len(errors) for name, errors in found.items()} == {"fp32": 3, "thinwire": 3, "half": 3}
    assert max(found["fp32"]) < 1e-6
    assert all(0.02 < error < 0.5 for error in found["thinwire"])
    assert all(0.3 < error < 1 for error in found["half"])


def test_methods_are_compared_round_by_round() -> None:
    times = Times({"slow": (2.0, 8.0, 3.0), "fast": (1.0, 2.0, 1.5)}, {})
    assert times.over("fast", "slow") == [2.0, 4.0, 2.0]
    assert times.times_faster("slow", "fast") == 0.5
    assert times.step_s("slow") == 3.0
    rows: Rows = {name: {"step_s": list(rounds)} for name, rounds in times.rounds.items()}
    assert ratios(rows, "fast", "slow") == [2.0, 4.0, 2.0]
    assert times_faster(rows, "slow", "fast") == 0.5
    assert ahead("fast", "slow")(rows).holds
    rows = {name: {"step_s": [*row["step_s"], *row["step_s"]]} for name, row in rows.items()}
    assert ahead("fast", "slow")(rows).holds
    assert ahead("slow", "fast")(rows).holds is False
    rows["fast"] = {"step_s": [1.0, 9.0, 1.5]}
    rows["slow"] = {"step_s": [2.0, 8.0, 3.0]}
    assert ahead("fast", "slow")(rows).holds is None


def test_the_rate_at_which_a_step_takes_a_time() -> None:
    def step_s(rate: float) -> float:
        return 0.2 + 50e6 / rate

    fast, slow = (400e6, step_s(400e6)), (200e6, step_s(200e6))
    assert solve_rate(fast, slow, 0.4) == pytest.approx(250e6)
    assert solve_rate(fast, slow, 0.7) == pytest.approx(100e6)
    # Whatever noise makes of it, it stays near what was measured.
    assert solve_rate(fast, slow, 0.201) == 8 * 400e6
    assert solve_rate(fast, slow, 100.0) == 200e6 / 8
    assert solve_rate((400e6, 0.5), (200e6, 0.4), 1.0) == 400e6
    assert [rate_text(rate) for rate in (287_600_000, 4_449_000, 1.26e9)] == ["290mbit", "4.4mbit", "1300mbit"]
    assert lab.parse_rate(rate_text(4_449_000)) == 4_400_000
