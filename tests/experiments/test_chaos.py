"""A few faults of each kind of training: every survivor has an error with the victim's rank, and none hangs."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from experiments.validation import chaos
from experiments.validation.chaos_rank import FAULTS, PHASES, TRAININGS, Scenario, Training, draw

SCENARIOS = [
    Scenario(Training("ddp", "ef(minmax(bits=2))", "shared"), 10.0, "kill", "backward", 0, 1),
    Scenario(Training("ddp", "powersgd(rank=2)", "group"), 10.0, "raise", "between", 1, 1),
    Scenario(Training("dense", "minmax(bits=4)", "group"), 10.0, "exit", "forward", 2, 2),
    Scenario(Training("fsdp", "minmax(bits=8)", "group"), 10.0, "kill", "forward", 1, 2),
    Scenario(Training("pipeline", "maxabs(bits=8)", "group"), 10.0, "kill", "between", 1, 1),
]


def test_every_survivor_knows_the_victim() -> None:
    multiprocessing.get_context("forkserver").set_forkserver_preload(chaos.PRELOADED)
    with ThreadPoolExecutor(2) as pool:
        outcomes = list(pool.map(chaos.run, SCENARIOS))
    for outcome in outcomes:
        assert outcome.struck, outcome
        for survivor in outcome.survivors:
            assert survivor.named, outcome
            assert survivor.saved, outcome


def test_scenarios_depend_on_the_seed_alone_and_are_all_kinds() -> None:
    drawn = [draw(1, number, 8.0) for number in range(600)]
    assert drawn == [draw(1, number, 8.0) for number in range(600)]
    assert drawn != [draw(2, number, 8.0) for number in range(600)]
    ours = [scenario for scenario, _ in drawn]
    assert {s.training for s in ours} == set(TRAININGS)
    assert {(s.fault, s.phase) for s in ours} == {(fault, phase) for fault in FAULTS for phase in PHASES}
    assert all(control.training.attachment == "stock" for _, control in drawn)


def test_a_broken_promise_fails_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    promised = chaos.Survivor(1, "TransportError", True, 1.5)
    cases = [(promised, "RuntimeError", 0), (chaos.Survivor(1, "aborted"), "aborted", 0)]
    changes: list[dict[str, Any]] = [{"named": False}, {"seconds": 13.5}, {"wrong_digests": 1}, {"saved": False}]
    cases += [(replace(promised, **change), "RuntimeError", 1) for change in changes]
    cases += [(chaos.Survivor(1, end), "RuntimeError", 1) for end in ("hung", "aborted")]
    for survivor, of_stock, code in cases:

        def run(scenario: Scenario, _: object = None, ours: Any = survivor, stock: str = of_stock) -> chaos.Outcome:
            own = scenario.training.attachment != "stock"
            return chaos.Outcome(scenario, [ours if own else chaos.Survivor(1, stock)], struck=True)

        monkeypatch.setattr(chaos, "run", run)
        assert chaos.chaos(faults=1) == code, survivor
