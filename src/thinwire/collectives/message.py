"""The messages of one call of a collective: their headers, and receives that are posted before the first send.

A message is one contiguous uint8 tensor: a header of 64 bytes, then the payloads of its layers in order. The header has
the step and layout that the message belongs to, what its sender did to it, and a checksum. Both sides know its size
beforehand, so the header has no sizes: it is compared with what the receiver expects, and nothing is read according to
it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol, Self

import torch
from torch import Tensor

from thinwire.collectives.errors import CommunicationError, PeerFailedError, TransportError
from thinwire.collectives.transport import Buffers, Pending, Transport
from thinwire.compressors import Key, State
from thinwire.kernels import FORMAT_VERSION, checksum, derive_key

HEADER_BYTES = 64
SIZE_BYTES = HEADER_BYTES + 64
"""Size of a message that contains only the size of another one."""
_MAGIC = b"thin"
_FIELDS = struct.Struct("<4sHHIIIQQ")
_OK, _FAILED, _DIVIDED = 0, 1, 2
_DIVIDED_MASK = 0xFFFFFFFFFFFFFFFF
"""Mask of the checksum of divided values, so that no damage makes them valid as others."""

WORKER, OWNER = 1, 2
"""Stages in which a rank encodes. Their random draws are independent of each other."""

_SHARED = -1
"""Number in the place of the rank in the key of draws that all ranks share."""


class Clock(Protocol):
    """Times the stages of a collective."""

    def stage(self, name: str) -> AbstractContextManager[None]:
        """Time the body as stage ``encode``, ``reduce``, ``decode`` or ``wire``."""
        ...


class NoClock:
    """A clock that measures nothing."""

    def stage(self, name: str) -> AbstractContextManager[None]:
        return nullcontext()


@dataclass(frozen=True)
class CollectiveCall:
    """Arguments of one call of a collective other than its tensors.

    All ranks pass the same, except for ``state`` and ``clock``.
    """

    seed: int
    """Seed of the random draws."""
    step: int
    """Number of the call. A message of another call is an error."""
    scale: float | None = None
    """Factor of the sum over all ranks; None for the mean."""
    state: State | None = None
    """Slots of the layers, if their compressors have any."""
    clock: Clock = field(default_factory=NoClock)
    draw: int | None = None
    """Number in place of ``step`` in the keys of random draws: calls with the same value draw the same."""

    def key(self, stage: int, rank: int) -> Key:
        """Return the key of the draws with which ``rank`` encodes, as `WORKER` or as `OWNER`."""
        return Key(derive_key(self.seed, self._draw, stage, rank), derive_key(self.seed, self._draw, stage, _SHARED))

    def sum_key(self, rank: int) -> Key:
        """Return the key of the draws for ``rank``'s contribution to native all-reduces."""
        return Key(derive_key(self.seed, self._draw, WORKER, rank), derive_key(self.seed, self._draw, _SHARED))

    def factor(self, num_ranks: int) -> float:
        """Return the factor of the sum over ``num_ranks`` ranks."""
        return 1.0 / num_ranks if self.scale is None else self.scale

    @property
    def _draw(self) -> int:
        return self.step if self.draw is None else self.draw


def complete(collective: Iterator[None]) -> None:
    """Run a collective to its end."""
    for _ in collective:
        pass


class MessageError(ValueError):
    """A message is not the one that its receiver expects: it is of another step or layout, or damaged."""


def seal(
    message: Tensor, *, source: int, phase: int, step: int, digest: int, failed: bool = False, divided: bool = False
) -> None:
    """Write the header of a message whose payloads are in place. ``divided``: see `verify`."""
    total = 0 if failed else checksum(message[HEADER_BYTES:]) ^ (_DIVIDED_MASK if divided else 0)
    head = _FIELDS.pack(
        _MAGIC,
        FORMAT_VERSION,
        _FAILED if failed else _DIVIDED if divided else _OK,
        source,
        phase,
        step & 0xFFFFFFFF,
        digest,
        total,
    )
    message[: _FIELDS.size].copy_(torch.frombuffer(bytearray(head), dtype=torch.uint8))


def verify(message: Tensor, *, peer: int, source: int, phase: int, step: int, digest: int) -> bool:
    """Check that a message received from rank ``peer`` is the expected one, which rank ``source`` made.

    Returns:
        Whether its values were multiplied by `thinwire.kernels.before_sum` of the factor of the sum, because partial
        sums might overflow.

    Raises:
        PeerFailedError: the sender failed.
        MessageError: the message is too short, damaged, or belongs to another step, layout or format.
    """
    if message.dtype != torch.uint8 or message.dim() != 1 or message.numel() < HEADER_BYTES or message.numel() % 4:
        raise MessageError(f"a message is a 1-D uint8 tensor of at least {HEADER_BYTES} bytes and whole 32-bit words")
    magic, version, status, sent_source, sent_phase, sent_step, sent_digest, total = _FIELDS.unpack(
        message[: _FIELDS.size].numpy().tobytes()
    )
    if magic != _MAGIC:
        raise MessageError(f"rank {peer} sent bytes that are not a thinwire message")
    if version != FORMAT_VERSION:
        raise MessageError(f"rank {peer} has wire format {version}, this rank {FORMAT_VERSION}: install one version")
    failed, divided = status not in (_OK, _DIVIDED), status == _DIVIDED
    # A rank that failed seals the message as its own, also where it would have forwarded another rank's.
    expected = sent_source if failed else source
    if (sent_source, sent_phase, sent_step, sent_digest) != (expected, phase, step & 0xFFFFFFFF, digest):
        raise MessageError(
            f"rank {peer} is out of step: its message is of step {sent_step} phase {sent_phase} layout "
            f"{sent_digest:016x} by rank {sent_source}, expected step {step} phase {phase} layout {digest:016x} "
            f"by rank {source}. Every rank must run the same number of backward passes on the same model"
        )
    if failed:
        text = f"rank {peer} failed in step {step}; its own error is in its log"
        raise PeerFailedError(text, rank=peer)
    if checksum(message[HEADER_BYTES:]) ^ (_DIVIDED_MASK if divided else 0) != total:
        raise MessageError(f"a message from rank {peer} arrived damaged in step {step} (checksum differs)")
    return divided


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
            TransportError: the peer is gone or silent.
            PeerFailedError: the peer failed.
            MessageError: the message is damaged or not the expected one.
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
