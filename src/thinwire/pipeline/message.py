"""Messages between the ranks of a pipeline: the announcement of a step with its samples, and the tensors of a
micro-batch at a stage boundary."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from thinwire.arguments import check_int, check_type
from thinwire.collectives.message import HEADER_BYTES
from thinwire.compressors import GRADIENT_DTYPES, CodecCall, Coded, Key, Piece, Raw, Segments
from thinwire.kernels import align, derive_key
from thinwire.store import LARGEST_SAMPLE, Corner, Part, Rows

_RAW = Raw()
Direction = Literal["forward", "backward"]
DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")
Ids = Sequence[int] | Tensor
"""Integers, one for each sample."""
Corners = Sequence[Sequence[int]] | Tensor
"""Integers, two for each sample: shape (samples, 2)."""
_MOST_TEXT = 1024
"""Largest number of characters of an error that other ranks are told."""


@dataclass(frozen=True)
class Batch:
    """The samples of a step, as the training loop gives them."""

    samples: tuple[int, ...]
    length: int | None = None
    lengths: tuple[int, ...] | None = None
    upcoming: tuple[int, ...] = ()
    corners: tuple[Corner, ...] | None = None

    @staticmethod
    def from_ids(
        samples: Ids, length: int | None, lengths: Ids | None, upcoming: Ids, corners: Corners | None = None
    ) -> Batch:
        """Return the batch, after its ids and lengths are checked.

        Raises:
            TypeError: an id is not an integer.
            ValueError: there are no samples, an id occurs twice or is negative, or a length is impossible.
        """
        ids = _integers("sample ids", samples)
        if not ids:
            raise ValueError("a step needs at least one sample id")
        if len(set(ids)) != len(ids):
            twice = next(sample for i, sample in enumerate(ids) if sample in ids[:i])
            raise ValueError(
                f"sample {twice} is in the batch twice, and one message is kept of each: give every sample of a batch "
                "an id of its own, as thinwire.data.Indexed does, and draw samples without replacement"
            )
        listed_lengths = None if lengths is None else _integers("lengths", lengths)
        if listed_lengths is not None and len(listed_lengths) != len(ids):
            raise ValueError(f"{len(listed_lengths)} lengths are given for {len(ids)} samples")
        if listed_lengths is not None and length is not None and max(listed_lengths) > length:
            raise ValueError(f"a sample has {max(listed_lengths)} positions, in a batch padded to {length}")
        if length is not None:
            check_int("length", length, 1)
        return Batch(ids, length, listed_lengths, _integers("upcoming ids", upcoming), _corners(corners, len(ids)))


def _corners(corners: Corners | None, count: int) -> tuple[Corner, ...] | None:
    if corners is None:
        return None
    pairs = corners.tolist() if isinstance(corners, Tensor) else [list(pair) for pair in corners]
    if len(pairs) != count or any(not isinstance(pair, list) or len(pair) != 2 for pair in pairs):
        raise ValueError(f"corners are {count} pairs of pixels, down and to the right, one for each sample")
    flat = _integers("corners", [pixels for pair in pairs for pixels in pair])
    return tuple(zip(flat[::2], flat[1::2], strict=True))


def _integers(what: str, values: Ids) -> tuple[int, ...]:
    listed = values.tolist() if isinstance(values, Tensor) else list(values)
    for value in listed:
        check_int(what, value, 0, LARGEST_SAMPLE - 1)
    return tuple(listed)


@dataclass(frozen=True)
class ScheduleStep:
    """One run of the schedule, a training step or an evaluation, the same on every rank."""

    number: int
    """Number of the run, evaluations included."""
    training_step: int
    """Number of the training step."""
    training: bool
    run: int
    """Number that identifies the training through all its restarts."""
    batch: Batch | None = None
    """Samples of the step; None where stages have the shapes that they were set up with and samples have no ids."""
    error: str = ""
    """Reason why the first stage's rank cannot take the step, if it cannot."""

    def to_json(self) -> bytes:
        """Return the announcement of the step, which `from_json` reads."""
        batch = None if self.batch is None else vars(self.batch)
        told = {**vars(self), "batch": batch, "error": self.error[:_MOST_TEXT]}
        return json.dumps(told, separators=(",", ":")).encode()

    @staticmethod
    def from_json(data: bytes) -> ScheduleStep:
        """Return the step that another rank has announced. Everything in it is checked.

        Raises:
            ValueError: the data is no such step.
        """
        try:
            told = json.loads(data)
            batch = told.pop("batch")
            step = ScheduleStep(**told, batch=None if batch is None else Batch.from_ids(**batch))
            for name in ("number", "training_step", "run"):
                check_int(name, getattr(step, name), 0, LARGEST_SAMPLE)
            check_type("training", step.training, bool, "true or false")
            check_type("error", step.error, str, "a text")
        except (TypeError, ValueError, KeyError, AttributeError, RecursionError) as error:
            text = f"{type(error).__name__}: {error}"[:_MOST_TEXT]
            raise ValueError(f"the first stage's rank announced a step that cannot be: {text}") from None
        return step

    def rows(self, chunk: int, num_chunks: int, count: int, length: int) -> Rows:
        """Return the samples of micro-batch ``chunk``; ``count`` and ``length`` are those that the pipeline was set up
        with."""
        if self.batch is None:
            return Rows.uniform(range(chunk * count, (chunk + 1) * count), length)
        sizes = chunk_sizes(len(self.batch.samples), num_chunks)
        here = slice(sum(sizes[:chunk]), sum(sizes[: chunk + 1]))
        padded = length if self.batch.length is None or not length else self.batch.length
        lengths = (padded,) * sizes[chunk] if self.batch.lengths is None else self.batch.lengths[here]
        corners = () if self.batch.corners is None else self.batch.corners[here]
        return Rows(self.batch.samples[here], tuple(min(own, padded) for own in lengths), padded, corners)


def chunk_sizes(count: int, num_chunks: int) -> list[int]:
    """Return the samples of each micro-batch of a batch, as ``torch.tensor_split`` cuts it."""
    each, more = divmod(count, num_chunks)
    return [each + (i < more) for i in range(num_chunks)]


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
        TypeError: a dtype is one that no compressor takes.
        ValueError: the tensors are of different batches.
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

    def check(self, tensors: Sequence[Tensor], rows: Rows, where: str) -> None:
        """Raise ``ValueError`` unless tensors have the shapes that the other side expects."""
        count, length = len(rows.samples), rows.padded
        expected, shapes = self.shapes(count, length), [tuple(tensor.shape) for tensor in tensors]
        if shapes != expected:
            raise ValueError(
                f"{where} has shapes {shapes}, the other side expects {expected} ({count} samples, length {length}): "
                "pass set_sample_ids() all samples of the batch that step() gets, and length= when it changes"
            )

    def empty(self, rows: Rows, device: torch.device) -> list[Tensor]:
        """Return tensors for those of a micro-batch."""
        shapes = self.shapes(len(rows.samples), rows.padded)
        dtypes = [spec.dtype for spec in self.specs]
        return [torch.empty(s, dtype=dtype, device=device) for s, dtype in zip(shapes, dtypes, strict=True)]

    def zeros(self, rows: Rows, device: torch.device | str = "cpu") -> Tensor:
        """Return a flat tensor for a micro-batch's activations, of `dtype`."""
        numel = sum(part.at(rows.padded) for part in self.parts(rows.padded))
        return torch.zeros(len(rows.samples) * numel, dtype=self.dtype, device=device)

    def flatten(self, tensors: Sequence[Tensor], rows: Rows, device: torch.device) -> Tensor:
        """Return a micro-batch's activations on ``device``, flat, sample by sample, of `dtype`, zero behind lengths.

        It may share memory with the only tensor.
        """
        wanted = [tensors[i].detach().to(device, self.dtype).reshape(len(rows.samples), -1) for i in self.floats]
        flat = (wanted[0].contiguous() if len(wanted) == 1 else torch.cat(wanted, dim=1)).view(-1)
        if all(length == rows.padded for length in rows.lengths):
            return flat
        flat = flat.clone()
        for tensor, part in self._views(flat, rows):
            for i, length in enumerate(rows.lengths):
                tensor[i, part.at(length) :] = 0
        return flat

    def unflatten(self, flat: Tensor, rows: Rows, into: Sequence[Tensor]) -> None:
        """Copy the activations in a flat tensor to their places in ``into``."""
        for (values, _), i in zip(self._views(flat, rows), self.floats, strict=True):
            into[i].copy_(values.view(into[i].shape))

    def _views(self, flat: Tensor, rows: Rows) -> list[tuple[Tensor, Part]]:
        parts = self.parts(rows.padded)
        columns = flat.view(len(rows.samples), -1).split([part.at(rows.padded) for part in parts], dim=1)
        return list(zip(columns, parts, strict=True))


@dataclass(frozen=True)
class MessageLayout:
    """Places of samples and tensors in the message of one micro-batch. Both sides compute them from the same facts."""

    crossing: BoundaryTensors
    rows: Rows
    coded: tuple[bool, ...]
    """Whether each sample is sent compressed: the activation, or its change since the last visit. Others are sent in
    full precision: on their first visit, and while they are warmed up."""
    raw: Segments
    coders: tuple[tuple[Coded, Segments], ...]
    chosen: tuple[int, Tensor] | None
    """Byte at which the sender's choices start, and the vectors that they are of: bool (samples, vectors of each). None
    where a store leaves no choice, or nothing is compressed."""
    others: tuple[tuple[int, int, int], ...]
    """Tensors without activations: the place among those that cross, the first byte, and the number of bytes."""
    num_bytes: int
    digest: int

    @staticmethod
    def build(
        crossing: BoundaryTensors,
        rows: Rows,
        coded: Sequence[bool],
        coders: Sequence[Coded],
        *,
        chooses: bool = False,
        site: str = "",
    ) -> MessageLayout:
        """Return the layout for these samples.

        Args:
            crossing: the tensors that cross the boundary.
            rows: the samples of the micro-batch.
            coded: whether each of them is sent compressed.
            coders: a compressor for each activation tensor.
            chooses: whether the sender chooses the reference of each vector's change, in a byte.
            site: distinguishes the random draws of this boundary from those of others.
        """
        at = HEADER_BYTES
        parts = crossing.parts(rows.padded)
        stride = sum(part.at(rows.padded) for part in parts)
        raw: list[Piece] = []
        pieces: list[list[Piece]] = [[] for _ in parts]
        for i, (sample, length, is_coded) in enumerate(zip(rows.samples, rows.lengths, coded, strict=True)):
            start = i * stride
            for t, part in enumerate(parts):
                coder = coders[t] if is_coded else _RAW
                shape = (length, part.width) if part.grows else (part.width,)
                piece = Piece(f"{site}/{sample}/{t}", start, part.at(length), 0, at, shape)
                (pieces[t] if is_coded else raw).append(piece)
                start += part.at(rows.padded)
                at += coder.payload_bytes(piece.numel, crossing.dtype)
        chosen = None
        if chooses and any(coded):
            which = rows.vectors(parts) & torch.tensor(coded, dtype=torch.bool, device="cpu").view(-1, 1)
            chosen = at, which
            at += align(int(which.sum()))
        others = []
        shapes = crossing.shapes(len(rows.samples), rows.padded)
        for i in crossing.others:
            num_bytes = torch.Size(shapes[i]).numel() * crossing.specs[i].dtype.itemsize
            others.append((i, at, num_bytes))
            at += align(num_bytes)
        facts = (len(rows.samples), rows.padded, at, *rows.samples, *rows.lengths, *map(int, coded))
        return MessageLayout(
            crossing,
            rows,
            tuple(coded),
            Segments.build(raw),
            tuple((coder, Segments.build(own)) for coder, own in zip(coders, pieces, strict=True) if own),
            chosen,
            tuple(others),
            at,
            derive_key(*facts),
        )

    def where(self, *, coded: bool) -> list[int]:
        """Return the places of the samples in the micro-batch that are sent compressed, or of the others."""
        return [i for i, own in enumerate(self.coded) if own is coded]

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
            values = tensors[i].detach().to(message.device).contiguous().reshape(-1)
            message[start : start + num_bytes].view(values.dtype).copy_(values)

    def take_others(self, message: Tensor, tensors: Sequence[Tensor]) -> None:
        """Copy the tensors without activations from ``message``, which may be on the host, into ``tensors``."""
        for i, start, num_bytes in self.others:
            into = tensors[i]
            into.copy_(message[start : start + num_bytes].view(into.dtype).view(into.shape), non_blocking=True)

    def put_raw(self, flat: Tensor, message: Tensor) -> None:
        """Copy the samples of ``flat`` that are sent raw into ``message``."""
        _RAW.encode(flat, message, CodecCall(self.raw, Key(0, 0)))

    def take_raw(self, message: Tensor, flat: Tensor) -> None:
        """Set the samples of ``flat``, which has the dtype of the crossing tensors, that are sent raw."""
        _RAW.decode(message, flat, CodecCall(self.raw))

    def encode(self, flat: Tensor, message: Tensor, key: int) -> None:
        """Encode the samples of ``flat`` that are sent compressed, with the random draws of ``key``."""
        for coder, segments in self.coders:
            coder.encode(flat, message, CodecCall(segments, Key(key, key)))

    def decode(self, message: Tensor, flat: Tensor, *, add: bool = False) -> None:
        """Decode the compressed samples into ``flat``, or add them to it (``add``)."""
        for coder, segments in self.coders:
            coder.decode(message, flat, CodecCall(segments), add=add)
