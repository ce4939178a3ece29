"""Twelve workers in one process: GD, L-SVRG, IntSGD and IntDIANA exactly as the algorithms say, in fp64 numpy.

Workers are an axis of the arrays, seeds another: what each worker computes and sends is what it would compute and send
alone. Integers are kept as fp64, exact to 2^53, and never clipped, so that one sees how large they want to be.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from experiments.papers.intsgd.datasets import Logistic

Array = NDArray[np.float64]
Draw = Callable[[int, tuple[int, ...]], Array]
"""Uniform numbers in [0, 1) of a shape, for a step."""

FLOAT_BITS = 32
_EPS = 1e-8
"""It keeps scales finite where nothing moves."""


@dataclass(frozen=True)
class Method:
    """An algorithm. ``shifts``: gradient differences are sent, as DIANA does; ``integers``: rounded at random;
    ``reference``: the L-SVRG estimator instead of the full gradient.
    """

    name: str
    title: str
    shifts: bool = False
    integers: bool = False
    reference: bool = False

    @property
    def random(self) -> bool:
        """Whether seeds make a difference."""
        return self.integers or self.reference


@dataclass(frozen=True)
class Trace:
    """One method's runs from all seeds: ``[records, seeds]`` after ``steps [records]``; the first record is the start.

    ``gradients`` counts evaluations over all of a worker's data (a sample's is ``1 / m``). ``largest_sent`` and
    ``largest_sum`` are the largest magnitudes since the record before, of one worker's integers and of their sum; 0
    where no integers were sent.
    """

    steps: Array
    values: Array
    gradients: Array
    bits: Array
    largest_sent: Array
    largest_sum: Array


def bits_of(largest: Array) -> Array:
    """Bits of a signed integer of at most this magnitude: ``1 + log2`` of it, section 4.2."""
    return 1.0 + np.log2(np.maximum(1.0, largest))


def run(problem: Logistic, method: Method, seeds: Sequence[int], steps: int, rate: float, *, every: int = 1) -> Trace:
    """Run ``method`` from 0 with learning rate ``rate``; a record every ``every`` steps. The coin's probability is the
    mini-batch's share."""
    n, d, num_seeds = problem.num_workers, problem.num_coordinates, len(seeds)
    rounding, batches, coins = (draws(seeds, purpose) for purpose in range(3))
    x, shifts, shift = np.zeros((d, num_seeds)), np.zeros((n, d, num_seeds)), np.zeros((d, num_seeds))
    w, at_w = x.copy(), np.zeros_like(shifts)
    squares = np.zeros(num_seeds)
    records = _Records(num_seeds)
    for step in range(steps):
        if method.reference:
            value = problem.gradients(x)[1] if step % every == 0 and step else None
            if step == 0:
                at_w, value = problem.gradients(w)
            gradients = at_w + (problem.differences(x, w, batches, step) if step else 0.0)
        else:
            gradients, value = problem.gradients(x)
        if step % every == 0 and value is not None:
            records.add(step, value)
        records.evaluated(1.0 if not method.reference or step == 0 else 2 * problem.batch_share)
        sent = gradients - shifts if method.shifts else gradients
        if method.integers and step:
            # Proposition 2, with one scale for all coordinates.
            alpha = np.sqrt(d) / np.sqrt(2 * n * squares + _EPS**2)
            # ⌊t⌋ and, with the probability of the rest, one more.
            integers = np.floor(alpha * sent + rounding(step, (n, d)))
            total = integers.sum(0)
            records.sent(np.abs(integers).max((0, 1)), np.abs(total).max(0))
            arrived, mean = integers / alpha, total / alpha / n
        else:
            records.floats()
            arrived, mean = sent, sent.mean(0)
        estimate = mean
        if method.shifts:
            shifts, estimate = shifts + arrived, shift + mean
            shift = estimate
        if method.reference and step:
            for seed in np.nonzero(coins(step, (1,))[0] < problem.batch_share)[0].tolist():
                w[:, seed] = x[:, seed]
                at_w[:, :, seed] = problem.gradients(x[:, [seed]])[0][:, :, 0]
                records.evaluated(1.0, seed)
        squares = (estimate**2).sum(0)
        x = x - rate * estimate
    records.add(steps, problem.gradients(x)[1])
    return records.trace()


def draws(seeds: Sequence[int], purpose: int) -> Draw:
    """Uniform numbers that are a function of seed, purpose and step; seeds are the last axis."""

    def draw(step: int, shape: tuple[int, ...]) -> Array:
        bits = (np.random.Philox(key=seed * 4 + purpose, counter=step << 64) for seed in seeds)
        return np.stack([np.random.Generator(each).random(shape) for each in bits], axis=-1)

    return draw


class _Records:
    def __init__(self, num_seeds: int) -> None:
        self._rows: list[tuple[int, Array, Array, Array, Array, Array]] = []
        self._gradients, self._bits = np.zeros(num_seeds), np.zeros(num_seeds)
        self._sent, self._sum = np.zeros(num_seeds), np.zeros(num_seeds)

    def evaluated(self, share: float, seed: int | None = None) -> None:
        if seed is None:
            self._gradients += share
        else:
            self._gradients[seed] += share

    def sent(self, largest: Array, largest_sum: Array) -> None:
        self._sent, self._sum = np.maximum(self._sent, largest), np.maximum(self._sum, largest_sum)
        self._bits += bits_of(largest)

    def floats(self) -> None:
        self._bits += FLOAT_BITS

    def add(self, step: int, value: Array) -> None:
        self._rows.append((step, value, self._gradients.copy(), self._bits.copy(), self._sent, self._sum))
        self._sent, self._sum = np.zeros_like(self._sent), np.zeros_like(self._sum)

    def trace(self) -> Trace:
        return Trace(*(np.array(column) for column in zip(*self._rows, strict=True)))
