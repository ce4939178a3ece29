"""The reference against the formulas it states: error bounds, unbiasedness, specials, random draws."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import example, given, settings, strategies as st
from torch import Tensor

from kernel_cases import kinds, one, values
from thinwire.kernels import Format, Residual, bucketed_bytes, floats, reference, rng

BOUNDS = {"nearest": 0.5, "stochastic": 1.0, "shift": 0.5}
"""The largest error of a way to round, in units."""
BAD = (torch.nan, -torch.nan, torch.inf, -torch.inf)


def roundtrip(x: Tensor, form: Format, *, key: int = 1) -> Tensor:
    spans, sent = one(x.numel()), torch.empty(bucketed_bytes(x.numel(), form), dtype=torch.uint8)
    reference.bucketed_encode(x, spans, sent, form, key=key)
    y = torch.empty(x.numel(), dtype=torch.float32)
    reference.bucketed_decode(sent, spans, y, form)
    return y


def unit_of(x: Tensor, *, bits: int, bucket: int) -> Tensor:
    """(max − min)/(2^bits − 1) of each element's bucket, in float64."""
    parts = [part.double() for part in x.split(bucket)]
    return torch.cat([(p.max() - p.min()).expand(p.numel()) / (2**bits - 1) for p in parts])


@settings(max_examples=30)
@given(
    bits=st.integers(1, 8),
    bucket=st.sampled_from([1, 3, 100, 128, 1024, 10**6]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]),
    rounding=st.sampled_from(sorted(BOUNDS)),
)
@example(bits=8, bucket=10**6, dtype=torch.float64, rounding="nearest")
@example(bits=1, bucket=1, dtype=torch.float16, rounding="shift")
def test_error_is_at_most_half_a_unit_to_nearest_and_one_unit_otherwise(
    bits: int, bucket: int, dtype: torch.dtype, rounding: str
) -> None:
    x = values(3001, bits, dtype)
    unit = unit_of(x.float(), bits=bits, bucket=bucket)
    slack = 2.0**-14 * unit + 2.0**-22 * x.double().abs()  # the 16-bit fixed point, and fp32
    error = (roundtrip(x, Format(bits, bucket, rounding=rounding)).double() - x.double()).abs()
    slack64 = 2.0**-22 * x.double().abs() if dtype == torch.float64 else 0.0
    assert torch.all(error <= BOUNDS[rounding] * unit + slack + slack64)


def test_ranges_that_overflow_vanish_or_are_tiny() -> None:
    x = torch.tensor([3e38, -3e38, 0.0])
    assert torch.isnan(roundtrip(x, Format(4, 128))).all()
    assert torch.isfinite(roundtrip(x.abs(), Format(4, 128))).all()
    for value in (0.0, -0.0, 1e-45, 1e-40, 1.0, -2.5, 3e38, 1e30):
        y = roundtrip(torch.full((300,), value), Format(2, 128))
        assert torch.equal(y, torch.full((300,), value))
        assert not torch.signbit(y).any() or value < 0
    x = torch.tensor([1e-31, 2e-31, 3e-31])
    assert torch.equal(roundtrip(x, Format(8, 128)), x[:1].expand(3))


@pytest.mark.parametrize("wide", [False, True])
def test_pack_is_a_bijection_of_the_stated_layout(wide: bool) -> None:
    pack, unpack = reference.pack, reference.unpack
    if wide:
        pack, unpack = floats.pack_wide, floats.unpack_wide
    for bits in range(3, 16) if wide else range(1, 9):
        drawn = torch.randint(0, 2**bits, (1000,), generator=torch.Generator().manual_seed(bits))
        codes = drawn if wide else drawn.to(torch.uint8)
        packed = pack(codes, bits)
        assert packed.numel() == 8 * 16 * bits
        assert torch.equal(unpack(packed, 1000, bits), codes)
        for i in (0, 1, 64, 127, 130, 999):  # bit by bit, from the definition
            group, place, low, at = i // 128, i % 128, 0, 0
            for width in [w for w in (8, 4, 2, 1) if bits & w]:
                byte = int(packed[group * 16 * bits + at + place % (16 * width)])
                field = (byte >> (place // (16 * width) * width)) & ((1 << width) - 1)
                assert field == (int(codes[i]) >> low) & ((1 << width) - 1)
                low, at = low + width, at + 16 * width


def _z_of_counts(counts: Tensor) -> float:
    expected = counts.double().mean()
    chi2 = ((counts - expected) ** 2 / expected).sum().item()
    freedom = counts.numel() - 1
    return (chi2 - freedom) / math.sqrt(2 * freedom)


def _z_of_product(a: Tensor, b: Tensor) -> float:
    variance = (2.0**32 - 1) / 12
    return ((a * b).sum() / (variance * math.sqrt(a.numel()))).item()


def test_draws_are_uniform_and_uncorrelated_over_elements_and_sequential_keys() -> None:
    """16-bit χ², lags, serial pairs, the two halves of a word, and neighboring keys and sites: |z| < 5 for all."""
    numel, kept, device = 2**20, [], torch.device("cpu")
    rows = [(0, 0), (1, 0), (2**63, 0), (0, 1), (5, 2**62)]
    for key, site in rows:
        draws = rng.random16(0, numel, *rng.row_key(key, site), device).long()
        centered = draws.double() - 32767.5
        assert abs(_z_of_counts(torch.bincount(draws, minlength=2**16))) < 5
        pairs = (draws[:-1] >> 8) * 256 + (draws[1:] >> 8)
        assert abs(_z_of_counts(torch.bincount(pairs, minlength=2**16))) < 5
        for lag in (1, 2, 3, 4, 16, 63, 64, 65, 128, 256, 1024):  # 64: the other half of the same word
            assert abs(_z_of_product(centered[:-lag], centered[lag:])) < 5
        for _, other in kept:
            assert abs(_z_of_product(centered, other)) < 5
            assert abs(_z_of_product(centered[1:], other[:-1])) < 5
        kept.append((key, centered))


def scale_of(x: Tensor, form: Format) -> Tensor:
    """a of maxabs and norm for each element's bucket, in float64, from the formulas."""
    found = []
    for part in x.double().split(form.bucket):
        a = part.norm() if form.scheme == "norm" else part.abs().max()
        if form.clip:
            a = torch.minimum(a, form.clip * part.square().mean().sqrt())
        found.append(a.expand(part.numel()))
    return torch.cat(found)


@pytest.mark.parametrize("bucket", [100, 10**6])
@pytest.mark.parametrize("bits", [1, 2, 3, 8])
def test_symmetric_grids_are_those_of_the_formulas(bits: int, bucket: int) -> None:
    for form in kinds(bits, bucket):
        if form.scheme in ("maxabs", "norm"):
            check_grid(form)


def check_grid(form: Format) -> None:
    x = values(1003, form.bits)
    x[::7] = 0.0
    a, y = scale_of(x, form), roundtrip(x, form).double()
    steps = 2 ** (form.bits - 1) if form.midrise else form.levels or 2 ** (form.bits - 1) - 1
    unit = a / steps
    saturated = x.double().clamp(-a, a)
    if form.midrise:
        saturated = saturated.clamp(unit / 2 - a, a - unit / 2)
        half = 0.5 * unit
        grid = (y / unit - 0.5).round() * unit + half
    else:
        grid = (y / unit).round() * unit
        assert torch.all(y[x == 0] == 0)
        assert not torch.signbit(y[x == 0]).any()
    slack = 2.0**-13 * unit + 2.0**-21 * a
    assert torch.all((y - grid).abs() <= slack), form
    assert torch.all(y.abs() <= a + slack), form
    bound = 0.5 if form.rounding == "nearest" else 1.0
    assert torch.all((y - saturated).abs() <= bound * unit + slack), form


KINDS = [form for bits in (1, 4) for form in kinds(bits, 128)]


def test_no_scheme_launders_what_is_not_finite() -> None:
    for form in KINDS:
        for bad in BAD:
            x = values(512, 0)
            x[200] = bad
            y = roundtrip(x, form)
            assert torch.isnan(y[128:256]).all(), form
            assert torch.isfinite(y[:128]).all(), form
            assert torch.isfinite(y[256:]).all(), form


@pytest.mark.parametrize("scale", [1.0, 1024.0, 3.0])
def test_error_feedback_keeps_what_encoding_loses(scale: float) -> None:
    for form in kinds(1, 100) + kinds(4, 100):
        check_residual(form, scale)


def check_residual(form: Format, scale: float) -> None:
    x, now, kept, spans = values(1000, 0), values(1000, 1) / scale, torch.empty(1000), one(1000)
    sent, plain = (torch.empty(bucketed_bytes(1000, form), dtype=torch.uint8) for _ in range(2))
    reference.bucketed_encode(x, spans, sent, form, key=1, residual=Residual(now, kept, scale))
    v = x + now * torch.tensor(scale)
    reference.bucketed_encode(v, spans, plain, form, key=1)
    assert torch.equal(sent, plain)
    y = torch.empty(1000)
    reference.bucketed_decode(sent, spans, y, form)
    assert torch.equal(kept, (v - y) / torch.tensor(scale))
    messages, out, decoded, again = [sent], torch.empty_like(sent), torch.empty(1000), torch.empty(1000)
    held = Residual(now, again, scale)
    reference.bucketed_reduce(messages, x, spans, out, decoded, form, scale=0.5, key=2, residual=held)
    v = (x + y) * 0.5 + now * torch.tensor(scale)
    assert torch.equal(again, (v - decoded) / torch.tensor(scale))
