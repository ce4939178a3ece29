"""Element-wise floats, learned levels, integer rounding: what they mean, and the native core against the reference."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from kernel_cases import DTYPES, one, special, values
from kernel_levels import LEVELS, at, check, needs_native
from thinwire import kernels
from thinwire.kernels import Format, Residual, Table, floats, site_id

pytestmark = pytest.mark.usefixtures("one_thread")

ROUNDINGS = ("truncate", "nearest", "stochastic")


class Codec(NamedTuple):
    num_bytes: Callable[[int], int]
    encode: Callable[..., object]
    decode: Callable[..., object]


def codec(name: str, *parameters: Tensor, encoding: Mapping[str, Any] | None = None, **how: Any) -> Codec:
    """A format of the kernels with its parameters, and those of encoding alone."""
    num_bytes, encode, decode = (getattr(kernels, f"{name}_{what}") for what in ("bytes", "encode", "decode"))
    known = parameters if name == "magnitudes" else ()
    return Codec(
        lambda numel: num_bytes(numel, *how.values()),
        lambda x, spans, sent, **more: encode(x, spans, sent, *parameters, **how, **(encoding or {}), **more),
        lambda sent, spans, y, **more: decode(sent, spans, y, *known, **how, **more),
    )


def roundtrip(of: Codec, x: Tensor) -> tuple[Tensor, Tensor]:
    """Decoded values and the message."""
    spans, sent, y = one(x.numel()), torch.empty(of.num_bytes(x.numel()), dtype=torch.uint8), torch.empty(x.numel())
    of.encode(x, spans, sent)
    of.decode(sent, spans, y)
    return y, sent


NATURAL = codec("natural", encoding={"key": 1})


def rangefloat(
    x: Tensor, largest: float, mantissa: float, *, bits: int, rounding: str = "nearest"
) -> tuple[Tensor, Tensor]:
    encoding = {"rounding": rounding, "key": 1}
    return roundtrip(codec("rangefloat", torch.tensor([[largest, mantissa]]), encoding=encoding, bits=bits), x)


def head(message: Tensor) -> tuple[int, int, float, int]:
    return struct.unpack("<IIfI", bytes(message[:16].tolist()))


def grid(bits: int, largest: float, mantissa: int) -> Tensor:
    """All positive values of a range float, ascending, in plain Python."""
    first, eps = kernels.rangefloat_eps(bits, mantissa, largest)
    words = [(first + i) << (23 - mantissa) for i in range(2 ** (bits - 1) - 1)]
    made = torch.tensor([struct.unpack("<f", struct.pack("<i", w))[0] for w in words])
    assert made[0] == eps
    return made


def test_natural_keeps_powers_of_two_within_its_range() -> None:
    for exponent in range(-140, 128):
        y, _ = roundtrip(NATURAL, torch.tensor([2.0**exponent, -(2.0**exponent), 0.0, -0.0]))
        wanted = 0.0 if exponent <= 18 - 127 else 2.0 ** min(exponent, 18)
        assert y.tolist() == [wanted, -wanted, 0.0, 0.0]
        assert not torch.signbit(y[2:]).any()


def test_the_range_of_natural_moves_with_the_scale_of_the_values() -> None:
    x, spans, y, wanted = torch.tensor([1.0, -0.37, 2.0**17, 1e-20]), one(4), torch.empty(4), torch.empty(4)
    plain, sent = torch.empty(128, dtype=torch.uint8), torch.empty(128, dtype=torch.uint8)
    kernels.natural_encode(x, spans, plain, key=3)
    kernels.natural_decode(plain, spans, wanted)
    for exponent in (-200, -10, 16, 100, 126):
        scale = 2.0 ** min(max(exponent, -18), 109)
        kernels.natural_encode(x * scale, spans, sent, key=3, scale=2.0**exponent)
        assert torch.equal(sent[64:], plain[64:])
        kernels.natural_decode(sent, spans, y)
        assert torch.equal(y, wanted * scale)


def test_every_rangefloat_keeps_all_of_its_values() -> None:
    """Each width and mantissa with one range and one rounding, which take turns."""
    seen = set()
    for bits in range(3, 13):
        for mantissa in range(23):
            largest = (1.0, 1.75, 1e-6, 3e38)[(bits + mantissa) % 4]
            try:
                levels = grid(bits, largest, mantissa)
            except ValueError:
                continue
            seen.add(bits)
            assert torch.all(levels.diff() > 0)
            assert levels[-1] <= torch.tensor(largest) < 2 * levels[-1]
            signed = torch.cat((-levels.flip(0), torch.zeros(1), levels))
            y, _ = rangefloat(signed, largest, mantissa, bits=bits, rounding=ROUNDINGS[(bits + mantissa) % 3])
            assert torch.equal(y, signed)
    assert seen == set(range(3, 13))


def test_what_saturates_is_counted() -> None:
    y, sent = roundtrip(NATURAL, torch.tensor([1e6, -3e38, 5.0]))
    assert (head(sent)[:2], y[:2].tolist()) == ((0, 2), [2.0**18, -(2.0**18)])
    y, sent = rangefloat(torch.tensor([1.0, 1.5, -7.0, 0.1]), 1.0, 4, bits=8)
    assert (head(sent)[:2], y[:3].tolist()) == ((0, 2), [1.0, 1.0, -1.0])


def test_rangefloat_with_impossible_parameters_decodes_to_nan() -> None:
    x, mantissas, ranges = values(200, 0), (2, 23, -1, 3.5, torch.nan), (-1.0, 0.0, torch.nan, torch.inf, 1e-40)
    for params in [*((1.0, mantissa) for mantissa in mantissas), *((largest, 4) for largest in ranges)]:
        assert torch.isnan(rangefloat(x, *params, bits=10)[0]).all(), params


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
    x, spans, ones = values(100, 0), one(100), torch.ones(1)
    sent, out = torch.zeros(1000, dtype=torch.uint8), torch.zeros(100, dtype=torch.int8)
    cut, levels, four = one(100, index0=128), torch.ones(1, 16), {"bits": 4, "bucket": 128}
    for call, error, says in (
        (lambda: kernels.natural_encode(x, spans, sent[:191], key=0), ValueError, "bytes"),
        (lambda: kernels.natural_encode(x.double(), spans, sent, key=0), TypeError, "float64"),
        (lambda: kernels.rangefloat_encode(x, spans, sent, ones.expand(2, 2), bits=8), ValueError, "shape"),
        (lambda: kernels.rangefloat_encode(x, spans, sent, levels[:, :2], bits=8, rounding="up"), ValueError, "round"),
        (lambda: kernels.levels_encode(x, spans, sent, levels[:, :4], **four), ValueError, "shape"),
        (lambda: kernels.levels_encode(x, cut, sent, levels, bits=4, bucket=3), ValueError, "multiple"),
        (lambda: kernels.levels_bytes(100, 4, 0), ValueError, "bucket"),
        (lambda: kernels.rangefloat_bytes(100, 16), ValueError, "3 and 15"),
        (lambda: kernels.rangefloat_eps(10, 2, 1.0), ValueError, "3 to 22"),
        *((lambda most=most: kernels.rangefloat_eps(10, 3, most), ValueError, "max") for most in (0.0, -1.0, math.nan)),
        (lambda: kernels.int_round(x, spans, ones, out, clip=128), ValueError, "clip"),
        (lambda: kernels.int_round(x, spans, ones, out[:99], clip=12), ValueError, "bytes"),
        (lambda: kernels.int_round(x, spans, ones, out.short(), clip=12), TypeError, "int8"),
    ):
        with pytest.raises(error, match=says):
            call()


SIZES = (0, 1, 63, 64, 127, 128, 129, 1000, 2048, 2049, 5000)


def spread(sizes: tuple[int, ...], num_bytes, *, grain: int = 128, gap: int = 1) -> Table:
    """Segments of these sizes, each of its own layer and elsewhere in it, with gaps between all of them."""
    rows, start, payload = [], gap, 64 * gap
    for i, numel in enumerate(sizes):
        rows.append((start, numel, i * grain, payload, site_id(f"layer{i}")))
        start, payload = start + numel + gap, payload + -(-num_bytes(numel) // 64) * 64 + 64 * gap
    return Table(torch.tensor(rows))


def blank(spans: Table, num_bytes, fill: int = 0xAB) -> Tensor:
    end = max(row.payload + num_bytes(row.numel) for row in spans.segments)
    return torch.full((end + 64,), fill, dtype=torch.uint8)


def check_codec(
    of: Codec, sizes: tuple[int, ...], make, dtype: torch.dtype, *, grain: int = 128, threads: tuple[int, ...] = (1,)
) -> None:
    """A message, and what decoding makes of it and of random bytes, are those of the reference."""
    spans = spread(sizes, of.num_bytes, grain=grain)
    x, sent = make(spans.num_elements + 3, 1, dtype), blank(spans, of.num_bytes)
    hostile = torch.randint(0, 256, sent.shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(1))

    def run() -> dict[str, Tensor]:
        message, stored, added, wild = sent.clone(), torch.full_like(x, 7.0), x.clone(), torch.full_like(x, 7.0)
        of.encode(x, spans, message)
        of.decode(message, spans, stored, scale=0.7)
        of.decode(message, spans, added, add=True, scale=-0.3)
        of.decode(hostile, spans, wild)
        return {"message": message, "stored": stored, "added": added, "hostile": wild}

    check(run, threads=threads, about=(sizes, make, dtype))


@needs_native
@pytest.mark.parametrize("dtype", DTYPES)
def test_natural_is_that_of_the_reference(dtype: torch.dtype) -> None:
    for sizes, threads, make in ((SIZES, (1,), values), (SIZES, (1,), special), ((300_001, 70), (2,), special)):
        check_codec(NATURAL, sizes, make, dtype, threads=threads)


@needs_native
@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_rangefloat_is_that_of_the_reference(rounding: str) -> None:
    for bits in range(3, 16):
        large, turn = bits == 10, bits + ROUNDINGS.index(rounding)
        sizes = (200_001, 129) if large else SIZES
        mantissas = torch.arange(len(sizes)) * 22 // (len(sizes) - 1) * 1.0
        largest = torch.tensor([1.0, 3.7, 100.0, 1e-3, 2e38, 1e-30, 3e-38]).repeat(2)[: len(sizes)]
        params = torch.stack((largest, torch.tensor([3.0, 8.0]) if large else mantissas), dim=1)
        of = codec("rangefloat", params, encoding={"rounding": rounding, "key": 5}, bits=bits)
        make, dtype = (special, values)[turn % 2], DTYPES[turn % 3]
        check_codec(of, sizes, make, dtype, threads=(2,) if large else (1,))


@needs_native
@pytest.mark.parametrize("bits", [3, 5, 8, 9, 12])
def test_every_code_of_a_rangefloat_decodes_as_in_the_reference(bits: int) -> None:
    """All codes, in all formats of one mantissa width each."""
    numel = 2**bits
    packed = floats.pack_wide(torch.arange(numel), bits)
    heads = [(largest, mantissa) for mantissa in range(23) for largest in (1.0, 1.9, 1e-38, 3.4e38)]

    def run() -> dict[str, Tensor]:
        found = {}
        for largest, mantissa in heads:
            sent = torch.zeros(kernels.rangefloat_bytes(numel, bits), dtype=torch.uint8)
            sent[8:16] = torch.tensor(list(struct.pack("<fI", largest, mantissa)), dtype=torch.uint8)
            sent[64 : 64 + packed.numel()] = packed
            kernels.rangefloat_decode(sent, one(numel), y := torch.empty(numel), bits=bits)
            found[f"{largest}, {mantissa}"] = y
        return found

    check(run)


def cases(widths: range, large: int) -> list[Any]:
    """Each width and each bucket once or more, the types of values by turns; one width of large segments."""
    buckets = (1, 3, 64, 100, 128, 1000, 4096, 20_000, 2**40)
    made = [(widths[i % len(widths)], buckets[i % len(buckets)]) for i in range(12)]
    made += [(large, bucket) for bucket in (128, 4096, 20_000, 2**40)]
    large_or_not = [False] * 12 + [True] * 4
    return [(*case, DTYPES[i % 3], is_large) for i, (case, is_large) in enumerate(zip(made, large_or_not, strict=True))]


def layout_of(bucket: int, large: bool) -> tuple[tuple[int, ...], dict[str, Any]]:
    """Sizes of segments, and how they are divided and tried."""
    sizes = (150_001, 129) if large else (*SIZES, 2 * bucket if 1000 <= bucket <= 20_000 else 300)
    return sizes, {"grain": math.lcm(bucket, 128) if bucket < 2**20 else 0, "threads": (2,) if large else (1,)}


@needs_native
@pytest.mark.parametrize(("bits", "bucket", "dtype", "large"), cases(range(1, 9), 4))
def test_levels_are_those_of_the_reference(bits: int, bucket: int, dtype: torch.dtype, large: bool) -> None:
    sizes, how = layout_of(bucket, large)
    levels = torch.rand(len(sizes), 2**bits, generator=torch.Generator().manual_seed(bits)).sort(dim=1).values
    levels[-1] = torch.linspace(0, 1, 2**bits)
    for make in (values, special):
        check_codec(codec("levels", levels, bits=bits, bucket=bucket), sizes, make, dtype, **how)


@needs_native
@pytest.mark.parametrize(("bits", "bucket", "dtype", "large"), cases(range(1, 5), 2))
def test_magnitudes_are_those_of_the_reference(bits: int, bucket: int, dtype: torch.dtype, large: bool) -> None:
    (sizes, how), make = layout_of(bucket, large), (values, special)[bits % 2]
    magnitudes = 3 * torch.rand(2 ** (bits - 1), generator=torch.Generator().manual_seed(bits)).sort().values
    of = codec("magnitudes", magnitudes, bits=bits, bucket=bucket)
    check_codec(of, sizes, make, dtype, **how)
    spans = spread(sizes, of.num_bytes, grain=how["grain"])
    x = make(spans.num_elements + 3, 1, dtype)

    def run() -> dict[str, Tensor]:
        found = {}
        for loss_scale, in_place in ((1.0, False), (0.25, True), (3.0, False)):
            now, sent = values(x.numel(), 7), blank(spans, of.num_bytes)
            after = now if in_place else torch.full_like(now, 5.0)
            of.encode(x, spans, sent, residual=Residual(now, after, loss_scale))
            found |= {f"message of {loss_scale}": sent, f"residual of {loss_scale}": after}
        return found

    check(run, threads=how["threads"])


@needs_native
@pytest.mark.parametrize("nearest", [False, True])
@pytest.mark.parametrize("integer", [torch.int8, torch.int32])
def test_integers_are_those_of_the_reference(integer: torch.dtype, nearest: bool) -> None:
    width = integer.itemsize
    clips = (1, 63, 127) if width == 1 else (1, 10**6, 715_827_882, 2**31 - 1)
    for sizes, threads, few in ((SIZES, (1,), clips), ((300_001, 70), (2,), clips[-1:])):
        spans = spread(sizes, lambda numel: numel * width)
        alphas = torch.tensor([1.0, 0.3, 20.0, 1e9, 1e30, torch.inf, torch.nan, 0.0]).repeat(2)[: len(sizes)]
        for i, (clip, make) in enumerate((clip, make) for clip in few for make in (values, special)):
            x = make(spans.num_elements + 3, 1, DTYPES[i % 3])

            def run(
                spans: Table = spans, x: Tensor = x, alphas: Tensor = alphas, clip: int = clip
            ) -> dict[str, Tensor]:
                out = blank(spans, lambda numel: numel * width).view(integer)
                clipped = kernels.int_round(x, spans, alphas, out, clip=clip, key=3, nearest=nearest)
                y = x.clone()
                kernels.int_decode(out, spans, y, torch.linspace(-1, 1, len(alphas)))
                return {"out": out, "clipped": clipped, "y": y}

            check(run, threads=threads, about=(x.dtype, make, clip))


@needs_native
@pytest.mark.parametrize("level", LEVELS)
def test_random_bytes_in_buffers_without_an_element_to_spare(level: str) -> None:
    """Every content of a message decodes to something; the sanitizer build sees any access past an end."""
    generator = torch.Generator().manual_seed(0)

    def random(num_bytes: int) -> Tensor:
        return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=generator)

    def try_all(numel: int, dtype: torch.dtype) -> None:
        spans, y, codecs = one(numel), torch.zeros(numel, dtype=dtype), [NATURAL]
        codecs += [codec("rangefloat", torch.rand(1, 2) * 22, bits=bits) for bits in range(3, 16)]
        for bits in range(1, 9):
            for bucket in (7, 100, 128, 2**40)[bits % 2 :: 2]:
                how = {"bits": bits, "bucket": bucket}
                codecs.append(codec("levels", torch.rand(1, 2**bits).sort().values, **how))
                if bits < 5:
                    codecs.append(codec("magnitudes", torch.ones(2 ** (bits - 1)), **how))
        for of in codecs:
            sent = random(of.num_bytes(numel))
            of.decode(sent, spans, y)
            sent[8:16] = torch.tensor([0, 0, 128, 63, 12, 0, 0, 0])  # what a range float may have there
            of.decode(sent, spans, y, add=True)
            of.encode(y, spans, sent)
            with pytest.raises(ValueError, match="bytes"):
                of.decode(sent[:-1], spans, y)
        for integer in (torch.int8, torch.int32):
            out = torch.empty(numel, dtype=integer)
            kernels.int_round(y, spans, torch.ones(1), out, clip=100, key=1)
            kernels.int_decode(out, spans, y, torch.ones(1))

    with at(level):
        for i, numel in enumerate((1, 5, 63, 64, 65, 127, 129, 1000, 2049)):
            try_all(numel, DTYPES[i % 3])


@needs_native
def test_messages_may_lie_at_any_address() -> None:
    x, spans, made = values(1000, 0), one(1000), []
    codecs = [NATURAL, codec("rangefloat", torch.tensor([[4.0, 3.0]]), bits=10)]
    codecs.append(codec("levels", torch.linspace(0, 1, 16).view(1, -1), bits=4, bucket=100))
    codecs.append(codec("bucketed", encoding={"key": 1}, form=Format(3, 100)))
    for shift in (0, 1, 2, 3, 17):
        made.append([])
        for of in codecs:
            sent = torch.full((of.num_bytes(1000) + shift,), 0xAB, dtype=torch.uint8)[shift:]
            of.encode(x, spans, sent)
            of.decode(sent, spans, y := torch.zeros(1000))
            made[-1] += [sent, y]
    for others in made[1:]:
        assert all(torch.equal(a, b) for a, b in zip(made[0], others, strict=True))
