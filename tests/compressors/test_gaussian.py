"""The levels of the Gaussian quantiser, and what they are worth."""

from __future__ import annotations

import math
from itertools import pairwise
from statistics import NormalDist

import pytest
import torch

from thinwire import parse
from thinwire.compressors.gaussian import MAGNITUDES


@pytest.mark.parametrize(("bits", "squared"), [(2, 0.1175), (3, 0.03454), (4, 0.009497)])
def test_levels_satisfy_lloyds_conditions_and_err_by_what_max_found(bits: int, squared: float) -> None:
    """Each is the mean of the unit normal between the midpoints to its neighbours."""
    levels, normal = MAGNITUDES[bits], NormalDist()
    assert len(levels) == 2 ** (bits - 1)
    ends = [0.0, *((low + high) / 2 for low, high in pairwise(levels)), 40.0]
    for level, low, high in zip(levels, ends, ends[1:], strict=False):
        mass = normal.cdf(-low) - normal.cdf(-high)
        assert level == pytest.approx((normal.pdf(low) - normal.pdf(high)) / mass, abs=1e-6)
    x = torch.randn(1000, 1024, generator=torch.Generator().manual_seed(0))
    off = parse(f"gaussian(bits={bits}, bucket=1024)").roundtrip(x) - x
    assert float(off.square().sum() / x.square().sum()) == pytest.approx(squared, rel=0.01)


def test_two_bits_are_the_formula() -> None:
    x = torch.randn(300, generator=torch.Generator().manual_seed(1))
    y = parse("gaussian(bits=2, bucket=128)").roundtrip(x)
    for bucket, received in zip(x.split(128), y.split(128), strict=True):
        s = math.sqrt(float(bucket.double().square().mean()))
        expected = torch.where(bucket.abs() > 0.9816 * s, 1.5104 * s, 0.45278 * s) * bucket.sign()
        assert torch.allclose(received, expected, rtol=1e-4)


def test_scales_are_square_roots_rounded_once_on_any_machine() -> None:
    """Vector libraries round the square root of an fp32 value in different ways, which would change bytes."""
    y = torch.rand(4096, generator=torch.Generator().manual_seed(2))
    x = torch.stack((torch.ones(4096), y), 1).reshape(-1)
    received = parse("gaussian(bits=2, bucket=2)").roundtrip(x).view(-1, 2)[:, 0]
    squares = (1 + y.double().square()) / 2
    scales = torch.tensor([math.sqrt(square) for square in squares.tolist()])
    small, large = torch.tensor(MAGNITUDES[2])
    magnitudes = torch.where(scales * ((small + large) * 0.5) <= 1.0, large, small)
    assert torch.equal(received, magnitudes * scales)
