"""The messages of one run of a collective: receives are posted first, and failures reach every rank."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from torch import Tensor

from thinwire.collectives.errors import CommunicationError, PeerFailedError, TransportError
from thinwire.collectives.message import seal, verify
from thinwire.collectives.transport import Buffers, Pending, Transport


class Messages:
    """One run of a collective's messages, as a context manager.

    Entering posts the receives of all phases. If the body raises, peers that still wait for a message of this rank
    receive one that is marked as failed, and their messages are awaited, so that all ranks leave the exchange with an
    error and the next one finds the transport in order. A `TransportError` is raised at once: no peer can be reached.
    """

    def __init__(self, transport: Transport, buffers: Buffers, *, step: int, digest: int) -> None:
        self._transport = transport
        self._buffers = buffers
        self._step, self._digest = step, digest
        self._arriving: dict[tuple[int, int], Pending] = {}
        self._leaving: dict[int, list[Pending]] = {}
        self._sizes: dict[tuple[int, int], int] = {}
        self._divided: set[tuple[int, int]] = set()

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
        """Return the buffer of this rank's message of a phase, to be filled before `send`."""
        return self._buffers.outbox[phase]

    def send(self, phase: int, *, num_bytes: int | None = None, divided: bool = False) -> None:
        """Seal the message of a phase and send it, or its first ``num_bytes``, to its receivers.

        ``divided``: whether its values were multiplied by `thinwire.kernels.before_sum` of the factor of the sum.
        """
        message = self._buffers.outbox[phase][:num_bytes]
        self._seal(message, phase, divided=divided)
        self._leaving[phase] = self._transport.send_from(self._buffers, phase, message.numel())

    def expect(self, phase: int, peer: int, num_bytes: int) -> None:
        """Post the receive of a message whose size has been received; its buffer is large enough for any size."""
        self._sizes[phase, peer] = num_bytes
        self._arriving[phase, peer] = self._transport.receive_into(self._buffers, phase, peer, num_bytes)

    def receive(self, phase: int, peer: int) -> Tensor:
        """Wait for a peer's message of a phase and check it.

        Raises:
            TransportError: The peer is gone or silent.
            PeerFailedError: The peer failed.
            MessageError: The message is damaged or not the expected one.
        """
        self._arriving.pop((phase, peer)).wait()
        message = self._buffers.inbox[phase, peer][: self._sizes.get((phase, peer))]
        source = self._buffers.arriving[phase, peer].source
        source = peer if source is None else source
        try:
            if verify(message, peer=peer, source=source, phase=phase, step=self._step, digest=self._digest):
                self._divided.add((phase, peer))
        except PeerFailedError as error:
            detector = self._transport.detector
            raise error if detector is None else detector.attribute(error) from None
        return message

    def is_divided(self, phase: int, peer: int) -> bool:
        """Whether the values of a message that `receive` has returned were divided; see `send`."""
        return (phase, peer) in self._divided

    def forward(self, phase: int, peer: int) -> None:
        """Send a message that was received on to this rank's receivers of that phase, unchanged."""
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
                if self._transport.detector is not None and not isinstance(error, CommunicationError):
                    self._transport.detector.report(error)
                self._send_failure()
            for pending in (*self._arriving.values(), *(p for leaving in self._leaving.values() for p in leaving)):
                pending.wait()
            self._transport.end(self._buffers)
        except TransportError:
            self._transport.give_up()
            raise

    def _send_failure(self) -> None:
        # No receive was posted for messages whose size was not sent: their receivers fail before they would post it.
        outgoing = [m for m in self._buffers.outgoing.values() if m.phase not in self._leaving and not m.late]
        for phase, _, _, _, source in sorted(outgoing, key=lambda m: m.source is not None):
            if source is not None:
                # It may be received into the buffer that it is sent from. It will be: this rank's own messages, for
                # which its senders may wait, have been sent.
                for address in [address for address in self._arriving if address[0] == phase]:
                    self._arriving.pop(address).wait()
            message = self._buffers.outbox[phase]
            self._seal(message, phase, failed=True)
            self._leaving[phase] = self._transport.send_from(self._buffers, phase, message.numel())

    def _seal(self, message: Tensor, phase: int, *, failed: bool = False, divided: bool = False) -> None:
        frame = {"source": self._transport.rank, "phase": phase, "step": self._step, "digest": self._digest}
        seal(message, **frame, failed=failed, divided=divided)
