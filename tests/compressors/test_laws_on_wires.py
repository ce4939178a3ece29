"""Laws of every compressor that concern its whole way through a Wire: loss scales, steps that are not finite,
checkpoints, and layers that come late."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
import torch
from test_laws import FAMILIES
from torch import Tensor

from harness import run_threads
from thinwire import Plan, Wire
from thinwire.plan import Filter
from thinwire.runtime import BucketEngine, WireSettings

SHAPES = {"first": (40, 100), "late": (64, 64)}
NUM_RANKS = 2
Gradients = dict[str, Tensor]


def gradient(rank: int, step: int) -> Gradients:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return {name: torch.randn(shape, generator=generator) * 1e-2 for name, shape in SHAPES.items()}


def wire_of(spec: str, transport) -> Wire:
    return Wire(BucketEngine(Plan.build(SHAPES, spec, Filter()), SHAPES, transport, WireSettings()))


def step_on(wire: Wire, found: Gradients, loss_scale: float = 1.0) -> Gradients:
    """What arrives of a rank's gradients."""
    layers = tuple((name, SHAPES[name]) for name in found)
    flat = torch.cat([value.reshape(-1) for value in found.values()]) * loss_scale
    wire.engine.begin_step()
    flat = wire.engine.reduce(flat, layers, loss_scale=loss_scale).wait() / loss_scale
    parts = flat.split([math.prod(shape) for _, shape in layers])
    return {name: part.clone() for (name, _), part in zip(layers, parts, strict=True)}


def same(one: Gradients, other: Gradients) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


def means(spec: str, steps: Sequence[tuple[float, Callable[[int], Gradients]]]) -> list[Gradients]:
    """What arrives in each of ``steps``: pairs of a loss scale and the gradients of a rank."""

    def run(transport) -> list[Gradients]:
        wire = wire_of(spec, transport)
        return [step_on(wire, gradients(transport.rank), loss_scale) for loss_scale, gradients in steps]

    first, *others = run_threads(run, NUM_RANKS)
    assert all(same(*pair) for other in others for pair in zip(first, other, strict=True)), "ranks differ"
    return first


@pytest.mark.parametrize("spec", FAMILIES)
def test_a_step_that_is_not_finite_moves_nothing_and_a_resumed_run_goes_on_bit_for_bit(spec: str) -> None:
    def run(transport) -> list[Gradients]:
        straight = wire_of(spec, transport)
        for step in range(3):
            step_on(straight, gradient(transport.rank, step))
        before, poisoned = straight.state_dict(), gradient(transport.rank, 3)
        kept = {key: value for key, value in before.items() if "/" in key}
        for poison, loss_scale in ((math.nan, 1.0), (math.inf, 1024.0)):
            if transport.rank == 1:
                poisoned["late"][3, 3] = poison
            assert not step_on(straight, poisoned, loss_scale)["late"].isfinite().all()
            state = straight.state_dict()
            assert same(kept, state)
        assert straight.stats.nonfinite_steps == 2 or not kept
        resumed, arrived = wire_of(spec, transport), []
        resumed.load_state_dict(state)
        for step in (5, 6):
            arrived.append(step_on(straight, gradient(transport.rank, step)))
            assert same(arrived[-1], step_on(resumed, gradient(transport.rank, step)))
        return arrived

    first, second = run_threads(run, NUM_RANKS)
    assert all(same(*pair) for pair in zip(first, second, strict=True))
    assert all(bool(value.isfinite().all()) for found in first for value in found.values())


@pytest.mark.parametrize("spec", FAMILIES)
def test_the_loss_scale_changes_nothing_that_arrives(spec: str) -> None:
    exact = means(spec, [(1.0, lambda rank, step=step: gradient(rank, step)) for step in range(3)])
    for scales in ((2.0**16,) * 3, (1.0, 2.0**10, 0.25)):
        scaled = means(spec, [(s, lambda rank, step=step: gradient(rank, step)) for step, s in enumerate(scales)])
        for want, got in zip(exact, scaled, strict=True):
            for name in want:
                assert float((got[name] - want[name]).norm()) <= 1e-3 * float(want[name].norm()), (name, scales)


def errors(spec: str, steps: Sequence[Callable[[int], Gradients]]) -> list[float]:
    """The relative errors of the late layer in each of ``steps`` in which it has a gradient."""
    found = []
    for arrived, gradients in zip(means(spec, [(1.0, step) for step in steps]), steps, strict=True):
        want = torch.stack([gradients(r).get("late", torch.zeros(1)).reshape(-1) for r in range(NUM_RANKS)]).mean(0)
        if bool(want.any()):
            found.append(float((arrived["late"] - want).norm() / want.norm()))
    return found


def without(rank: int) -> Gradients:
    return {"first": gradient(rank, 77)["first"]}


def zero(rank: int) -> Gradients:
    return {**gradient(rank, 77), "late": torch.zeros(SHAPES["late"])}


@pytest.mark.parametrize("spec", FAMILIES)
def test_a_layer_that_comes_late_arrives_as_well_as_one_that_was_there(spec: str) -> None:
    steps = [lambda rank, step=step: gradient(rank, step) for step in range(3)]
    there = errors(spec, steps)
    for before in (without, zero):
        late = errors(spec, [before, before, *steps])
        assert all(b <= 1.2 * a + 0.02 for a, b in zip(there, late, strict=True)), f"{late} and not {there}"


@pytest.mark.parametrize("spec", ["rangefloat(bits=8)", "ef(rangefloat(bits=8))", "levels(learn_at=(0,), min_numel=0)"])
def test_what_rank_0_has_no_gradient_of_is_learned_from_another(spec: str) -> None:
    def alone(rank: int) -> Gradients:
        found = gradient(rank, 5)
        return {**found, "late": found["late"] * rank}

    (error, again) = errors(spec, [alone, lambda rank: gradient(rank, 6)])
    assert error < 0.15
    assert again < 0.15


def test_an_error_where_something_is_learned_is_raised_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self, values):
        raise ArithmeticError("no format")

    monkeypatch.setattr("thinwire.compressors.RangeFloat.chosen", broken)

    def run(transport) -> str:
        try:
            step_on(wire_of("rangefloat", transport), gradient(transport.rank, 0))
        except Exception as error:  # noqa: BLE001 - compared below
            return f"{type(error).__name__}: {error}"
        return "nothing raised"

    first, second = run_threads(run, NUM_RANKS, 10.0)
    assert "ArithmeticError: no format" in first
    assert "PeerFailedError" in second
    assert "rank 0: ArithmeticError: no format" in second
