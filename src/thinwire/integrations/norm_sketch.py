"""How long the means of all ranks' vectors are, from a few values of each: random projections, which are linear."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from thinwire.kernels import derive_key, power_of_two, signed_sums

_LANES = 1 << 18
"""Elements that are added up before they are mixed: as many fp32 values stay in a core's cache."""
_LEAST, _MOST = 32, 256


def sketch_size(numel: int) -> int:
    """Values of the sketch of a vector of ``numel`` elements: its length errs by ``√(1/(2·size))`` of it, 4 % to 12 %,
    and that of many layers together by less."""
    return min(_MOST, max(_LEAST, power_of_two(numel // 256)))


def norm_sketch(vector: Tensor, *key: int) -> Tensor:
    """``S·x``, fp64, with a random S of signs: ``E‖S·x‖² = ‖x‖²`` (a count sketch, Charikar et al. 2002).

    S depends on ``key`` and the number of elements alone, so that the mean of ranks' sketches is the sketch of their
    mean. Every operation is element-wise, so that equal vectors have the same bits on every machine; means of fp32
    values are exact in fp64, in whichever order a collective adds them.
    """
    size, numel = sketch_size(vector.numel()), vector.numel()
    lanes = max(size, power_of_two(min(numel, _LANES)))
    return signed_sums(vector, _runs(key, numel, lanes), *_mix(lanes, vector.device), size)


def mean_norms(sketches: Tensor, received: Tensor, squares: Tensor) -> Tensor:
    """``‖x‖`` of vectors with these ``sketches`` of which disturbed copies arrived: (vectors,), fp64.

    ``received`` (vectors, values) are the sketches of those copies, ``squares`` (vectors,) their squared lengths. The
    error of a copy's sketch is known and estimates that of the vector's, the better the closer they are (a control
    variate): of an exact copy the norm is exact.
    """
    own, other = _square_sums(sketches), _square_sums(received)
    product = _square_sums(sketches + received) - own - other
    likeness = torch.where(other > 0, product / (2 * other), 0.0).square().clamp(max=1.0)
    estimates = own + likeness * (squares - other)
    return torch.where(estimates > 0, estimates, own).sqrt()


def _square_sums(rows: Tensor) -> Tensor:
    """``Σ x²`` of each of ``rows``, whose width is a power of two, in a fixed order."""
    squares = rows.square()
    while (half := squares.shape[1] // 2) > 0:
        squares = squares[:, :half] + squares[:, half:]
    return squares[:, 0]


def _runs(key: tuple[int, ...], numel: int, lanes: int) -> Tensor:
    """A sign of every run of so many elements, and the lane of its first one."""
    draws = [derive_key(*key, run) for run in range(-(-numel // lanes))]
    runs = [(1 if draw >> 32 & 1 else -1, draw % lanes) for draw in draws]
    return torch.tensor(runs, dtype=torch.int64).reshape(len(runs), 2)


@lru_cache(maxsize=64)
def _mix(count: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """A fixed order of so many lanes, and a sign for each."""
    draws = torch.Generator().manual_seed(count)
    order = torch.randperm(count, generator=draws)
    return order.to(device), (torch.randint(0, 2, (count,), generator=draws) * 2 - 1).float().to(device)
