"""What single compressors promise beside the laws: their papers' lemmas, their states, their limits."""

from __future__ import annotations

import contextlib
import math
from importlib.metadata import EntryPoint
from unittest import mock

import pytest
import torch
from hypothesis import given, settings, strategies as st

import thinwire
from thinwire import kernels, parse
from thinwire.compressors import (
    FFT,
    CodecCall,
    Coded,
    Key,
    Levels,
    Piece,
    PowerSGD,
    Segments,
    UnsuitedError,
    at_step,
    first_state,
    for_world,
    registered,
    sum_alone,
    used_bytes,
)
from thinwire.compressors._core import spec as specs
from thinwire.compressors.atomo import probabilities
from thinwire.compressors.floats import best_mantissa
from thinwire.plan import Plan
from thinwire.policies import family
from thinwire.testing.laws import decode_one, encode_one


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=10)
@given(seed=st.integers(0, 2**20), bits=st.integers(1, 4), multiple=st.integers(1, 6), spread=st.floats(0.0, 1.0))
def test_lemma_4_of_the_thesis(seed: int, bits: int, multiple: int, spread: float) -> None:
    """E‖Q_δ(x) − x‖² ≤ (δ/δ*)·E_r‖x*_r − x‖² for δ* = multiple·δ and whatever x*_r is chosen on the coarse lattice."""
    x = normal(64, seed=seed)
    delta = float((x.max() - x.min()) / (2**bits - 1))
    coarse, quantizer = multiple * delta, parse(f"lattice(bits={bits}, bucket=64)")
    draws = 400
    ours = sum(float((quantizer.roundtrip(x, key=k) - x).square().sum()) for k in range(draws)) / draws
    theirs = 0.0
    for k in range(draws):
        shift = coarse * ((k + 0.5) / draws - 0.5) + float(x.min())
        wander = spread * coarse * normal(64, seed=seed + 7 * k)  # a best point, or any other
        theirs += float((coarse * torch.round((x + wander - shift) / coarse) + shift - x).square().sum()) / draws
    # Both sides are means over finitely many shifts.
    assert ours <= theirs * (delta / coarse) * 1.1 + 1e-6
    assert ours <= 64 * delta**2 / 12 * 1.1


def test_the_lattice_is_shifted_alike_on_all_ranks() -> None:
    lattice, made = parse("lattice(bits=3, bucket=128)"), []
    assert isinstance(lattice, Coded)
    for key in (Key(1, 9), Key(2, 9), Key(1, 10)):
        made.append(torch.zeros(lattice.payload_bytes(1000, torch.float32), dtype=torch.uint8))
        lattice.encode(normal(1000), made[-1], CodecCall(Segments.build([Piece("layer", 0, 1000, 0, 0)]), key))
    assert torch.equal(made[0], made[1])
    assert not torch.equal(made[0], made[2])


def test_levels_are_ascending_and_small_layers_take_minmax() -> None:
    compressor = parse("levels(bits=3, bucket=128, learn_at=(0,))")
    assert str(compressor.fit((100, 100))) == "minmax(bits=3, bucket=128)"
    assert compressor.fit((400, 400)) is compressor
    assert isinstance(compressor, Levels)
    x = normal(1 << 17)
    learned = compressor.learn(x, {"levels": torch.linspace(0, 1, 8)})["levels"]
    assert bool((learned.diff() > 0).all())
    assert 0 <= float(learned[0]) < 0.2 < 0.8 < float(learned[-1]) <= 1
    x[5] = math.nan
    assert bool(torch.isfinite(compressor.learn(x, {"levels": torch.linspace(0, 1, 8)})["levels"]).all())


def test_a_row_and_a_channel_have_a_scale_of_their_own() -> None:
    x = normal(6, 50) * torch.logspace(0, 5, 6).view(-1, 1)
    by_row = parse("maxabs(bits=4, scale=row)").roundtrip(x)
    assert bool(((by_row - x).abs().amax(1) <= x.abs().amax(1) / 7).all())
    whole = parse("maxabs(bits=4, scale=layer)").roundtrip(x)
    assert float(whole[0].abs().max()) in (0.0, pytest.approx(float(x.abs().max()) / 7))
    assert str(parse("maxabs(bits=4, scale=channel)").fit((8, 3, 5, 5))) == "maxabs(bits=4, bucket=75)"
    assert str(parse("maxabs(bits=4, scale=row)").fit((8, 3, 5, 7))) == "maxabs(bits=4, bucket=7)"


@pytest.mark.parametrize("blocks", ["256", "whole"])
def test_fft_keeps_the_largest_components(blocks: str) -> None:
    x, fft = normal(4096), parse(f"fft(theta=0.7, bits=32, block={blocks})")
    assert isinstance(fft, FFT)
    spectrum = fft.spectrum(x)
    kept = fft.spectrum(fft.roundtrip(x).reshape(-1))
    count = math.ceil(0.3 * spectrum.numel())
    assert int((kept.abs() > 1e-4).sum()) == count
    assert float(spectrum.abs().topk(count).values[-1]) >= float((spectrum - kept).abs().max()) * 0.999


def test_fft_follows_steps_and_learning_rates() -> None:
    stepwise = parse("fft(theta=((0, 0.9), (100, 0.5)))")
    found = [str(at_step(stepwise, step, None)) for step in (0, 99, 100)]
    assert found == [f"fft(theta={theta}, bits=10)" for theta in (0.9, 0.9, 0.5)]
    falling = parse("fft(theta=diminishing, lipschitz=2.0)")
    assert [at_step(falling, 0, rate).theta for rate in (0.125, 0.0125, 0.0)] == [0.5, 10 / 64, 0.0]  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="pass optimizer="):
        at_step(falling, 0, None)


def test_thresholds_count_what_finds_no_room() -> None:
    compressor = parse("threshold(lam=1.0, capacity=0.1)")
    assert isinstance(compressor, Coded)
    x = normal(5000)
    message, segments = encode_one(compressor, x)
    above = int((x.abs() > 1).sum())
    assert compressor.limits(message, segments) == (0, above - 500)
    y = decode_one(compressor, message, segments, x.dtype)
    assert int((y != 0).sum()) == 500
    assert float(x[y == 0].abs().max()) <= float(y[y != 0].abs().min())
    few = parse("threshold(lam=3.0, capacity=0.1)")
    assert isinstance(few, Coded)
    few.encode(x, message, CodecCall(segments, Key.derive(0)))
    assert used_bytes(few, message, segments.pieces[0]) < 0.3 * message.numel()
    message[4:8].view(torch.int32).fill_(501)
    with pytest.raises(ValueError, match="501 elements in a payload with room for 500"):
        used_bytes(few, message, segments.pieces[0])


def test_powersgd_finds_a_matrix_of_its_rank_also_after_gradients_of_zero() -> None:
    """After them, or those of too low a rank, all directions are found again."""
    piece = Piece("layer", 0, 60 * 80, 0, 0, (60, 80))
    for rank, zeros in ((3, 0), (4, 1)):
        compressor, x = PowerSGD(rank), torch.zeros(60 * 80)
        state = first_state(compressor, x, Segments.build([piece]))
        full = normal(60, rank) @ normal(rank, 80, seed=1)
        for step in range(4 * zeros + 1):
            assert state is not None
            x = torch.zeros(60 * 80) if step < zeros else full.reshape(-1).clone()
            sum_alone(compressor, x, piece, x.dtype, key=Key.derive(0), state=state)
            assert step >= zeros or torch.equal(x, torch.zeros(60 * 80))
            state = state.swapped()
        assert float((x.view(60, 80) - full).norm() / full.norm()) < 1e-3


def test_what_a_compressor_cannot_take_is_sent_raw_and_is_reported() -> None:
    shapes = {"w": (64, 64), "thin": (2, 4000), "v": (5000,)}
    plan = Plan.build(shapes, {"v": "powersgd(rank=2)", "*": "powersgd(rank=2)"})
    assert str(plan["w"]) == "ef(powersgd(rank=2))"
    assert str(plan["v"]) == str(plan["thin"]) == "raw()"
    assert "factors matrices" in plan.unsuited["v"]
    assert "more than half of the bytes" in plan.unsuited["thin"]


def test_biased_compressors_get_feedback_unless_they_say_no() -> None:
    def planned(spec: str) -> str:
        return str(Plan.build({"w": (64, 64)}, spec)["w"])

    for start in ("topk(density=0.1", "powersgd(rank=2", "onebit(bucket=512", "sign(majority=True", "fft(theta=0.5"):
        assert planned(f"{start})").startswith("ef(")
        assert "ef(" not in planned(f"{start}, feedback=False)")
    assert planned("topk(0.1) | minmax(8)") == "ef(topk(density=0.1) | minmax(bits=8, bucket=128))"
    assert planned("minmax(bits=4, rounding=nearest)").startswith("minmax")


def test_every_registered_compressor_is_exported_and_says_where_it_comes_from() -> None:
    for name, make in registered().items():
        assert make.__doc__, name
        assert getattr(thinwire.compressors, make.__name__) is make


def test_a_compressor_from_another_package_is_found_by_its_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("outside", "test_compressors:Outside", "thinwire.compressors")
    monkeypatch.setattr(specs, "entry_points", lambda group: [point] if group == point.group else [])
    monkeypatch.setattr(specs, "_registry", dict(specs._registry))
    assert str(parse("ef(outside(bits=3))")) == "ef(outside(bits=3, bucket=128))"


class Outside(thinwire.compressors.MinMax):
    """A compressor of another package."""

    spec_name = "outside"


def _error(values: torch.Tensor, levels: torch.Tensor) -> float:
    nearest = torch.bucketize(values, (levels[1:] + levels[:-1]) / 2)
    return float((levels[nearest] - values).norm())


def test_levels_reach_lloyds_error_in_three_learnings() -> None:
    compressor = Levels(3, 1024, (0, 1, 2), 0)
    levels = torch.arange(8) / 7
    for seed in range(3):
        drawn = normal(12, 1024, seed=seed)
        levels = compressor.learn(drawn.reshape(-1), {"levels": levels})["levels"]
    low, high = drawn.amin(1, keepdim=True), drawn.amax(1, keepdim=True)
    scaled = ((drawn - low) / (high - low)).reshape(-1).double()
    lloyd = torch.linspace(0, 1, 8).double()
    for _ in range(500):
        nearest = torch.bucketize(scaled, (lloyd[1:] + lloyd[:-1]) / 2)
        sums = torch.zeros_like(lloyd).index_add_(0, nearest, scaled)
        lloyd = sums / torch.bincount(nearest, minlength=lloyd.numel())
    assert _error(scaled, levels.double()) < 1.03 * _error(scaled, lloyd)
    uniform, learned = (Levels(3, 1024, learn_at, 0).roundtrip(drawn) for learn_at in ((), (0,)))
    assert float((learned - drawn).norm()) < 0.9 * float((uniform - drawn).norm())


def test_levels_start_as_the_same_bits_on_every_machine() -> None:
    # `torch.linspace` counts from both ends in steps of the vector width.
    first = Levels(5).slots[0].first((400, 400), "weight")
    assert first.tolist() == [float(torch.tensor(float(i)) / 31.0) for i in range(32)]


@pytest.mark.parametrize("options", ["momentum=0.0", "momentum=0.9", "momentum=0.5, nesterov=True"])
def test_dgc_is_that_of_its_authors(options: str) -> None:
    """Momentum is corrected, and forgotten where it was sent; without any it is error feedback."""
    compressor, scale = parse(f"dgc(topk(density=0.05), {options})"), 8.0
    assert isinstance(compressor, Coded)
    segments = Segments.build([Piece("layer", 0, 2000, 0, 0)])
    state = first_state(compressor, normal(2000), segments, scale)
    u, v = torch.zeros(2000), torch.zeros(2000)
    momentum = float(options[9:12])
    for step in range(4):
        x = normal(2000, seed=step)
        message, _ = encode_one(compressor, scale * x, key=step, state=state)
        y = decode_one(compressor, message, segments, x.dtype) / scale
        u = momentum * (u + x) if "nesterov" in options else momentum * u + x
        v = v + u + x if "nesterov" in options else v + u
        sent = v.abs() >= v.abs().topk(100).values[-1]
        torch.testing.assert_close(y, torch.where(sent, v, 0.0))
        u, v = torch.where(sent, 0.0, u), torch.where(sent, 0.0, v)
        assert state is not None
        state = state.swapped()


SCHEDULED = ["topk(density={})", "ef(randk(density={}))", "ef(topk(density={}) | minmax(bits=8))"]
SCHEDULED += ["globaltopk(density={})", "dgc(topk(density={}), clip=2.0)", "powersgd(rank={})", "ef(powersgd(rank={}))"]


def test_ranks_and_densities_may_follow_a_schedule() -> None:
    for spec in SCHEDULED:
        values = (8, 4, 2) if "rank=" in spec else (0.25, 0.0625, 0.01)
        scheduled = parse(spec.format(f"((0, {values[0]}), (4, {values[1]}), (8, {values[2]}))"))
        assert parse(str(scheduled)) == scheduled
        of = [parse(spec.format(value)) for value in values]
        for step, present in ((0, of[0]), (3, of[0]), (4, of[1]), (7, of[1]), (8, of[2]), (1000, of[2])):
            assert at_step(scheduled, step, None) == present
        assert of[0].wire_bytes((64, 96)) == scheduled.wire_bytes((64, 96)) > of[2].wire_bytes((64, 96))
        with pytest.raises(ValueError, match="schedule of its own"):
            family(scheduled)


def test_dgc_clips_each_ranks_gradient_before_it_is_added() -> None:
    """To a norm of ``clip / √n`` on n ranks (Lin et al. 2018, section 3.2); shorter ones stay, NaN is not lost."""
    dgc, gradient = for_world(parse("dgc(topk(density=1.0), momentum=0.0, clip=2.0)"), 4, 64), normal(64)
    assert isinstance(dgc, Coded)
    segments = Segments.build([Piece("layer", 0, 64, 0, 0)])
    for length, scale in ((10.0, 1.0), (0.5, 1.0), (10.0, 1024.0)):
        x = gradient * (length / gradient.norm())
        state = first_state(dgc, x, segments, scale)
        sent = decode_one(dgc, encode_one(dgc, x * scale, state=state)[0], segments, x.dtype)
        torch.testing.assert_close(sent / scale, x * min(1.0, 1.0 / length))
        assert state is not None
        assert not state.next["velocity"].any()
    gradient[3] = math.inf
    assert bool(torch.isnan(decode_one(dgc, *encode_one(dgc, gradient), gradient.dtype)).any())


def test_atomo_sends_rank_terms_of_the_singular_values_and_is_unbiased() -> None:
    """Its probabilities are those of algorithm 1: 1 for the largest, and in proportion below; a low rank is exact."""
    sizes = torch.tensor([8.0, 1.0, 1.0, 0.5])
    assert probabilities(sizes, 2).tolist() == pytest.approx([1.0, 0.4, 0.4, 0.2])
    assert probabilities(torch.zeros(4), 2).tolist() == pytest.approx([0.5] * 4)
    x = normal(24, 16) @ torch.diag(1.0 / torch.arange(1, 17))
    fitted = parse("atomo(rank=2)").fit(x.shape)
    assert fitted.wire_bytes(x.shape) == 64 + 4 * 2 * (24 + 16)
    received = torch.stack([fitted.roundtrip(x, key) for key in range(200)])
    sizes = torch.linalg.svdvals(x)
    # Different terms are orthogonal, so the expected squared error is Σ σ²(1/p − 1).
    deviation = float((sizes**2 * (1 / probabilities(sizes, 2) - 1)).sum().div(200).sqrt())
    assert float((received.mean(0) - x).norm()) < 3 * deviation
    assert float((received - x).square().sum((1, 2)).mean().sqrt()) == pytest.approx(200**0.5 * deviation, rel=0.2)
    low = normal(24, 2) @ normal(2, 16, seed=1)
    torch.testing.assert_close(fitted.roundtrip(low), low, atol=1e-4, rtol=1e-4)
    assert bool(fitted.roundtrip(torch.full((24, 16), math.nan)).isnan().all())
    for shape in ((24,), (4, 4)):
        with pytest.raises(UnsuitedError):
            parse("atomo(rank=2)").fit(shape)


@pytest.mark.parametrize("cast", [False, True])
def test_fft_with_a_diminishing_share_converges(cast: bool) -> None:
    """θ² = L·η (Theorem 3.5), without error feedback: descent on a quadratic with L = 1 comes to its minimum."""
    fft = parse(f"fft(theta=diminishing, block=64, feedback=False, cast={cast})")
    curvatures, x, shares = torch.logspace(-1, 0, 512), normal(512), []
    first = float((curvatures * x**2).sum())
    for step in range(200):
        rate = 0.25 / (1 + step / 50)
        present = at_step(fft, step, rate)
        assert isinstance(present, FFT)
        assert isinstance(present.theta, float)
        assert present.theta**2 <= rate < (present.theta + 1 / 64) ** 2
        shares.append(present.theta)
        x = x - rate * present.roundtrip(curvatures * x, step)
    assert shares[0] == 0.5
    assert shares == sorted(shares, reverse=True)
    assert float((curvatures * x**2).sum()) < 0.01 * first


def test_descent_with_weights_on_a_shifted_lattice_converges_on_a_quadratic() -> None:
    """QSDP's iteration (theorem 2), ``x ← Q(x − η/β·∇f(x))``, gets as close as its rounding allows.

    Small steps, which nearest rounding takes back, get through on average where the lattice is shifted at random.
    """
    rate, curvatures, target = 0.05, torch.linspace(1.0, 2.0, 510), 0.9 * torch.tanh(normal(510))
    delta = 2.0 / 255  # 8 bits between the two ends, which stay
    ends, losses = torch.tensor([-1.0, 1.0]), {}
    for spec in ("lattice(bits=8, bucket=512)", "minmax(bits=8, bucket=512, rounding=nearest)"):
        quantize, x, found = parse(spec), torch.zeros(510), []
        for step in range(300):
            moved = x - rate / 2.0 * curvatures * (x - target)
            x = quantize.roundtrip(torch.cat((ends, moved)), step)[2:].clamp(-1.0, 1.0)
            found.append(float((curvatures * (x - target) ** 2).sum()) / 2)
        losses[spec.split("(")[0]] = sum(found[200:]) / 100
    # A step's error of δ²/12, of which 1 − ηλ/β is left in the next one.
    kept = (1 - rate / 2.0 * curvatures) ** 2
    assert losses["lattice"] < 1.5 * float((curvatures * delta**2 / 24 / (1 - kept)).sum())
    assert losses["minmax"] > 10 * losses["lattice"]


def test_descent_with_weights_on_a_shifted_lattice_and_quantized_gradients_converges_on_a_quadratic() -> None:
    """QSDP's iteration with both quantized (corollary 3), ``x ← Q(x − η/β·Q'(g(x)))``, gets as close as both
    roundings allow; weights rounded to nearest do not, although gradients are rounded at random."""
    rate, curvatures, target = 0.05, torch.linspace(1.0, 2.0, 510), 0.9 * torch.tanh(normal(510))
    delta = 2.0 / 255
    ends, gradients, losses = torch.tensor([-1.0, 1.0]), parse("minmax(bits=4, bucket=512)"), {}
    lost: list[torch.Tensor] = []
    for spec in ("lattice(bits=8, bucket=512)", "minmax(bits=8, bucket=512, rounding=nearest)"):
        quantize, x, found = parse(spec), torch.zeros(510), []
        for step in range(3000):
            gradient = curvatures * (x - target)
            sent = gradients.roundtrip(gradient, step)
            if step >= 200 and spec.startswith("lattice"):
                lost.append((sent - gradient).square())
            moved = x - rate / 2.0 * sent
            x = quantize.roundtrip(torch.cat((ends, moved)), 10_000 + step)[2:].clamp(-1.0, 1.0)
            found.append(float((curvatures * (x - target) ** 2).sum()) / 2)
        losses[spec.split("(")[0]] = sum(found[200:]) / 2800
    # All weights are shifted alike, so it takes thousands of steps to see a mean.
    # A step's error: δ²/12 of weights, and (η/β)² times the variance of a gradient that was sent.
    variance = delta**2 / 12 + (rate / 2.0) ** 2 * torch.stack(lost).mean(0)
    kept = (1 - rate / 2.0 * curvatures) ** 2
    predicted = float((curvatures / 2 * variance / (1 - kept)).sum())
    assert 0.6 * predicted < losses["lattice"] < 1.5 * predicted
    assert losses["minmax"] > 5 * losses["lattice"]


_SPREADS = {
    "normal": normal(1 << 13),
    "cubes": normal(1 << 13) ** 3,
    "log-normal": (3 * normal(1 << 13)).exp(),
    "uniform": torch.rand(1 << 13, generator=torch.Generator().manual_seed(0)),
    "mostly zero": normal(1 << 13) * (normal(1 << 13, seed=1) > 2),
    "two sizes": torch.where(normal(1 << 13) > 0, 1.0, 1e-4),
}


@pytest.mark.parametrize("spread", _SPREADS)
def test_a_mantissa_is_found_in_few_trials(spread: str) -> None:
    """It loses as little as the best of all mantissas, whose least squared error each is tried for here."""
    values = _SPREADS[spread]
    top = float(values.abs().max())
    for bits in (4, 8, 15):
        with mock.patch.object(kernels, "rangefloat_encode", wraps=kernels.rangefloat_encode) as encode:
            chosen = best_mantissa(values, top, bits, "nearest")
        assert encode.call_count <= 6
        errors = {}
        for mantissa in range(bits):
            with contextlib.suppress(ValueError):
                kernels.rangefloat_eps(bits, mantissa, top)
                fixed = parse(f"rangefloat(bits={bits}, mantissa={mantissa}, range={top})")
                errors[mantissa] = float((fixed.roundtrip(values) - values).norm())
        assert errors[chosen] <= 1.001 * min(errors.values())
