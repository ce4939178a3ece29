"""The message of one micro-batch across a stage boundary: where each sample lies in it, and how it is encoded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor

from thinwire.collectives.message import HEADER_BYTES
from thinwire.compressors import CodecCall, Coded, Key, Piece, Raw, Segments
from thinwire.kernels import align, derive_key
from thinwire.pipeline.boundary_tensors import BoundaryTensors
from thinwire.store import Rows

_RAW = Raw()


class Encoding(IntEnum):
    """How a sample is sent."""

    RAW = 0
    """In full precision: on its first visit, and while it is warmed up."""
    CODED = 1
    """Compressed: the activation, or its change since the last visit."""


class _Other(NamedTuple):
    """Where a tensor that holds no activations lies."""

    tensor: int
    start: int
    num_bytes: int


@dataclass(frozen=True)
class MessageLayout:
    """Where each sample and tensor lies in the message of one micro-batch. Both sides compute it from the same
    facts."""

    crossing: BoundaryTensors
    rows: Rows
    kinds: tuple[Encoding, ...]
    raw: Segments
    coded: tuple[tuple[Coded, Segments], ...]
    chosen: tuple[int, Tensor] | None
    """The byte at which the sender's choices start, and of which vectors they are: bool (samples, vectors of each).
    None where a store leaves no choice, or nothing is compressed."""
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
        """The layout for these samples.

        Args:
            crossing: The tensors that cross the boundary.
            rows: The samples of the micro-batch.
            kinds: How each of them is sent.
            coders: A compressor for each activation tensor.
            chooses: Whether the sender chooses what the changes of vectors are taken from: a byte for each.
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
        """Indices of the samples in the micro-batch that are sent as ``kind``."""
        return [i for i, own in enumerate(self.kinds) if own is kind]

    def put_choices(self, choices: Tensor, message: Tensor) -> None:
        """Copy the sender's choices, uint8 (samples, vectors of each), into ``message``."""
        assert self.chosen is not None, "the store leaves a choice"
        start, which = self.chosen
        made = choices[which]
        message[start : start + len(made)] = made

    def take_choices(self, message: Tensor) -> Tensor | None:
        """The sender's choices; 0 for vectors that have none. None where there are none."""
        if self.chosen is None:
            return None
        start, which = self.chosen
        choices = torch.zeros(which.shape, dtype=torch.uint8, device="cpu")
        choices[which] = message[start : start + int(which.sum())]
        return choices

    def put_others(self, tensors: Sequence[Tensor], message: Tensor) -> None:
        """Copy the tensors that hold no activations into ``message``."""
        for i, start, num_bytes in self.others:
            values = tensors[i].detach().to("cpu").contiguous().reshape(-1)
            message[start : start + num_bytes].view(values.dtype).copy_(values)

    def take_others(self, message: Tensor, tensors: Sequence[Tensor]) -> None:
        """Copy them from ``message`` into ``tensors``."""
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
        """Decode those samples into ``flat``, or add them to it (``add``)."""
        for coder, segments in self.coded:
            coder.decode(message, flat, CodecCall(segments), add=add)
