"""After ``detach()`` every method answers or raises at once: none waits for a thread that has ended."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import sharded
import thinwire
from harness import on_ranks, run_threads
from nets import make
from thinwire.local import DiLoCo
from thinwire.plan import Plan
from thinwire.runtime import BucketEngine, ThreadExecutor

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


def _check(calls: dict[str, Callable[[], Any]], raising: set[str], why: str) -> None:
    """Those in ``raising`` say why, and the others answer."""
    answers = {name: _soon(call) for name, call in calls.items()}
    assert {name for name, answer in answers.items() if answer != "answered"} == raising, answers
    assert all(why in answers[name] for name in raising), answers


STATES = {"state_dict", "gather_state_dict", "load_state_dict"}


def _calls(wire: thinwire.Wire, state: dict[str, torch.Tensor]) -> dict[str, Callable[[], Any]]:
    """All that users call."""
    return {
        "state_dict": wire.state_dict,
        "gather_state_dict": wire.gather_state_dict,
        "load_state_dict": lambda: wire.load_state_dict(state),
        "reset_stats": wire.reset_stats,
        "state_dict_template": lambda: wire.state_dict_template(3),
        "stats": lambda: wire.stats,
        "sent_bytes": wire.sent_bytes,
        "detach": wire.detach,
    }


def _detached_wire(transport: Any) -> None:
    wire = thinwire.Wire(BucketEngine(Plan.build(SHAPES, "ef(minmax(bits=4))"), SHAPES, transport))
    wire.engine.begin_step()
    wire.engine.reduce(torch.ones(64 * 64), LAYERS).wait()
    state = wire.state_dict()
    wire.detach()
    calls: dict[str, Callable[[], Any]] = {
        **_calls(wire, state),
        "resync": lambda: wire.engine.resync({}),
        "check_parity": lambda: wire.engine.check_parity([], None),
        "reduce": lambda: wire.engine.reduce(torch.zeros(64 * 64), LAYERS).wait(),
        "plan_rows": wire.engine.plan_rows,
        "begin_step": wire.engine.begin_step,
    }
    _check(calls, {*STATES, "resync", "check_parity", "reduce"}, "detach")


def test_every_method_of_a_detached_wire_answers_or_raises() -> None:
    run_threads(_detached_wire, 2)


@on_ranks(2)
def test_every_method_of_a_detached_sharded_wire_answers_or_raises(rank: int) -> None:
    model = sharded.build()
    wire = sharded.compress(model, "minmax(bits=8, bucket=64)", "ef(minmax(bits=8, bucket=64))")
    sharded.train(model, 2)
    state = wire.state_dict()
    wire.detach()
    _check(_calls(wire, state), STATES, "detach")


@on_ranks(2)
def test_every_method_of_closed_local_updates_answers_or_raises(rank: int) -> None:
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
    _check(calls, {*STATES, "step"}, "closed")


def test_a_closed_worker_refuses_jobs() -> None:
    worker = ThreadExecutor("test")
    worker.close()
    assert "RuntimeError" in _soon(lambda: worker.call(lambda: None))
    with pytest.raises(RuntimeError, match="closed"):
        worker.submit(iter(()))  # type: ignore[arg-type]
    assert _soon(worker.close) == "answered"
    assert _soon(worker.wait_idle) == "answered"
