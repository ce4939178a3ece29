"""All-gather of coded layers: every value is encoded once, and every rank decodes the messages of all ranks."""

from __future__ import annotations

import struct
from collections.abc import Generator

import torch
from torch import Tensor

from thinwire.collectives.layout import Chunk, Layout
from thinwire.collectives.message import HEADER_BYTES, WORKER, CollectiveCall, MessageError, Messages
from thinwire.collectives.transport import Arena, Buffers, Transport
from thinwire.compressors import CodecCall, used_bytes

_SIZE = struct.Struct("<i")


def gather_buffers(layout: Layout, transport: Transport, arena: Arena | None = None) -> Buffers:
    """Open the messages of `gather_mean`, as `Transport.open` does, in the same order on all ranks.

    Messages whose size depends on the data are packed before they are sent. ``work`` then has the unpacked messages
    of all ranks.
    """
    buffers = transport.open(layout.gather_traffic(), arena)
    # Every rank sends all its data to all others. Begun at once, without a wait for announcements, that takes longer
    # over a long link, as soon as messages fill a few of TCP's first windows.
    buffers.ahead = ()
    if any(chunk.bounded for chunk in layout.gathered):
        size = layout.gathered[0].message_bytes
        buffers.work = [torch.zeros(size, dtype=torch.uint8, device="cpu") for _ in range(layout.world_size)]
    return buffers


def gather_mean(
    x: Tensor, layout: Layout, transport: Transport, buffers: Buffers, call: CollectiveCall
) -> Generator[None]:
    """Replace the gathered layers of the flat tensor ``x`` by their sum times ``call.scale``, by default by their mean.

    1. Encode and send. Every rank encodes its layers and sends them to all others. If the size depends on the data, the
       size is sent first.
    2. Decode. Every rank decodes the messages of all ranks, its own included, in the order of ranks.

    It is for compressors that cannot divide a layer, or whose sums lose more when they are encoded again. ``buffers``
    are `gather_buffers`. Yields and raises as `all_reduce` does, whose other arguments it has.
    """
    clock, scale = call.clock, call.factor(layout.world_size)
    rank, key = transport.rank, call.key(WORKER, transport.rank)
    peers = [(rank + shift) % layout.world_size for shift in range(1, layout.world_size)]
    with Messages(transport, buffers, step=call.step, digest=layout.digest) as messages:
        packing = _Packing(layout.gathered[0], buffers, messages) if buffers.work else None
        for k, chunk in enumerate(layout.gathered):
            with clock.stage("encode"):
                mine = buffers.work[rank] if packing else messages.outgoing(k)
                for compressor, segments in chunk.groups:
                    compressor.encode(x, mine, CodecCall(segments, key, state=call.state))
                if packing:
                    packing.announce(mine)
                else:
                    messages.send(k)
        yield

        for k, chunk in enumerate(layout.gathered):
            with clock.stage("wire"):
                if packing:
                    packing.receive(peers)
                    arrived = list(buffers.work)
                else:
                    by_rank = {peer: messages.receive(k, peer) for peer in peers} | {rank: messages.outgoing(k)}
                    arrived = [by_rank[r] for r in range(layout.world_size)]
            with clock.stage("decode"):
                for compressor, segments in chunk.groups:
                    compressor.mean(arrived, x, CodecCall(segments, scale=scale))


class _Packing:
    """Sender of messages of bounded size without their unused bytes: sizes in phase 0, packed messages in phase 1."""

    def __init__(self, chunk: Chunk, buffers: Buffers, messages: Messages) -> None:
        self._room, self._buffers, self._messages = chunk.message_bytes, buffers, messages
        self._pieces = [(compressor, piece) for compressor, segments in chunk.groups for piece in segments.pieces]

    def announce(self, mine: Tensor) -> None:
        packed, size = self._messages.outgoing(1), HEADER_BYTES
        for compressor, piece in self._pieces:
            used = used_bytes(compressor, mine, piece)
            packed[size : size + used] = mine[piece.payload : piece.payload + used]
            size += used
        field = torch.frombuffer(bytearray(_SIZE.pack(size)), dtype=torch.uint8)
        self._messages.outgoing(0)[HEADER_BYTES : HEADER_BYTES + _SIZE.size] = field
        self._messages.send(0)
        self._size = size

    def receive(self, peers: list[int]) -> None:
        sizes = {peer: self._read_size(self._messages.receive(0, peer), peer) for peer in peers}
        for peer, size in sizes.items():
            self._messages.expect(1, peer, size)
        self._messages.send(1, num_bytes=self._size)
        for peer in peers:
            self._unpack(self._messages.receive(1, peer), self._buffers.work[peer], peer)

    def _read_size(self, message: Tensor, peer: int) -> int:
        (size,) = _SIZE.unpack(message[HEADER_BYTES : HEADER_BYTES + _SIZE.size].numpy().tobytes())
        if not HEADER_BYTES <= size <= self._room or size % 64:
            raise MessageError(f"rank {peer} announced a message of {size} bytes; room is {self._room}")
        return size

    def _unpack(self, packed: Tensor, into: Tensor, peer: int) -> None:
        at = HEADER_BYTES
        for compressor, piece in self._pieces:
            # The length in the payload's header is checked: it may not reach past the message.
            room = into[piece.payload : piece.payload + compressor.payload_bytes(piece.numel, torch.float32)]
            head = min(64, packed.numel() - at, room.numel())
            room[:head] = packed[at : at + head]
            try:
                used = used_bytes(compressor, into, piece)
            except ValueError as error:
                raise MessageError(f"a message from rank {peer} is invalid: {error}") from None
            if at + used > packed.numel():
                raise MessageError(f"a message from rank {peer} ends inside {piece.name}")
            room[:used] = packed[at : at + used]
            at += used
