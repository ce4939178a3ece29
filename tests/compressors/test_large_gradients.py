"""Gradients of 1e38, which fp32 holds and whose sums it may not: compressors under every collective algorithm."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence

import pytest
import torch
from test_laws import FAMILIES
from torch import Tensor

from harness import run_threads
from thinwire import Plan, Wire, parse
from thinwire.collectives import CollectiveCall, Layer, Layout, World, all_reduce, complete, parse_algorithm
from thinwire.compressors import RESIDUAL, Clipping, Coded, Saturating, State, find_mixin
from thinwire.plan import Filter
from thinwire.runtime import BucketEngine, WireSettings

LARGE = 1e38
RANKS, STEPS, LARGE_AT = 4, 9, 2
SHAPE = (32, 48)
LAYERS = (("w", SHAPE),)
ALGORITHMS = {"sra": None, "ring": None, "tree": None, "hierarchical": lambda rank: rank // 2}
"""And how their ranks share nodes."""


def gradient(rank: int, step: int, largest: float) -> Tensor:
    x = torch.randn(SHAPE, generator=torch.Generator().manual_seed(100 * step + rank)).view(-1)
    return x * (largest / float(x.abs().max()))


def means(spec: str, algorithm: str, largest: list[float]) -> tuple[list[list[Tensor]], int]:
    """By rank and step, the mean of gradients whose largest elements are these, and how often the state was reset."""

    def run(transport) -> tuple[list[Tensor], int]:
        plan = Plan.build({"w": SHAPE}, spec, Filter(min_numel=0))
        wire = Wire(BucketEngine(plan, {"w": SHAPE}, transport, WireSettings(algorithm=parse_algorithm(algorithm))))
        received = []
        for step, most in enumerate(largest):
            wire.engine.begin_step()
            received.append(wire.engine.reduce(gradient(transport.rank, step, most), LAYERS).wait().clone())
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


@pytest.mark.parametrize("spec", FAMILIES)
def test_a_gradient_of_1e38_leaves_no_trace_and_is_received(spec: str) -> None:
    for algorithm in ALGORITHMS:
        if spec != "sign(majority=True)" or algorithm == "sra":  # an owner counts votes itself
            _check(spec, algorithm)


def _check(spec: str, algorithm: str) -> None:
    compressor = parse(spec)
    clips = any(find_mixin(compressor, kind) for kind in (Clipping, Saturating))
    by_rank, resets = means(spec, algorithm, [LARGE if step == LARGE_AT else 1.0 for step in range(STEPS)])
    for answers in zip(*by_rank, strict=True):
        assert all(torch.equal(other.view(torch.int32), answers[0].view(torch.int32)) for other in answers)
    received = by_rank[0]
    finite = [bool(mean.isfinite().all()) for mean in received]
    assert all(finite[-2:]), (algorithm, finite)
    assert resets <= 1
    if not finite[LARGE_AT]:
        sent = [compressor.roundtrip(gradient(rank, LARGE_AT, LARGE).view(SHAPE)) for rank in range(RANKS)]
        assert not all(bool(x.isfinite().all()) for x in sent)
    elif compressor.traits.largest >= LARGE and not clips:
        usual = means(spec, algorithm, [1.0] * STEPS)[0][0]
        assert error(received[LARGE_AT], LARGE_AT, LARGE) <= 1.5 * error(usual[LARGE_AT], LARGE_AT, 1.0) + 0.01


@pytest.mark.parametrize(
    ("algorithm", "large"),
    [
        ("ring", range(RANKS)),
        ("ring", [2]),
        ("tree", [0]),
        ("tree(root=0)", range(RANKS)),
        ("hierarchical", [2]),
        ("hierarchical(inside=same)", range(RANKS)),
    ],
)
@pytest.mark.parametrize("spec", ["raw", "ef(minmax(bits=2))", "ef(topk(density=0.5))"])
def test_partial_sums_beyond_fp32_are_divided(spec: str, algorithm: str, large: Sequence[int]) -> None:
    """Gradients of which three add up to more than fp32 holds have the mean of small ones, times the same factor."""
    compressor = parse(spec)
    assert isinstance(compressor, Coded)
    layers = [Layer("w", 0, (6000,), compressor)]
    layout = Layout.build(layers, World(RANKS, (0, 0, 1, 1)), torch.float32, parse_algorithm(algorithm))

    def run(transport, factor: float) -> tuple[list[Tensor], Tensor]:
        buffers, state = transport.open(layout.reduction_traffic()), State.fresh(layout.slots, layout.numel)
        means = []
        for step in range(3):
            generator = torch.Generator().manual_seed(100 * step + transport.rank)
            x = 1.5 + 0.5 * torch.rand(layout.numel, generator=generator)
            x *= factor if transport.rank in large else factor / 8
            complete(all_reduce(x, layout, transport, buffers, CollectiveCall(seed=0, step=step, state=state)))
            means.append(x / factor)
            state = state.swapped()
        kept = state.now.get(RESIDUAL.name, torch.zeros(layout.numel)) / factor
        return means, kept

    beyond = 2.0**126
    assert math.isinf(float(3 * torch.tensor(1.5 * beyond)))
    usual, divided = (
        run_threads(lambda transport, factor=factor: run(transport, factor), RANKS) for factor in (1.0, beyond)
    )
    for (means, residual), (large_means, large_residual) in zip(usual, divided, strict=True):
        for mean, large_mean in zip(means, large_means, strict=True):
            # Inside nodes, values are added in another order.
            torch.testing.assert_close(large_mean, mean, rtol=1e-6 if "hier" in algorithm else 0.0, atol=0.0)
        torch.testing.assert_close(large_residual, residual, rtol=0.0, atol=1e-6 if "hier" in algorithm else 0.0)
