"""Transports between devices: collectives in the order of the current stream, without host waits.

Work that follows a collective on the stream sees its result. Over NCCL these are its own operations. Over gloo, with
CPU tensors, the same calls block, which allows tests without a GPU.
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.collectives.errors import TransportError
from thinwire.collectives.transport import _OPS, Failing, Pending, PendingWork, Transport
from thinwire.compat import all_gather_single
from thinwire.compressors import Reduction


class DeviceTransport(Transport):
    """Sends tensors on ``device`` between ranks. ``host`` is the transport for tensors on the host.

    All ranks call the same operations in the same order, from one thread each.
    """

    def __init__(self, host: Transport, device: torch.device) -> None:
        super().__init__()
        self.host, self.device, self.detector = host, device, host.detector
        self.rank, self.world_size = host.rank, host.world_size

    def all_to_all(self, out: Tensor, x: Tensor, received: Sequence[int], sent: Sequence[int]) -> None:
        """Send the next ``sent[r]`` elements of ``x`` to each rank r, and fill ``out`` with ``received[r]`` of each.

        Both are flat uint8 tensors, without gaps and in the order of ranks.
        """
        mine = self.rank
        self._count(sum(sent) - sent[mine], sum(received) - received[mine])
        self._all_to_all(out, x, list(received), list(sent))

    def all_gather_into(self, out: Tensor, x: Tensor) -> None:
        """Fill ``out`` with the ``x`` of all ranks, end to end. ``x`` may be this rank's place in ``out``."""
        moved = (self.world_size - 1) * x.numel() * x.element_size()
        self._count(moved, moved)
        self._all_gather_into(out.view(-1), x.view(-1))

    def close(self) -> None:
        super().close()
        self.host.close()

    @abstractmethod
    def _all_to_all(self, out: Tensor, x: Tensor, received: list[int], sent: list[int]) -> None: ...

    @abstractmethod
    def _all_gather_into(self, out: Tensor, x: Tensor) -> None: ...

    def all_gather(self, x: Tensor) -> Tensor:
        """Return the tensors of all ranks, which are on the host, stacked by rank."""
        return self.host.all_gather(x)

    def _send(self, message: Tensor, peer: int, tag: int) -> Pending:
        raise TypeError("transports between devices have all_to_all and all_gather_into, and no single messages")

    def _receive(self, message: Tensor, peer: int, tag: int) -> Pending:
        return self._send(message, peer, tag)


class DeviceGroupTransport(DeviceTransport):
    """A transport over a process group for tensors of ``device``: NCCL for CUDA; gloo, for tests, on the CPU."""

    def __init__(self, host: Transport, device: torch.device, group: dist.ProcessGroup, timeout: timedelta) -> None:
        super().__init__(host, device)
        self.group = group
        self._timeout = timeout

    def _all_to_all(self, out: Tensor, x: Tensor, received: list[int], sent: list[int]) -> None:
        self._run("all-to-all", lambda: dist.all_to_all_single(out, x, received, sent, group=self.group))

    def _all_gather_into(self, out: Tensor, x: Tensor) -> None:
        self._run("all-gather", lambda: all_gather_single(out, x, self.group))

    def _start_all_reduce(self, x: Tensor, lane: int, op: Reduction) -> Pending:
        if self.device.type == "cpu":
            # The host's order of additions, so that both ways give the same bits.
            return self.host._start_all_reduce(x, lane, op)
        work = self._run("all-reduce", lambda: dist.all_reduce(x, _OPS[op], group=self.group, async_op=True))
        if work is None:
            raise TransportError("the all-reduce failed: this process is not in the group")
        return PendingWork(work, "the all-reduce", self._timeout, detector=self.detector)

    def broadcast(self, x: Tensor) -> None:
        self._run("broadcast", lambda: dist.broadcast(x, group=self.group, group_src=0))

    def _run(self, what: str, operation: Callable[[], dist.Work | None]) -> dist.Work | None:
        if self.detector is not None:
            self.detector.advance()
        with Failing(f"the {what}", self._timeout, detector=self.detector):
            return operation()


class DeviceLoopbackTransport(DeviceTransport):
    """A transport between threads of one process that act as ranks on one device, each on a stream of its own.

    `world` makes the transports of all ranks. On the host the threads wait for each other; on the device streams wait
    for events of other streams.
    """

    def __init__(self, host: Transport, device: torch.device, world: _LoopbackWorld) -> None:
        super().__init__(host, device)
        self._world = world

    @staticmethod
    def world(hosts: Sequence[Transport], device: torch.device, timeout_s: float = 30.0) -> list[DeviceTransport]:
        """Return a transport for each of ``hosts``, which are the transports of the ranks' threads on the host."""
        world = _LoopbackWorld(len(hosts), timeout_s)
        return [DeviceLoopbackTransport(host, device, world) for host in hosts]

    def _all_to_all(self, out: Tensor, x: Tensor, received: list[int], sent: list[int]) -> None:
        def take(given: list[tuple[Tensor, list[int]]]) -> None:
            for into, (theirs, splits) in zip(out.split(received), given, strict=True):
                into.copy_(theirs.split(splits)[self.rank])

        self._share((x, sent), take)

    def _all_gather_into(self, out: Tensor, x: Tensor) -> None:
        def take(given: list[tuple[Tensor, list[int]]]) -> None:
            for into, (theirs, _) in zip(out.view(self.world_size, -1), given, strict=True):
                if into.data_ptr() != theirs.data_ptr():
                    into.copy_(theirs.reshape(-1))

        self._share((x, []), take)

    def _start_all_reduce(self, x: Tensor, lane: int, op: Reduction) -> Pending:
        totals: list[Tensor] = []

        def take(given: list[tuple[Tensor, list[int]]]) -> None:
            theirs = torch.stack([theirs for theirs, _ in given])
            totals.append(theirs.sum(0, dtype=x.dtype) if op == "sum" else theirs.amax(0))

        self._share((x, []), take)
        x.copy_(totals[0])
        return _Nothing()

    def broadcast(self, x: Tensor) -> None:
        firsts: list[Tensor] = []
        self._share((x, []), lambda given: firsts.append(given[0][0].clone()))
        x.copy_(firsts[0])

    def _share(self, mine: tuple[Tensor, list[int]], take: Callable[[list[tuple[Tensor, list[int]]]], None]) -> None:
        """Publish ``mine`` to all ranks and call ``take`` with the values of all ranks, which may be overwritten
        afterwards."""
        world = self._world
        try:
            world.given[self.rank], world.ready[self.rank] = mine, self._mark()
            world.barrier.wait(world.timeout_s)
            self._follow(world.ready)
            take(list(world.given))
            world.taken[self.rank] = self._mark()
            world.barrier.wait(world.timeout_s)
            self._follow(world.taken)
        except threading.BrokenBarrierError:
            raise TransportError(f"a rank did not come to a collective within {world.timeout_s:g} s") from None

    def _mark(self) -> torch.cuda.Event | None:
        """Return an event at the current position of the current stream."""
        if self.device.type != "cuda":
            return None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        return event

    def _follow(self, events: Sequence[torch.cuda.Event | None]) -> None:
        """Make the current stream wait for these events."""
        for event in events:
            if event is not None:
                torch.cuda.current_stream(self.device).wait_event(event)


class _LoopbackWorld:
    def __init__(self, size: int, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.barrier = threading.Barrier(size)
        self.given: list[tuple[Tensor, list[int]]] = [(torch.empty(0, dtype=torch.float32, device="cpu"), [])] * size
        self.ready: list[torch.cuda.Event | None] = [None] * size
        self.taken: list[torch.cuda.Event | None] = [None] * size


class _Nothing:
    """A handle for work that is done or enqueued."""

    def wait(self) -> None:
        return
