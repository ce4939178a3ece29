"""One message of a micro-batch across a stage boundary: what lies where in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor

from thinwire.attach.pipeline.crossing import Crossing
from thinwire.collectives.message import HEADER_BYTES
from thinwire.compressors import Coded, Key, Piece, Raw, Segments
from thinwire.kernels import align, derive_key
from thinwire.store import Rows

RAW = Raw()


class Kind(IntEnum):
    """How a sample travels."""

    WHOLE = 0
    """In full precision."""
    RECORD = 1
    """As the record that both sides keep of it: its first visit, where records have fewer bits than activations."""
    CODED = 2
    """In the compressor's codes, of the activation or of its change."""


class _Other(NamedTuple):
    tensor: int
    start: int
    num_bytes: int


@dataclass(frozen=True)
class Layout:
    """Where everything lies in the message of one micro-batch. Both sides make it from the same facts."""

    crossing: Crossing
    rows: Rows
    kinds: tuple[Kind, ...]
    whole: Segments
    coded: tuple[tuple[Coded, Segments], ...]
    records: tuple[tuple[int, int], ...]
    """Rows that travel as records, and where these start."""
    others: tuple[_Other, ...]
    num_bytes: int
    digest: int

    @staticmethod
    def build(
        crossing: Crossing,
        rows: Rows,
        kinds: Sequence[Kind],
        coders: Sequence[Coded],
        *,
        record_bytes: int = 0,
        site: str = "",
    ) -> Layout:
        """``coders`` has one for each activation; ``site`` names the draws."""
        at = HEADER_BYTES
        parts = crossing.parts(rows.padded)
        stride = sum(part.at(rows.padded) for part in parts)
        whole: list[Piece] = []
        coded: list[list[Piece]] = [[] for _ in parts]
        records = []
        for i, (sample, length, kind) in enumerate(zip(rows.samples, rows.lengths, kinds, strict=True)):
            if kind is Kind.RECORD:
                records.append((i, at))
                at += record_bytes
                continue
            start = i * stride
            for t, part in enumerate(parts):
                coder = RAW if kind is Kind.WHOLE else coders[t]
                shape = (length, part.width) if part.grows else (part.width,)
                piece = Piece(f"{site}/{sample}/{t}", start, part.at(length), 0, at, shape)
                (whole if kind is Kind.WHOLE else coded[t]).append(piece)
                start += part.at(rows.padded)
                at += coder.payload_bytes(piece.numel, crossing.dtype)
        others = []
        shapes = crossing.shapes(len(rows.samples), rows.padded)
        for i in crossing.others:
            num_bytes = torch.Size(shapes[i]).numel() * crossing.specs[i].dtype.itemsize
            others.append(_Other(i, at, num_bytes))
            at += align(num_bytes)
        facts = (len(rows.samples), rows.padded, at, *rows.samples, *rows.lengths, *kinds)
        return Layout(
            crossing,
            rows,
            tuple(kinds),
            Segments.build(whole),
            tuple((coder, Segments.build(of)) for coder, of in zip(coders, coded, strict=True) if of),
            tuple(records),
            tuple(others),
            at,
            derive_key(*facts),
        )

    def rows_of(self, kind: Kind) -> list[int]:
        """Which of the micro-batch's samples travel in this way."""
        return [i for i, its in enumerate(self.kinds) if its is kind]

    def put_others(self, tensors: Sequence[Tensor], message: Tensor) -> None:
        """Copy the tensors that are no activations."""
        for i, start, num_bytes in self.others:
            values = tensors[i].detach().to("cpu").contiguous().reshape(-1)
            message[start : start + num_bytes].view(values.dtype).copy_(values)

    def take_others(self, message: Tensor, tensors: Sequence[Tensor]) -> None:
        """Copy them back."""
        for i, start, num_bytes in self.others:
            into = tensors[i]
            into.copy_(message[start : start + num_bytes].view(into.dtype).view(into.shape))

    def put_whole(self, flat: Tensor, message: Tensor) -> None:
        RAW.encode(flat, self.whole, message, key=Key(0, 0))

    def take_whole(self, message: Tensor, flat: Tensor) -> None:
        """Set the samples of ``flat``, which has the crossing's dtype, that travel in full precision."""
        RAW.decode(message, self.whole, flat)

    def encode(self, flat: Tensor, message: Tensor, key: int) -> None:
        """Encode the samples of ``flat`` that travel in codes, with draws of this key."""
        for coder, segments in self.coded:
            coder.encode(flat, segments, message, key=Key(key, key))

    def decode(self, message: Tensor, flat: Tensor, *, add: bool = False) -> None:
        """Set those samples of ``flat``, or add what arrives to them."""
        for coder, segments in self.coded:
            coder.decode(message, segments, flat, add=add)
