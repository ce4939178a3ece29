"""IntSGD's arithmetic: integer sums, scales against the formulas, clipping, NaN, and scales of a world over threads."""

from __future__ import annotations

import math
import warnings
from itertools import pairwise

import numpy as np
import pytest
import torch
from test_wire import gradients, make, step_on

from harness import run_threads
from summed_world import SummedWorld
from thinwire.compressors import (
    Compressor,
    HeuristicIntSGD,
    IntSGD,
    Key,
    Part,
    Parts,
    SumCall,
    integer_square_sum,
    parse,
)
from thinwire.runtime.stats import ClippingMonitor

LAYERS = {"a": (40, 30), "b": (7,), "c": (1000,)}


def world_of(compressor: Compressor | str, num_ranks: int) -> SummedWorld:
    return SummedWorld(parse(compressor) if isinstance(compressor, str) else compressor, num_ranks, LAYERS)


def scale_of(world: SummedWorld, layer: str, slot: str = "r") -> float:
    return float(world.states[0].layers[layer].now[slot])


def sample(world: SummedWorld, seed: int, scale: float = 1.0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [scale * torch.randn(world.numel, generator=generator) for _ in range(world.num_ranks)]


def transcribed(block: str, num_ranks: int, bits: int, steps: list[list[np.ndarray]]) -> tuple[list, dict]:
    """The specification in numpy: fp64 throughout, rounding to nearest. Every step's outcome, and the last r."""
    beta, eps = 0.9, 1e-8
    starts = np.cumsum([0, *(math.prod(shape) for shape in LAYERS.values())])
    blocks = [slice(a, b) for a, b in pairwise(starts)]
    if block == "global":
        blocks = [slice(0, int(starts[-1]))]
    d = int(starts[-1])
    clip = 2 ** (bits - 1) - 1 if bits < 8 else (2 ** (bits - 1) - 1) // num_ranks
    mean = np.mean(steps[0], axis=0)
    outcomes = [mean]
    r = [float(np.sum(mean[b] ** 2)) for b in blocks]
    received = mean
    for ranks in steps[1:]:
        if len(outcomes) > 1:
            r = [beta * old + (1 - beta) * float(np.sum(received[b] ** 2)) for old, b in zip(r, blocks, strict=True)]
        received = np.zeros(d)
        for number, b in enumerate(blocks):
            d_l = b.stop - b.start
            alpha = math.sqrt(d_l) / math.sqrt(2 * num_ranks * r[number] + d_l / d * eps**2)
            q = [np.clip(np.rint(alpha * g[b]), -clip, clip) for g in ranks]
            received[b] = sum(q) / (num_ranks * alpha)
        outcomes.append(received)
    r = [beta * old + (1 - beta) * float(np.sum(received[b] ** 2)) for old, b in zip(r, blocks, strict=True)]
    return outcomes, dict(zip(LAYERS if block == "layer" else ["all"], r, strict=True))


@pytest.mark.parametrize(
    ("bits", "block", "num_ranks"),
    [(2, "layer", 5), (4, "global", 2), (8, "layer", 1), (8, "global", 5), (32, "layer", 2)],
)
def test_it_is_the_formula_of_the_paper(block: str, num_ranks: int, bits: int) -> None:
    """Propositions 2 and 4, over steps whose gradients shrink by half each."""
    world = world_of(f"intsgd(bits={bits}, rounding=determ, block={block})", num_ranks)
    steps = [sample(world, seed, 0.5**seed) for seed in range(6)]
    wanted, norms = transcribed(block, num_ranks, bits, [[g.double().numpy() for g in ranks] for ranks in steps])
    for at, (ranks, want) in enumerate(zip(steps, wanted, strict=True)):
        received = world.step(ranks)
        # A value halfway between two integers may round another way in fp32: one unit of one rank's.
        off = np.abs(received.double().numpy() - want)
        assert np.mean(off > 1e-5 * np.abs(want).max()) < 0.002, at
    got = [scale_of(world, name) for name in LAYERS] if block == "layer" else [scale_of(world, "a", "r_all")]
    assert got == pytest.approx(list(norms.values()), rel=1e-3)


def test_sums_of_squares_of_integers_are_exact() -> None:
    for dtype, least, most in ((torch.int8, -128, 127), (torch.int32, -(2**31), 2**31 - 1)):
        for numel in (0, 1, 1000, 70_001, 600_003):
            q = torch.randint(least, most + 1, (numel,), generator=torch.Generator().manual_seed(0)).to(dtype)
            assert float(integer_square_sum(q)) == pytest.approx(sum(v * v for v in q.tolist()), rel=2.0**-51)
    q = torch.full((600_000,), -128, dtype=torch.int8)
    assert float(integer_square_sum(q)) == 600_000 * 128**2


ADVERSARIAL = [3.4e38, -3.4e38, 1e30, -1e30, 1.0, -1.0, 0.5, 1e-3, 1e-45, 0.0]


@pytest.mark.parametrize("make_one", [IntSGD, HeuristicIntSGD])
def test_no_sum_overflows_for_any_number_of_ranks(make_one) -> None:
    """n ranks that all send their largest integers, for every n up to 1024."""
    for bits, most in ((8, 127), (32, 1024)):
        for num_ranks in range(1, most + 1):
            clip = make_one(bits=bits, num_ranks=num_ranks).clip
            assert 1 <= clip <= (2 ** (bits - 1) - 1) // num_ranks
    worlds = [*((8, n, "random") for n in (1, 3, 127)), (8, 2, "determ"), (32, 1, "random"), (32, 100, "random")]
    few_bits = [(4, 1, "random"), (4, 18, "random"), (2, 127, "random")] if make_one is IntSGD else []
    for bits, num_ranks, rounding in [*worlds, (32, 3, "determ"), *few_bits]:
        world = world_of(make_one(bits=bits, rounding=rounding), num_ranks)
        world.step(sample(world, 0, 1e-6))
        # All alike, so that every rank sends its largest magnitudes, of one sign: the sums are the worst case.
        g = torch.tensor(ADVERSARIAL).repeat(world.numel // 10 + 1)[: world.numel]
        if make_one is HeuristicIntSGD:
            g = g.clamp(-(2.0**125), 2.0**125)
        received = world.step([g.clone() for _ in range(num_ranks)])
        clip = world.compressor.clip  # type: ignore[attr-defined]
        held = np.float32(clip)  # or the next one below, in fp32
        held = held if int(held) <= clip else np.nextafter(held, np.float32(0))
        assert int(world.sums[-1].long().abs().max()) == num_ranks * int(held)
        assert bool(torch.isfinite(received).all())


def test_ranks_draw_apart_so_that_errors_average_out() -> None:
    """The same gradient and scale on all ranks: the errors of 16 ranks add up like those of strangers."""
    world = world_of(IntSGD(bits=32), 16)
    g = sample(world, 0)[0]
    world.step([g] * 16)
    part, state = Part(world.pieces[2], slice(0, 1040)), world.states[0]
    place = (world.compressor.alphas([part], state) * g[1207:]).double()  # type: ignore[attr-defined]
    alone = ((place - place.floor()) * (1 - place + place.floor())).mean()
    errors = []
    for step in range(50):
        total = torch.zeros(1000, dtype=torch.float64)
        for rank in range(16):
            out = torch.zeros(1040, dtype=torch.int32)
            call = SumCall((Parts((part,)),), (out,), Key(1000 * step + rank, step), state, 1 / 16)
            next(world.compressor.rounds(g, g, call))
            total += out[:1000] - place
        errors.append(total)
    together = torch.stack(errors)
    assert float(together.square().mean()) == pytest.approx(16 * float(alone), rel=0.03)
    assert abs(float(together.mean())) < 0.1


@pytest.mark.parametrize("spec", ["intsgd(bits=8, block=global)", "intsgd(bits=32)"])
def test_scales_stay_finite_when_gradients_vanish_and_come_back(spec: str) -> None:
    world = world_of(spec, 3)
    zeros = [torch.zeros(world.numel)] * 3
    for _ in range(120):
        assert torch.equal(world.step(zeros), zeros[0])
    part = [Part(piece, slice(0, 0)) for piece in world.pieces]
    alphas = world.compressor.alphas(part, world.states[0])  # type: ignore[attr-defined]
    assert bool(torch.isfinite(alphas).all())
    # All is clipped at first; after a few steps the scale has found the gradients again.
    ranks = sample(world, 1)
    mean = torch.stack(ranks).mean(0)
    off = [float((world.step(ranks) - mean).norm() / mean.norm()) for _ in range(40)]
    assert all(math.isfinite(o) for o in off)
    assert off[0] > 0.5
    assert max(off[-5:]) < 1.1


@pytest.mark.parametrize(("spec", "num_ranks"), [("intsgd(bits=8)", 16), ("intsgd(bits=8, block=global)", 2)])
def test_a_layer_that_starts_at_zero_recovers_within_one_step(spec: str, num_ranks: int) -> None:
    world, off = world_of(spec, num_ranks), []
    first = sample(world, 0)
    for x in first:
        x[1207:] = 0.0  # layer c
    world.step(first)
    for step in range(1, 12):
        ranks = [x + 1.0 for x in sample(world, step)]
        mean = torch.stack(ranks).mean(0)
        off.append(float((world.step(ranks) - mean)[1207:].norm() / mean[1207:].norm()))
    assert max(off[1:]) < 0.6


def test_the_published_heuristic_rounds_the_exponent_down_and_has_one_for_a_buffer() -> None:
    world = world_of("heuristic_intsgd(bits=8, block=buffer, exponent=floor)", 2)
    ranks = sample(world, 0)
    for x in ranks:
        x[:1200] *= 1e-3  # layer a
        x[1300] = 7.0
    world.step(ranks)
    got = world.step(ranks)
    # 2^floor(log2 7) = 4 is the largest magnitude; a 63rd of it, the least but 0, and layer a has nothing of it.
    assert float(got.max()) == pytest.approx(63 / 63.5 * 4.0)
    assert int((got[:1200] != 0).sum()) == 0
    unit = 4.0 / 127
    assert float((got / unit - (got / unit).round()).abs().max()) < 1e-3


def test_clipped_values_are_counted_and_warned_of_once() -> None:
    def run(transport):
        wire = make(transport, {"b.weight": "intsgd(bits=8)"})
        step_on(wire, gradients(transport.rank, 0))
        found = gradients(transport.rank, 1)
        found["b.weight"] *= 1e6
        step_on(wire, found)
        return wire.stats

    for stats in run_threads(run, 2):
        assert stats.encoded - stats.saturated < 0.001 * stats.encoded
        assert stats.encoded == 64 * 64
        assert stats.clipped == stats.saturated / stats.encoded == stats.to_dict()["clipped"]

    def steps(clipping: ClippingMonitor, num: int, clipped: int, of: int) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for _ in range(num):
                clipping.add(clipped, of)
                clipping.warn()

    steps(clipping := ClippingMonitor(), 50, 0, 0)  # nothing was made integers of
    steps(clipping, 50, 9, 1000)
    steps(clipping := ClippingMonitor(), 19, 50, 1000)
    clipping.add(50, 1000)
    with pytest.warns(UserWarning, match="5.0% of the gradients' values were clipped"):
        clipping.warn()
    steps(clipping, 50, 1000, 1000)


def test_the_scale_follows_a_gradient_that_falls_but_not_one_of_zero() -> None:
    world = world_of("intsgd(bits=8)", 4)
    errors = []
    for step in range(8):
        ranks = sample(world, step, 1.0 if step < 5 else 0.01)
        mean = torch.stack(ranks).mean(0)
        errors.append(float((world.step(ranks) - mean).norm() / mean.norm()))
    assert max(errors[6:]) < 2.0, errors
    before = scale_of(world, "a")
    world.step([torch.zeros(world.numel)] * 4)
    assert scale_of(world, "a") == pytest.approx(0.9 * before)
