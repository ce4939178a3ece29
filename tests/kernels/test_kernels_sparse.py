"""Sparse selection and packed indices: what they mean, and the native core against the reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernel_cases import DTYPES, same, special, values
from kernel_levels import check, needs_native
from thinwire import kernels

pytestmark = pytest.mark.usefixtures("one_thread")


def largest(x: Tensor, k: int) -> Tensor:
    """Indices of the k largest |x|, of equal ones the lower, ascending."""
    return x.float().abs().sort(descending=True, stable=True).indices[:k].sort().values.int()


def sparse_rows(numel: int) -> Tensor:
    """An embedding's gradient: nearly all rows are zero."""
    x = values(numel, 1)
    x.view(-1, 64)[torch.rand(numel // 64, generator=torch.Generator().manual_seed(1)) > 0.004] = 0.0
    return x


def burst(numel: int) -> Tensor:
    """All large values side by side, where a sample sees few of them."""
    x = values(numel, 2) * 1e-3
    x[1000:1900] += 5.0
    return x


SHAPES = {
    "ordinary": lambda n: values(n, 0),
    "zeros": torch.zeros,
    "equal": lambda n: torch.full((n,), -2.5),
    "rows": sparse_rows,
    "burst": burst,
    "few values": lambda n: values(n, 3).sign() * (torch.arange(n) % 3 + 1),
    "sorted": lambda n: torch.arange(n) / n,
}


@needs_native
@pytest.mark.parametrize("shape", SHAPES)
def test_topk_is_that_of_torch(shape: str) -> None:
    """Also of ties, zeros and values that a sample misses: its threshold is too high, or too many reach it."""
    for numel, few in ((64, {0, 1, 63, 64}), (6400, {6, 64, 3200, 6399, 6400}), (64 * 3200, {900})):
        x = SHAPES[shape](numel)
        for k in few:
            expected = largest(x, k)

            def run(x: Tensor = x, numel: int = numel, k: int = k, expected: Tensor = expected) -> dict[str, Tensor]:
                indices, picked, finite = kernels.select_topk(x, 0, numel, k)
                assert torch.equal(indices, expected)
                assert torch.equal(picked, x[indices.long()])
                assert finite
                some, _, _ = kernels.select_topk(x, 0, numel, k, sampled=True, key=k)
                assert some.numel() <= k
                assert bool(torch.isin(some, indices).all())
                return {"sampled": some}

            check(run, threads=(2,) if numel > 10**5 else (1,), about=k)


def test_sampled_topk_finds_nearly_all() -> None:
    x = values(300_000, 0)
    found = [kernels.select_topk(x, 0, 300_000, 3000, sampled=True, key=key)[0].numel() for key in range(20)]
    assert sum(found) > 0.97 * 20 * 3000
    assert min(found) > 0.8 * 3000


@pytest.mark.parametrize("dtype", DTYPES)
def test_selection_of_values_that_are_not_finite(dtype: torch.dtype) -> None:
    x = values(5000, 0, dtype)
    x[100], x[50], x[4000] = torch.inf, torch.nan, -torch.inf
    indices, picked, finite = kernels.select_topk(x, 10, 4900, 3)
    assert not finite
    assert indices.tolist() == [40, 90, 3990]
    assert same(picked, x[indices.long() + 10].float())
    assert kernels.select_topk(x, 10, 4900, 1)[0].tolist() == [40]
    assert not kernels.select_topk(x, 0, 5000, 0)[2]
    assert kernels.select_topk(x, 101, 3000, 5)[2]
    assert kernels.select_topk(x, 5000, 0, 0)[2]


@pytest.mark.parametrize("dtype", DTYPES)
def test_threshold_takes_all_above_it_or_the_largest(dtype: torch.dtype) -> None:
    x = values(10_000, 0, dtype)
    part = x[7:9007].float()
    for threshold in (0.0, 1.0, 100.0, 3e38):
        wanted = (part.abs() > threshold).nonzero().view(-1).int()
        indices, picked, finite, overflow = kernels.select_threshold(x, 7, 9000, threshold, 9000)
        assert (torch.equal(indices, wanted), finite, overflow) == (True, True, 0)
        assert torch.equal(picked, part[indices.long()])
        capacity = wanted.numel() // 2
        indices, _, _, overflow = kernels.select_threshold(x, 7, 9000, threshold, capacity)
        assert torch.equal(indices, largest(part, capacity))
        assert overflow == wanted.numel() - capacity


@pytest.mark.parametrize("dtype", DTYPES)
def test_histogram_counts_eighths_of_octaves(dtype: torch.dtype) -> None:
    x = special(10_000, 0, dtype)
    counts = kernels.abs_histogram(x, 3, 9990)
    assert (counts.dtype, counts.shape, int(counts.sum())) == (torch.int32, (2048,), 9990)
    ones = kernels.abs_histogram(torch.tensor([1.0, -1.1, 1.125, 2.0]), 0, 4)
    assert ones.nonzero().view(-1).tolist() == [127 * 8, 127 * 8 + 1, 128 * 8]
    assert int(ones[127 * 8]) == 2


def test_indices_come_back() -> None:
    for numel in (1, 7, 8, 1000, 65_536, 65_537, 300_000):
        for k in sorted({0, 1, numel // 1000, numel // 100, numel // 20, numel // 2, numel}):
            size = kernels.index_bytes(numel, k)
            assert size % 64 == 0
            assert size <= 64 + min(numel / 8 + 1, 2 * k + 4 * (numel / 65536 + 1))
            generator = torch.Generator().manual_seed(k)
            indices = torch.randperm(numel, generator=generator)[:k].sort().values.int()
            for count in {k, k // 2, 0}:
                message = torch.full((size + 11,), 0xAB, dtype=torch.uint8)
                kernels.pack_indices(indices[:count], numel, k, message, 5)
                assert torch.equal(kernels.unpack_indices(message, 5, numel, k), indices[:count])
                assert bool((message[:5] == 0xAB).all())
                assert bool((message[5 + size :] == 0xAB).all())


def test_impossible_requests_are_refused() -> None:
    x, before = values(100, 0), values(100, 0)
    message, picks = torch.zeros(1000, dtype=torch.uint8), torch.tensor([3, 1], dtype=torch.int32)
    for call, error, says in (
        (lambda: kernels.select_topk(x, 50, 51, 3), ValueError, "not all in x"),
        (lambda: kernels.select_topk(x, 0, 50, 51), ValueError, "k must be"),
        (lambda: kernels.select_topk(x.double(), 0, 50, 5), TypeError, "float32"),
        *((lambda t=t: kernels.select_threshold(x, 0, 100, t, 5), ValueError, "threshold") for t in (-1.0, torch.nan)),
        *(
            (lambda wrong=wrong: kernels.pack_indices(wrong, 100, 5, message, 0), ValueError, "ascend")
            for wrong in (picks, picks[1:].repeat(2), picks.flip(0) - 2, picks.flip(0) + 97)
        ),
        (lambda: kernels.pack_indices(picks.flip(0), 100, 1, message, 0), ValueError, "at most k"),
        (lambda: kernels.unpack_indices(message, 990, 1000, 500), ValueError, "bytes"),
        (lambda: kernels.sparse_add(x, 0, 100, picks, torch.ones(3)), ValueError, "do not fit"),
        (lambda: kernels.sparse_add(x, 5, 90, picks + 87, torch.ones(2)), ValueError, "between 0 and 89"),
        (lambda: kernels.sparse_zero(x, 5, 90, picks - 2), ValueError, "between 0 and 89"),
    ):
        with pytest.raises(error, match=says):
            call()
    assert torch.equal(x, before)


@needs_native
@pytest.mark.parametrize("numel", [1, 5, 63, 65, 2049, 70_001, 300_000])
def test_selection_is_that_of_the_reference(numel: int) -> None:
    """Of buffers without an element to spare, behind others or not."""
    for i, dtype in enumerate(DTYPES):
        start = (0, 3)[(i + numel) % 2]
        x = (special, values)[i % 2](numel + start, 1, dtype)

        def run(x: Tensor = x, start: int = start) -> dict[str, Tensor]:
            found = {"histogram": kernels.abs_histogram(x, start, numel)}
            for k in {0, 1, numel // 100, numel // 7, numel}:
                for sampled in (False, True):
                    indices, picked, finite = kernels.select_topk(x, start, numel, k, sampled=sampled, key=k)
                    name = f"{k}, {sampled}"
                    found |= {f"indices {name}": indices, f"values {name}": picked}
                    found |= {f"finite {name}": torch.tensor(finite)}
            for threshold, capacity in ((0.0, numel), (1.0, 50), (1.0, numel), (2.5, 0), (torch.inf, 50)):
                *two, finite, overflow = kernels.select_threshold(x, start, numel, threshold, capacity)
                name = f"{threshold}, {capacity}"
                found |= {f"indices {name}": two[0], f"values {name}": two[1]}
                found |= {f"rest {name}": torch.tensor([finite, overflow])}
            return found

        check(run, threads=(1, 2) if numel == 300_000 else (1,), about=dtype)


@needs_native
def test_packed_indices_are_those_of_the_reference() -> None:
    """And any bytes are ascending indices."""
    for numel in (1, 5, 64, 127, 1000, 70_000):
        generator = torch.Generator().manual_seed(numel)
        for k in {0, 1, numel // 100, numel // 16, numel // 3, numel}:
            size = kernels.index_bytes(numel, k)
            indices = torch.randperm(numel, generator=generator)[:k].sort().values.int()
            wild = [torch.randint(0, top, (size,), generator=generator).to(torch.uint8) for top in (256, 2)]

            def run(
                numel: int = numel, k: int = k, size: int = size, indices: Tensor = indices, wild: list[Tensor] = wild
            ) -> dict[str, Tensor]:
                packed = torch.full((size + 1,), 0xAB, dtype=torch.uint8)
                kernels.pack_indices(indices[: k - k // 4], numel, k, packed, 1)
                hostile = {f"hostile {i}": kernels.unpack_indices(m, 0, numel, k) for i, m in enumerate(wild)}
                assert all(bool((found.diff() > 0).all()) and found.numel() <= k for found in hostile.values())
                assert all(0 <= int(i) < numel for found in hostile.values() for i in (*found[:1], *found[-1:]))
                return {"packed": packed, "indices": kernels.unpack_indices(packed, 1, numel, k)} | hostile

            check(run, about=(numel, k))


@needs_native
@pytest.mark.parametrize("dtype", DTYPES)
def test_scattering_is_that_of_the_reference(dtype: torch.dtype) -> None:
    for start, numel, count in ((7, 4990, 700), (0, 1, 1), (0, 65, 65)):
        x, added = special(start + numel, 0, dtype), special(count, 1)
        indices = torch.randperm(numel)[:count].int()

        def run(
            x: Tensor = x, start: int = start, numel: int = numel, indices: Tensor = indices, added: Tensor = added
        ) -> dict[str, Tensor]:
            y, zeroed = x.clone(), x.clone()
            kernels.sparse_add(y, start, numel, indices, added, 0.3)
            kernels.sparse_zero(zeroed, start, numel, indices)
            return {"y": y, "zeroed": zeroed}

        check(run)
