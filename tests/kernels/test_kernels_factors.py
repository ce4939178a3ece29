"""Products of matrices with narrow ones, and bases: against fp64, and the native core's bits at every level and on any
threads."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from torch import Tensor

from kernel_levels import LEVELS, at, is_same, needs_native
from thinwire.kernels import narrow_product, orthonormal_basis, set_product, subtract_product

SHAPES = (
    *((1, 1, 1), (1, 7, 5), (2, 40, 16), (1, 33, 257), (1, 256, 768), (3, 33, 17), (2, 0, 4), (1, 4, 0)),
    (1, 600, 700),
)
"""The last one is enough work for several threads."""
RANKS = (1, 3, 4, 5, 16)


def _drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(math.prod(shape) + len(shape)))


def _factors(shape: tuple[int, ...], rank: int) -> tuple[Tensor, Tensor]:
    """A left factor whose memory has its columns one after the other, as QR leaves it, and a right one."""
    count, rows, columns = shape
    return _drawn(count, rank, rows).mT, _drawn(count, columns, rank)


def _close(found: Tensor, expected: Tensor, terms: int) -> None:
    assert found.shape == expected.shape
    torch.testing.assert_close(found.double(), expected, rtol=0.0, atol=1e-6 * (1 + terms))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_are_those_of_fp64(shape: tuple[int, ...]) -> None:
    for rank in (*RANKS, 40):
        m, (left, right) = _drawn(*shape), _factors(shape, rank)
        exact = left.double() @ right.double().mT
        _close(narrow_product(m, right), m.double() @ right.double(), shape[-1])
        _close(narrow_product(m.mT, left), m.double().mT @ left.double(), shape[-2])
        out, rest = torch.full(shape, 7.0), m.clone()
        set_product(out, left, right)
        _close(out, exact, rank)
        subtract_product(rest, left, right)
        _close(rest, m.double() - exact, rank)


@pytest.mark.parametrize("few", [3, 40])
def test_matrices_lie_anywhere_and_what_is_between_them_stays(few: int) -> None:
    count, rows, columns, step, lead = 3, 6, 11, 100, 5
    flat = _drawn(lead + count * step)
    m = flat[lead:].as_strided((count, rows, columns), (step, columns, 1))
    left, right = _factors((count, rows, columns), few)
    assert torch.equal(narrow_product(m, right), narrow_product(m.contiguous(), right))
    assert torch.equal(narrow_product(m.mT, left), narrow_product(m.contiguous().mT, left))

    before, rest = flat.clone(), m.clone()
    subtract_product(m, left, right)
    subtract_product(rest, left, right)
    assert torch.equal(m, rest)
    set_product(m, left, right)
    _close(m, left.double() @ right.double().mT, few)
    between = torch.ones_like(flat, dtype=torch.bool)
    between[lead:].as_strided((count, rows, columns), (step, columns, 1)).fill_(False)
    assert torch.equal(flat[between], before[between])


@needs_native
def test_levels_and_threads_change_no_bit() -> None:
    for shape in SHAPES:
        m, (left, right) = _drawn(*shape), _factors(shape, 5)
        many, made = ((1, 4) if shape == SHAPES[-1] else (1,)), []
        for level, threads in product(LEVELS, many):
            with at(level, threads):
                out, rest = torch.full(shape, 7.0), m.clone()
                set_product(out, left, right)
                subtract_product(rest, left, right)
                made.append([narrow_product(m, right), narrow_product(m.mT, left), out, rest])
            assert all(is_same(*pair) for pair in zip(made[0], made[-1], strict=True)), (shape, level, threads)


def test_what_is_not_finite_reaches_its_row_and_its_column_alone() -> None:
    for row, column in ((0, 0), (30, 255), (32, 256)):
        m, (left, right) = _drawn(1, 33, 257), _factors((1, 33, 257), 3)
        m[0, row, column] = math.nan
        for found, at_index in ((narrow_product(m, right)[0], row), (narrow_product(m.mT, left)[0], column)):
            assert found.isnan().any(1).nonzero().flatten().tolist() == [at_index]
            assert found[at_index].isnan().all()


def test_gradients_of_16_bits_and_matrices_that_are_not_contiguous_are_taken() -> None:
    left, right = _factors((1, 12, 20), 2)
    out = torch.empty(1, 12, 20, dtype=torch.bfloat16)
    set_product(out, left, right)
    assert torch.equal(out, (left @ right.mT).bfloat16())
    m, (_, right) = _drawn(2, 24, 36)[:, ::2, ::3], _factors((2, 12, 12), 2)
    _close(narrow_product(m, right), m.double() @ right.double(), 12)


@pytest.mark.parametrize("few", [3, 40])
def test_normalized_factors_give_the_same_product_but_for_a_power_of_two(few: int) -> None:
    for largest in (0.0, 1e-20, 1.0, 3e19, 1e30):
        m, (_, right) = _drawn(2, 33, 257), _factors((2, 33, 257), few)
        right[1] *= largest / right[1].abs().max()
        found, unit = narrow_product(m, right, normalized=True), right.double() / max(largest, 1e-38)
        assert bool(found.isfinite().all())
        expected = m[1].double() @ unit[1]
        power = float(found[1].double().abs().max() / expected.abs().max()) if largest else 1.0
        _close(found[1] / power, expected, 257)
        assert 0.45 < power <= 1.1


@pytest.mark.parametrize("few", [3, 40])
def test_a_right_factor_that_is_not_finite_makes_all_of_its_matrix_nan(few: int) -> None:
    for value in (math.nan, math.inf):
        left, right = _factors((2, 33, 257), few)
        left[1] = 0.0
        right[1, 200, 1] = value
        out = torch.empty(2, 33, 257)
        set_product(out, left, right)
        assert bool(out[1].isnan().all())
        assert bool(out[0].isfinite().all())


def _orthonormal(narrow: Tensor) -> Tensor:
    q = orthonormal_basis(narrow).double()
    unit = torch.eye(narrow.shape[-1]).double().expand(len(q), -1, -1)
    torch.testing.assert_close(q.mT @ q, unit, rtol=0.0, atol=2e-6)
    return q


def test_bases_are_orthonormal_and_span_the_columns_which_may_depend_on_each_other() -> None:
    for rank, rows in product((*RANKS, 40), (40, 257, 1024)):
        narrow = _drawn(2, rows, rank) * torch.logspace(-30, 30, rank)
        q, columns = _orthonormal(narrow), narrow.double() / narrow.double().norm(dim=1, keepdim=True)
        assert float((columns - q @ (q.mT @ columns)).norm(dim=1).max()) < 2e-6
    for factor in (0.0, 1.0, -1.0, 2.0**-120):
        narrow = _drawn(1, 300, 4)
        narrow[:, :, 1:3] = narrow[:, :, :1] * factor
        _orthonormal(narrow)


@needs_native
def test_a_basis_of_what_is_not_finite_is_not_a_number() -> None:
    for bad in (math.inf, -math.inf, math.nan):
        narrow = _drawn(3, 50, 4)
        narrow[1, 7, 2] = bad
        assert orthonormal_basis(narrow).isnan().flatten(1).all(1).tolist() == [False, True, False]


@needs_native
def test_bases_have_the_same_bits_at_every_level() -> None:
    for rank in RANKS:
        narrow, found = _drawn(3, 777, rank), []
        for level in LEVELS:
            with at(level):
                found.append(orthonormal_basis(narrow))
        assert all(is_same(found[0], basis) for basis in found)
