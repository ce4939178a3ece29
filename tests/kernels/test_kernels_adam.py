"""Adam's moments: the native core against PyTorch's operations, bit for bit; and both against the formulas."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import product

import pytest
import torch
from torch import Tensor

from kernel_levels import check, needs_native
from thinwire.kernels import AdamGradient, AdamStep, MovingAverage, adam_apply, adam_normalize

pytestmark = pytest.mark.usefixtures("one_thread")

SIZES = (0, 1, 15, 2048, 5003, 200_003)
"""The last one is enough work for several threads."""


def _values(numel: int, seed: int) -> Tensor:
    """Of all magnitudes, subnormal ones and those of which the square overflows included."""
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-45, 25, (numel,), generator=generator)
    values = torch.randn(numel, generator=generator) * 10.0**exponents
    if numel > 40:
        values[7], values[20], values[33] = math.inf, math.nan, 0.0
    return values


def _at(offset: int, values: Tensor) -> Tensor:
    """The same values so many elements behind an address that is a multiple of 64."""
    return torch.cat([torch.full((offset,), 7.0), values])[offset:]


def _layers() -> Iterator[tuple[int, int, int]]:
    """Seed, elements and offset of layers of all sizes, one after the other at aligned and at other addresses."""
    for i, numel in enumerate((*SIZES, *SIZES[1:5])):
        yield 10 * i, numel, i % 2


@needs_native
@pytest.mark.parametrize("first", [False, True], ids=["second moment", "both moments"])
def test_bits_are_the_same_everywhere(first: bool) -> None:
    def run() -> dict[str, Tensor]:
        gradients, steps, found = [], [], {}
        for seed, numel, offset in _layers():
            gradient, momentum, weights, update, moved = (_at(offset, _values(numel, seed + i)) for i in range(2, 7))
            before, after = _values(numel, seed + 1).abs(), _at(offset, torch.full((numel,), 7.0))
            momentum_after = torch.full((numel,), 7.0)
            moving = MovingAverage(momentum, momentum_after, 0.9) if first else None
            gradients.append(AdamGradient(gradient, MovingAverage(before, after, 0.999), moving, 1e-8, 3e-4))
            steps.append(AdamStep(weights, update, MovingAverage(moved, moved, 0.9) if first else None, 0.9999, 1.7))
            all_of_it = (gradient, before, after, momentum_after, weights, moved)
            found |= {f"{i} of {seed}": tensor for i, tensor in enumerate(all_of_it)}
        adam_normalize(gradients)
        adam_apply(steps)
        return found

    check(run, threads=(1, 2))


LAYOUTS: list[Callable[[Tensor], Tensor]] = [
    Tensor.clone,
    lambda x: x.contiguous(memory_format=torch.channels_last),
    lambda x: x.transpose(0, 2).contiguous().transpose(0, 2),
    lambda x: torch.stack([x, x], -1)[..., 0],
]
"""Contiguous, channels last, transposed, and with gaps."""


def test_a_step_is_the_formula_however_tensors_lie_in_memory() -> None:
    w, g, v, m = (torch.randn(4, 6, 5, 3).abs() for _ in range(4))
    square, momentum = 0.99 * v + 0.01 * g * g, 0.9 * m + 0.1 * g
    sent = 0.5 * momentum / (square.sqrt() + 1e-3)
    after = 0.9 * momentum + 0.1 * sent
    expected, found = (0.99 * w - 2 * after, sent, square, after), []
    for first, second in product(LAYOUTS, repeat=2):
        weights, gradient, squares, kept = first(w), first(g), second(v), second(m)
        moving = MovingAverage(kept, kept, 0.9)
        adam_normalize([AdamGradient(gradient, MovingAverage(squares, squares, 0.99), moving, 1e-3, 0.5)])
        adam_apply([AdamStep(weights, gradient, moving, 0.99, 2.0)])
        found.append((weights, gradient, squares, kept))
        torch.testing.assert_close(found[-1], expected)
        assert all(torch.equal(*pair) for pair in zip(found[0], found[-1], strict=True))


def test_autograd_notices_a_step_between_forward_and_backward() -> None:
    weights = torch.randn(5, requires_grad=True)
    loss = weights.square().sum()
    with torch.no_grad():
        adam_apply([AdamStep(weights, torch.ones(5), None, 1.0, 1.0)])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
