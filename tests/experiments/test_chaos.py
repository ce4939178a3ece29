"""A few faults of each kind of training: every survivor has an error with the victim's rank, and none hangs."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from experiments.chaos import chaos
from experiments.chaos.scenario import FAULTS, PHASES, TRAININGS, Scenario, Training, draw

SCENARIOS = [
    Scenario(Training("ddp", "ef(minmax(bits=2))", "shared"), 10.0, "kill", "backward", 0, 1),
    Scenario(Training("ddp", "powersgd(rank=2)", "group"), 10.0, "raise", "between", 1, 1),
    Scenario(Training("dense", "minmax(bits=4)", "group"), 10.0, "exit", "forward", 2, 2),
    Scenario(Training("fsdp", "minmax(bits=8)", "group"), 10.0, "kill", "forward", 1, 2),
    Scenario(Training("pipeline", "maxabs(bits=8)", "group"), 10.0, "kill", "between", 1, 1),
]


def test_every_survivor_knows_the_victim() -> None:
    chaos._processes.set_forkserver_preload(chaos.PRELOADED)
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
