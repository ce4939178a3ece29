"""Norms and sketches: against fp64, and the native core beside PyTorch's operations, bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernel_levels import check, needs_native
from thinwire.kernels import SignedSum, power_of_two, signed_sums, square_sums

SIZES = (0, 1, 5, 64, 1000, 1 << 16, (1 << 16) + 3, 300_001)


def _drawn(numel: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(numel)) * 3.0


def _drawn_way(numel: int, lanes: int, size: int) -> SignedSum:
    """Signs, shifts and an order that are drawn."""
    draws = torch.Generator().manual_seed(lanes + size)
    count = -(-numel // lanes)
    run_signs = torch.randint(0, 2, (count,), generator=draws) * 2 - 1
    shifts = torch.randint(0, lanes, (count,), generator=draws)
    signs = (torch.randint(0, 2, (lanes,), generator=draws) * 2 - 1).float()
    return SignedSum(torch.stack([run_signs, shifts], 1), torch.randperm(lanes, generator=draws), signs, size)


def _sketch(vector: Tensor, lanes: int, size: int) -> Tensor:
    return signed_sums([vector], [_drawn_way(vector.numel(), lanes, size)])


def _square_sum(x: Tensor) -> Tensor:
    return square_sums([x])[0]


def test_the_square_sum_is_that_of_fp64() -> None:
    for numel in SIZES:
        for x in (_drawn(numel), _drawn(numel).bfloat16()):
            found = _square_sum(x)
            assert found.dtype is torch.float64
            assert float(found) == pytest.approx(float(x.double().square().sum()), rel=1e-14)


def test_a_sketch_adds_every_element_once_with_its_sign() -> None:
    """Of 32 sums, of a vector of whole numbers: their parity and their largest possible sum are known."""
    for numel in SIZES:
        ones, lanes = torch.ones(numel), power_of_two(max(32, min(numel, 1024)))
        sums = _sketch(ones, lanes, 32)
        assert sums.shape == (32,)
        assert int(sums.sum()) % 2 == numel % 2
        assert float(sums.abs().sum()) <= numel
        # Linear: the sketch of a sum is the sum of the sketches, exactly of small whole numbers.
        whole = (_drawn(numel) * 4).round()
        assert torch.equal(_sketch(whole + ones, lanes, 32), _sketch(whole, lanes, 32) + sums)


@needs_native
@pytest.mark.parametrize(("lanes", "size"), [(32, 32), (1024, 64), (1 << 15, 256)])
def test_the_native_core_has_the_bits_of_pytorch(lanes: int, size: int) -> None:
    drawn = [_drawn(numel) for numel in SIZES]
    check(lambda: {str(len(x)): _sketch(x, lanes, size) for x in drawn} | {"squares": square_sums(drawn)})


def test_what_is_not_finite_is_in_the_result() -> None:
    for bad in (float("nan"), float("inf")):
        x = _drawn(1000)
        x[617] = bad
        assert not _square_sum(x).isfinite()
        assert not _sketch(x, 1024, 32).isfinite().all()


def test_many_vectors_at_once_are_each_for_itself() -> None:
    vectors = [_drawn(numel) for numel in (5, 300, 0, 70_000)]
    sizes = ((32, 32), (64, 64), (32, 32), (4096, 256))
    ways = [_drawn_way(x.numel(), *size) for x, size in zip(vectors, sizes, strict=True)]
    each = [signed_sums([x], [way]) for x, way in zip(vectors, ways, strict=True)]
    assert torch.equal(signed_sums(vectors, ways), torch.cat(each))
    assert torch.equal(square_sums(vectors), torch.cat([square_sums([x]) for x in vectors]))
    # Beside one that the native core does not take.
    mixed = [*vectors, _drawn(7).bfloat16()]
    assert torch.equal(square_sums(mixed)[:4], square_sums(vectors))
