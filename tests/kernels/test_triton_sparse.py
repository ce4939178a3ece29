"""The Triton kernels of sparse selection: the results of the reference, whatever the input."""

# pyright: reportMissingImports=false
from __future__ import annotations

import pytest
import torch

from kernel_cases import same, special, values
from thinwire import kernels
from thinwire.kernels import reference_sparse
from thinwire.kernels.sparse import draw_sample, packs_bitmap

pytest.importorskip("triton", reason="triton is not installed: pip install --no-deps triton")

from triton_cases import DEVICE, assembly, compiled, in_the_interpreter, quiet, rounded, runs


def gpu_sparse():
    from thinwire.kernels import gpu_sparse

    return gpu_sparse


def alike(wanted: tuple, got: tuple) -> bool:
    return wanted[2:] == got[2:] and all(same(a, b.cpu()) for a, b in zip(wanted[:2], got[:2], strict=True))


SHAPES = {
    "ordinary": lambda n: values(n, 0),
    "special": lambda n: special(n, 0),
    "zeros": lambda n: torch.zeros(n),
    "few values": lambda n: values(n, 3).sign() * (torch.arange(n) % 3 + 1),
}


@runs
@quiet
@pytest.mark.parametrize("shape", SHAPES)
def test_selection(shape: str) -> None:
    run = gpu_sparse()
    for numel in (0, 1, 2048, 9001):
        x = SHAPES[shape](numel) if numel > 50 else torch.ones(numel)
        there = x.to(DEVICE)
        for k in sorted({0, min(numel, 1), numel // 100, numel // 2, numel}):
            none = draw_sample(numel, 0, 0, 1.0)
            wanted = reference_sparse.select_topk(x, k, none, sampled=False)
            assert alike(wanted, run.select_topk(there, k, none, sampled=False))
        for threshold, capacity in [(0.0, numel), (1.0, 10), (2.0, numel), (1e30, 3), (0.5, 0)]:
            wanted = reference_sparse.select_threshold(x, threshold, capacity)
            assert alike(wanted, run.select_threshold(there, threshold, capacity))
        assert same(reference_sparse.abs_histogram(x), run.abs_histogram(there).cpu())


@runs
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_selection_in_half_precision(dtype: torch.dtype) -> None:
    x, none = values(5000, 0, dtype), draw_sample(5000, 0, 0, 1.0)
    wanted = reference_sparse.select_topk(x, 70, none, sampled=False)
    assert alike(wanted, gpu_sparse().select_topk(x.to(DEVICE), 70, none, sampled=False))


@runs
def test_sampled_selection() -> None:
    x = values(70_000, 0)
    for key, deviations in [(1, 1.0), (2, 1.0), (3, -3.0), (4, -3.0)]:  # too high a threshold, and too low a one
        sample = draw_sample(70_000, 700, key, deviations)
        assert sample.rank
        wanted = reference_sparse.select_topk(x, 700, sample, sampled=True)
        assert alike(wanted, gpu_sparse().select_topk(x.to(DEVICE), 700, sample, sampled=True))


@runs
@pytest.mark.parametrize(("numel", "k"), [(1, 1), (100, 7), (5000, 5000), (9001, 40), (200_000, 300), (70_000, 9000)])
def test_packed_indices(numel: int, k: int) -> None:
    run, bitmap = gpu_sparse(), packs_bitmap(numel, k)
    size = kernels.index_bytes(numel, k)
    generator = torch.Generator().manual_seed(numel)
    for count in {0, 1, k // 2, k}:
        indices = torch.randperm(numel, generator=generator)[:count].sort().values.int()
        for at in (64, 67):
            sent = torch.full((size + at + 64,), 0xAB, dtype=torch.uint8)
            there = sent.to(DEVICE, copy=True)
            reference_sparse.pack_indices(indices, numel, k, sent, at, bitmap)
            run.pack_indices(indices.to(DEVICE), numel, k, there, at, bitmap)
            assert same(sent, there.cpu())
            assert same(indices, run.unpack_indices(there, at, numel, k, bitmap).cpu())
    hostile = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)
    wanted = reference_sparse.unpack_indices(hostile, 0, numel, k, bitmap)
    assert same(wanted, run.unpack_indices(hostile.to(DEVICE), 0, numel, k, bitmap).cpu())


@runs
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_values_are_added_where_they_belong(dtype: torch.dtype) -> None:
    y = values(9000, 1, dtype)
    indices = torch.randperm(9000)[:3000].int()
    added, wanted = values(3000, 2), y.float()
    there = y.to(DEVICE, copy=True)
    reference_sparse.sparse_add(wanted, indices, added, 0.3)
    gpu_sparse().sparse_add(there, indices.to(DEVICE), added.to(DEVICE), 0.3)
    touched = torch.zeros(9000, dtype=torch.bool)
    touched[indices.long()] = True
    assert same(torch.where(touched, rounded(wanted, dtype), y), there.cpu())


@compiled
@pytest.mark.timeout(300)
def test_in_the_interpreter() -> None:
    in_the_interpreter(__file__, at_least=16)


@compiled
def test_compiles() -> None:
    run = gpu_sparse()
    types = dict.fromkeys(("least", "counts", "ends", "indices", "bins", "words"), "*i32")
    types |= dict.fromkeys(("x", "values", "y"), "*fp32") | {"marks": "*u8", "scale": "fp32"}
    types |= dict.fromkeys(("numel", "tiles", "k", "count"), "i32")
    for name in ("count_keys", "put_keys", "count_bins", "set_bits", "count_bits", "put_bits", "add_values"):
        assert "fma." not in assembly(getattr(run, name), types, SIZE=2048)
