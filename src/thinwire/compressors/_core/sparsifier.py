"""The base of sparsifiers, which send a choice of elements: their indices and their values.

A payload is a header of 64 bytes (a flag for NaN and Inf, the number of elements, the number of elements that did not
fit), the indices (a bitmap, or a list of 16-bit offsets in blocks of 65536, whichever is shorter), and the values, in
fp32 or coded by another compressor.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.compressors._core.coded import Coded
from thinwire.compressors._core.compressor import Compressor, Count, Traits, needs_state
from thinwire.compressors._core.mixins import Bounded, Indexed, Saturating, Scheduled, StepEnd
from thinwire.compressors._core.segments import CodecCall, Piece, Segments
from thinwire.compressors._core.slots import LayerState, Slot

HEADER = 64


class Picked(NamedTuple):
    """Elements of a piece that are sent."""

    indices: Tensor
    """Indices (int32) from the piece's first element, ascending."""
    values: Tensor
    """Values (fp32) of the elements."""
    finite: bool
    """Whether all elements of the piece are finite, sent or not."""
    overflow: int = 0
    """Number of elements that should have been sent and did not fit."""


@dataclass(frozen=True)
class Sparsifier(Coded, Bounded, Indexed, Saturating):
    """A compressor that sends a choice of each layer's elements. Layers stay whole and are gathered by all ranks."""

    @property
    def coder(self) -> Coded | None:
        """Compressor of the values; None if they are sent in fp32."""
        return None

    @property
    def traits(self) -> Traits:
        return Traits(dense=False)

    @abstractmethod
    def room(self, numel: int) -> int:
        """Return the largest number of elements that are sent of a layer of ``numel``."""

    @abstractmethod
    def pick(self, x: Tensor, piece: Piece, call: CodecCall) -> Picked:
        """Return the chosen elements of a piece of the flat tensor ``x``."""

    def payload_bytes(self, numel: int, dtype: torch.dtype) -> int:
        return self.payload_size(numel, self.room(numel))

    def payload_size(self, numel: int, room: int) -> int:
        if not numel:
            return 0
        values = kernels.align(4 * room) if self.coder is None else self.coder.payload_bytes(room, torch.float32)
        return HEADER + kernels.index_bytes(numel, room) + values

    def encode(self, x: Tensor, message: Tensor, call: CodecCall) -> None:
        chosen = [(p, self.pick(x, p, call)) for p in call.pieces if p.numel]
        rooms = []
        for piece, picked in chosen:
            room = picked.indices.numel() if self.traits.bounded else self.room(piece.numel)
            header = [int(not picked.finite), picked.indices.numel(), picked.overflow]
            put_header(message, piece, header)
            kernels.pack_indices(picked.indices, piece.numel, room, message, piece.payload + HEADER)
            rooms.append(room)
        self._put_values([p for p, _ in chosen], rooms, [picked.values for _, picked in chosen], message, call)

    def _put_values(
        self, pieces: Sequence[Piece], rooms: Sequence[int], values: Sequence[Tensor], message: Tensor, call: CodecCall
    ) -> None:
        if self.coder is None:
            for piece, room, chosen in zip(pieces, rooms, values, strict=True):
                at = piece.payload + HEADER + kernels.index_bytes(piece.numel, room)
                put_floats(message, at, chosen, room)
            return
        flat = torch.zeros(sum(rooms), dtype=torch.float32, device=message.device)
        for chosen, start in zip(values, accumulate(rooms, initial=0), strict=False):
            flat[start : start + chosen.numel()] = chosen
        self.coder.encode(flat, message, call._replace(segments=_value_segments(tuple(pieces), tuple(rooms))))

    def _rooms(self, message: Tensor, pieces: Sequence[Piece]) -> list[int]:
        """Return how many elements each payload contains. A header is not trusted beyond `room`."""
        if not self.traits.bounded:
            return [self.room(piece.numel) for piece in pieces]
        return [min(max(0, read_header(message, piece)[1]), self.room(piece.numel)) for piece in pieces]

    def _values(self, message: Tensor, pieces: Sequence[Piece], rooms: Sequence[int]) -> list[Tensor]:
        if self.coder is None:
            values = []
            for piece, room in zip(pieces, rooms, strict=True):
                at = piece.payload + HEADER + kernels.index_bytes(piece.numel, room)
                values.append(message[at : at + 4 * room].view(torch.float32))
            return values
        flat = torch.empty(sum(rooms), dtype=torch.float32, device=message.device)
        self.coder.decode(message, flat, CodecCall(_value_segments(tuple(pieces), tuple(rooms))))
        return list(flat.split(list(rooms)))

    def decode(self, message: Tensor, y: Tensor, call: CodecCall, *, add: bool = False) -> None:
        pieces = [piece for piece in call.pieces if piece.numel]
        check_place(message, pieces, y, self.payload_bytes)
        rooms = self._rooms(message, pieces)
        values = self._values(message, pieces, rooms)
        for piece, room, received in zip(pieces, rooms, values, strict=True):
            out = y[piece.elements]
            if read_header(message, piece)[0]:
                out.fill_(math.nan)
                continue
            if not add:
                out.zero_()
            indices = kernels.unpack_indices(message, piece.payload + HEADER, piece.numel, room)
            kernels.sparse_add(y, piece.start, piece.numel, indices, received[: indices.numel()], call.scale)

    def forget_sent(self, message: Tensor, segments: Segments, y: Tensor) -> None:
        """Set the elements of ``y`` that a message contains to zero."""
        pieces = [piece for piece in segments.pieces if piece.numel]
        for piece, room in zip(pieces, self._rooms(message, pieces), strict=True):
            indices = kernels.unpack_indices(message, piece.payload + HEADER, piece.numel, room)
            kernels.sparse_zero(y, piece.start, piece.numel, indices)

    def used_bytes(self, message: Tensor, piece: Piece) -> int:
        if not self.traits.bounded:
            return self.payload_bytes(piece.numel, torch.float32)
        count = read_header(message, piece)[1]
        if not 0 <= count <= self.room(piece.numel):
            raise ValueError(f"{piece.name}: {count} elements in a payload with room for {self.room(piece.numel)}")
        return self.payload_size(piece.numel, count)

    def index_bytes(self, message: Tensor, piece: Piece) -> int:
        return kernels.index_bytes(piece.numel, self._rooms(message, [piece])[0]) if piece.numel else 0

    def limits(self, message: Tensor, segments: Segments) -> tuple[Count, Count]:
        if not self.traits.bounded:
            return 0, 0
        return 0, sum(read_header(message, piece)[2] for piece in segments.pieces if piece.numel)

    def __or__(self, other: Compressor) -> Compressor:
        if not isinstance(other, Coded):
            raise TypeError(f"{other} cannot follow |: chosen values are coded by a quantizer without state")
        return Chain(self, other)


@dataclass(frozen=True)
class Chain(Sparsifier, StepEnd, Scheduled):
    """A sparsifier whose values another compressor codes: ``topk(density=0.01) | minmax(bits=8)``."""

    spec_name: ClassVar[str] = "chain"

    first: Sparsifier
    values: Coded

    def __post_init__(self) -> None:
        values: Any = self.values
        if isinstance(self.first, Chain) or not isinstance(self.first, Sparsifier):
            raise TypeError(f"{self.first} chooses no values: what stands before | is a sparsifier such as topk")
        if not isinstance(values, Coded) or isinstance(values, Sparsifier) or needs_state(values):
            raise TypeError(f"{values} cannot follow |: chosen values are coded by a quantizer without state")

    @property
    def coder(self) -> Coded:
        return self.values

    @property
    def traits(self) -> Traits:
        first, values = self.first.traits, self.values.traits
        return first._replace(
            exact_bits=first.exact_bits and values.exact_bits,
            largest=values.largest,
            absolute=first.absolute or values.absolute,
        )

    @property
    def slots(self) -> tuple[Slot, ...]:
        return self.first.slots

    def at_step(self, step: int, learning_rate: float | None) -> Chain:
        if not isinstance(self.first, Scheduled):
            return self
        first = self.first.at_step(step, learning_rate)
        assert isinstance(first, Sparsifier)
        return self if first is self.first else Chain(first, self.values)

    def room(self, numel: int) -> int:
        return self.first.room(numel)

    def pick(self, x: Tensor, piece: Piece, call: CodecCall) -> Picked:
        return self.first.pick(x, piece, call)

    def end_step(self, layers: Sequence[LayerState], loss_scale: float) -> None:
        if isinstance(self.first, StepEnd):
            self.first.end_step(layers, loss_scale)

    def __str__(self) -> str:
        return f"{self.first} | {self.values}"


def put_header(message: Tensor, piece: Piece, words: Sequence[int]) -> None:
    """Write the words of a payload's header, and zeros after them."""
    header = message[piece.payload : piece.payload + HEADER]
    header.view(torch.int32).copy_(
        torch.tensor([*words, *[0] * (HEADER // 4 - len(words))], dtype=torch.int32, device="cpu")
    )


def put_floats(message: Tensor, at: int, values: Tensor, room: int) -> None:
    """Write fp32 ``values`` at byte ``at``, and zeros up to the space of ``room`` values."""
    end = at + 4 * values.numel()
    message[at:end].view(torch.float32).copy_(values)
    message[end : at + kernels.align(4 * room)] = 0


def read_header(message: Tensor, piece: Piece) -> list[int]:
    return message[piece.payload : piece.payload + HEADER].view(torch.int32).tolist()


def check_place(message: Tensor, pieces: Sequence[Piece], y: Tensor, payload_bytes) -> None:
    """Raise an error unless the payloads lie inside the message and the pieces inside ``y``."""
    if message.dtype != torch.uint8:
        raise TypeError(f"a message is a uint8 tensor, not {message.dtype}")
    for piece in pieces:
        end = piece.payload + payload_bytes(piece.numel, torch.float32)
        if end > message.numel():
            raise ValueError(f"message of {message.numel()} bytes is too short: {piece.name} ends at byte {end}")
        if piece.start + piece.numel > y.numel():
            raise ValueError(f"{piece.name} ends at element {piece.start + piece.numel} of a tensor of {y.numel()}")


@lru_cache(maxsize=1024)
def _value_segments(pieces: tuple[Piece, ...], rooms: tuple[int, ...]) -> Segments:
    """Return where the values of ``pieces`` are: end to end in a flat tensor, and behind the indices in a message."""
    placed = []
    for piece, room, start in zip(pieces, rooms, accumulate(rooms, initial=0), strict=False):
        at = piece.payload + HEADER + kernels.index_bytes(piece.numel, room)
        placed.append(Piece(piece.site, start, room, 0, at))
    return Segments.build(placed)
