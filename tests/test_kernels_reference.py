"""The reference against the formulas it states: error bounds, unbiasedness, specials, random draws."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernel_cases import one, table, values
from thinwire.kernels import Format, bucketed_bytes, bucketed_grain, derive_key, reference, rng
from thinwire.kernels.table import Row

ROW = Row(start=0, numel=0, index0=0, payload=0, site=7)


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("bucket", [1, 3, 100, 128, 1024, 10**6])
def test_error_is_at_most_half_a_unit_to_nearest_and_one_unit_otherwise(
    bits: int, bucket: int, dtype: torch.dtype
) -> None:
    x = values(3001, bits, dtype)
    unit = unit_of(x.float(), bits=bits, bucket=bucket)
    slack = 2.0**-14 * unit + 2.0**-22 * x.double().abs()  # the 16-bit fixed point, and fp32
    for rounding, bound in (("nearest", 0.5), ("stochastic", 1.0), ("shift", 0.5)):
        form = Format(bits, bucket, rounding=rounding)
        error = (roundtrip(x, form).double() - x.double()).abs()
        slack64 = 2.0**-22 * x.double().abs() if dtype == torch.float64 else 0.0
        assert torch.all(error <= bound * unit + slack + slack64)


@settings(deadline=None, max_examples=60)
@given(
    numel=st.integers(1, 700),
    bits=st.integers(1, 8),
    bucket=st.integers(1, 800),
    exponent=st.integers(-25, 37),
    seed=st.integers(0, 2**31),
)
def test_codes_are_those_of_the_formula(numel: int, bits: int, bucket: int, exponent: int, seed: int) -> None:
    """code = min(floor((x − lo)/unit + u), 2^b − 1) in float64, but for draws within rounding of a boundary."""
    x = (torch.randn(numel, generator=torch.Generator().manual_seed(seed)) * 10.0**exponent).clamp(-1e38, 1e38)
    form = Format(bits, bucket)
    found = reference.scales(x, form)
    draws = rng.random16(0, numel, 1, 2, x.device)
    codes = reference.quantise(x, found, form, draws).double()
    low, unit = (reference.per_element(v, numel, bucket).double() for v in found[:2])
    exact = torch.where(unit == 0, 0.0, (x.double() - low) / unit) + draws.double() / 2**16
    assert torch.all(codes <= 2**bits - 1)
    assert torch.all(codes <= exact + 2.0**-12)
    assert torch.all(codes >= exact - 1 - 2.0**-12)


@pytest.mark.parametrize("bits", [1, 4, 8])
def test_stochastic_rounding_is_unbiased_and_independent(bits: int) -> None:
    x = values(256, 3).clamp(-3, 3)
    x[:128].clamp_(-1, 1)
    times, keys = 400, 8  # draws of other elements, and of other keys
    copies = x.repeat(times)
    rows = torch.cat([roundtrip(copies, Format(bits, 128), key=derive_key(bits, k)) for k in range(keys)])
    rows = rows.view(times * keys, 256)
    unit = unit_of(x, bits=bits, bucket=128)
    error = (rows.double() - x.double()) / unit
    fraction = ((x.double() - reference.per_element(x.view(2, 128).min(1).values, 256, 128).double()) / unit) % 1
    deviation = (fraction * (1 - fraction)).sqrt()
    inside = deviation > 0.05  # elsewhere a draw is too rare for the normal law
    z = error.mean(0)[inside] / deviation[inside] * math.sqrt(rows.shape[0])
    assert z.abs().max() < 4.5
    assert abs(z.square().mean().item() - 1) < 6 * math.sqrt(2 / z.numel())
    often = deviation > 0.3
    assert (error.std(0)[often] / deviation[often] - 1).abs().max() < 0.15
    neighbours = (error[:, 1:] * error[:, :-1]).mean(0)[inside[1:] & inside[:-1]]
    assert neighbours.abs().max() < 0.25 * 4.5 / math.sqrt(rows.shape[0])


@pytest.mark.parametrize("bucket", [100, 128, 1000])
def test_a_layer_cut_at_the_grain_gets_the_codes_of_the_whole(bucket: int) -> None:
    grain = bucketed_grain(bucket)
    x = values(3 * grain + 77, 5)
    form = Format(3, bucket)
    whole = reference.encode_row(x, ROW, form, key=11)
    buckets, groups = -(-x.numel() // bucket), -(-x.numel() // 128)
    meta, codes = whole[: 8 * buckets].view(2, -1), whole[-(-8 * buckets // 64) * 64 :][: groups * 48]
    at = 0
    for numel in (grain, 2 * grain, 77):
        part = reference.encode_row(x[at : at + numel], ROW._replace(index0=at), form, key=11)
        n, g = -(-numel // bucket), -(-numel // 128)
        first = at // bucket
        assert torch.equal(part[: 8 * n].view(2, -1), meta[:, 4 * first : 4 * (first + n)])
        assert torch.equal(part[-(-8 * n // 64) * 64 :][: g * 48], codes[at // 128 * 48 :][: g * 48])
        at += numel


@pytest.mark.parametrize("bad", [torch.nan, -torch.nan, torch.inf, -torch.inf])
def test_a_bucket_with_a_value_that_is_not_finite_decodes_to_nan_throughout(bad: float) -> None:
    x = values(512, 0)
    x[200] = bad
    y = roundtrip(x, Format(4, 128))
    assert torch.isnan(y[128:256]).all()
    assert torch.isfinite(y[:128]).all()
    assert torch.isfinite(y[256:]).all()


def test_a_range_that_overflows_decodes_to_nan() -> None:
    x = torch.tensor([3e38, -3e38, 0.0])
    assert torch.isnan(roundtrip(x, Format(4, 128))).all()
    assert torch.isfinite(roundtrip(x.abs(), Format(4, 128))).all()


@pytest.mark.parametrize("value", [0.0, -0.0, 1e-45, 1e-40, 1.0, -2.5, 3e38, 1e30])
def test_constant_buckets_come_back_exactly(value: float) -> None:
    y = roundtrip(torch.full((300,), value), Format(2, 128))
    assert torch.equal(y, torch.full((300,), value))
    assert not torch.signbit(y).any() or value < 0


def test_tiny_ranges_decode_to_the_minimum() -> None:
    x = torch.tensor([1e-31, 2e-31, 3e-31])
    assert torch.equal(roundtrip(x, Format(8, 128)), x[:1].expand(3))


@pytest.mark.parametrize("bits", range(1, 9))
def test_pack_is_a_bijection_of_the_stated_layout(bits: int) -> None:
    codes = torch.randint(0, 2**bits, (1000,), dtype=torch.uint8, generator=torch.Generator().manual_seed(bits))
    packed = reference.pack(codes, bits)
    assert packed.numel() == 8 * 16 * bits
    assert torch.equal(reference.unpack(packed, 1000, bits), codes)
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
    """16-bit χ², lags, serial pairs, the two halves of a word, and neighbouring keys and sites: |z| < 5 for all."""
    numel, kept, device = 2**20, [], torch.device("cpu")
    rows = [(0, 0), (1, 0), (2, 0), (3, 0), (2**63, 0), (0, 1), (0, 2), (5, 2**62)]
    for key, site in rows:
        draws = rng.random16(0, numel, *rng.row_key(key, site), device).long()
        centred = draws.double() - 32767.5
        assert abs(_z_of_counts(torch.bincount(draws, minlength=2**16))) < 5
        pairs = (draws[:-1] >> 8) * 256 + (draws[1:] >> 8)
        assert abs(_z_of_counts(torch.bincount(pairs, minlength=2**16))) < 5
        for lag in (1, 2, 3, 4, 16, 63, 64, 65, 128, 256, 1024):  # 64: the other half of the same word
            assert abs(_z_of_product(centred[:-lag], centred[lag:])) < 5
        for _, other in kept:
            assert abs(_z_of_product(centred, other)) < 5
            assert abs(_z_of_product(centred[1:], other[:-1])) < 5
        kept.append((key, centred))


def test_draws_depend_on_the_element_not_on_where_a_row_starts() -> None:
    device = torch.device("cpu")
    whole = rng.random16(0, 5000, 3, 4, device)
    assert torch.equal(rng.random16(1280, 1000, 3, 4, device), whole[1280:2280])
    assert torch.equal(rng.random16(2**34, 300, 3, 4, device), rng.random16(2**34, 400, 3, 4, device)[:300])


def test_sum_and_reduce_are_what_they_say() -> None:
    form = Format(4, 64)
    spans = table((100, 300), form)
    size = spans.extent(form).message_bytes
    own = values(spans.num_elements, 0)
    sent, decoded = [], []
    for rank in range(3):
        m = torch.zeros(size, dtype=torch.uint8)
        reference.bucketed_encode(values(own.numel(), rank + 1), spans, m, form, key=rank)
        v = torch.zeros_like(own)
        reference.bucketed_decode(m, spans, v, form)
        sent.append(m)
        decoded.append(v)
    mean = (((own + decoded[0]) + decoded[1]) + decoded[2]) * torch.tensor(0.25)
    y, out = torch.zeros_like(own), torch.zeros(size, dtype=torch.uint8)
    reference.bucketed_sum(sent, own, spans, y, form, scale=0.25)
    inside = torch.cat([torch.arange(r.start, r.start + r.numel) for r in spans.segments])
    assert torch.equal(y[inside], mean[inside])
    reference.bucketed_reduce(sent, own, spans, out, y, form, scale=0.25, key=9)
    again, decoded_again = torch.zeros_like(out), torch.zeros_like(y)
    reference.bucketed_encode(mean, spans, again, form, key=9)
    reference.bucketed_decode(again, spans, decoded_again, form)
    assert torch.equal(out, again)
    assert torch.equal(y[inside], decoded_again[inside])
