"""Residuals that are kept in 8 bits between steps."""

from __future__ import annotations

import torch
from test_wire import gradients, make, step_on

import sharded
from harness import on_ranks, run_threads
from thinwire.collectives import Transport

MEAN = torch.linspace(-1, 1, 64 * 64).view(64, 64) ** 5
"""Values that are much smaller than others in their bucket stay in the residual for long."""


def test_what_is_sent_in_the_long_run_is_what_was_given() -> None:
    """As much of it as with residuals in fp32, to within a few per cent; without error feedback half is lost."""

    def missing(spec: str) -> float:
        def run(transport: Transport) -> float:
            wire, received = make(transport, {"b.weight": spec, "*": "raw"}, seed=3), torch.zeros(64, 64)
            for step in range(150):
                found = gradients(transport.rank, step)
                received += step_on(wire, found | {"b.weight": MEAN + 0.1 * found["b.weight"]})["b.weight"]
            wire.detach()
            return float((received - 150 * MEAN).norm() / (150 * MEAN).norm())

        return run_threads(run, 2)[0]

    packed, full, none = (
        missing(spec)
        for spec in ("ef(topk(density=0.02), bits=8)", "ef(topk(density=0.02))", "topk(density=0.02, feedback=False)")
    )
    assert packed < 1.1 * full < 0.3 * none


@on_ranks(2)
def test_sharded_models_keep_them_in_8_bits_too(rank: int) -> None:
    full = sharded.compress(sharded.build(), "raw", "ef(minmax(bits=2, bucket=128))")
    model = sharded.build()
    wire = sharded.compress(model, "raw", "ef(minmax(bits=2, bucket=128), bits=8)")
    sharded.train(model, 3)
    assert wire.stats.slot_bytes == wire.memory <= 0.3 * full.memory
