"""Spectra in the native core beside PyTorch's transforms."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from thinwire import kernels
from thinwire.kernels import Components, native

pytestmark = pytest.mark.skipif(not kernels.HAVE_NATIVE, reason="there is no native core")


@pytest.fixture(params=native.CORE.levels() if native.CORE else [])
def level(request: pytest.FixtureRequest) -> Iterator[str]:
    before = native.core().level()
    native.core().set_level(request.param)
    yield request.param
    native.core().set_level(before)


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


@pytest.mark.parametrize(("block", "numel"), [(64, 64 * 9), (128, 5000), (1024, 40 * 1024 - 3), (4096, 100 * 4096 + 1)])
@pytest.mark.parametrize("share", [0.0, 0.15, 1.0])
def test_the_largest_components_are_those_of_pytorch(level: str, block: int, numel: int, share: float) -> None:
    x = values(numel + 5)
    k = math.ceil(share * kernels.num_components(numel, block))
    (indices, parts), finite = kernels.spectrum_pick(x, 5, numel, block, k)
    expected, components = chosen(x[5:], block, k)
    assert finite
    assert indices.numel() == k
    assert bool((indices.diff() > 0).all())
    ours = torch.view_as_complex(parts.double())
    torch.testing.assert_close(ours, components[indices.long()], rtol=1e-5, atol=2e-6)
    # Rounding may swap components of nearly the same magnitude, and no others.
    if 0 < k < components.numel():
        assert float(ours.abs().min()) >= float(components[expected].abs().min()) * (1 - 1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("add", [False, True])
def test_a_sum_of_components_gives_the_signal_of_the_sum(level: str, dtype: torch.dtype, add: bool) -> None:
    block, numel = 256, 30 * 256 - 100
    x = [values(numel), values(numel + 7)[7:].contiguous()]
    sent = [kernels.spectrum_pick(v, 0, numel, block, 2000)[0] for v in x]
    before = torch.randn(numel + 9, generator=torch.Generator().manual_seed(1)).to(dtype)
    y = before.clone()
    kernels.spectrum_sum(sent, y, 4, numel, block, add=add, scale=0.5)
    sums = torch.zeros(kernels.num_components(numel, block), dtype=torch.complex128)
    for indices, parts in sent:
        sums[indices.long()] += torch.view_as_complex(parts.double())
    expected = torch.fft.irfft(sums.view(-1, block // 2 + 1), n=block, norm="ortho").view(-1)[:numel] * 0.5
    expected = (expected + (before[4:-5].double() if add else 0.0)).to(dtype)
    torch.testing.assert_close(y[4:-5], expected)
    assert torch.equal(y[:4], before[:4])
    assert torch.equal(y[-5:], before[-5:])


def test_levels_give_the_same_bits() -> None:
    x, signals, picks = values(50 * 512), [], []
    for name in native.core().levels():
        native.core().set_level(name)
        picks.append(kernels.spectrum_pick(x, 0, x.numel(), 512, 3000)[0])
        signals.append(torch.zeros_like(x))
        kernels.spectrum_sum(picks[-1:], signals[-1], 0, x.numel(), 512)
    native.core().set_level(native.core().levels()[0])
    for pick, signal in zip(picks[1:], signals[1:], strict=True):
        assert torch.equal(pick.indices, picks[0].indices)
        assert torch.equal(pick.parts, picks[0].parts)
        assert torch.equal(signal, signals[0])


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e30])
def test_what_is_not_finite_is_told(bad: float) -> None:
    x = values(20 * 128)
    x[1000] = bad
    assert not kernels.spectrum_pick(x, 0, x.numel(), 128, 100)[1]


def test_blocks_unlike_those_sampled_do_not_change_the_choice() -> None:
    """Large values lie where no block is sampled: too many components then reach the threshold, or too few."""
    block = 64
    for loud in (1e-6, 1e3):
        x = torch.full((960 * block,), 1.0) * torch.randn(960 * block, generator=torch.Generator().manual_seed(2))
        x.view(-1, 20, block)[:, 1:] *= loud
        k = 5000
        expected, components = chosen(x, block, k)
        (indices, _), _ = kernels.spectrum_pick(x, 0, x.numel(), block, k)
        smallest = float(components[indices.long()].abs().min())
        assert smallest >= float(components[expected].abs().min()) * (1 - 1e-5)


@pytest.mark.parametrize("indices", [[3, 2], [-1, 4], [0, 10**6], [5, 5]])
def test_indices_that_do_not_ascend_are_refused_and_nothing_is_written(indices: list[int]) -> None:
    for block in (128, 100):
        y = torch.ones(20 * block)
        sent = Components(torch.tensor(indices, dtype=torch.int32), torch.ones(2, 2))
        with pytest.raises(ValueError, match="ascend"):
            kernels.spectrum_sum([sent], y, 0, y.numel(), block)
        assert bool((y == 1).all())
