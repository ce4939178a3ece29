"""Tensors at a stage boundary, and a micro-batch's message: the places of samples in it, and their encodings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from thinwire.collectives.message import HEADER_BYTES
from thinwire.compressors import GRADIENT_DTYPES, CodecCall, Coded, Key, Piece, Raw, Segments
from thinwire.kernels import align, derive_key
from thinwire.store import Part, Rows

_RAW = Raw()

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
        """Indices of the tensors that are activations."""
        kinds = [spec.dtype for spec in self.specs]
        return tuple(i for i, dtype in enumerate(kinds) if dtype.is_floating_point or dtype.is_complex)

    @cached_property
    def others(self) -> tuple[int, ...]:
        """Indices of the tensors that are integers or bools."""
        return tuple(i for i in range(len(self.specs)) if i not in self.floats)

    @cached_property
    def batch(self) -> int:
        """Number of samples of a micro-batch, as set up."""
        shapes = [self.specs[i].shape for i in (*self.floats, *self.others)]
        return shapes[0][0] if shapes and shapes[0] else 0

    @cached_property
    def length(self) -> int:
        """Number of positions of a sample, as set up; 0 if none has any."""
        return next((shape[1] for shape in (self.specs[i].shape for i in self.floats) if len(shape) > 2), 0)

    @cached_property
    def dtype(self) -> torch.dtype:
        """Dtype of the flat tensor of a micro-batch's activations."""
        dtypes = {self.specs[i].dtype for i in self.floats}
        return dtypes.pop() if len(dtypes) == 1 else torch.float32

    def shapes(self, count: int, length: int) -> list[tuple[int, ...]]:
        """Return the shapes of all tensors in a micro-batch of ``count`` samples, padded to ``length`` positions."""
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
        """Return the part of a sample in each activation tensor, at ``length`` positions."""
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
        """Return a micro-batch's activations, sample by sample, on the host: flat, of `dtype`, zero behind each length.

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
        """Return the activations in a flat tensor, as (samples, elements) each."""
        return [tensor for tensor, _ in self._views(flat, rows)]

    def _views(self, flat: Tensor, rows: Rows) -> list[tuple[Tensor, Part]]:
        parts = self.parts(rows.padded)
        columns = flat.view(len(rows.samples), -1).split([part.at(rows.padded) for part in parts], dim=1)
        return list(zip(columns, parts, strict=True))


def chunk_sizes(count: int, num_chunks: int) -> list[int]:
    """Return the samples of each micro-batch of a batch, as ``torch.tensor_split`` cuts it."""
    each, more = divmod(count, num_chunks)
    return [each + (i < more) for i in range(num_chunks)]


class Encoding(IntEnum):
    """The encoding of a sample."""

    RAW = 0
    """Full precision: on the sample's first visit, and while it is warmed up."""
    CODED = 1
    """The activation, or its change since the last visit, compressed."""


class _Other(NamedTuple):
    """The place of a tensor without activations in a message."""

    tensor: int
    start: int
    num_bytes: int


@dataclass(frozen=True)
class MessageLayout:
    """Places of samples and tensors in the message of one micro-batch. Both sides compute them from the same facts."""

    crossing: BoundaryTensors
    rows: Rows
    kinds: tuple[Encoding, ...]
    raw: Segments
    coded: tuple[tuple[Coded, Segments], ...]
    chosen: tuple[int, Tensor] | None
    """Byte at which the sender's choices start, and the vectors that they are of: bool (samples, vectors of each). None
    where a store leaves no choice, or nothing is compressed."""
    others: tuple[_Other, ...]
    num_bytes: int
    digest: int

    @staticmethod
    def build(
        crossing: BoundaryTensors,
        rows: Rows,
        kinds: Sequence[Encoding],
        coders: Sequence[Coded],
        *,
        chooses: bool = False,
        site: str = "",
    ) -> MessageLayout:
        """Return the layout for these samples.

        Args:
            crossing: The tensors that cross the boundary.
            rows: The samples of the micro-batch.
            kinds: The encoding of each of them.
            coders: A compressor for each activation tensor.
            chooses: Whether the sender chooses the reference of each vector's change, in a byte.
            site: Distinguishes the random draws of this boundary from those of others.
        """
        at = HEADER_BYTES
        parts = crossing.parts(rows.padded)
        stride = sum(part.at(rows.padded) for part in parts)
        raw: list[Piece] = []
        coded: list[list[Piece]] = [[] for _ in parts]
        for i, (sample, length, kind) in enumerate(zip(rows.samples, rows.lengths, kinds, strict=True)):
            start = i * stride
            for t, part in enumerate(parts):
                coder = _RAW if kind is Encoding.RAW else coders[t]
                shape = (length, part.width) if part.grows else (part.width,)
                piece = Piece(f"{site}/{sample}/{t}", start, part.at(length), 0, at, shape)
                (raw if kind is Encoding.RAW else coded[t]).append(piece)
                start += part.at(rows.padded)
                at += coder.payload_bytes(piece.numel, crossing.dtype)
        chosen = None
        if chooses and Encoding.CODED in kinds:
            which = rows.vectors(parts) & torch.tensor(
                [kind is Encoding.CODED for kind in kinds], dtype=torch.bool, device="cpu"
            ).view(-1, 1)
            chosen = at, which
            at += align(int(which.sum()))
        others = []
        shapes = crossing.shapes(len(rows.samples), rows.padded)
        for i in crossing.others:
            num_bytes = torch.Size(shapes[i]).numel() * crossing.specs[i].dtype.itemsize
            others.append(_Other(i, at, num_bytes))
            at += align(num_bytes)
        facts = (len(rows.samples), rows.padded, at, *rows.samples, *rows.lengths, *kinds)
        return MessageLayout(
            crossing,
            rows,
            tuple(kinds),
            Segments.build(raw),
            tuple((coder, Segments.build(pieces)) for coder, pieces in zip(coders, coded, strict=True) if pieces),
            chosen,
            tuple(others),
            at,
            derive_key(*facts),
        )

    def rows_sent_as(self, kind: Encoding) -> list[int]:
        """Return the indices of the samples in the micro-batch that are sent as ``kind``."""
        return [i for i, own in enumerate(self.kinds) if own is kind]

    def put_choices(self, choices: Tensor, message: Tensor) -> None:
        """Copy the sender's choices, uint8 (samples, vectors of each), into ``message``."""
        assert self.chosen is not None, "the store leaves a choice"
        start, which = self.chosen
        made = choices[which]
        message[start : start + len(made)] = made

    def take_choices(self, message: Tensor) -> Tensor | None:
        """Return the sender's choices; 0 for vectors that have none. None where there are none."""
        if self.chosen is None:
            return None
        start, which = self.chosen
        choices = torch.zeros(which.shape, dtype=torch.uint8, device="cpu")
        choices[which] = message[start : start + int(which.sum())]
        return choices

    def put_others(self, tensors: Sequence[Tensor], message: Tensor) -> None:
        """Copy the tensors without activations into ``message``."""
        for i, start, num_bytes in self.others:
            values = tensors[i].detach().to("cpu").contiguous().reshape(-1)
            message[start : start + num_bytes].view(values.dtype).copy_(values)

    def take_others(self, message: Tensor, tensors: Sequence[Tensor]) -> None:
        """Copy the tensors without activations from ``message`` into ``tensors``."""
        for i, start, num_bytes in self.others:
            into = tensors[i]
            into.copy_(message[start : start + num_bytes].view(into.dtype).view(into.shape))

    def put_raw(self, flat: Tensor, message: Tensor) -> None:
        """Copy the samples of ``flat`` that are sent raw into ``message``."""
        _RAW.encode(flat, message, CodecCall(self.raw, Key(0, 0)))

    def take_raw(self, message: Tensor, flat: Tensor) -> None:
        """Set the samples of ``flat``, which has the dtype of the crossing tensors, that are sent raw."""
        _RAW.decode(message, flat, CodecCall(self.raw))

    def encode(self, flat: Tensor, message: Tensor, key: int) -> None:
        """Encode the samples of ``flat`` that are sent compressed, with the random draws of ``key``."""
        for coder, segments in self.coded:
            coder.encode(flat, message, CodecCall(segments, Key(key, key)))

    def decode(self, message: Tensor, flat: Tensor, *, add: bool = False) -> None:
        """Decode the compressed samples into ``flat``, or add them to it (``add``)."""
        for coder, segments in self.coded:
            coder.decode(message, flat, CodecCall(segments), add=add)
