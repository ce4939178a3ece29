"""Messages between ranks of one node in shared memory: receivers decode from the memory that the sender encodes into.

The thesis (section 3.5.2) copies messages through shared memory; here they are not copied.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from thinwire.arguments import check_choice
from thinwire.collectives.errors import TransportError
from thinwire.collectives.shared_memory import (
    Process,
    SharedMemoryError,
    await_word,
    node_identity,
    number_nodes,
    share,
    unavailable,
)
from thinwire.collectives.transport import (
    Arena,
    Awaited,
    Buffers,
    OutgoingMessage,
    Pending,
    Traffic,
    Transport,
    arriving,
    inbox_for,
    laid_out,
    num_phases,
    receivable_ahead,
    reservation,
    room_bytes,
)
from thinwire.compressors import Reduction
from thinwire.kernels import LINE_BYTES, SharedCounter, align

TransportChoice = Literal["auto", "group", "shared"]
_SPIN_S = 30e-6
"""Seconds that a thread takes to sleep and wake up, about."""


def with_shared_memory(transport: Transport, timeout: timedelta, choice: TransportChoice = "auto") -> Transport:
    """Return ``transport`` with shared memory between ranks of one node. All ranks must call this.

    Args:
        transport: sends between nodes.
        timeout: the limit of every wait for another rank.
        choice: "auto" returns ``transport`` itself if no two ranks can share memory, with a warning if ranks share a
            node; "shared" raises in that case, and if only some ranks can; "group" always returns ``transport``.

    Raises:
        SharedMemoryError: on every rank, as described for ``choice``.
        TransportError: a rank has failed or does not answer.
    """
    check_choice("transport", choice, get_args(TransportChoice))
    if choice == "group" or transport.world_size == 1:
        return transport
    try:
        return SharedMemoryTransport(transport, timeout, strict=choice == "shared")
    except SharedMemoryError as error:
        if choice == "shared":
            raise
        if not isinstance(error, _NobodyError):
            text = f'{error}. Messages between ranks of one node are sent; Network(transport="group") accepts that'
            warnings.warn(text, RuntimeWarning, stacklevel=2)
        return transport


class _NobodyError(SharedMemoryError):
    """No two ranks share a node, or no rank has shared memory."""


class _Neighbor:
    """Another rank of this rank's node."""

    def __init__(self, rank: int, process: Process, memory: Tensor) -> None:
        self.rank, self._process = rank, process
        self._given_up = SharedCounter(memory, 0)

    def check(self) -> None:
        """Raise TransportError if it has died or given up."""
        if not self._process.is_alive():
            raise TransportError(
                f"rank {self.rank} has died (process {self._process.pid} of this node has ended; its own log may say "
                "why): restart from the last checkpoint",
                rank=self.rank,
            )
        if self._given_up.value:
            raise TransportError(
                f"rank {self.rank} has given up, because another rank had died or was silent (its own log names it): "
                "restart from the last checkpoint"
            )


class _MessagePlace(NamedTuple):
    """The place of a message in its sender's arena, and of its words in their memory, in bytes."""

    published: int
    consumed: dict[int, int]
    """Place of the word with which each receiver reports that it has read the message."""
    payload: int


def message_places(
    messages: Sequence[OutgoingMessage], neighbors: frozenset[int]
) -> tuple[dict[int, _MessagePlace], int, int]:
    """Return the places of a rank's messages to its ``neighbors`` by phase, the bytes of all words, and those of all
    messages.

    Every rank computes this for every rank of its node, so nothing about it is sent.
    """
    places, at, payload = {}, 0, 0
    for message in messages:
        receivers = [rank for rank in message.receivers if rank in neighbors]
        if receivers:
            consumed = {rank: at + LINE_BYTES * (i + 1) for i, rank in enumerate(receivers)}
            places[message.phase] = _MessagePlace(at, consumed, payload)
            at += LINE_BYTES * (len(receivers) + 1)
            payload += align(message.num_bytes)
    return places, at, payload


@dataclass(eq=False)
class SharedBuffers(Buffers):
    """Buffers with those for messages inside the node in shared memory.

    Words count exchanges: a message is published when its word reaches ``uses``, the number of the current exchange,
    and may be overwritten when the words of its receivers have reached it.
    """

    own_bytes: int = 0
    """Bytes of this rank's words and of messages outside the arena."""
    published: dict[int, SharedCounter] = field(default_factory=dict)
    """Words of the messages that this rank sends, by phase."""
    taken: list[tuple[int, SharedCounter]] = field(default_factory=list)
    """Receivers of the messages that this rank sends, and their words."""
    awaited: dict[tuple[int, int], SharedCounter] = field(default_factory=dict)
    """Words of the messages that this rank receives, by phase and sender."""
    done: list[SharedCounter] = field(default_factory=list)
    """Words by which this rank reports that it has read messages."""
    remote: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Receivers on other nodes, by phase."""

    @property
    def num_bytes(self) -> int:
        """Memory in use, in bytes. Memory of other ranks is counted there."""
        return self.arena_bytes + self.own_bytes + sum(t.numel() for t in self.work)


class SharedMemoryTransport(Transport):
    """Shared memory inside a node, and another transport between nodes and for native collectives.

    A message to ranks of this node is encoded into memory that they have mapped and decode from. It is copied only if
    it is forwarded. Ranks of the node that wait for a rank notice its death within a second, however long the timeout
    is.
    """

    def __init__(
        self, inner: Transport, timeout: timedelta, *, strict: bool = False, identity: Tensor | None = None
    ) -> None:
        """All ranks must call this.

        Args:
            inner: the other transport.
            timeout: the limit of every wait for another rank.
            strict: raise also if only some ranks have no shared memory.
            identity: identifies this rank's node, in place of `node_identity`.

        Raises:
            SharedMemoryError: on every rank: no two ranks share a node, or a rank cannot share memory.
            TransportError: a rank has failed or does not answer.
        """
        super().__init__(inner)
        self._timeout_s = timeout.total_seconds()
        self._node = self._find_node(node_identity() if identity is None else identity, strict)
        # With a single core the rank that is waited for could not run while this one spins.
        self._spin_s = _SPIN_S if self._node and len(os.sched_getaffinity(0)) > 1 else 0.0
        others = self._node - {self.rank}
        mine, mapped = share(inner, LINE_BYTES if others else 0, dict.fromkeys(others, LINE_BYTES))
        self._given_up = SharedCounter(mine, 0) if others else None
        self._neighbors = {rank: _Neighbor(rank, its.process, its.memory) for rank, its in mapped.items()}

    def _find_node(self, identity: Tensor, strict: bool) -> frozenset[int]:
        """Return the ranks with which this one shares memory, itself included; empty if it cannot."""
        why = unavailable()
        rows = self.inner.all_gather(
            torch.cat([identity, torch.tensor([why is not None], dtype=torch.uint8, device="cpu")])
        )
        without = [rank for rank, row in enumerate(rows) if row[-1]]
        numbers = number_nodes([bytes(row.tolist()) for row in rows])
        able = [number for rank, number in enumerate(numbers) if rank not in without]
        if without and (strict or not able):
            ranks = ", ".join(str(rank) for rank in without)
            raise _NobodyError(f"no shared memory on ranks {ranks}: {why or 'they know why'}")
        if len(able) == len(set(able)):
            raise _NobodyError("no two ranks are on one node, so none can share memory")
        return frozenset(rank for rank in range(self.world_size) if numbers[rank] == numbers[self.rank] and not why)

    def give_up(self) -> None:
        super().give_up()
        if self._given_up is not None:
            # Neighbors would otherwise wait for this rank until their timeout.
            self._given_up.post(1)

    def open(self, traffic: Traffic, arena: Arena | None = None) -> SharedBuffers:
        """See `Transport.open`. Raises `SharedMemoryError`, on every rank alike, if memory runs out."""
        rank, arena = self.rank, arena or Arena()
        neighbors = self._node - {rank}
        places = {peer: message_places(traffic[peer], self._node - {peer}) for peer in self._node | {rank}}
        mine, own_bytes, num_bytes = places[rank]
        senders = {
            p: size for p, (own, size, _) in places.items() if any(rank in place.consumed for place in own.values())
        }
        words, others = share(self, own_bytes, senders)
        # The same on all ranks, also of other nodes: all of them take part.
        reserved = reservation(max(map(room_bytes, traffic)))
        if reserved > arena.reserved:
            arena.memory, mapped = share(self, reserved if neighbors else 0, dict.fromkeys(neighbors, reserved))
            arena.others, arena.reserved = {peer: its.memory for peer, its in mapped.items()}, reserved
        arena.num_bytes = max(num_bytes, arena.num_bytes)
        outgoing = {message.phase: message for message in traffic[rank]}
        outbox: dict[int, Tensor] = {}
        inbox: dict[tuple[int, int], Tensor] = {}
        incoming, tag = arriving(traffic, rank), self.new_tag(num_phases(traffic))
        buffers = SharedBuffers(outgoing, outbox, inbox, incoming, tag, arena, num_bytes)
        for phase, place in mine.items():
            outbox[phase] = _payload(arena.memory, place, outgoing[phase])
            buffers.published[phase] = SharedCounter(words, place.published)
            buffers.taken += [(peer, SharedCounter(words, at)) for peer, at in place.consumed.items()]
        alone = {}
        for (phase, peer), message in incoming.items():
            forwarded = phase in outgoing and outgoing[phase].source is not None
            if peer in others:
                place, theirs = places[peer][0][phase], others[peer].memory
                inbox[phase, peer] = _payload(arena.others[peer], place, message)
                buffers.awaited[phase, peer] = SharedCounter(theirs, place.published)
                buffers.done.append(SharedCounter(theirs, place.consumed[rank]))
            elif forwarded and phase in mine:
                # A message from another node, for others of this one, is received into the memory that they read, maybe
                # after this rank has ended the exchange.
                inbox[phase, peer] = outbox[phase]
            else:
                alone[phase, peer] = message
        received, buffers.received = inbox_for(alone)
        inbox |= received
        # What comes from another node and goes to others alone is sent from where it is received.
        outbox |= {p: room for (p, _), room in received.items() if p in outgoing and outgoing[p].source is not None}
        for phase, message in outgoing.items():
            buffers.remote[phase] = tuple(peer for peer in message.receivers if peer not in self._node)
        rest = {phase: message for phase, message in outgoing.items() if phase not in outbox}
        outbox |= laid_out(rest, torch.zeros(room_bytes(rest.values()), dtype=torch.uint8, device="cpu"))
        buffers.ahead = receivable_ahead(outgoing, alone)
        buffers.own_bytes = own_bytes + room_bytes(alone.values()) + room_bytes(rest.values())
        return buffers

    def begin(self, buffers: Buffers) -> None:
        """See `Transport.begin`. Waits until neighbors have read the messages of the last exchange in the same
        arena."""
        super().begin(buffers)
        assert isinstance(buffers, SharedBuffers)
        for peer, word, uses in buffers.arena.unread:
            self._await(word, uses, peer, "sending to")
        buffers.arena.unread = [(peer, word, buffers.uses) for peer, word in buffers.taken]

    def end(self, buffers: Buffers) -> None:
        assert isinstance(buffers, SharedBuffers)
        for word in buffers.done:
            word.post(buffers.uses)
        super().end(buffers)

    def send_from(self, buffers: Buffers, phase: int, num_bytes: int) -> list[Pending]:
        assert isinstance(buffers, SharedBuffers)
        if phase in buffers.published:
            shared = num_bytes * (len(buffers.outgoing[phase].receivers) - len(buffers.remote[phase]))
            self._count(shared, 0, shared)
            buffers.published[phase].post(buffers.uses)
        message = buffers.outbox[phase][:num_bytes]
        return [self.send(message, peer, buffers.tag + phase) for peer in buffers.remote[phase]]

    def receive_into(self, buffers: Buffers, phase: int, peer: int, num_bytes: int | None = None) -> Pending:
        assert isinstance(buffers, SharedBuffers)
        word = buffers.awaited.get((phase, peer))
        if word is None:
            return super().receive_into(buffers, phase, peer, num_bytes)
        self._count(0, buffers.inbox[phase, peer][:num_bytes].numel())
        return Awaited(partial(self._await, word, buffers.uses, peer, "receiving from"))

    def _await(self, word: SharedCounter, value: int, peer: int, doing: str) -> None:
        check, waiting = self._neighbors[peer].check, f"{doing} rank {peer} failed"
        try:
            await_word(word, value, check, peer=peer, timeout_s=self._timeout_s, spin_s=self._spin_s, waiting=waiting)
        except TransportError as error:
            if self.detector is None:
                raise
            # A neighbor that has only given up has no rank in its error.
            raise self.detector.explain(error, peer if error.rank is not None else None) from error

    def _receive_ahead(self, message: Tensor, peer: int, tag: int) -> Pending | None:
        return self.inner._receive_ahead(message, peer, tag)

    def _start_native(self, x: Tensor, lane: int, op: Reduction) -> Pending:
        return self.inner._start_native(x, lane, op)


def _payload(memory: Tensor, place: _MessagePlace, message: OutgoingMessage) -> Tensor:
    return memory[place.payload : place.payload + message.num_bytes]
