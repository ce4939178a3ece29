"""Summed compressors that factor matrices, written as in their papers."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import SimpleNamespace
from typing import NamedTuple

import torch
from torch import Tensor

from thinwire.compressors._core.compressor import Compressor, UnsuitedError
from thinwire.compressors._core.segments import Part, Parts, SumCall
from thinwire.compressors._core.summed import Subtract, Summed, SumShape
from thinwire.kernels import set_product, subtract_product

_LEAST_RATIO = 2
"""Least ratio of a layer's elements to those of its factors for which it is compressed."""


@dataclass(frozen=True)
class SummedMatrices(Summed):
    """A `Summed` compressor that is written as in papers, for a matrix, and runs on batches of matrices of one shape.

    A layer's matrix has its first axis as rows and all others as columns.
    """

    @abstractmethod
    def factor_shapes(self, rows: int, columns: int) -> tuple[tuple[int, int], ...]:
        """Return the shape of a matrix's part in each round, for ``rows`` x ``columns``."""

    @property
    def sum_dtype(self) -> torch.dtype:
        """Dtype in which ranks' parts are sent and added."""
        return torch.float32

    @abstractmethod
    def factors(self, m: Tensor, slot: SimpleNamespace) -> Generator[Tensor, Tensor, Tensor]:
        """Yield this rank's part of a round and receive its mean over all ranks; after the last, return ``left``.

        The result is ``left @ right.mT``, [count, rows, columns], where ``right`` is the mean of the last round; this
        rank's part of it gives this rank's part of the result.

        Args:
            m: [count, rows, columns], fp32; each matrix is contiguous, wherever the next one begins.
            slot: the layers' slots by name, [count, *shape]. What is assigned is their value in the next step.
        """

    def fit(self, shape: Sequence[int]) -> Compressor:
        check_matrix(self, shape, lambda *sides: sum(map(math.prod, self.factor_shapes(*sides))))
        return self

    def sums(self, shape: Sequence[int], dtype: torch.dtype) -> tuple[SumShape, ...]:
        return tuple(SumShape(math.prod(part), self.sum_dtype) for part in self.factor_shapes(*matrix_shape(shape)))

    def rounds(self, x: Tensor, y: Tensor, call: SumCall) -> Generator[None, None, Subtract]:
        batches = [_Batch(self, x, alike, call) for alike in _alike(*call.parts)]
        for number in range(len(call.buffers)):
            for batch in batches:
                batch.put(number)
            yield
            for batch in batches:
                batch.take(number)
        for batch in batches:
            batch.set(y)

        def subtract(rest: Tensor) -> None:
            for batch in batches:
                batch.subtract(rest)

        return subtract


class _MatrixStack(NamedTuple):
    """Layers of one shape that lie evenly spaced, in the flat tensor and in the buffers of all rounds."""

    names: tuple[str, ...]
    shape: tuple[int, int]
    starts: tuple[int, ...]
    buffer_starts: tuple[tuple[int, ...], ...]
    """First element in the buffer of each round."""


class _Batch:
    """Evenly spaced matrices of one shape, [count, rows, columns], compressed together."""

    def __init__(self, compressor: SummedMatrices, x: Tensor, alike: _MatrixStack, call: SumCall) -> None:
        self._alike, self._call = alike, call
        self._slots = [call.slots(name) for name in alike.names]
        names = [slot.name for slot in compressor.slots if slot.shape is not None]
        self._slot = SimpleNamespace(**{name: torch.stack([s.now[name] for s in self._slots]) for name in names})
        self._factors = compressor.factors(self._matrices(x).float(), self._slot)
        self._mine = next(self._factors)
        self._total = self._mine
        self._left: Tensor | None = None

    def _matrices(self, flat: Tensor) -> Tensor:
        return _evenly_spaced(flat, self._alike.starts, self._alike.shape)

    def put(self, number: int) -> None:
        """Write this rank's part of a round into its buffer."""
        sent = self._in_buffer(number)
        torch.mul(self._mine, self._call.scale, out=sent)
        if sent.dtype is not self._mine.dtype:
            self._mine = sent.float() / self._call.scale  # what rounding loses, the residual keeps

    def take(self, number: int) -> None:
        """Continue with the mean of a round."""
        self._total = self._in_buffer(number).float()
        try:
            self._mine = self._factors.send(self._total)
        except StopIteration as end:
            self._left = end.value

    def _in_buffer(self, number: int) -> Tensor:
        starts = self._alike.buffer_starts[number]
        return _evenly_spaced(self._call.buffers[number], starts, self._mine.shape[-2:])

    def set(self, y: Tensor) -> None:
        assert self._left is not None
        set_product(self._matrices(y), self._left, self._total)
        for name, value in vars(self._slot).items():
            for slots, layer in zip(self._slots, value, strict=True):
                slots.next[name].copy_(layer)

    def subtract(self, rest: Tensor) -> None:
        """Subtract this rank's part of the result from the layers of ``rest`` (fp32), in one pass."""
        assert self._left is not None
        subtract_product(self._matrices(rest), self._left, self._mine)


@lru_cache(maxsize=4096)
def _alike(*rounds: Parts) -> list[_MatrixStack]:
    """Find layers that go together, as the layers of repeated blocks do: they are one strided tensor, and nothing is
    copied. They are found once, and not in every step."""
    by_shape: dict[tuple[int, int], list[tuple[Part, ...]]] = {}
    for layer in zip(*rounds, strict=True):
        by_shape.setdefault(matrix_shape(layer[0].piece.shape), []).append(layer)
    batches: list[list[tuple[Part, ...]]] = []
    for layers in by_shape.values():
        batch: list[tuple[Part, ...]] = []
        for layer in sorted(layers, key=_places):
            step = _steps(batch[-1], layer) if batch else None
            if step is None or min(step) < 0 or (len(batch) > 1 and step != _steps(batch[0], batch[1])):
                batch = []
                batches.append(batch)
            batch.append(layer)
    return [_group_by_shape(batch) for batch in batches]


def _group_by_shape(layers: Sequence[tuple[Part, ...]]) -> _MatrixStack:
    pieces = [parts[0].piece for parts in layers]
    starts, *buffer_starts = zip(*map(_places, layers), strict=True)
    return _MatrixStack(
        tuple(piece.name for piece in pieces), matrix_shape(pieces[0].shape), starts, tuple(buffer_starts)
    )


def _places(layer: Sequence[Part]) -> tuple[int, ...]:
    """Return the first element of a layer in ``x`` and in the buffer of each round."""
    return layer[0].piece.start, *(part.where.start for part in layer)


def _steps(one: Sequence[Part], other: Sequence[Part]) -> list[int]:
    return [b - a for a, b in zip(_places(one), _places(other), strict=True)]


def _evenly_spaced(flat: Tensor, starts: Sequence[int], shape: Sequence[int]) -> Tensor:
    """Return the matrices of ``shape`` that begin at ``starts``, [count, rows, columns], in the memory of ``flat``."""
    rows, columns = shape
    step = starts[1] - starts[0] if len(starts) > 1 else rows * columns
    return flat[starts[0] :].as_strided((len(starts), rows, columns), (step, columns, 1))


def check_matrix(compressor: Compressor, shape: Sequence[int], sent: Callable[[int, int], int]) -> None:
    """Raise `UnsuitedError` unless a layer is a matrix of which ``sent(rows, columns)`` elements are at most half."""
    if len(shape) < 2 or not math.prod(shape):
        raise UnsuitedError(f"{compressor} factors matrices, and a layer of shape {tuple(shape)} is none")
    if _LEAST_RATIO * sent(*matrix_shape(shape)) > math.prod(shape):
        raise UnsuitedError(f"{compressor} would take more than half of the bytes of a layer of shape {tuple(shape)}")


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """Return the rows and columns of a layer as a matrix: its first axis, and all others together."""
    return shape[0], math.prod(shape[1:])
