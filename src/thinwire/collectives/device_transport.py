"""Transports between devices: collectives in the order of the current stream, without host waits.

Work that follows a collective on the stream sees its result. Over NCCL these are its own operations. Over gloo, with
CPU tensors, the same calls block, which allows tests without a GPU.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.collectives.errors import TransportError
from thinwire.collectives.transport import OPS, ErrorTranslation, Pending, PendingWork, Transport
from thinwire.compat import all_gather_single
from thinwire.compressors import Reduction


class DeviceTransport(Transport, ABC):
    """Sends tensors on ``device`` between ranks. ``inner`` is the transport for tensors on the host.

    All ranks call the same operations in the same order, from one thread each.
    """

    def __init__(self, inner: Transport, device: torch.device) -> None:
        super().__init__(inner)
        self.device = device

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

    @abstractmethod
    def _all_to_all(self, out: Tensor, x: Tensor, received: list[int], sent: list[int]) -> None: ...

    @abstractmethod
    def _all_gather_into(self, out: Tensor, x: Tensor) -> None: ...

    def _send(self, message: Tensor, peer: int, tag: int) -> Pending:
        raise TypeError("transports between devices have all_to_all and all_gather_into, and no single messages")

    def _receive(self, message: Tensor, peer: int, tag: int) -> Pending:
        return self._send(message, peer, tag)


class DeviceGroupTransport(DeviceTransport):
    """A transport over a process group for tensors of ``device``: NCCL for CUDA; gloo, for tests, on the CPU."""

    def __init__(self, inner: Transport, device: torch.device, group: dist.ProcessGroup, timeout: timedelta) -> None:
        super().__init__(inner, device)
        self.group, self._timeout = group, timeout

    def _all_to_all(self, out: Tensor, x: Tensor, received: list[int], sent: list[int]) -> None:
        self._run("all-to-all", lambda: dist.all_to_all_single(out, x, received, sent, group=self.group))

    def _all_gather_into(self, out: Tensor, x: Tensor) -> None:
        self._run("all-gather", lambda: all_gather_single(out, x, self.group))

    def _start_all_reduce(self, x: Tensor, lane: int, op: Reduction) -> Pending:
        if self.device.type == "cpu":
            # The host's order of additions, so that both ways give the same bits.
            return super()._start_all_reduce(x, lane, op)
        work = self._run("all-reduce", lambda: dist.all_reduce(x, OPS[op], group=self.group, async_op=True))
        if work is None:
            raise TransportError("the all-reduce failed: this process is not in the group")
        return PendingWork(work, "the all-reduce", self._timeout, detector=self.detector)

    def broadcast(self, x: Tensor) -> None:
        self._run("broadcast", lambda: dist.broadcast(x, group=self.group, group_src=0))

    def _run(self, what: str, operation: Callable[[], dist.Work | None]) -> dist.Work | None:
        self._advance()
        with ErrorTranslation(f"the {what}", self._timeout, detector=self.detector):
            return operation()
