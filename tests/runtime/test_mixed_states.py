"""What all ranks must have in common in the states that they load is compared, whichever compressor keeps it."""

from __future__ import annotations

import re

import pytest
import torch
from test_laws import SPECS
from test_wire import same
from torch import Tensor

from harness import run_threads
from thinwire import DisagreementError, Plan, Wire, parse
from thinwire.plan import Filter
from thinwire.runtime import BucketEngine, WireSettings

SHAPES = {"w": (64, 48), "v": (40, 30)}
LAYERS = tuple(SHAPES.items())
NUMEL = 64 * 48 + 40 * 30
SHARED = {spec: [slot.name for slot in parse(spec).slots if slot.shared and not slot.scratch] for spec in SPECS}
LEARNED = [spec for spec, slots in SHARED.items() if slots and not re.search("scale=params|levels", spec)]
"""Whose shared slots are not those of any other run, so early."""


def trained(spec: str, transport, scale: float, *, simulated: bool = False) -> Wire:
    plan = Plan.build(SHAPES, spec, Filter(min_numel=0))
    wire = Wire(BucketEngine(plan, SHAPES, transport, WireSettings(seed=1), simulated=simulated))
    generator = torch.Generator().manual_seed(transport.rank)
    for _ in range(3):
        wire.engine.begin_step()
        flat = torch.randn(NUMEL, generator=generator) ** 3 * scale
        wire.engine.reduce(flat, LAYERS).wait()
    return wire


@pytest.mark.parametrize("spec", LEARNED)
def test_the_state_of_another_run_on_one_rank_is_refused_on_all(spec: str) -> None:
    """Its step, seed and plan are the same; `Slot.shared` values are not."""

    def run(transport) -> str:
        saved: dict[float, dict[str, Tensor]] = {}
        for scale in (1.0, 30.0):
            wire = trained(spec, transport, scale)
            saved[scale] = wire.state_dict()
            wire.detach()
        wire = trained(spec, transport, 5.0)
        before = wire.state_dict()
        with pytest.raises(DisagreementError, match="load what was saved together") as error:
            wire.load_state_dict(saved[30.0 if transport.rank else 1.0])
        assert same(before, wire.state_dict())
        wire.load_state_dict(saved[30.0])
        assert same(saved[30.0], wire.state_dict())
        return str(error.value)

    first, second = run_threads(run, 2)
    assert first == second
    assert any(f"rank 0 has '{slot} of w: checksum 0x" in first for slot in SHARED[spec]), first


def test_slots_of_a_simulation_are_each_ranks_own() -> None:
    def run(transport) -> Tensor:
        wire = trained("powersgd(rank=2)", transport, 1.0, simulated=True)
        state = wire.state_dict()
        wire.load_state_dict(state)
        return state[f"rank{transport.rank}/q/w"]

    first, second = run_threads(run, 2)
    assert not torch.equal(first, second)
