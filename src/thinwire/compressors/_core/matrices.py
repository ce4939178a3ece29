"""Summed compressors that factor matrices, written as in their papers."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch import Tensor

from thinwire.compressors._core.calls import SumCall
from thinwire.compressors._core.compressor import Compressor, Unsuited
from thinwire.compressors._core.segments import Part
from thinwire.compressors._core.summed import Subtract, Summed, SumShape
from thinwire.kernels import set_product, site_id, subtract_product

_LEAST_RATIO = 2
"""A layer is compressed if its factors have at most one element for so many of its own."""

_LARGEST_EXPONENT = 100
"""Of powers of two that fp32 holds, and so do their inverses."""

_SMALL = 1 << 14
"""Elements of a matrix up to which matrices are batched: copying them then costs less than a call for each."""


@dataclass(frozen=True)
class SummedMatrices(Summed):
    """A `Summed` compressor that is written for one matrix, as in papers, and runs on batches of matrices of one shape.

    A layer's matrix has its first axis as rows and all others as columns.
    """

    @abstractmethod
    def factor_shapes(self, rows: int, columns: int) -> tuple[tuple[int, int], ...]:
        """Return the shape of what a matrix of ``rows`` x ``columns`` adds in each round."""

    @abstractmethod
    def factors(self, m: Tensor, slot: SimpleNamespace) -> Generator[Tensor, Tensor, Tensor]:
        """Yield this rank's part of a round and receive its mean over all ranks; after the last, return ``left``.

        The result is ``left @ right.mT``, [..., rows, columns], where ``right`` is the mean of the last round; this
        rank's part of it gives this rank's part of the result.

        Args:
            m: [..., rows, columns], fp32.
            slot: the layers' slots by name, [..., *shape]. What is assigned is their value in the next step.
        """

    def fit(self, shape: Sequence[int]) -> Compressor:
        if len(shape) < 2 or not math.prod(shape):
            raise Unsuited(f"{self} factors matrices, and a layer of shape {tuple(shape)} is none")
        if _LEAST_RATIO * sum(map(math.prod, self.factor_shapes(*matrix_shape(shape)))) > math.prod(shape):
            raise Unsuited(f"{self} would take more than half of the bytes of a layer of shape {tuple(shape)}")
        return self

    def sums(self, shape: Sequence[int], dtype: torch.dtype) -> tuple[SumShape, ...]:
        return tuple(SumShape(math.prod(part), torch.float32) for part in self.factor_shapes(*matrix_shape(shape)))

    def rounds(self, x: Tensor, y: Tensor, call: SumCall) -> Generator[None, None, Subtract]:
        batches = [_Batch(self, x, batch, call) for batch in _batches(call.parts[0], x)]
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


class _Batch:
    """Matrices of one shape, compressed together."""

    def __init__(self, compressor: SummedMatrices, x: Tensor, indices: Sequence[int], call: SumCall) -> None:
        self._indices, self._call = indices, call
        self._pieces = [call.parts[0][i].piece for i in indices]
        self._slots = [call.slots(piece.name) for piece in self._pieces]
        names = [slot.name for slot in compressor.slots if slot.shape is not None]
        self._slot = SimpleNamespace(**{name: self._joined([s.now[name] for s in self._slots]) for name in names})
        shape = matrix_shape(self._pieces[0].shape)
        m = self._joined([x[piece.elements].view(shape).float() for piece in self._pieces])
        self._factors = compressor.factors(m, self._slot)
        self._mine = next(self._factors)
        self._total = self._mine
        self._left: Tensor | None = None

    @staticmethod
    def _joined(matrices: Sequence[Tensor]) -> Tensor:
        return matrices[0] if len(matrices) == 1 else torch.stack(tuple(matrices))

    def _layers(self, joined: Tensor) -> Sequence[Tensor]:
        return [joined] if len(self._pieces) == 1 else joined.unbind()

    def put(self, number: int) -> None:
        """Write this rank's part of a round into its buffer."""
        for i, part in zip(self._indices, self._layers(self._mine), strict=True):
            where = self._call.parts[number][i].where
            torch.mul(part, self._call.scale, out=self._call.buffers[number][where].view(part.shape))

    def take(self, number: int) -> None:
        """Go on with the mean of a round."""
        buffer, shape = self._call.buffers[number], self._mine.shape[-2:]
        self._total = self._joined([buffer[self._call.parts[number][i].where].view(shape) for i in self._indices])
        try:
            self._mine = self._factors.send(self._total)
        except StopIteration as end:
            self._left = end.value

    def set(self, y: Tensor) -> None:
        """Set the layers of ``y`` to the result, and their slots of the next step."""
        # What is not finite in the small factor makes the whole product NaN.
        right = self._total + (self._total * 0.0).sum((-2, -1), keepdim=True)
        for out, left, of_layer in self._products(y, right):
            set_product(out, left, of_layer)
        for name, value in vars(self._slot).items():
            for slots, layer in zip(self._slots, self._layers(value), strict=True):
                slots.next[name].copy_(layer)

    def subtract(self, rest: Tensor) -> None:
        """Subtract this rank's part of the result from the layers of ``rest`` (fp32), in one pass."""
        for out, left, right in self._products(rest, self._mine):
            subtract_product(out, left, right)

    def _products(self, flat: Tensor, right: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """The matrix of each layer in ``flat``, and its two factors."""
        assert self._left is not None
        for piece, left, of_layer in zip(self._pieces, self._layers(self._left), self._layers(right), strict=True):
            yield flat[piece.elements].view(matrix_shape(piece.shape)), left, of_layer


def _batches(parts: Sequence[Part], x: Tensor) -> list[list[int]]:
    """Indices of parts whose matrices go together."""
    batches: dict[object, list[int]] = {}
    for i, (piece, _) in enumerate(parts):
        together = piece.numel <= _SMALL or not x.is_cpu
        batches.setdefault((matrix_shape(piece.shape), None if together else i), []).append(i)
    return list(batches.values())


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """Rows and columns of a layer as a matrix: its first axis, and all others together."""
    return shape[0], math.prod(shape[1:])


def normal_matrix(shape: Callable[[Sequence[int]], tuple[int, int]]) -> Callable[[Sequence[int], str], Tensor]:
    """Return the initial value of a slot of ``shape``: normal, drawn from the layer's name, so that ranks agree."""

    def initial(layer: Sequence[int], name: str) -> Tensor:
        return torch.randn(shape(layer), generator=torch.Generator().manual_seed(site_id(name)))

    return initial


def scaled_to_one(m: Tensor) -> Tensor:
    """Return each matrix of ``m`` [..., rows, columns] times a power of two, so that its largest element is about 1.

    The columns span the same space. Without this, a product with what a gradient of 1e19 left in a slot overflows.
    """
    _, exponent = torch.frexp(m.abs().amax((-2, -1), keepdim=True))
    return torch.ldexp(m, -exponent.clamp(-_LARGEST_EXPONENT, _LARGEST_EXPONENT))
