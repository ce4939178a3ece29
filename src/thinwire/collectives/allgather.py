"""All-gather: every value is encoded once, and every rank decodes all ranks' messages."""

from __future__ import annotations

import struct
from collections.abc import Generator

import torch
from torch import Tensor

from thinwire.collectives.exchange import Exchange
from thinwire.collectives.keys import WORKER, stage_key
from thinwire.collectives.layout import Chunk, Layout
from thinwire.collectives.message import HEADER_BYTES, MessageError
from thinwire.collectives.stages import Clock, NoClock
from thinwire.collectives.transport import Buffers, Transport
from thinwire.compressors import State

_SIZE = struct.Struct("<i")


def gather_buffers(layout: Layout, transport: Transport) -> Buffers:
    """Room for the messages of `gather_mean`. All ranks must call this, in the same order.

    Where sizes depend on the data, messages are packed for the wire: ``work`` then holds every rank's payloads where
    decoding finds them.
    """
    buffers = transport.open(layout.gather_traffic())
    if any(chunk.bounded for chunk in layout.gathered):
        size = layout.gathered[0].message_bytes
        buffers.work = [torch.zeros(size, dtype=torch.uint8) for _ in range(layout.world_size)]
    return buffers


def gather_mean(
    x: Tensor,
    layout: Layout,
    transport: Transport,
    buffers: Buffers,
    *,
    seed: int,
    step: int,
    scale: float | None = None,
    state: State | None = None,
    clock: Clock | None = None,
    draw: int | None = None,
) -> Generator[None]:
    """Replace the gathered layers of the flat tensor ``x`` by ``scale`` times their sum, by default their mean.

    1. Each rank encodes its layers and sends them to all. 2. All decode all messages, their own among them, in the
    order of ranks. For compressors that cannot cut a layer, or whose sum would have to be compressed anew and worse.
    Where sizes depend on the data, ranks tell each other one size first. ``buffers`` are `gather_buffers`; ``draw``
    stands for the step in the keys of random draws, if given.

    Yields once, as `all_reduce` does, and raises what it raises.
    """
    clock = clock or NoClock()
    scale = 1.0 / layout.world_size if scale is None else scale
    rank, key = transport.rank, stage_key(seed, step if draw is None else draw, WORKER, transport.rank)
    peers = [(rank + shift) % layout.world_size for shift in range(1, layout.world_size)]
    with Exchange(transport, buffers, step=step, digest=layout.digest) as exchange:
        packing = _Packing(layout.gathered[0], buffers, exchange) if buffers.work else None
        for k, chunk in enumerate(layout.gathered):
            with clock.stage("encode"):
                mine = buffers.work[rank] if packing else exchange.outgoing(k)
                for compressor, segments in chunk.groups:
                    compressor.encode(x, segments, mine, key=key, state=state)
                if packing:
                    packing.announce(mine)
                else:
                    exchange.send(k)
        yield

        for k, chunk in enumerate(layout.gathered):
            with clock.stage("wire"):
                if packing:
                    packing.receive(peers)
                    messages = list(buffers.work)
                else:
                    arrived = {peer: exchange.receive(k, peer) for peer in peers}
                    arrived[rank] = exchange.outgoing(k)
                    messages = [arrived[r] for r in range(layout.world_size)]
            with clock.stage("decode"):
                for compressor, segments in chunk.groups:
                    compressor.mean(messages, segments, x, scale=scale)


class _Packing:
    """Sizes in phase 0, and in phase 1 what each message holds, without the room that it did not need."""

    def __init__(self, chunk: Chunk, buffers: Buffers, exchange: Exchange) -> None:
        self._chunk, self._buffers, self._exchange = chunk, buffers, exchange

    def announce(self, mine: Tensor) -> None:
        packed = self._exchange.outgoing(1)
        size = HEADER_BYTES
        for compressor, segments in self._chunk.groups:
            for piece in segments.pieces:
                used = compressor.used_bytes(mine, piece)
                packed[size : size + used] = mine[piece.payload : piece.payload + used]
                size += used
        told = bytearray(_SIZE.pack(size))
        self._exchange.outgoing(0)[HEADER_BYTES : HEADER_BYTES + _SIZE.size] = torch.frombuffer(told, dtype=torch.uint8)
        self._exchange.send(0)
        self._size = size

    def receive(self, peers: list[int]) -> None:
        sizes = {peer: self._told(self._exchange.receive(0, peer), peer) for peer in peers}
        for peer, size in sizes.items():
            self._exchange.expect(1, peer, size)
        self._exchange.send(1, num_bytes=self._size)
        for peer in peers:
            self._unpack(self._exchange.receive(1, peer), self._buffers.work[peer], peer)

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
