"""The tensors that cross a stage boundary: their shapes in each micro-batch, and the part that each sample has."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from thinwire.compressors import GRADIENT_DTYPES
from thinwire.store import Part, Rows

Direction = Literal["forward", "backward"]


class Spec(NamedTuple):
    """Shape and dtype of one tensor of a micro-batch."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class BoundaryTensors:
    """The tensors that cross a boundary in one direction, as the pipeline was set up: batch first, then the length.

    Floating-point tensors are cut into samples along their first dimension. The second one of the first that has more
    than two is the length, which may differ from step to step; tensors of two dimensions have it, too, if their second
    is as large. Integers and bools are sent as they are.

    Raises:
        TypeError: A dtype is one that no compressor takes.
        ValueError: The tensors are of different batches.
    """

    specs: tuple[Spec, ...]

    def __post_init__(self) -> None:
        for shape, dtype in (self.specs[i] for i in self.floats):
            if dtype not in GRADIENT_DTYPES:
                raise TypeError(
                    f"an activation of {dtype} crosses a stage boundary: compressors take float32, bfloat16 and "
                    "float16. Cast it, or leave this stage PyTorch's own"
                )
            if not shape or shape[0] != self.batch:
                raise ValueError(
                    f"activations of shapes {[tuple(spec.shape) for spec in self.specs]} cross a stage boundary: the "
                    "first dimension of each must be the batch"
                )

    @cached_property
    def floats(self) -> tuple[int, ...]:
        """Indices of the tensors that hold activations."""
        kinds = [spec.dtype for spec in self.specs]
        return tuple(i for i, dtype in enumerate(kinds) if dtype.is_floating_point or dtype.is_complex)

    @cached_property
    def others(self) -> tuple[int, ...]:
        """Indices of the tensors that do not: integers and bools."""
        return tuple(i for i in range(len(self.specs)) if i not in self.floats)

    @cached_property
    def batch(self) -> int:
        """Samples of a micro-batch, as set up."""
        shapes = [self.specs[i].shape for i in (*self.floats, *self.others)]
        return shapes[0][0] if shapes and shapes[0] else 0

    @cached_property
    def length(self) -> int:
        """Positions of a sample, as set up; 0 if none has any."""
        return next((shape[1] for shape in (self.specs[i].shape for i in self.floats) if len(shape) > 2), 0)

    @cached_property
    def dtype(self) -> torch.dtype:
        """Dtype of the flat tensor of a micro-batch's activations."""
        dtypes = {self.specs[i].dtype for i in self.floats}
        return dtypes.pop() if len(dtypes) == 1 else torch.float32

    def shapes(self, count: int, length: int) -> list[tuple[int, ...]]:
        """Shapes of all tensors in a micro-batch of ``count`` samples, padded to ``length`` positions."""
        return [self._shape(i, count, length) for i in range(len(self.specs))]

    def _shape(self, i: int, count: int, length: int) -> tuple[int, ...]:
        shape = list(self.specs[i].shape)
        if shape and shape[0] == self.batch:
            shape[0] = count
        if self._grows(i):
            shape[1] = length
        return tuple(shape)

    def _grows(self, i: int) -> bool:
        shape = self.specs[i].shape
        return bool(self.length) and len(shape) > 1 and shape[1] == self.length

    def parts(self, length: int) -> tuple[Part, ...]:
        """The part that a sample has in each activation tensor, at ``length`` positions."""
        parts = []
        for i in self.floats:
            own = self._shape(i, 1, length)[1:]
            grows = self._grows(i)
            parts.append(Part(own[0], math.prod(own[1:]), True) if grows else Part(1, math.prod(own), False))
        return tuple(parts)

    def check(self, tensors: Sequence[Tensor], count: int, length: int, where: str) -> None:
        """Raise ``ValueError`` unless tensors have the shapes that the other side expects."""
        expected = self.shapes(count, length)
        shapes = [tuple(tensor.shape) for tensor in tensors]
        if shapes != expected:
            raise ValueError(
                f"{where} has shapes {shapes}, the other side expects {expected} ({count} samples, length {length}): "
                "pass set_sample_ids() all samples of the batch that step() gets, and length= when it changes"
            )

    def flatten(self, tensors: Sequence[Tensor], rows: Rows) -> Tensor:
        """The activations of a micro-batch, sample by sample, on the host: flat, of `dtype`; zero behind each length.

        It may share memory with the only tensor.
        """
        wanted = [tensors[i].detach().to("cpu", self.dtype) for i in self.floats]
        count = len(rows.samples)
        if len(wanted) == 1:
            flat = wanted[0].contiguous().view(-1)
        else:
            flat = torch.cat([tensor.reshape(count, -1) for tensor in wanted], dim=1).view(-1)
        if all(length == rows.padded for length in rows.lengths):
            return flat
        flat = flat.clone()
        for tensor, part in self._views(flat, rows):
            for i, length in enumerate(rows.lengths):
                tensor[i, part.at(length) :] = 0
        return flat

    def unflatten(self, flat: Tensor, rows: Rows) -> list[Tensor]:
        """The activations in a flat tensor, as (samples, elements) each."""
        return [tensor for tensor, _ in self._views(flat, rows)]

    def _views(self, flat: Tensor, rows: Rows) -> list[tuple[Tensor, Part]]:
        parts = self.parts(rows.padded)
        columns = flat.view(len(rows.samples), -1).split([part.at(rows.padded) for part in parts], dim=1)
        return list(zip(columns, parts, strict=True))


def chunk_sizes(count: int, num_chunks: int) -> list[int]:
    """Samples of each micro-batch of a batch, as ``torch.tensor_split`` cuts it."""
    each, more = divmod(count, num_chunks)
    return [each + (i < more) for i in range(num_chunks)]
