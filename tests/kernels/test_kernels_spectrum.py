"""Spectra in the native core beside PyTorch's transforms."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from kernel_levels import at
from thinwire import kernels
from thinwire.kernels import Received, Table, native

pytestmark = pytest.mark.skipif(not kernels.HAVE_NATIVE, reason="there is no native core")


class Sent:
    """The k largest components of ``x[start : start + numel]``: a message of one segment and their parts."""

    def __init__(self, x: Tensor, start: int, numel: int, block: int, k: int) -> None:
        self.table, self.block, self.kept = Table(torch.tensor([[start, numel, 0, 64, 0]])), block, (k,)
        self.total = kernels.num_components(numel, block)
        self.message = torch.full((128 + kernels.index_bytes(self.total, k),), 255, dtype=torch.uint8)
        self.parts = torch.full((2 * k,), math.nan)
        how = {"block": block, "kept": self.kept}
        self.top = kernels.spectrum_encode(x, self.table, self.message, self.parts, **how)[0]

    @property
    def indices(self) -> Tensor:
        return kernels.unpack_indices(self.message, 128, self.total, *self.kept)

    @property
    def received(self) -> Received:
        return Received(self.message, self.parts)


def values(numel: int) -> Tensor:
    """Of very different size from block to block, as layers of a model are."""
    generator = torch.Generator().manual_seed(numel)
    return torch.randn(numel, generator=generator) * torch.logspace(-3, 0, numel)


def chosen(x: Tensor, block: int, k: int) -> tuple[Tensor, Tensor]:
    """Indices and components of the k largest, by PyTorch, in fp64."""
    padded = torch.nn.functional.pad(x.double(), (0, -x.numel() % block)).view(-1, block)
    components = torch.fft.rfft(padded, norm="ortho").view(-1)
    indices = components.abs().topk(k).indices.sort().values
    return indices, components


def check_choice(x: Tensor, start: int, block: int, share: float, largest: float = 1.0) -> None:
    k = math.ceil(share * kernels.num_components(x.numel() - start, block))
    sent = Sent(x, start, x.numel() - start, block, k)
    expected, components = chosen(x[start:], block, k)
    assert sent.indices.numel() == sent.indices.unique().numel() == k
    ours = torch.view_as_complex(sent.parts.view(-1, 2).double())
    torch.testing.assert_close(ours, components[sent.indices.long()], rtol=1e-5, atol=2e-6 * largest)
    assert sent.top == float(sent.parts.abs().max() if k else 0)
    assert sent.message[64:128].tolist() == [0] * 64
    # Rounding may swap components of nearly the same magnitude, and no others.
    if 0 < k < components.numel():
        assert float(ours.abs().min()) >= float(components[expected].abs().min()) * (1 - 1e-5)


@pytest.mark.parametrize(("block", "numel"), [(64, 64 * 9), (128, 5000), (1024, 40 * 1024 - 3), (4096, 30 * 4096 + 1)])
def test_the_largest_components_are_those_of_pytorch(block: int, numel: int) -> None:
    for share in (0.0, 0.15, 1.0):
        check_choice(values(numel + 5), 5, block, share)


@pytest.mark.parametrize(("sampled", "share"), [(0.0, 0.02), (0.0, 0.6), (1e-3, 0.15), (1e3, 0.02), (1e3, 0.6)])
def test_a_sample_unlike_the_rest_changes_no_choice(sampled: float, share: float) -> None:
    """One group of 2048 elements out of eight is looked at first, to guess where the k-th largest component lies."""
    x = torch.randn(64, 2048, generator=torch.Generator().manual_seed(3))
    x[[8 * i + 5 * i % 8 for i in range(8)]] *= sampled
    check_choice(x.flatten(), 0, 256, share, max(1.0, sampled))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("add", [False, True])
def test_a_sum_of_components_gives_the_signal_of_the_sum(dtype: torch.dtype, add: bool) -> None:
    block, numel = 256, 30 * 256 - 100
    x = [values(numel), values(numel + 7)[7:].contiguous()]
    sent = [Sent(v, 0, numel, block, 2000) for v in x]
    before = torch.randn(numel + 9, generator=torch.Generator().manual_seed(1)).to(dtype)
    y = before.clone()
    table = Table(torch.tensor([[4, numel, 0, 64, 0]]))
    how = {"block": block, "kept": (2000,), "add": add, "scale": 0.5}
    kernels.spectrum_decode([s.received for s in sent], table, y, **how)
    sums = torch.zeros(kernels.num_components(numel, block), dtype=torch.complex128)
    for s in sent:
        sums[s.indices.long()] += torch.view_as_complex(s.parts.view(-1, 2).double())
    expected = torch.fft.irfft(sums.view(-1, block // 2 + 1), n=block, norm="ortho").view(-1)[:numel] * 0.5
    expected = (expected + (before[4:-5].double() if add else 0.0)).to(dtype)
    torch.testing.assert_close(y[4:-5], expected)
    assert torch.equal(y[:4], before[:4])
    assert torch.equal(y[-5:], before[-5:])


@pytest.mark.parametrize("block", [64, 100, 256, 512, 1024, 16384])
def test_levels_give_the_same_bits(block: int) -> None:
    """Of values, and of components unlike those that are sampled; added and set; from any bytes of a message."""
    plain = values(24 * block - 3)
    odd, count = plain.clone(), 6 * (block // 2 + 1)
    odd[: 8 * block] *= 1e3
    noise = torch.randint(0, 256, (10**6,), generator=torch.Generator().manual_seed(1)).to(torch.uint8)
    for x in (plain, odd):
        made = []
        for name in native.core().levels():
            with at(name):
                sent = Sent(x, 0, x.numel(), block, count)
                hostile = noise[: sent.message.numel()].clone()
                hostile[64:128] = 0
                signals = [torch.zeros_like(x, dtype=dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)]
                for signal in signals:
                    for message, add in ((sent.message, False), (sent.message, True), (hostile, True)):
                        received = [Received(message, sent.parts)]
                        kernels.spectrum_decode(received, sent.table, signal, block=block, kept=sent.kept, add=add)
                made.append((sent.message[64:], sent.parts, *signals))
        for others in made[1:]:
            assert all(torch.equal(a, b) for a, b in zip(made[0], others, strict=True))


def test_a_segment_that_is_not_finite_becomes_nan() -> None:
    for bad, level in zip((math.nan, -math.nan, math.inf, 1e30), native.core().levels() * 4, strict=False):
        x = values(60 * 128)
        x[20 * 128 + 1000] = bad
        table = Table(torch.tensor([[i * 2560, 2560, 0, i * 4096, i] for i in range(3)]))
        message, parts, y = torch.zeros(3 * 4096, dtype=torch.uint8), torch.zeros(600), torch.zeros_like(x)
        how = {"block": 128, "kept": (100,) * 3}
        with at(level):
            tops = kernels.spectrum_encode(x, table, message, parts, **how)
            kernels.spectrum_decode([Received(message, parts)], table, y, **how)
        assert [math.isnan(top) for top in tops] == [False, True, False]
        assert bool(y[2560:5120].isnan().all())
        assert bool(y[:2560].isfinite().all() & y[5120:].isfinite().all())


@pytest.mark.parametrize("sizes", [[40000] * 6, [1 << 19, 5000, 300], [100, 4096, 70000, 0, 8191]])
def test_segments_are_what_they_are_alone(sizes: list[int]) -> None:
    """Whether threads share a segment or have one each, and where some are too short for a block."""
    x, block = values(sum(sizes)), 4096
    kept = tuple(kernels.num_components(n, block) // 7 if n else 0 for n in sizes)
    rows, start, payload = [], 0, 0
    for n, k in zip(sizes, kept, strict=True):
        rows.append([start, n, 0, payload, 0])
        start, payload = start + n, payload + 64
        payload += kernels.index_bytes(kernels.num_components(n, block), k) if n else 0
    table = Table(torch.tensor(rows))
    message, parts = torch.zeros(payload, dtype=torch.uint8), torch.zeros(2 * sum(kept))
    tops = kernels.spectrum_encode(x, table, message, parts, block=block, kept=kept)
    y = torch.full_like(x, math.nan)
    kernels.spectrum_decode([Received(message, parts)], table, y, block=block, kept=kept)
    first = 0
    for row, k, top in zip(table.segments, kept, tops, strict=True):
        if not row.numel:
            continue
        alone = Sent(x, row.start, row.numel, block, k)
        assert alone.top == top
        assert torch.equal(alone.message[64:], message[row.payload : row.payload + alone.message.numel() - 64])
        assert torch.equal(alone.parts, parts[first : first + 2 * k])
        signal = torch.zeros_like(x)
        kernels.spectrum_decode([alone.received], alone.table, signal, block=block, kept=(k,))
        part = slice(row.start, row.start + row.numel)
        assert torch.equal(signal[part], y[part])
        first += 2 * k


def test_what_does_not_fit_is_refused() -> None:
    sent = Sent(values(2560), 0, 2560, 128, 300)
    y, how = torch.zeros(2560), {"block": 128, "kept": (300,)}
    for message, parts, change, error, says in (
        (sent.message, sent.parts[:-2], {}, ValueError, "parts"),
        (sent.message, sent.parts.double(), {}, TypeError, "float32"),
        (sent.message[:-64], sent.parts, {}, ValueError, "message"),
        (sent.message, sent.parts, {"block": 1}, ValueError, "block"),
    ):
        with pytest.raises(error, match=says):
            kernels.spectrum_decode([Received(message, parts)], sent.table, y, **(how | change))
    with pytest.raises(ValueError, match="k must be"):
        kernels.spectrum_encode(y, sent.table, sent.message, torch.zeros(10**5), block=128, kept=(50000,))
