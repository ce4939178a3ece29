"""Residuals that are kept in 8 bits between steps."""

from __future__ import annotations

import torch
from torch import Tensor

import sharded
from harness import on_ranks, run_threads
from thinwire import Plan, Wire
from thinwire.collectives import Transport
from thinwire.plan import Filter
from thinwire.runtime import BucketEngine, WireSettings

SHAPES = {"a.weight": (60, 101), "b.weight": (64, 64)}
LAYERS = tuple(SHAPES.items())
NUMEL = 60 * 101 + 64 * 64
PACKED = "ef(topk(density=0.02), bits=8)"
"""Values that are much smaller than others in their bucket stay in the residual for long."""


def _wire(transport: Transport, rules: object = PACKED) -> Wire:
    return Wire(BucketEngine(Plan.build(SHAPES, rules, Filter(min_numel=0)), SHAPES, transport, WireSettings(seed=3)))


def _reduce(wire: Wire, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + wire.rank)
    wire.engine.begin_step()
    return wire.engine.reduce(
        torch.linspace(-1, 1, NUMEL) ** 5 + 0.1 * torch.randn(NUMEL, generator=generator), LAYERS
    ).wait()


def test_what_is_sent_in_the_long_run_is_what_was_given() -> None:
    """As much of it as with residuals in fp32, to within a few per cent; without error feedback half is lost."""

    def missing(spec: str) -> float:
        def run(transport: Transport) -> float:
            wire = _wire(transport, spec)
            received = sum(_reduce(wire, step) for step in range(150))
            wire.detach()
            given = 150 * torch.linspace(-1, 1, NUMEL) ** 5
            return float((received - given).norm() / given.norm())

        return run_threads(run, 2)[0]

    packed, full, none = (
        missing(spec) for spec in (PACKED, "ef(topk(density=0.02))", "topk(density=0.02, feedback=False)")
    )
    assert packed < 1.1 * full < 0.3 * none


@on_ranks(2)
def test_sharded_models_keep_them_in_8_bits_too(rank: int) -> None:
    full = sharded.compress(sharded.build(), "raw", "ef(minmax(bits=2, bucket=128))")
    model = sharded.build()
    wire = sharded.compress(model, "raw", "ef(minmax(bits=2, bucket=128), bits=8)")
    sharded.train(model, 3)
    assert wire.stats.slot_bytes == wire.memory <= 0.3 * full.memory
