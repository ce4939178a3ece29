"""The messages of one collective: receives posted first, failures told to everybody."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from torch import Tensor

from thinwire.collectives.message import seal, verify
from thinwire.collectives.transport import Buffers, Pending, Transport, TransportError


class Exchange:
    """One run of a collective's messages, as a context manager.

    Entering posts every receive of every phase. If the body raises, the peers that still wait for a message of this
    rank get one that says so, and what they send is awaited, so that all ranks leave together with an error and the
    next exchange finds the transport in order. A `TransportError` is passed on at once: there is nobody to tell.
    """

    def __init__(self, transport: Transport, buffers: Buffers, *, step: int, digest: int) -> None:
        self._transport = transport
        self._buffers = buffers
        self._step, self._digest = step, digest
        self._arriving: dict[tuple[int, int], Pending] = {}
        self._leaving: dict[int, list[Pending]] = {}
        self._sizes: dict[tuple[int, int], int] = {}

    def __enter__(self) -> Self:
        try:
            self._transport.begin(self._buffers)
            for address in self._buffers.inbox:
                if not self._buffers.arriving[address].late:
                    self._arriving[address] = self._transport.receive_into(self._buffers, *address)
        except TransportError:
            self._transport.give_up()
            raise
        return self

    def outgoing(self, phase: int) -> Tensor:
        """The message of a phase, to be filled before it is sent."""
        return self._buffers.outbox[phase]

    def send(self, phase: int, *, num_bytes: int | None = None) -> None:
        """Seal the message of a phase and send it to its receivers. ``num_bytes``: only so much of it."""
        message = self._buffers.outbox[phase][:num_bytes]
        self._seal(message, phase)
        self._leaving[phase] = self._transport.send_from(self._buffers, phase, message.numel())

    def expect(self, phase: int, peer: int, num_bytes: int) -> None:
        """Post the receive of a message whose size is known now, within the room that its buffer has."""
        self._sizes[phase, peer] = num_bytes
        self._arriving[phase, peer] = self._transport.receive_into(self._buffers, phase, peer, num_bytes)

    def receive(self, phase: int, peer: int) -> Tensor:
        """Wait for a peer's message of a phase and check it.

        Raises:
            TransportError, PeerFailedError, MessageError
        """
        self._arriving.pop((phase, peer)).wait()
        message = self._buffers.inbox[phase, peer][: self._sizes.get((phase, peer))]
        maker = self._buffers.arriving[phase, peer].maker
        source = peer if maker is None else maker
        verify(message, peer=peer, source=source, phase=phase, step=self._step, digest=self._digest)
        return message

    def forward(self, phase: int, peer: int) -> None:
        """Hand a message that was received to this rank's own receivers of that phase, verbatim."""
        outgoing, message = self._buffers.outbox[phase], self._buffers.inbox[phase, peer]
        if outgoing.data_ptr() != message.data_ptr():
            outgoing.copy_(message)
        self._leaving[phase] = self._transport.send_from(self._buffers, phase, message.numel())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, TransportError):
            self._transport.give_up()
        if self._transport.broken:
            return
        try:
            if error is not None:
                self._tell_failure()
            for pending in (*self._arriving.values(), *(p for leaving in self._leaving.values() for p in leaving)):
                pending.wait()
            self._transport.end(self._buffers)
        except TransportError:
            self._transport.give_up()
            raise

    def _tell_failure(self) -> None:
        # Nobody waits for a message of a size that was never told: who hears of the failure before goes no further.
        outgoing = [m for m in self._buffers.outgoing.values() if m.phase not in self._leaving and not m.late]
        for phase, _, _, _, maker in sorted(outgoing, key=lambda m: m.maker is not None):
            if maker is not None:
                # Its buffer may be the one in which it arrives. It will: nothing that this rank owes is missing now.
                for address in [address for address in self._arriving if address[0] == phase]:
                    self._arriving.pop(address).wait()
            message = self._buffers.outbox[phase]
            self._seal(message, phase, failed=True)
            self._leaving[phase] = self._transport.send_from(self._buffers, phase, message.numel())

    def _seal(self, message: Tensor, phase: int, *, failed: bool = False) -> None:
        rank = self._transport.rank
        seal(message, source=rank, phase=phase, step=self._step, digest=self._digest, failed=failed)
