"""How methods are timed: in turns, in steps that are replayed, in separate runs, over links of a rate."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from experiments.__main__ import main as experiments_main
from experiments.framework.methods import FP32, NOTHING, THINWIRE, Method
from experiments.framework.replay import Clock, Compute, ReplayedTask, gradients_along, record
from experiments.framework.timing import SeparateRuns, Times, Timing, joined, rate_text, solve_rate
from experiments.tasks.images import TIMED_SMOKE
from harness import run_ranks
from thinwire_tools import lab
from thinwire_tools.ranks import RankProcesses

GPT, CNN = TIMED_SMOKE


class Machine:
    """Takes the place of the ``time`` module: ``sleep`` lets time pass, and ``work`` costs a processor's, too."""

    def __init__(self) -> None:
        self.now = self.own = self.others = 0.0
        self.beside = 0.0
        """Seconds that another thread works during the next sleep."""

    def perf_counter(self) -> float:
        return self.now

    def thread_time(self) -> float:
        return self.own

    def process_time(self) -> float:
        return self.own + self.others

    def sleep(self, seconds: float) -> None:
        self.now += seconds + 0.0001
        self.others, self.beside = self.others + min(self.beside, seconds), max(0.0, self.beside - seconds)

    def work(self, seconds: float) -> None:
        self.now, self.own = self.now + seconds, self.own + seconds


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """One on which no thread waits for a core."""
    made = Machine()
    monkeypatch.setattr("experiments.framework.replay.time", made)
    monkeypatch.setattr("experiments.framework.replay.os.listdir", lambda path: [])
    return made


def test_computing_takes_as_many_times_as_long_and_that_sleep_ends_late_does_not_add_up(machine: Machine) -> None:
    Clock(3).compute(1.0)
    Clock(3).settle()
    assert machine.now < 0.001, "a clock that is not started lets no time pass"
    for slowdown in (1, 3):
        started, clock = machine.now, Clock(slowdown)
        clock.start()
        gradient = torch.randn(8)
        copy = clock.compute(0.05, gradient)
        assert machine.now == pytest.approx(started + slowdown * 0.05, abs=0.0002)
        assert copy is not None
        assert copy is not gradient
        assert torch.equal(copy, gradient)
        for _ in range(50):
            clock.compute(0.001)
        assert machine.now == pytest.approx(started + slowdown * 0.1, abs=0.0002)


def test_work_between_computations_takes_as_many_times_as_long_and_another_thread_stops_them(machine: Machine) -> None:
    clock = Clock(4)
    machine.work(0.3)
    clock.start()
    clock.compute(0.1)
    machine.work(0.05)
    clock.settle()
    assert machine.now == pytest.approx(0.3 + 4 * 0.15, abs=0.001)
    # It is made up for once.
    clock.settle()
    machine.beside = 0.02
    clock.compute(0.1)
    clock.settle()
    assert machine.now == pytest.approx(0.3 + 4 * 0.27, abs=0.001)


def test_a_recorded_step_has_all_gradients_in_the_order_in_which_they_come() -> None:
    compute = record(GPT.task)
    names = [name for name, _ in GPT.task.build(0).named_parameters()]
    assert sorted(compute.gradients_s) == sorted(names)
    # The embedding is the output's matrix, too, and is done last.
    assert list(compute.gradients_s)[-1] == names[0]
    assert compute.step_s > 0
    assert Compute(**json.loads(json.dumps(vars(compute)))) == compute


def test_replayed_steps_hand_out_what_they_are_given() -> None:
    clock, compute = Clock(1), record(GPT.task)
    task = ReplayedTask(GPT.task, compute, clock, GPT.task.bucket_cap_mb)
    model = task.build(0)
    optimizer = task.optimizer(model)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    generator = torch.Generator().manual_seed(0)
    clock.start()
    for _ in range(2):
        gradients = {name: torch.randn(p.shape, generator=generator) for name, p in before.items()}
        optimizer.zero_grad(set_to_none=True)
        task.loss(model, gradients).backward()
        optimizer.step()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            assert torch.equal(parameter.grad, gradients[name]), name
            assert torch.equal(parameter, before[name])


def _along(rank: int) -> None:
    """Two steps' recorded gradients are those of a model that trains under DDP."""
    batches = list(GPT.task.batches(0, rank, 2))[:2]
    ddp = GPT.task.distribute(GPT.task.build(0))
    optimizer = GPT.task.optimizer(ddp.module)
    for batch, gradients in zip(batches, gradients_along(GPT.task, batches), strict=True):
        with ddp.no_sync():
            GPT.task.loss(ddp, batch).backward()
        own = torch.cat([p.grad.flatten() for p in ddp.parameters() if p.grad is not None])
        recorded = torch.cat([g.flatten() for g in gradients.values()])
        assert float(recorded.norm()) == pytest.approx(float(own.norm()), rel=1e-4)
        optimizer.zero_grad(set_to_none=True)
        GPT.task.loss(ddp, batch).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def test_gradients_are_recorded_along_a_training_by_all_ranks() -> None:
    run_ranks(_along, 2)


def test_every_run_has_new_ranks_and_one_time_of_each_method() -> None:
    turns: list[str] = []
    runs = SeparateRuns("host", False, num_ranks=2, runs=2)
    (found,) = runs.times(
        GPT, (FP32, THINWIRE, NOTHING), rounds=2, steps=1, rates=(None,), on_turn=lambda _, title: turns.append(title)
    )
    assert {name: len(seconds) for name, seconds in found.rounds.items()} == {"fp32": 2, "thinwire": 2, "nothing": 2}
    assert runs.computes is not None
    # No method is faster than what is computed.
    assert min(min(seconds) for seconds in found.rounds.values()) >= 0.9 * runs.computes[GPT].step_s
    assert len(turns) == 2 * 3 * 3


@pytest.mark.network
@pytest.mark.skipif(lab.unavailable() is not None, reason=str(lab.unavailable()))
def test_links_are_as_much_slower_as_time() -> None:
    runs = SeparateRuns("links", True, num_ranks=2, runs=1, num_cores=1)

    def link(timing: Any) -> Any:
        timing.times(GPT, (NOTHING,), rounds=1, steps=1, rates=("100mbit",), on_turn=lambda *_: None)
        return timing.link

    assert runs.each(link)[0]["rate_bps"] == [50_000_000] * 2


def test_runs_are_joined_by_their_median_rounds() -> None:
    def run(scale: float) -> Times:
        rounds = {"a": (scale, 3 * scale, 2 * scale), "b": (scale, scale, scale)}
        stages = {"a": {"encode_s": scale}}
        return Times(rounds, {"a": 7.0}, {}, stages, {"a": {"encode_s": rounds["a"]}}, rounds)

    found = joined([run(1.0), run(10.0)])
    assert found.rounds == found.cpu_s == {"a": (2.0, 20.0), "b": (1.0, 10.0)}
    assert found.least_stages == {"a": {"encode_s": (2.0, 20.0)}}
    assert found.times_faster("b", "a") == 2.0


@pytest.mark.network
@pytest.mark.skipif(lab.unavailable() is not None, reason=str(lab.unavailable()))
def test_replayed_steps_are_compared_with_computed_ones(tmp_path: Path) -> None:
    path = tmp_path / "instrument.json"
    options = ["--smoke", "--runs", "2", "--rounds", "1", "--steps", "1", "--json", str(path)]
    assert experiments_main(["bench", "instrument", *options]) == 0
    rows = {row["name"]: row for row in json.loads(path.read_text())["results"]}
    assert {"replayed", "slowed", "computed_s"} < {name.partition("/")[0] for name in rows}
    for name, row in rows.items():
        assert row["value"] > 0, name
        if not name.startswith("computed_s"):
            assert row["lower"] <= row["value"] <= row["upper"]
            assert len(row["by_run"]) == 2


def test_errors_are_those_of_what_arrives() -> None:
    pytest.importorskip("sklearn")
    half = Method("half", "half", "#000000", spec="truncate(gamma=2)")
    with Timing("host", emulated=False) as timing:
        found = timing.errors(CNN, (FP32, THINWIRE, half), steps=3, on_turn=lambda steps, title: None)
    assert {name: len(errors) for name, errors in found.items()} == {"fp32": 3, "thinwire": 3, "half": 3}
    assert max(found["fp32"]) < 1e-6
    assert all(0.02 < error < 0.5 for error in found["thinwire"])
    assert all(0.3 < error < 1 for error in found["half"])


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
    assert lab.parse_rate(rate_text(4_449_000)) == 4_400_000


def test_a_rank_that_fails_costs_its_figure_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RankProcesses.run

    def run_and_kill(ranks: RankProcesses, function: Any, *args: Any) -> list[dict[str, Any]]:
        if function.__qualname__ == "Rank.train":
            ranks.process(1).kill()
        return run(ranks, function, *args)

    monkeypatch.setattr(lab, "unavailable", lambda: "no right to make namespaces")
    monkeypatch.setattr(RankProcesses, "run", run_and_kill)
    assert experiments_main(["fft", "--smoke", "--parts", "15", "13", "5", "--out", str(tmp_path)]) == 1
    found = json.loads((tmp_path / "all.json").read_text())
    assert {row["figure"] for row in found["results"]} == {"15", "5"}
    assert found["about"]["failures"] == {"13": "rank 1: ended by signal 9"}
