"""Adam's moments: the native core against PyTorch's operations, bit for bit; and both against the formulas."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from kernel_levels import check, needs_native
from thinwire.kernels import AdamGradient, AdamStep, Moving, adam_apply, adam_normalise

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
def test_normalising_has_the_same_bits_everywhere(first: bool) -> None:
    def run() -> dict[str, Tensor]:
        layers, found = [], {}
        for seed, numel, offset in _layers():
            gradient, momentum = _at(offset, _values(numel, seed)), _at(offset, _values(numel, seed + 2))
            before, after = _values(numel, seed + 1).abs(), _at(offset, torch.full((numel,), 7.0))
            momentum_after = torch.full((numel,), 7.0)
            moving = Moving(momentum, momentum_after, 0.9) if first else None
            layers.append(AdamGradient(gradient, Moving(before, after, 0.999), moving, 1e-8, 3e-4))
            found |= {f"sent {seed}": gradient, f"square {seed}": after, f"momentum {seed}": momentum_after}
            found |= {f"before {seed}": before}
        adam_normalise(layers)
        return found

    check(run, threads=(1, 2))


@needs_native
@pytest.mark.parametrize("first", [False, True], ids=["update", "momentum"])
def test_a_step_has_the_same_bits_everywhere(first: bool) -> None:
    def run() -> dict[str, Tensor]:
        layers, found = [], {}
        for seed, numel, offset in _layers():
            weights, update, momentum = (_at(offset, _values(numel, seed + i)) for i in (3, 4, 5))
            moving = Moving(momentum, momentum, 0.9) if first else None
            layers.append(AdamStep(weights, update, moving, 0.9999, 1.7))
            found |= {f"weights {seed}": weights, f"momentum {seed}": momentum}
        adam_apply(layers)
        return found

    check(run, threads=(1, 2))


def test_normalising_is_the_formula() -> None:
    g, v, m = torch.randn(300), torch.rand(300), torch.randn(300)
    gradient, square, momentum = g.clone(), v.clone(), torch.empty(300)
    adam_normalise([AdamGradient(gradient, Moving(v, square, 0.99), Moving(m, momentum, 0.9), 1e-3, 0.5)])
    torch.testing.assert_close(square, 0.99 * v + 0.01 * g * g)
    torch.testing.assert_close(momentum, 0.9 * m + 0.1 * g)
    torch.testing.assert_close(gradient, 0.5 * momentum / (square.sqrt() + 1e-3))


def test_a_step_is_the_formula_also_of_weights_in_another_layout() -> None:
    w, d, m = torch.randn(20, 30), torch.randn(20, 30), torch.randn(20, 30)
    expected = 0.99 * w - 2 * (0.9 * m + 0.1 * d)
    for weights in (w.clone(), w.t().contiguous().t()):
        momentum = m.clone()
        adam_apply([AdamStep(weights, d, Moving(momentum, momentum, 0.9), 0.99, 2.0)])
        torch.testing.assert_close(weights, expected)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": Tensor.clone,
    "channels last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "transposed": lambda x: x.transpose(0, 2).contiguous().transpose(0, 2),
    "with gaps": lambda x: torch.stack([x, x], -1)[..., 0],
}


def test_how_tensors_lie_in_memory_changes_no_bit() -> None:
    w, g, v, m = (torch.randn(4, 6, 5, 3).abs() for _ in range(4))
    plain = LAYOUTS["contiguous"]
    cases = [(plain, plain), *((way, plain) for way in LAYOUTS.values()), *((plain, way) for way in LAYOUTS.values())]
    found = []
    for first, second in cases:
        values, gradient, square, momentum = first(w), first(g), second(v), second(m)
        moving = Moving(momentum, momentum, 0.9)
        adam_normalise([AdamGradient(gradient, Moving(square, square, 0.99), moving, 1e-3, 0.5)])
        adam_apply([AdamStep(values, gradient, moving, 0.99, 2.0)])
        found.append((values, gradient, square, momentum))
    for others in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], others, strict=True))


def test_autograd_notices_a_step_between_forward_and_backward() -> None:
    weights = torch.randn(5, requires_grad=True)
    loss = weights.square().sum()
    with torch.no_grad():
        adam_apply([AdamStep(weights, torch.ones(5), None, 1.0, 1.0)])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
