"""A state that is loaded is the one that was saved, or is refused with the name of the entry that is not."""

from __future__ import annotations

import pytest
import torch
from test_wire import gradients, make, step_on
from torch import Tensor

from harness import run_threads
from thinwire import PeerFailedError
from thinwire.runtime.checkpoint import sealed

RULES = {"b.weight": "ef(powersgd(rank=2))", "*": "ef(minmax(bits=2))"}


def trained_state() -> dict[str, Tensor]:
    def run(transport) -> dict[str, Tensor]:
        wire = make(transport, RULES, seed=3)
        for step in range(3):
            step_on(wire, gradients(transport.rank, step))
        state = wire.gather_state_dict()
        wire.detach()
        return state

    return run_threads(run, 2)[0]


def test_every_bit_that_changed_is_found_and_its_entry_named() -> None:
    state = trained_state()
    generator = torch.Generator().manual_seed(0)

    def run(transport) -> None:
        wire = make(transport, RULES, seed=3)
        wire.load_state_dict(state)
        loaded = wire.state_dict()
        for name, value in state.items():
            for _ in range(4):
                bit = int(torch.randint(0, 8 * value.numel() * value.element_size(), (), generator=generator))
                damaged = value.clone().contiguous()
                damaged.view(-1).view(torch.uint8)[bit // 8] ^= 1 << bit % 8
                expected = f"{name} in the state is not what was saved" if "residual" in name else None
                with pytest.raises(ValueError, match=expected):
                    wire.load_state_dict({**state, name: damaged})
        assert all(torch.equal(value, loaded[name]) for name, value in wire.state_dict().items())

    # One rank takes both ranks' slots: its world has another size.
    run_threads(run, 1)


def test_state_that_is_not_finite_is_refused() -> None:
    state = trained_state()
    slots = {name: value for name, value in state.items() if name.startswith("rank0/") and "checksums" not in name}
    slots["rank0/residual/a.weight"][3, 4] = float("nan")

    def run(transport) -> None:
        kind, expected = (ValueError, "NaN or Inf") if transport.rank == 0 else (PeerFailedError, "failed on rank 0")
        with pytest.raises(kind, match=expected):
            make(transport, RULES, seed=3).load_state_dict({**state, **sealed(slots, "rank0/checksums")})

    run_threads(run, 2)
