"""The messages of one collective: buffers allocated once, receives posted first, failures told to everybody."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from thinwire.collectives.layout import Layout
from thinwire.collectives.message import SIZE_BYTES, seal, verify
from thinwire.collectives.transport import Pending, Transport, TransportError

Address = tuple[int, int]
"""(phase, peer)."""


@dataclass(frozen=True)
class Buffers:
    """Every message that a rank sends and receives in one collective, by phase and peer."""

    outbox: Mapping[Address, Tensor]
    inbox: Mapping[Address, Tensor]
    work: Sequence[Tensor] = ()
    """Of an all-gather: every rank's payloads, by rank, where decoding finds them."""
    late: frozenset[int] = frozenset()
    """Phases whose receives wait for a size (`Exchange.expect`)."""

    @staticmethod
    def scatter_reduce_allgather(layout: Layout, rank: int) -> Buffers:
        """Phase 0: each peer's chunk to it, mine from it. Phase 1: my chunk's mean to all, each peer's from it."""
        sizes = [chunk.message_bytes for chunk in layout.chunks]
        peers = [peer for peer in range(layout.world_size) if peer != rank]
        mine = _message(sizes[rank])
        outbox = {(0, peer): _message(sizes[peer]) for peer in peers} | {(1, peer): mine for peer in peers}
        inbox = {(0, peer): _message(sizes[rank]) for peer in peers}
        inbox |= {(1, peer): _message(sizes[peer]) for peer in peers}
        return Buffers(outbox, inbox)

    @staticmethod
    def allgather(layout: Layout, rank: int) -> Buffers:
        """Phase 0: my message to all, each peer's from it. Where sizes depend on the data, these travel in phase 0."""
        size, bounded = layout.gathered.message_bytes, layout.gathered.bounded
        peers = [peer for peer in range(layout.world_size) if peer != rank]
        work = [_message(size) for _ in range(layout.world_size)]
        if not bounded:
            return Buffers({(0, p): work[rank] for p in peers}, {(0, p): work[p] for p in peers}, work)
        told, packed = _message(SIZE_BYTES), _message(size)
        outbox = {(0, peer): told for peer in peers} | {(1, peer): packed for peer in peers}
        inbox = {(0, peer): _message(SIZE_BYTES) for peer in peers} | {(1, peer): _message(size) for peer in peers}
        return Buffers(outbox, inbox, work, frozenset({1}))

    @property
    def num_bytes(self) -> int:
        """Memory held."""
        tensors = {id(t): t.numel() for t in (*self.outbox.values(), *self.inbox.values(), *self.work)}
        return sum(tensors.values())


def _message(num_bytes: int) -> Tensor:
    return torch.zeros(num_bytes, dtype=torch.uint8)


class Exchange:
    """One run of a collective's messages, as a context manager.

    Entering posts every receive of every phase. If the body raises, the peers that still wait for a message of this
    rank get one that says so, and what they send is awaited, so that all ranks leave together with an error and the
    next exchange finds the transport in order. A `TransportError` is passed on at once: there is nobody to tell.
    """

    def __init__(self, transport: Transport, buffers: Buffers, *, step: int, digest: int, phases: int) -> None:
        self._transport = transport
        self._buffers = buffers
        self._step, self._digest = step, digest
        self._tag = transport.new_tag(phases)
        self._arriving: dict[Address, Pending] = {}
        self._leaving: dict[Address, Pending] = {}
        self._sizes: dict[Address, int] = {}

    def __enter__(self) -> Self:
        for (phase, peer), buffer in self._buffers.inbox.items():
            if phase not in self._buffers.late:
                self._arriving[phase, peer] = self._transport.receive(buffer, peer, self._tag + phase)
        return self

    def expect(self, phase: int, peer: int, num_bytes: int) -> None:
        """Post the receive of a message whose size is known now, within the room that its buffer has."""
        self._sizes[phase, peer] = num_bytes
        buffer = self._buffers.inbox[phase, peer][:num_bytes]
        self._arriving[phase, peer] = self._transport.receive(buffer, peer, self._tag + phase)

    def send(self, phase: int, *peers: int, num_bytes: int | None = None) -> None:
        """Seal the message of this phase, which is one and the same for all ``peers`` named together, and send it.

        ``num_bytes``: only so much of it.
        """
        message = self._buffers.outbox[phase, peers[0]][:num_bytes]
        seal(message, source=self._transport.rank, phase=phase, step=self._step, digest=self._digest)
        for peer in peers:
            self._leaving[phase, peer] = self._transport.send(message, peer, self._tag + phase)

    def receive(self, phase: int, peer: int) -> Tensor:
        """Wait for a peer's message of a phase and check it.

        Raises:
            TransportError, PeerFailedError, MessageError
        """
        self._arriving.pop((phase, peer)).wait()
        message = self._buffers.inbox[phase, peer][: self._sizes.get((phase, peer))]
        verify(message, source=peer, phase=phase, step=self._step, digest=self._digest)
        return message

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._transport.broken |= isinstance(error, TransportError)
        if self._transport.broken:
            return
        if error is not None:
            self._tell_failure()
        for pending in (*self._arriving.values(), *self._leaving.values()):
            pending.wait()

    def _tell_failure(self) -> None:
        for (phase, peer), message in self._buffers.outbox.items():
            # Nobody waits for a message of a size that was never told: who hears of the failure before goes no further.
            if (phase, peer) not in self._leaving and phase not in self._buffers.late:
                # A copy: the buffer itself may still be leaving for another peer.
                notice = message.clone()
                seal(
                    notice, source=self._transport.rank, phase=phase, failed=True, step=self._step, digest=self._digest
                )
                self._leaving[phase, peer] = self._transport.send(notice, peer, self._tag + phase)
