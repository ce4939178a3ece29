"""Transports between threads of one process that act as ranks: for tests, and for several ranks on one device."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from thinwire.collectives.device_transport import DeviceTransport
from thinwire.collectives.errors import TransportError
from thinwire.collectives.transport import Awaited, Pending, Transport
from thinwire.compressors import Reduction


class _Rendezvous:
    """A place where the threads of all ranks exchange values, in one order."""

    def __init__(self, size: int, timeout_s: float, device: torch.device | None = None) -> None:
        self.timeout_s, self._device = timeout_s, device
        self._barrier = threading.Barrier(size)
        self._given: list[Any] = [None] * size
        self._ready: list[torch.cuda.Event | None] = [None] * size
        self._taken: list[torch.cuda.Event | None] = [None] * size

    def share(self, rank: int, mine: Any, take: Callable[[list[Any]], None]) -> None:
        """Publish ``mine`` to all ranks and call ``take`` with the values of all ranks, which may be overwritten
        afterwards. On a device, streams wait for events of other streams."""
        try:
            self._given[rank] = mine
            self._meet(rank, self._ready)
            take(list(self._given))
            self._meet(rank, self._taken)
        except threading.BrokenBarrierError:
            raise TransportError(f"a rank did not come to a collective within {self.timeout_s:g} s") from None

    def _meet(self, rank: int, events: list[torch.cuda.Event | None]) -> None:
        if self._device is None or self._device.type != "cuda":
            self._barrier.wait(self.timeout_s)
            return
        mine, stream = torch.cuda.Event(), torch.cuda.current_stream(self._device)
        mine.record(stream)
        events[rank] = mine
        self._barrier.wait(self.timeout_s)
        for event in events:
            assert event is not None
            stream.wait_event(event)


@dataclass
class _World:
    """State that the threads of all ranks share."""

    timeout_s: float
    lanes: tuple[_Rendezvous, _Rendezvous]
    mailboxes: dict[tuple[int, int, int], queue.SimpleQueue[Tensor]] = field(default_factory=dict)
    """Messages by sender, receiver and tag."""


class LoopbackTransport(Transport):
    """Sends tensors between threads. ``LoopbackTransport.world(n)`` makes the transports of all ranks."""

    def __init__(self, rank: int, size: int, world: _World) -> None:
        super().__init__()
        self.rank, self.world_size, self._world = rank, size, world

    @staticmethod
    def world(size: int, timeout_s: float = 30.0) -> list[LoopbackTransport]:
        world = _World(timeout_s, (_Rendezvous(size, timeout_s), _Rendezvous(size, timeout_s)))
        return [LoopbackTransport(rank, size, world) for rank in range(size)]

    def _mailbox(self, source: int, target: int, tag: int) -> queue.SimpleQueue[Tensor]:
        return self._world.mailboxes.setdefault((source, target, tag), queue.SimpleQueue())

    def _send(self, message: Tensor, peer: int, tag: int) -> Pending:
        self._mailbox(self.rank, peer, tag).put(message.clone())
        return Awaited()

    def _receive(self, message: Tensor, peer: int, tag: int) -> Pending:
        return Awaited(partial(self._take, message, self._mailbox(peer, self.rank, tag), peer))

    def _take(self, into: Tensor, mailbox: queue.SimpleQueue[Tensor], peer: int) -> None:
        try:
            message = mailbox.get(timeout=self._world.timeout_s)
        except queue.Empty:
            text = f"nothing came from rank {peer} within {self._world.timeout_s:g} s"
            raise TransportError(text, rank=peer) from None
        if message.shape != into.shape:
            text = f"rank {peer} sent {message.numel()} bytes, expected {into.numel()}"
            raise TransportError(text, rank=peer)
        into.copy_(message)

    def _start_all_reduce(self, x: Tensor, lane: int, op: Reduction) -> Pending:
        # All ranks wait for the sums of a lane in the same order.
        def wait() -> None:
            gathered = self._gather(x, lane)
            x.copy_(gathered.amax(0) if op == "max" else gathered.sum(0))

        return Awaited(wait)

    def broadcast(self, x: Tensor) -> None:
        x.copy_(self.all_gather(x)[0])

    def all_gather(self, x: Tensor) -> Tensor:
        return self._gather(x, 0)

    def _gather(self, x: Tensor, lane: int) -> Tensor:
        stacked: list[Tensor] = []
        self._world.lanes[lane].share(self.rank, x, lambda given: stacked.append(torch.stack(given)))
        return stacked[0]


class DeviceLoopbackTransport(DeviceTransport):
    """Sends tensors between threads on one device, each of which has a stream of its own."""

    def __init__(self, inner: Transport, device: torch.device, meeting: _Rendezvous) -> None:
        super().__init__(inner, device)
        self._meeting = meeting

    @staticmethod
    def world(hosts: Sequence[Transport], device: torch.device, timeout_s: float = 30.0) -> list[DeviceTransport]:
        """Return a transport for each of ``hosts``, which are the transports of the ranks' threads on the host."""
        meeting = _Rendezvous(len(hosts), timeout_s, device)
        return [DeviceLoopbackTransport(host, device, meeting) for host in hosts]

    def _all_to_all(self, out: Tensor, x: Tensor, received: list[int], sent: list[int]) -> None:
        def take(given: list[tuple[Tensor, list[int]]]) -> None:
            for into, (theirs, splits) in zip(out.split(received), given, strict=True):
                into.copy_(theirs.split(splits)[self.rank])

        self._meeting.share(self.rank, (x, sent), take)

    def _all_gather_into(self, out: Tensor, x: Tensor) -> None:
        def take(given: list[Tensor]) -> None:
            for into, theirs in zip(out.view(self.world_size, -1), given, strict=True):
                if into.data_ptr() != theirs.data_ptr():
                    into.copy_(theirs.reshape(-1))

        self._meeting.share(self.rank, x, take)

    def _start_all_reduce(self, x: Tensor, lane: int, op: Reduction) -> Pending:
        stacked: list[Tensor] = []
        self._meeting.share(self.rank, x, lambda given: stacked.append(torch.stack(given)))
        x.copy_(stacked[0].sum(0, dtype=x.dtype) if op == "sum" else stacked[0].amax(0))
        return Awaited()

    def broadcast(self, x: Tensor) -> None:
        firsts: list[Tensor] = []
        self._meeting.share(self.rank, x, lambda given: firsts.append(given[0].clone()))
        x.copy_(firsts[0])
