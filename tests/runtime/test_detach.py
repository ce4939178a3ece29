"""After ``detach()`` every method answers or raises at once: none waits for a thread that has ended."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import thinwire
from harness import run_ranks, run_threads
from nets import make, train
from sharded import build, compress, train as train_sharded
from thinwire.local import DiLoCo
from thinwire.plan import Plan
from thinwire.runtime import ThreadExecutor

SHAPES = {"w": (64, 64)}
LAYERS = (("w", (64, 64)),)


def _soon(call: Callable[[], Any], seconds: float = 20.0) -> str:
    """What ``call`` raises, or "answered"; never waits longer than ``seconds``."""
    outcome: list[str] = []

    def run() -> None:
        try:
            call()
        except Exception as error:  # noqa: BLE001 - it is the answer
            outcome.append(f"{type(error).__name__}: {error}")
        else:
            outcome.append("answered")

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return outcome[0] if outcome else "hangs"


def _methods(wire: thinwire.Wire, state: dict[str, torch.Tensor]) -> dict[str, Callable[[], Any]]:
    flat = torch.zeros(64 * 64)
    return {
        "state_dict": wire.state_dict,
        "gather_state_dict": wire.gather_state_dict,
        "load_state_dict": lambda: wire.load_state_dict(state),
        "reset_stats": wire.reset_stats,
        "resync": lambda: wire.resync({}),
        "check_parity": lambda: wire.check_parity([], None, now=True),
        "reduce": lambda: wire.reduce(flat, LAYERS).wait(),
        "state_dict_of": lambda: wire.state_dict_of(3),
        "stats": lambda: wire.stats,
        "plan_rows": wire.plan_rows,
        "wire_bytes_per_step": wire.wire_bytes_per_step,
        "begin_step": wire.begin_step,
        "detach": wire.detach,
    }


RAISE = {"state_dict", "gather_state_dict", "load_state_dict", "resync", "check_parity", "reduce"}


def _detached_wire(transport: Any) -> dict[str, str]:
    wire = thinwire.Wire(Plan.build(SHAPES, "ef(minmax(bits=4))"), SHAPES, transport)
    wire.begin_step()
    wire.reduce(torch.ones(64 * 64), LAYERS).wait()
    state = wire.state_dict()
    wire.detach()
    return {name: _soon(call) for name, call in _methods(wire, state).items()}


def test_every_method_of_a_detached_wire_answers_or_raises() -> None:
    for answers in run_threads(_detached_wire, 2):
        assert {name for name, answer in answers.items() if answer != "answered"} == RAISE
        for name in RAISE:
            assert "detach" in answers[name], answers[name]


def _detached_ddp(rank: int) -> dict[str, str]:
    model = make(rank)
    wire = thinwire.compress(model, "ef(minmax(bits=4))", skip_if_slower=False)
    train(model, rank, 2)
    state = wire.state_dict()
    wire.detach()
    answers = {name: _soon(call) for name, call in _methods(wire, state).items()}
    train(model, rank, 1, first=2)
    return answers


def test_a_detached_wire_of_ddp_too() -> None:
    for answers in run_ranks(_detached_ddp, 2):
        assert "hangs" not in answers.values()
        assert {name for name, answer in answers.items() if answer != "answered"} == RAISE


def _detached_fsdp(rank: int, size: int) -> dict[str, str]:
    model = build()
    wire = compress(model, "minmax(bits=8, bucket=64)", "ef(minmax(bits=8, bucket=64))")
    train_sharded(model, 2)
    state = wire.state_dict()
    wire.detach()
    calls: dict[str, Callable[[], Any]] = {
        "state_dict": wire.state_dict,
        "gather_state_dict": wire.gather_state_dict,
        "load_state_dict": lambda: wire.load_state_dict(state),
        "reset_stats": wire.reset_stats,
        "state_dict_of": lambda: wire.state_dict_of(3),
        "stats": lambda: wire.stats,
        "gather_bytes": wire.gather_bytes,
        "reduce_bytes": wire.reduce_bytes,
        "detach": wire.detach,
    }
    answers = {name: _soon(call) for name, call in calls.items()}
    train_sharded(model, 1, first=2)
    return answers


def test_every_method_of_a_detached_sharded_wire_answers_or_raises() -> None:
    for answers in run_ranks(_detached_fsdp, 2, 2):
        raising = {name for name, answer in answers.items() if answer != "answered"}
        assert raising == {"state_dict", "gather_state_dict", "load_state_dict"}
        for name in raising:
            assert "detach" in answers[name], answers[name]


def _closed_diloco(rank: int) -> dict[str, str]:
    module = make(rank).module
    local = DiLoCo(module, torch.optim.SGD(module.parameters(), lr=0.1), every=1)
    local.step()
    state = local.state_dict()
    local.close()
    calls: dict[str, Callable[[], Any]] = {
        "step": local.step,
        "finish": local.finish,
        "state_dict": local.state_dict,
        "gather_state_dict": local.gather_state_dict,
        "load_state_dict": lambda: local.load_state_dict(state),
        "stats": lambda: local.wire.stats,
        "close": local.close,
    }
    return {name: _soon(call) for name, call in calls.items()}


def test_every_method_of_closed_local_updates_answers_or_raises() -> None:
    for answers in run_ranks(_closed_diloco, 2):
        raising = {name for name, answer in answers.items() if answer != "answered"}
        assert raising == {"step", "state_dict", "gather_state_dict", "load_state_dict"}
        for name in raising:
            assert "closed" in answers[name], answers[name]


def test_a_closed_worker_refuses_jobs() -> None:
    worker = ThreadExecutor("test")
    worker.close()
    assert "RuntimeError" in _soon(lambda: worker.call(lambda: None))
    with pytest.raises(RuntimeError, match="closed"):
        worker.submit(iter(()))  # type: ignore[arg-type]
    assert _soon(worker.close) == "answered"
    assert _soon(worker.wait_idle) == "answered"
