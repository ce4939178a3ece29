"""Messages between devices for any collective algorithm: they travel in rounds, which no host waits for.

A round is one exchange among all ranks. In the first rounds contributions go up: those of leaves, then of ranks with
one further level below them, and so on to the owners. In the others means go down, by the distance from the owner.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple, Self

import torch
from torch import Tensor

from thinwire.collectives.device_transport import DeviceTransport
from thinwire.collectives.layout import Layout
from thinwire.collectives.transport import Transport, sent_bytes


class _Move(NamedTuple):
    sender: int
    receiver: int
    phase: int
    num_bytes: int


class _Round(NamedTuple):
    phases: list[int]
    """Phases of the messages that this rank sends, in the order of receivers."""
    sent: list[int]
    """Bytes for each rank."""
    room: Tensor
    """Memory of all messages that this rank receives, in the order of senders."""
    received: list[int]
    """Bytes from each rank."""


class Rounds:
    """The messages of a layout's chunks on one rank's device, allocated once.

    They take the place of `Messages` in an exchange, without headers, which the host would have to wait to read.
    """

    def __init__(self, layout: Layout, rank: int, device: torch.device, *, up: bool = True, down: bool = True) -> None:
        """Allocate them. ``up``: whether contributions are sent; ``down``: whether means are.

        Raises:
            ValueError: partial sums might overflow, which only a header could tell.
        """
        if up and layout.has_partial_sums and layout.dtype == torch.float16:
            raise ValueError(
                f"{layout.algorithm} adds up partial sums, for which float16 may be too small, and between devices no "
                "rank can tell that it has divided them: use the collective algorithm sra, or bfloat16"
            )
        traffic = layout.reduction_traffic(up=up, down=down)
        self.sent_bytes = sent_bytes(traffic, rank)
        """Number of bytes that this rank hands to the transport."""
        self.outbox: dict[int, Tensor] = {}
        """Messages that this rank sends, by phase."""
        self._inbox: dict[tuple[int, int], Tensor] = {}
        self._numbers: dict[tuple[int, int], int] = {}
        """Number of the round in which a message is received, by phase and sender."""
        self._rounds: list[_Round] = []
        moves: dict[tuple[int, int], list[_Move]] = {}
        for sender, messages in enumerate(traffic):
            for message in messages:
                is_mean, k = divmod(message.phase, len(layout.chunks))
                tree = layout.trees[layout.chunks[k].owner]
                level = tree.depth[sender] if is_mean else tree.height[sender]
                moves.setdefault((is_mean, level), []).extend(
                    _Move(sender, receiver, message.phase, message.num_bytes) for receiver in message.receivers
                )
        for number, (_, moved) in enumerate(sorted(moves.items())):
            sent, received = [0] * layout.world_size, [0] * layout.world_size
            # Senders and receivers have the messages between them in the order of phases.
            leaving = sorted(move for move in moved if move.sender == rank)
            arriving = sorted(move for move in moved if move.receiver == rank)
            room = torch.zeros(sum(move.num_bytes for move in arriving), dtype=torch.uint8, device=device)
            for move, part in zip(arriving, room.split([move.num_bytes for move in arriving]), strict=True):
                received[move.sender] += move.num_bytes
                address = move.phase, move.sender
                self._inbox[address], self._numbers[address] = part, number
            for move in leaving:
                sent[move.receiver] += move.num_bytes
            self._rounds.append(_Round([move.phase for move in leaving], sent, room, received))
        for message in traffic[rank]:
            if message.source is None:
                own = torch.zeros(message.num_bytes, dtype=torch.uint8, device=device)
            else:
                own = next(part for (phase, _), part in self._inbox.items() if phase == message.phase)
            self.outbox[message.phase] = own

    @property
    def num_bytes(self) -> int:
        """Memory in use, in bytes."""
        tensors = {t.data_ptr(): t.nbytes for t in (*self.outbox.values(), *self._inbox.values())}
        return sum(tensors.values())

    @contextmanager
    def over(self, transport: Transport) -> Iterator[Self]:
        """Exchange the messages over ``transport`` in the body; rounds in which this rank receives nothing may follow
        it."""
        assert isinstance(transport, DeviceTransport)
        self._transport, self._done = transport, 0
        yield self
        self._run(len(self._rounds))

    def outgoing(self, phase: int) -> Tensor:
        """Return the memory of this rank's message of a phase, to be filled before its round."""
        return self.outbox[phase]

    def send(self, phase: int, *, divided: bool = False) -> None:
        """Do nothing: the message leaves in its round."""
        assert not divided, "no header tells of it"

    def receive(self, phase: int, peer: int) -> Tensor:
        """Return a peer's message of a phase, which the current stream has from here on."""
        self._run(self._numbers[phase, peer] + 1)
        return self._inbox[phase, peer]

    def is_divided(self, phase: int, peer: int) -> bool:
        """Return False: see `send`."""
        return False

    def forward(self, phase: int, peer: int) -> None:
        """Do nothing: the message, received where it is sent from, leaves in its round."""

    def _run(self, end: int) -> None:
        """Start the rounds before number ``end`` that have not been started."""
        for phases, sent, room, received in self._rounds[self._done : end]:
            leaving = [self.outbox[phase] for phase in phases]
            message = leaving[0] if len(leaving) == 1 else torch.cat([room[:0], *leaving])
            self._transport.all_to_all(room, message, received, sent)
        self._done = max(self._done, end)
