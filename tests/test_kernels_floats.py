"""Element-wise floats, learned levels, integer rounding: what they mean, and the native core against the reference."""

from __future__ import annotations

import math
import struct

import pytest
import torch
from torch import Tensor

from kernel_cases import one, values
from thinwire import kernels
from thinwire.kernels import reference_floats


def natural(x: Tensor, *, key: int = 1) -> Tensor:
    spans, sent = one(x.numel()), torch.empty(kernels.natural_bytes(x.numel()), dtype=torch.uint8)
    kernels.natural_encode(x, spans, sent, key=key)
    y = torch.empty(x.numel())
    kernels.natural_decode(sent, spans, y)
    return y


def rangefloat(
    x: Tensor, largest: float, mantissa: int, *, bits: int, rounding: str = "nearest", key: int = 1
) -> tuple[Tensor, Tensor]:
    """Decoded values and the message."""
    spans, sent = one(x.numel()), torch.empty(kernels.rangefloat_bytes(x.numel(), bits), dtype=torch.uint8)
    params = torch.tensor([[largest, float(mantissa)]])
    kernels.rangefloat_encode(x, spans, sent, params, bits=bits, rounding=rounding, key=key)
    y = torch.empty(x.numel())
    kernels.rangefloat_decode(sent, spans, y, bits=bits)
    return y, sent


def head(message: Tensor) -> tuple[int, int, float, int]:
    return struct.unpack("<IIfI", bytes(message[:16].tolist()))


def grid(bits: int, largest: float, mantissa: int) -> Tensor:
    """All positive values of a range float, ascending, in plain Python."""
    first, eps = kernels.rangefloat_eps(bits, mantissa, largest)
    words = [(first + i) << (23 - mantissa) for i in range(2 ** (bits - 1) - 1)]
    made = torch.tensor([struct.unpack("<f", struct.pack("<i", w))[0] for w in words])
    assert made[0] == eps
    return made


@pytest.mark.parametrize("exponent", range(-140, 128))
def test_natural_keeps_powers_of_two_within_its_range(exponent: int) -> None:
    y = natural(torch.tensor([2.0**exponent, -(2.0**exponent), 0.0, -0.0]))
    wanted = 0.0 if exponent <= 18 - 127 else 2.0 ** min(exponent, 18)
    assert y.tolist() == [wanted, -wanted, 0.0, 0.0]
    assert not torch.signbit(y[2:]).any()


def test_natural_rounds_to_the_neighbours_without_bias() -> None:
    x = torch.tensor([1.0, 1.25, 1.5, 1.9, -0.3, 3e-5, 2.0**-107 * 1.5, -200.0]).repeat(40_000)
    y = natural(x).view(-1, 8).double()
    x = x[:8].double()
    down = 2.0 ** torch.floor(torch.log2(x.abs()))
    assert torch.all((y.abs() == down) | (y.abs() == 2 * down))
    error, deviation = (y.mean(0) - x) / x.abs(), y.std(0) / x.abs()
    assert torch.all(error.abs() <= 4.5 * deviation / 200 + 1e-9)
    assert torch.all(deviation**2 <= 1 / 8 + 1e-3)  # ω = 1/8


def test_natural_saturates_and_says_so() -> None:
    sent = torch.empty(kernels.natural_bytes(3), dtype=torch.uint8)
    kernels.natural_encode(torch.tensor([1e6, -3e38, 5.0]), one(3), sent, key=1)
    assert head(sent)[:2] == (0, 2)
    y = torch.empty(3)
    kernels.natural_decode(sent, one(3), y)
    assert y[:2].tolist() == [2.0**18, -(2.0**18)]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_is_not_laundered(bad: float) -> None:
    x = values(300, 0)
    x[200] = bad
    assert torch.isnan(natural(x)).all()
    y, sent = rangefloat(x, 4.0, 3, bits=8)
    assert torch.isnan(y).tolist() == [i == 200 for i in range(300)]
    assert head(sent)[0] == 1


@pytest.mark.parametrize("rounding", ["truncate", "nearest", "stochastic"])
@pytest.mark.parametrize(
    ("bits", "mantissa", "largest"),
    [(3, 0, 1.0), (4, 1, 0.7), (6, 3, 100.0), (8, 4, 1.0), (9, 2, 1.0), (10, 3, 1.0), (12, 6, 3.7), (15, 10, 1e-3)],
)
def test_rangefloat_keeps_its_grid_and_rounds_between(bits: int, mantissa: int, largest: float, rounding: str) -> None:
    levels = grid(bits, largest, mantissa)
    signed = torch.cat((-levels.flip(0), torch.zeros(1), levels))
    y, sent = rangefloat(signed, largest, mantissa, bits=bits, rounding=rounding)
    assert torch.equal(y, signed)
    assert head(sent) == (0, 0, struct.unpack("<f", struct.pack("<f", largest))[0], mantissa)
    x = (torch.rand(20_000, generator=torch.Generator().manual_seed(bits)) * 2 - 1) * largest
    x[::3] *= 1e-2
    y, _ = rangefloat(x, largest, mantissa, bits=bits, rounding=rounding)
    above = torch.searchsorted(signed, x).clamp(max=signed.numel() - 1)
    below = (above - 1).clamp(min=0)
    assert torch.all((y == signed[above]) | (y == signed[below]))
    if rounding == "truncate":
        assert torch.all(y.abs() <= x.abs())
    if rounding == "nearest":
        best = torch.minimum((signed[above] - x).abs(), (signed[below] - x).abs())
        assert torch.all((y - x).abs() <= best)
        assert torch.all(y[x.argsort()].diff() >= 0)


@pytest.mark.parametrize(("bits", "mantissa", "largest"), [(4, 0, 1.0), (8, 4, 1.0), (10, 7, 1.0), (15, 12, 2.0)])
def test_stochastic_rangefloat_is_unbiased_also_below_its_smallest_value(
    bits: int, mantissa: int, largest: float
) -> None:
    levels, times = grid(bits, largest, mantissa), 40_000
    x = torch.tensor([levels[0] * 0.3, -levels[0] * 0.01, (levels[2] + 2 * levels[3]) / 3, -levels[-1] * 0.99])
    y, _ = rangefloat(x.repeat(times), largest, mantissa, bits=bits, rounding="stochastic")
    y = y.view(times, 4).double()
    error = (y.mean(0) - x.double()).abs()
    assert torch.all(error <= 4.5 * y.std(0) / math.sqrt(times) + 2.0**-16 * levels[0])


def test_rangefloat_saturates_and_says_so() -> None:
    y, sent = rangefloat(torch.tensor([1.0, 1.5, -7.0, 0.1]), 1.0, 4, bits=8)
    assert y[:3].tolist() == [1.0, 1.0, -1.0]
    assert head(sent)[:2] == (0, 2)


@pytest.mark.parametrize("params", [(1.0, 2), (1.0, 23), (1.0, -1), (1.0, 3.5), (-1.0, 4), (0.0, 4), (torch.nan, 4),
                                    (torch.inf, 4), (1.0, torch.nan), (1e-40, 4)])  # fmt: skip
def test_rangefloat_with_impossible_parameters_decodes_to_nan(params: tuple[float, float]) -> None:
    x, spans = values(200, 0), one(200)
    sent, y = torch.empty(kernels.rangefloat_bytes(200, 10), dtype=torch.uint8), torch.empty(200)
    kernels.rangefloat_encode(x, spans, sent, torch.tensor([params]), bits=10)
    kernels.rangefloat_decode(sent, spans, y, bits=10)
    assert torch.isnan(y).all()


def test_rangefloat_eps_names_the_mantissas_that_work() -> None:
    first, eps = kernels.rangefloat_eps(10, 3, 1.0)
    assert (first, eps) == ((127 << 3) + 1 - 511, struct.unpack("<f", struct.pack("<i", first << 20))[0])
    with pytest.raises(ValueError, match="3 to 22"):
        kernels.rangefloat_eps(10, 2, 1.0)
    for largest in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="max"):
            kernels.rangefloat_eps(10, 3, largest)
    with pytest.raises(ValueError, match="3 to 15"):
        kernels.rangefloat_bytes(100, 16)


@pytest.mark.parametrize("bits", range(3, 16))
def test_wide_codes_are_packed_in_planes(bits: int) -> None:
    codes = torch.randint(0, 2**bits, (1000,), generator=torch.Generator().manual_seed(bits))
    packed = reference_floats.pack_wide(codes, bits)
    assert packed.numel() == 8 * 16 * bits
    assert torch.equal(reference_floats.unpack_wide(packed, 1000, bits), codes)
    for i in (0, 1, 64, 127, 130, 999):
        group, place, low, at = i // 128, i % 128, 0, 0
        for width in [w for w in (8, 4, 2, 1) if bits & w]:
            byte = int(packed[group * 16 * bits + at + place % (16 * width)])
            field = (byte >> (place // (16 * width) * width)) & ((1 << width) - 1)
            assert field == (int(codes[i]) >> low) & ((1 << width) - 1)
            low, at = low + width, at + 16 * width


def levels_roundtrip(x: Tensor, levels: Tensor, *, bits: int, bucket: int) -> Tensor:
    spans = one(x.numel())
    sent = torch.empty(kernels.levels_bytes(x.numel(), bits, bucket), dtype=torch.uint8)
    kernels.levels_encode(x, spans, sent, levels.view(1, -1), bits=bits, bucket=bucket)
    y = torch.empty(x.numel())
    kernels.levels_decode(sent, spans, y, bits=bits, bucket=bucket)
    return y


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("bucket", [1, 100, 128, 1000, 2**40])
def test_levels_code_to_the_nearest(bits: int, bucket: int) -> None:
    x = values(3001, bits)
    levels = torch.rand(2**bits, generator=torch.Generator().manual_seed(bits)).sort().values
    y = levels_roundtrip(x, levels, bits=bits, bucket=bucket)
    for part, got in zip(x.double().split(bucket), y.double().split(bucket), strict=True):
        span = part.max() - part.min()
        best = ((part.min() + span * levels.double())[None] - part[:, None]).abs().min(1).values
        assert torch.all((got - part).abs() <= best + 1e-5 * span + 1e-6 * part.abs().max())


def test_levels_of_buckets_that_are_not_finite_or_constant() -> None:
    x = values(512, 0)
    x[130], x[256:384] = torch.nan, 3.5
    y = levels_roundtrip(x, torch.linspace(0, 1, 16), bits=4, bucket=128)
    assert torch.isnan(y[128:256]).all()
    assert torch.isfinite(y[:128]).all()
    assert torch.equal(y[256:384], x[256:384])
    assert torch.isnan(levels_roundtrip(torch.tensor([3e38, -3e38]), torch.tensor([0.0, 1.0]), bits=1, bucket=2)).all()


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32])
def test_int_round_is_unbiased_and_clips(dtype: torch.dtype) -> None:
    times = 40_000
    x = torch.tensor([0.3, -0.3, 1.0, -2.0, 5.9, 200.0, -6.01, 0.0]).repeat(times)
    out = torch.full((x.numel(),), 77, dtype=dtype)
    clipped = kernels.int_round(x, one(x.numel()), torch.tensor([1.0]), out, clip=6, key=3)
    assert clipped.tolist() == [2 * times]
    q = out.view(times, 8).double()
    assert q.abs().max() == 6
    wanted = x[:8].double().clamp(-6, 6)
    assert torch.all((q.mean(0) - wanted).abs() <= 4.5 * q.std(0) / math.sqrt(times) + 2.0**-16)
    assert torch.all((q - wanted).abs() < 1)


def test_int_round_to_nearest_even_and_of_what_is_not_finite() -> None:
    x = torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5, 0.49, torch.nan, torch.inf, 3e38])
    out = torch.empty(9, dtype=torch.int32)
    clipped = kernels.int_round(x, one(9), torch.tensor([1.0]), out, clip=2**31 - 1, nearest=True)
    assert out.tolist() == [0, 2, 2, 0, -2, 0, 0, 0, 2**31 - 128]
    assert clipped.tolist() == [1]
    y = torch.empty(9)
    kernels.int_decode(out, one(9), y, torch.tensor([0.25]))
    assert y[:3].tolist() == [0.0, 0.5, 0.5]


def test_impossible_requests_are_refused() -> None:
    x, spans = values(100, 0), one(100)
    sent = torch.zeros(1000, dtype=torch.uint8)
    with pytest.raises(ValueError, match="bytes"):
        kernels.natural_encode(x, spans, sent[:191], key=0)
    with pytest.raises(TypeError, match="float64"):
        kernels.natural_encode(x.double(), spans, sent, key=0)
    with pytest.raises(ValueError, match="rounding"):
        kernels.rangefloat_encode(x, spans, sent, torch.ones(1, 2), bits=8, rounding="up")
    with pytest.raises(ValueError, match="shape"):
        kernels.rangefloat_encode(x, spans, sent, torch.ones(2, 2), bits=8)
    with pytest.raises(ValueError, match="shape"):
        kernels.levels_encode(x, spans, sent, torch.ones(1, 4), bits=4, bucket=128)
    with pytest.raises(ValueError, match="bucket"):
        kernels.levels_bytes(100, 4, 0)
    with pytest.raises(ValueError, match="multiple"):
        kernels.levels_encode(x, one(100, index0=128), sent, torch.ones(1, 16), bits=4, bucket=3)
    with pytest.raises(ValueError, match="clip"):
        kernels.int_round(x, spans, torch.ones(1), torch.zeros(100, dtype=torch.int8), clip=128)
    with pytest.raises(ValueError, match="bytes"):
        kernels.int_round(x, spans, torch.ones(1), torch.zeros(99, dtype=torch.int8), clip=12)
    with pytest.raises(TypeError, match="int8"):
        kernels.int_round(x, spans, torch.ones(1), torch.zeros(100, dtype=torch.int16), clip=12)


def test_sizes() -> None:
    assert [kernels.natural_bytes(n) for n in (0, 1, 64, 65)] == [0, 128, 128, 192]
    assert [kernels.rangefloat_bytes(n, 10) for n in (0, 1, 128, 129)] == [0, 64 + 192, 64 + 192, 64 + 320]
    assert kernels.levels_bytes(1000, 4, 128) == 64 + 64 + 8 * 64
    assert kernels.levels_bytes(0, 4, 128) == 0
