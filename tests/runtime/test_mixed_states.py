"""What all ranks must have in common in the states that they load is compared, whichever compressor keeps it."""

from __future__ import annotations

import pytest
import torch
from test_laws import SPECS
from test_wire import gradients, make as make_wire, same, step_on
from torch import Tensor

from harness import run_threads
from thinwire import DisagreementError, Plan, Wire, parse
from thinwire.plan import Filter
from thinwire.runtime import WireSettings

SHAPES = {"w": (64, 48), "v": (40, 30)}
LAYERS = tuple(SHAPES.items())
NUMEL = 64 * 48 + 40 * 30
SHARED = {spec: [slot.name for slot in parse(spec).slots if slot.shared and not slot.scratch] for spec in SPECS}
UNLEARNED = {"levels(bits=4, bucket=1024, min_numel=0)", "ef(levels(bits=2, min_numel=0))"}
"""Whose shared slots are those of any other run, so early."""


def trained(spec: str, transport, scale: float, *, simulated: bool = False) -> Wire:
    plan = Plan.build(SHAPES, spec, Filter(min_numel=0))
    wire = Wire(plan, SHAPES, transport, WireSettings(seed=1), simulated=simulated)
    generator = torch.Generator().manual_seed(transport.rank)
    for _ in range(3):
        wire.begin_step()
        flat = torch.randn(NUMEL, generator=generator) ** 3 * scale
        if simulated:
            wire.simulate(flat, LAYERS)
            wire.note_result(flat, LAYERS)
        else:
            wire.reduce(flat, LAYERS).wait()
    return wire


@pytest.mark.parametrize("spec", [s for s, slots in SHARED.items() if slots and "scale=params" not in s])
def test_the_state_of_another_run_on_one_rank_is_refused_on_all(spec: str) -> None:
    """Its step, seed and plan are the same; `Slot.shared` values are not."""

    def run(transport) -> tuple[str, bool]:
        saved: dict[float, dict[str, Tensor]] = {}
        for scale in (1.0, 30.0):
            wire = trained(spec, transport, scale)
            saved[scale] = wire.state_dict()
            wire.detach()
        wire = trained(spec, transport, 5.0)
        if spec in UNLEARNED:
            wire.load_state_dict(saved[30.0 if transport.rank else 1.0])
            return "", True
        before = wire.state_dict()
        with pytest.raises(DisagreementError) as error:
            wire.load_state_dict(saved[30.0 if transport.rank else 1.0])
        untouched = same(before, wire.state_dict())
        wire.load_state_dict(saved[30.0])
        return str(error.value), untouched and same(saved[30.0], wire.state_dict())

    (first, right), (second, right_there) = run_threads(run, 2)
    assert first == second
    assert right
    assert right_there
    if spec not in UNLEARNED:
        assert any(f"rank 0 has '{slot} of w: checksum 0x" in first for slot in SHARED[spec]), first
        assert "load what was saved together" in first


def test_slots_of_a_simulation_are_each_ranks_own() -> None:
    def run(transport) -> Tensor:
        wire = trained("powersgd(rank=2)", transport, 1.0, simulated=True)
        state = wire.state_dict()
        wire.load_state_dict(state)
        return state[f"rank{transport.rank}/q/w"]

    first, second = run_threads(run, 2)
    assert not torch.equal(first, second)


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_a_gathered_state_suits_other_worlds(num_ranks: int) -> None:
    """Residuals then differ between ranks, and shared slots do not."""
    rules = {"a.weight": "intdiana", "b.weight": "ef(minmax(bits=2))", "c.*": "powersgd(rank=2)", "scalar": "raw"}

    def run(transport):
        wire = make_wire(transport, rules)
        for step in range(3):
            step_on(wire, gradients(transport.rank, step))
        return wire.gather_state_dict()

    state = run_threads(run, 2)[0]
    run_threads(lambda transport: make_wire(transport, rules).load_state_dict(state), num_ranks)
