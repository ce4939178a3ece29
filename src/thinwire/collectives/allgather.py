"""All-gather: every value is encoded once, and every rank decodes all ranks' messages."""

from __future__ import annotations

import struct
from collections.abc import Generator

import torch
from torch import Tensor

from thinwire.collectives.exchange import Buffers, Exchange
from thinwire.collectives.keys import WORKER, stage_key
from thinwire.collectives.layout import Chunk, Layout
from thinwire.collectives.message import HEADER_BYTES, MessageError
from thinwire.collectives.stages import Clock, NoClock
from thinwire.collectives.transport import Transport
from thinwire.compressors import State

_SIZE = struct.Struct("<i")


def allgather(
    x: Tensor,
    layout: Layout,
    transport: Transport,
    buffers: Buffers,
    *,
    seed: int,
    step: int,
    state: State | None = None,
    clock: Clock | None = None,
) -> Generator[None]:
    """Replace the gathered layers of the flat tensor ``x`` by their mean; every rank ends with the same bytes.

    1. Each rank encodes its layers and sends them to all. 2. All decode all messages, their own among them, in the
    order of ranks. For compressors that cannot cut a layer, or whose sum would have to be compressed anew and worse.
    Where sizes depend on the data, ranks tell each other one size first.

    Yields once, as `scatter_reduce_allgather` does, and raises what it raises.
    """
    clock = clock or NoClock()
    rank, num_ranks, chunk = transport.rank, transport.world_size, layout.gathered
    peers = [(rank + shift) % num_ranks for shift in range(1, num_ranks)]
    run = _Bounded(chunk, buffers) if chunk.bounded else _Fixed()
    with Exchange(transport, buffers, step=step, digest=layout.digest, phases=run.phases) as exchange:
        mine = buffers.work[rank]
        with clock.stage("encode"):
            key = stage_key(seed, step, WORKER, rank)
            for compressor, segments in chunk.groups:
                compressor.encode(x, segments, mine, key=key, state=state)
            run.send(exchange, mine, peers)
        yield

        with clock.stage("wire"):
            run.receive(exchange, peers)
        with clock.stage("decode"):
            for compressor, segments in chunk.groups:
                compressor.mean(buffers.work, segments, x, scale=1.0 / num_ranks)


class _Fixed:
    """Messages as they are encoded: one phase."""

    phases = 1

    def send(self, exchange: Exchange, mine: Tensor, peers: list[int]) -> None:
        exchange.send(0, *peers)

    def receive(self, exchange: Exchange, peers: list[int]) -> None:
        for peer in peers:
            exchange.receive(0, peer)


class _Bounded:
    """Sizes in one phase, and in another what each message holds, without the room that it did not need."""

    phases = 2

    def __init__(self, chunk: Chunk, buffers: Buffers) -> None:
        self._chunk, self._buffers = chunk, buffers

    def send(self, exchange: Exchange, mine: Tensor, peers: list[int]) -> None:
        packed = self._buffers.outbox[1, peers[0]]
        size = HEADER_BYTES
        for compressor, segments in self._chunk.groups:
            for piece in segments.pieces:
                used = compressor.used_bytes(mine, piece)
                packed[size : size + used] = mine[piece.payload : piece.payload + used]
                size += used
        told = bytearray(_SIZE.pack(size))
        self._buffers.outbox[0, peers[0]][HEADER_BYTES : HEADER_BYTES + _SIZE.size] = torch.frombuffer(
            told, dtype=torch.uint8
        )
        exchange.send(0, *peers)
        self._size = size

    def receive(self, exchange: Exchange, peers: list[int]) -> None:
        sizes = {peer: self._told(exchange.receive(0, peer), peer) for peer in peers}
        for peer, size in sizes.items():
            exchange.expect(1, peer, size)
        exchange.send(1, *peers, num_bytes=self._size)
        for peer, size in sizes.items():
            self._unpack(exchange.receive(1, peer)[:size], self._buffers.work[peer], peer)

    def _told(self, message: Tensor, peer: int) -> int:
        (size,) = _SIZE.unpack(message[HEADER_BYTES : HEADER_BYTES + _SIZE.size].numpy().tobytes())
        if not HEADER_BYTES <= size <= self._chunk.message_bytes or size % 64:
            raise MessageError(f"rank {peer} announced a message of {size} bytes; room is {self._chunk.message_bytes}")
        return size

    def _unpack(self, packed: Tensor, into: Tensor, peer: int) -> None:
        at = HEADER_BYTES
        for compressor, segments in self._chunk.groups:
            for piece in segments.pieces:
                # The payload's own header says how long it is; it may say anything, but not reach past the message.
                room = into[piece.payload : piece.payload + compressor.payload_bytes(piece.numel, torch.float32)]
                head = min(64, packed.numel() - at, room.numel())
                room[:head] = packed[at : at + head]
                try:
                    used = compressor.used_bytes(into, piece)
                except ValueError as error:
                    raise MessageError(f"a message from rank {peer} says {error}") from None
                if at + used > packed.numel():
                    raise MessageError(f"a message from rank {peer} ends inside {piece.name}")
                room[:used] = packed[at : at + used]
                at += used
