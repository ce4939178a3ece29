"""The protocol between an aggregator and its workers: integers in frames with headers of fixed size.

The aggregator says hello with its version and a nonce. A worker greets with a `Greeting` and an HMAC-SHA256 of nonce
and greeting, whose key is the token that both share (empty if there is none): the token is never sent, and what was
recorded of one connection opens no other. From then on both sides send frames: a header of 24 bytes (little-endian) and
its payload. ``CONTRIBUTE`` carries a chunk of integers up, ``RESULT`` the sum (or the maxima) of all workers' down:
of 1 or 4 bytes each, or, where a header has a limit, packed into as many bits as magnitudes up to it need.
Chunk k of a lane goes to slot k modulo the lane's slots, and no worker sends chunk k before it has the result of the
chunk that had its slot before: so every slot serves one chunk at a time, and the number of slots bounds what is under
way. There is no field for a float.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor

from thinwire.kernels.format import GROUP
from thinwire.kernels.reference import pack, unpack

VERSION = 4
HELLO = struct.Struct("<4sHxx16s")
NONCE_BYTES = 16
PROOF_BYTES = hashlib.sha256().digest_size
GREETING = struct.Struct("<4sHHHBxIIQ")
HEADER = struct.Struct("<4sBBBBHHIQ")
MAX_WORKERS = 1024
MAX_LANES = 8
MAX_SLOTS = 1 << 16
MAX_SLOT_ELEMENTS = 1 << 20
MAX_TEXT_BYTES = 1000
MAX_LIMIT = 127
"""Largest magnitude of packed integers, and of their sums."""
_MAGIC = b"twag"


class ProtocolError(ValueError):
    """Bytes that are not of this protocol, or break its rules."""


class Kind(IntEnum):
    """The kind of a frame."""

    WELCOME = 1
    """Frame from the aggregator once all workers are there: ``elements`` in a slot, ``chunk`` slots for each lane."""
    CONTRIBUTE = 2
    RESULT = 3
    LEAVE = 4
    """Frame from a worker that will send no more."""
    ERROR = 5
    """Frame from the aggregator: the session is over because of a worker; the payload is ``elements`` bytes of text."""
    ENDED = 6
    """Frame from the aggregator: the session is over, but not because of a worker; the payload is a text, too."""


class Op(IntEnum):
    """The operation on the workers' integers."""

    SUM = 0
    MAX = 1


class Greeting(NamedTuple):
    """The first message of a worker. All workers of a session must send the same, except for their rank."""

    rank: int
    world_size: int
    lanes: int
    slots: int
    """Number of slots wanted for all lanes together; 0 takes the aggregator's default share."""
    timeout_ms: int
    """Milliseconds that workers may wait for one another."""
    session: int

    def pack(self) -> bytes:
        return GREETING.pack(
            _MAGIC, VERSION, self.rank, self.world_size, self.lanes, self.slots, self.timeout_ms, self.session
        )

    @staticmethod
    def unpack(data: bytes | bytearray | memoryview) -> Greeting:
        """Return the greeting in a worker's first bytes.

        Raises:
            ProtocolError: the bytes are no greeting, or one with impossible values.
        """
        magic, version, rank, world_size, lanes, slots, timeout_ms, session = GREETING.unpack(data)
        _check_start(magic, version)
        if not 1 <= world_size <= MAX_WORKERS or rank >= world_size:
            raise ProtocolError(f"it says that it is rank {rank} of {world_size}; there may be {MAX_WORKERS} workers")
        if not 1 <= lanes <= MAX_LANES or slots > MAX_SLOTS or not timeout_ms:
            raise ProtocolError(f"it wants {lanes} lanes, {slots} slots and a timeout of {timeout_ms} ms")
        return Greeting(rank, world_size, lanes, slots, timeout_ms, session)


def hello(nonce: bytes) -> bytes:
    """Return the first bytes that an aggregator sends."""
    return HELLO.pack(_MAGIC, VERSION, nonce)


def read_nonce(data: bytes | bytearray | memoryview) -> bytes:
    """Return the nonce of a hello.

    Raises:
        ProtocolError: the bytes are no hello, or one of another version.
    """
    magic, version, nonce = HELLO.unpack(data)
    _check_start(magic, version)
    return nonce


def check_magic(data: bytes | memoryview) -> None:
    """Raise `ProtocolError` if the first bytes of a connection are not those of this protocol."""
    if data[: len(_MAGIC)] != _MAGIC[: len(data)]:
        raise ProtocolError("it does not speak the aggregator's protocol")


def _check_start(magic: bytes, version: int) -> None:
    check_magic(magic)
    if version != VERSION:
        raise ProtocolError(f"it speaks version {version} of the protocol, this is {VERSION}: install one version")


def proof(token: str, nonce: bytes, greeting: bytes | memoryview) -> bytes:
    """Return the bytes after a greeting, which show that its sender knows the token."""
    return hmac.digest(token.encode(), nonce + bytes(greeting), "sha256")


class Header(NamedTuple):
    """First 24 bytes of a frame."""

    kind: Kind
    op: Op = Op.SUM
    width: int = 1
    """Number of bytes of an integer: 1 or 4."""
    lane: int = 0
    slot: int = 0
    elements: int = 0
    """Number of elements of the payload, or bytes of a text."""
    chunk: int = 0
    limit: int = 0
    """Largest magnitude of the integers, which are packed; 0 if they are ``width`` bytes each."""

    @property
    def payload_bytes(self) -> int:
        if self.kind in (Kind.ERROR, Kind.ENDED):
            return self.elements
        if self.kind not in (Kind.CONTRIBUTE, Kind.RESULT):
            return 0
        return packed_bytes(self.elements, self.limit) if self.limit else self.elements * self.width

    def pack(self) -> bytes:
        what = self.kind, self.op, self.width, self.lane, self.slot, self.limit, self.elements, self.chunk
        return HEADER.pack(_MAGIC, *what)

    @staticmethod
    def unpack(data: bytes | bytearray | memoryview, slot_elements: int) -> Header:
        """Return the header of a frame whose payload is of at most so many elements.

        Raises:
            ProtocolError: the bytes are no header, or one with impossible values.
        """
        magic, kind, op, width, lane, slot, limit, count, chunk = HEADER.unpack(data)
        if magic != _MAGIC:
            raise ProtocolError("what it sent is no frame of the aggregator's protocol")
        try:
            header = Header(Kind(kind), Op(op), width, lane, slot, count, chunk, limit)
        except ValueError as error:
            raise ProtocolError(f"it sent a frame with {error}") from None
        if header.width not in (1, 4):
            raise ProtocolError(f"it sent integers of {header.width} bytes; there are those of 1 and 4")
        if limit and (limit > MAX_LIMIT or header.width != 1 or header.op != Op.SUM):
            raise ProtocolError(f"it sent packed integers up to {limit}; sums of at most {MAX_LIMIT} are packed")
        most = MAX_TEXT_BYTES if header.kind in (Kind.ERROR, Kind.ENDED) else MAX_SLOT_ELEMENTS
        if header.kind in (Kind.CONTRIBUTE, Kind.RESULT):
            most = slot_elements
        if count > most:
            raise ProtocolError(f"it sent a frame of {count} elements, and {most} is the most that was agreed")
        return header


def packed_bytes(elements: int, limit: int) -> int:
    return -(-elements // GROUP) * GROUP // 8 * _bits(limit)


def packed(integers: Tensor, limit: int) -> bytes:
    """Pack integers (int8, flat) of magnitudes up to ``limit`` into as many bits as these need."""
    return pack((integers + limit).view(torch.uint8), _bits(limit)).numpy().tobytes()


def unpacked(data: bytes | bytearray | memoryview, elements: int, limit: int) -> Tensor:
    """Return the integers (int8) from the bytes of `packed`.

    Raises:
        ProtocolError: one of them is beyond the limit.
    """
    codes = unpack(torch.frombuffer(bytearray(data), dtype=torch.uint8), elements, _bits(limit))
    if elements and int(codes.max()) > 2 * limit:
        raise ProtocolError(f"it sent integers up to {int(codes.max()) - limit} as such of at most {limit}")
    return codes.view(torch.int8) - limit


def _bits(limit: int) -> int:
    return (2 * limit).bit_length()


def error_frame(text: str, *, by_worker: bool) -> bytes:
    """Return a frame that ends a session; ``by_worker`` says whether a worker is the cause."""
    data = text.encode()[:MAX_TEXT_BYTES].decode(errors="ignore").encode()
    return Header(Kind.ERROR if by_worker else Kind.ENDED, elements=len(data)).pack() + data
