"""Gradients of 1e38, which fp32 holds and whose sums it may not: every compressor under every collective algorithm."""

from __future__ import annotations

import warnings

import pytest
import torch
from test_laws import SPECS
from torch import Tensor

from harness import run_threads
from thinwire import Plan, Wire, parse
from thinwire.collectives import parse_algorithm
from thinwire.compressors import Clipping, Saturating, find_mixin
from thinwire.plan import Filter

LARGE = 1e38
RANKS, STEPS, LARGE_AT = 4, 9, 2
SHAPE = (32, 48)
LAYERS = (("w", SHAPE),)
ALGORITHMS = {"sra": None, "ring": None, "tree": None, "hierarchical": lambda rank: rank // 2}
"""And how their ranks share nodes."""
GRADIENTS = [spec for spec in SPECS if not spec.startswith(("delta(", "direct(")) and "scale=params" not in spec]
"""Not those of activations, nor one that takes an optimizer."""
VOTES = ("sign(majority=True)", "ef(sign(majority=True))")


def gradient(rank: int, step: int, largest: float) -> Tensor:
    x = torch.randn(SHAPE, generator=torch.Generator().manual_seed(100 * step + rank)).view(-1)
    return x * (largest / float(x.abs().max()))


def means(spec: str, algorithm: str, largest: list[float]) -> tuple[list[list[Tensor]], int]:
    """By rank and step, the mean of gradients whose largest elements are these, and how often the state was reset."""

    def run(transport) -> tuple[list[Tensor], int]:
        plan = Plan.build({"w": SHAPE}, spec, Filter(min_numel=0))
        wire = Wire(plan, {"w": SHAPE}, transport, algorithm=parse_algorithm(algorithm))
        received = []
        for step, most in enumerate(largest):
            wire.begin_step()
            received.append(wire.reduce(gradient(transport.rank, step, most), LAYERS).wait().clone())
        resets = wire.stats.state_resets
        wire.detach()
        return received, resets

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        answers = run_threads(run, RANKS, node_of=ALGORITHMS[algorithm])
    assert len({resets for _, resets in answers}) == 1
    return [received for received, _ in answers], answers[0][1]


def error(received: Tensor, step: int, largest: float) -> float:
    """Relative to the mean that was to be received."""
    mean = torch.stack([gradient(rank, step, largest).double() for rank in range(RANKS)]).mean(0)
    return float((received.double() - mean).norm() / mean.norm())


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("spec", GRADIENTS)
def test_a_gradient_of_1e38_leaves_no_trace_and_is_received_where_owners_add(spec: str, algorithm: str) -> None:
    if spec in VOTES and algorithm != "sra":
        pytest.skip("an owner counts votes itself")
    compressor = parse(spec)
    clips = any(find_mixin(compressor, kind) for kind in (Clipping, Saturating))
    by_rank, resets = means(spec, algorithm, [LARGE if step == LARGE_AT else 1.0 for step in range(STEPS)])
    for answers in zip(*by_rank, strict=True):
        assert all(torch.equal(other.view(torch.int32), answers[0].view(torch.int32)) for other in answers)
    received = by_rank[0]
    finite = [bool(mean.isfinite().all()) for mean in received]
    assert all(finite[-2:]), finite
    assert resets <= 1
    if not finite[LARGE_AT]:
        sent = [compressor.roundtrip(gradient(rank, LARGE_AT, LARGE).view(SHAPE)) for rank in range(RANKS)]
        # Partial sums are quantised, too, and may be beyond fp32.
        assert algorithm != "sra" or not all(bool(x.isfinite().all()) for x in sent)
    elif compressor.traits.largest >= LARGE and not clips:
        usual = means(spec, algorithm, [1.0] * STEPS)[0][0]
        assert error(received[LARGE_AT], LARGE_AT, LARGE) <= 1.5 * error(usual[LARGE_AT], LARGE_AT, 1.0) + 0.01
