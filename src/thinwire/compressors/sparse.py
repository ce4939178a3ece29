"""What all sparsifiers have in common: which elements, and their values.

A payload is a header of 64 bytes (a flag for NaN and Inf, how many elements, how many more there should have been), the
indices (a bitmap, or a list of 16-bit offsets in blocks of 65536, whichever is shorter), and the values: fp32, or what
another compressor makes of them.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.compressors.base import Coded, Compressor, Count
from thinwire.compressors.pieces import Key, Piece, Segments, State

HEADER = 64


class Picked(NamedTuple):
    """The elements of a piece that are sent."""

    indices: Tensor
    """int32, ascending, from the piece's first element."""
    values: Tensor
    """fp32."""
    finite: bool
    """Whether all elements of the piece are finite, sent or not."""
    overflow: int = 0
    """Elements that should have been sent and found no room."""


@dataclass(frozen=True)
class Sparsifier(Coded):
    """Sends a choice of each layer's elements, whole layers at a time, gathered by all ranks."""

    @property
    def coder(self) -> Coded | None:
        """What codes the values; None: they travel in fp32."""
        return None

    @property
    def dense(self) -> bool:
        return False

    @property
    def unbiased(self) -> bool:
        return False

    @property
    def grain(self) -> int | None:
        return None

    @abstractmethod
    def room(self, numel: int) -> int:
        """Elements of a layer of ``numel`` that are sent, at most."""

    @abstractmethod
    def pick(self, x: Tensor, piece: Piece, *, key: Key, state: State | None) -> Picked:
        """Choose elements of a piece of the flat tensor ``x``."""

    def rule(self, x: Tensor, segments: Segments, *, key: Key, state: State | None) -> dict[str, Any]:
        """The same choice for all pieces at once, in terms of `thinwire.kernels.rows_choose`."""
        return {}

    def _row_rooms(self, segments: Segments) -> tuple[int, ...]:
        return tuple(self.room(piece.numel) for piece in segments.pieces)

    def payload_bytes(self, numel: int, dtype: torch.dtype) -> int:
        return self.payload_bytes_of(numel, self.room(numel))

    def payload_bytes_of(self, numel: int, room: int) -> int:
        """Bytes of a payload with room for so many elements."""
        if not numel:
            return 0
        values = kernels.align(4 * room) if self.coder is None else self.coder.payload_bytes(room, torch.float32)
        return HEADER + kernels.index_bytes(numel, room) + values

    def encode(self, x: Tensor, segments: Segments, message: Tensor, *, key: Key, state: State | None = None) -> None:
        if kernels.asynchronous(x):
            self._encode_at_once(x, segments, message, key, state)
            return
        chosen = [(p, self.pick(x, p, key=key, state=state)) for p in segments.pieces if p.numel]
        rooms = []
        for piece, picked in chosen:
            room = picked.indices.numel() if self.size == "bounded" else self.room(piece.numel)
            header = [int(not picked.finite), picked.indices.numel(), picked.overflow]
            put_header(message, piece, header)
            kernels.pack_indices(picked.indices, piece.numel, room, message, piece.payload + HEADER)
            rooms.append(room)
        self._put_values([p for p, _ in chosen], rooms, [picked.values for _, picked in chosen], message, key)

    def _encode_at_once(self, x: Tensor, segments: Segments, message: Tensor, key: Key, state: State | None) -> None:
        """Where the host cannot count without waiting: what is bounded takes all of its room."""
        rooms, rule = self._row_rooms(segments), self.rule(x, segments, key=key, state=state)
        options = {"floats": self.coder is None, "bounded": self.size == "bounded", **rule}
        values = kernels.rows_choose(x, segments.table, message, rooms, **options)
        if self.coder is not None:
            pieces = tuple(piece for piece in segments.pieces if piece.numel)
            rooms = tuple(self.room(piece.numel) for piece in pieces)
            self.coder.encode(values, _value_segments(pieces, rooms), message, key=key)

    def _put_values(
        self, pieces: Sequence[Piece], rooms: Sequence[int], values: Sequence[Tensor], message: Tensor, key: Key
    ) -> None:
        if self.coder is None:
            for piece, room, mine in zip(pieces, rooms, values, strict=True):
                at = piece.payload + HEADER + kernels.index_bytes(piece.numel, room)
                put_floats(message, at, mine, room)
            return
        flat = torch.zeros(sum(rooms), dtype=torch.float32, device=message.device)
        for mine, start in zip(values, _starts(rooms), strict=True):
            flat[start : start + mine.numel()] = mine
        self.coder.encode(flat, _value_segments(tuple(pieces), tuple(rooms)), message, key=key)

    def _rooms(self, message: Tensor, pieces: Sequence[Piece]) -> list[int]:
        """Elements that each payload has room for; what a header says is not believed beyond the formula."""
        if self.size == "fixed":
            return [self.room(piece.numel) for piece in pieces]
        return [min(max(0, header_of(message, piece)[1]), self.room(piece.numel)) for piece in pieces]

    def _values(self, message: Tensor, pieces: Sequence[Piece], rooms: Sequence[int]) -> list[Tensor]:
        if self.coder is None:
            found = []
            for piece, room in zip(pieces, rooms, strict=True):
                at = piece.payload + HEADER + kernels.index_bytes(piece.numel, room)
                found.append(message[at : at + 4 * room].view(torch.float32))
            return found
        flat = torch.empty(sum(rooms), dtype=torch.float32, device=message.device)
        self.coder.decode(message, _value_segments(tuple(pieces), tuple(rooms)), flat)
        return [flat[start : start + room] for start, room in zip(_starts(rooms), rooms, strict=True)]

    def decode(self, message: Tensor, segments: Segments, y: Tensor, *, add: bool = False, scale: float = 1.0) -> None:
        pieces = [piece for piece in segments.pieces if piece.numel]
        check_place(message, pieces, y, self.payload_bytes)
        if kernels.asynchronous(y):
            self._decode_at_once(message, segments, y, add, scale)
            return
        rooms = self._rooms(message, pieces)
        values = self._values(message, pieces, rooms)
        for piece, room, mine in zip(pieces, rooms, values, strict=True):
            out = y[piece.elements]
            if header_of(message, piece)[0]:
                out.fill_(math.nan)
                continue
            if not add:
                out.zero_()
            indices = kernels.unpack_indices(message, piece.payload + HEADER, piece.numel, room)
            kernels.sparse_add(y, piece.start, piece.numel, indices, mine[: indices.numel()], scale)

    def _decode_at_once(self, message: Tensor, segments: Segments, y: Tensor, add: bool, scale: float) -> None:
        table, rooms = segments.table, self._row_rooms(segments)
        pieces = tuple(piece for piece in segments.pieces if piece.numel)
        if self.coder is None:
            values = None
        else:
            values = torch.empty(sum(rooms), dtype=torch.float32, device=y.device)
            at = _value_segments(pieces, tuple(self.room(piece.numel) for piece in pieces))
            self.coder.decode(message, at, values)
        indices = kernels.rows_unpack(message, table, rooms)
        kernels.rows_add_at(y, message, table, rooms, indices, values, add=add, scale=scale)

    def keep_rest(self, message: Tensor, segments: Segments, after: Tensor, loss_scale: float) -> None:
        if self.coder is None:
            self.forget_sent(message, segments, after)
        else:
            self.decode(message, segments, after, add=True, scale=-1.0)
        if loss_scale != 1.0:
            kernels.rows_scale(after, segments.table, after, over=loss_scale)

    def forget_sent(self, message: Tensor, segments: Segments, y: Tensor) -> None:
        """Zero the elements of ``y`` that a message carries."""
        if kernels.asynchronous(y):
            rooms = self._row_rooms(segments)
            kernels.rows_zero_at(y, segments.table, rooms, kernels.rows_unpack(message, segments.table, rooms))
            return
        pieces = [piece for piece in segments.pieces if piece.numel]
        for piece, room in zip(pieces, self._rooms(message, pieces), strict=True):
            indices = kernels.unpack_indices(message, piece.payload + HEADER, piece.numel, room)
            kernels.sparse_zero(y, piece.start, piece.numel, indices)

    def used_bytes(self, message: Tensor, piece: Piece) -> int:
        if self.size == "fixed":
            return super().used_bytes(message, piece)
        count = header_of(message, piece)[1]
        if not 0 <= count <= self.room(piece.numel):
            raise ValueError(f"{piece.name}: {count} elements in a payload with room for {self.room(piece.numel)}")
        return self.payload_bytes_of(piece.numel, count)

    def index_bytes(self, message: Tensor, piece: Piece) -> int:
        return kernels.index_bytes(piece.numel, self._rooms(message, [piece])[0]) if piece.numel else 0

    def limits(self, message: Tensor, segments: Segments) -> tuple[Count, Count]:
        if self.size == "fixed":
            return 0, 0
        if kernels.asynchronous(message):
            return 0, kernels.header_words(message, segments.table, 2).sum()
        return 0, sum(header_of(message, piece)[2] for piece in segments.pieces if piece.numel)

    def __or__(self, other: Compressor) -> Compressor:
        from thinwire.compressors.chain import Chain

        if not isinstance(other, Coded):
            raise TypeError(f"{other} cannot follow |: what codes chosen values is a quantiser without state")
        return Chain(self, other)


def put_header(message: Tensor, piece: Piece, words: Sequence[int]) -> None:
    """Write the first words of a payload's header, and zeros after them."""
    header = message[piece.payload : piece.payload + HEADER]
    header.view(torch.int32).copy_(torch.tensor([*words, *[0] * (HEADER // 4 - len(words))], dtype=torch.int32))


def put_floats(message: Tensor, at: int, values: Tensor, room: int) -> None:
    """Write fp32 ``values`` at byte ``at``, and zeros up to the end of what ``room`` values take."""
    end = at + 4 * values.numel()
    message[at:end].view(torch.float32).copy_(values)
    message[end : at + kernels.align(4 * room)] = 0


def header_of(message: Tensor, piece: Piece) -> list[int]:
    """The words of a payload's header."""
    return message[piece.payload : piece.payload + HEADER].view(torch.int32).tolist()


def check_place(message: Tensor, pieces: Sequence[Piece], y: Tensor, payload_bytes) -> None:
    """Raise unless the payloads lie inside the message and the pieces inside ``y``."""
    if message.dtype != torch.uint8:
        raise TypeError(f"a message is a uint8 tensor, not {message.dtype}")
    for piece in pieces:
        end = piece.payload + payload_bytes(piece.numel, torch.float32)
        if end > message.numel():
            raise ValueError(f"message of {message.numel()} bytes is too short: {piece.name} ends at byte {end}")
        if piece.start + piece.numel > y.numel():
            raise ValueError(f"{piece.name} ends at element {piece.start + piece.numel} of a tensor of {y.numel()}")


def _starts(rooms: Sequence[int]) -> list[int]:
    starts, at = [], 0
    for room in rooms:
        starts.append(at)
        at += room
    return starts


@lru_cache(maxsize=1024)
def _value_segments(pieces: tuple[Piece, ...], rooms: tuple[int, ...]) -> Segments:
    """Where the chosen values of ``pieces`` lie: end to end in a flat tensor, and behind the indices in a message."""
    placed = []
    for piece, room, start in zip(pieces, rooms, _starts(rooms), strict=True):
        at = piece.payload + HEADER + kernels.index_bytes(piece.numel, room)
        placed.append(Piece(piece.name, start, room, 0, at))
    return Segments.build(placed)
