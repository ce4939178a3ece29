"""Flat buffers on a device: the collectives of a `FlatEngine`, enqueued on the stream of whoever hands them over."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from thinwire.collectives import (
    DeviceBuffers,
    DeviceTransport,
    Layout,
    ShardBuffers,
    Topology,
    TransportError,
    device_all_gather,
    device_all_reduce,
    device_reduce_scatter,
)
from thinwire.wire.agree import agree
from thinwire.wire.device_engine import Ranges
from thinwire.wire.flat import STALE_OPERATIONS, Contents, FlatStats, Kind, Operation, lay_out, sent_bytes_of
from thinwire.wire.link import settle
from thinwire.wire.stream import on_the_host


class DeviceFlatEngine:
    """Takes the place of a `FlatEngine` where buffers lie on the device of a `DeviceTransport`.

    Nothing runs beside the caller: FSDP2 has streams of its own for gathers and reductions, and events between them.
    A collective is over for the host when it is enqueued.
    """

    def __init__(self, transport: DeviceTransport, *, topology: Topology, seed: int, record: Mapping[str, str]) -> None:
        """As of `FlatEngine`."""
        agree(record, transport)
        self.transport: DeviceTransport = transport
        self.topology, self.world = settle(topology, transport)
        self.stats = FlatStats()
        self.seed = seed
        self._buffers: dict[Hashable, tuple[Layout, DeviceBuffers | ShardBuffers]] = {}
        self._last: dict[Hashable, int] = {}
        self._operations = 0
        self._broken: TransportError | None = None

    def submit(self, operation: Operation) -> torch.futures.Future[Tensor]:
        """Enqueue a collective; the future is done. All ranks must submit the same in turn."""
        if self._broken is not None:
            raise TransportError(f"the link broke earlier: {self._broken}")
        # Backward may have been called inside autocast, which would make sums of 16 bits.
        with on_the_host(), torch.autocast(self.transport.device.type, enabled=False):
            try:
                self._run(operation)
            except TransportError as error:
                self._broken = error
                raise
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(torch.empty(0))
        return future

    def _run(self, operation: Operation) -> None:
        kind, x = operation.kind, operation.fill()
        number, self._operations = self._operations, self._operations + 1
        key = (kind, operation.contents.key, operation.dtype)
        device, rank = self.transport.device, self.transport.rank
        if key not in self._buffers:
            # Every rank forgets the same at the same operation.
            for other in [k for k, last in self._last.items() if last < number - STALE_OPERATIONS]:
                del self._buffers[other], self._last[other]
            layout = lay_out(kind, operation.contents, operation.dtype, self.world, self.topology)
            about = f"{kind} of {operation.contents.numel} elements of {operation.dtype}"
            agree({"buffer": about, "cut": f"{layout.digest:016x}"}, self.transport)
            if kind == "all_reduce":
                self._buffers[key] = layout, DeviceBuffers.of(layout, rank, device)
            else:
                self._buffers[key] = layout, ShardBuffers.open(layout, rank, device, up=kind == "reduce_scatter")
        self._last[key] = number
        (layout, buffers), clock = self._buffers[key], Ranges()
        state = operation.state(x) if operation.state is not None else None
        draw = number if operation.draw is None else operation.draw
        if isinstance(buffers, DeviceBuffers):
            device_all_reduce(x, layout, self.transport, buffers, seed=self.seed, step=draw, state=state, clock=clock)
        elif operation.out is not None:
            options = {"seed": self.seed, "draw": draw, "state": state, "clock": clock}
            device_reduce_scatter(x, operation.out, self.transport, buffers, scale=operation.scale, **options)
        else:
            device_all_gather(x, self.transport, buffers, seed=self.seed, draw=draw, state=state, clock=clock)
        if operation.done is not None:
            operation.done(x)

    def agree(self, record: Mapping[str, str]) -> None:
        """As of `FlatEngine`."""
        agree(record, self.transport)

    def alone(self, job: Callable[[], object]) -> None:
        """Run ``job``: nothing is under way on the host."""
        job()

    def sent_bytes(self, kind: Kind, contents: Contents, dtype: torch.dtype) -> int:
        """As of `FlatEngine`."""
        return sent_bytes_of(kind, lay_out(kind, contents, dtype, self.world, self.topology), self.transport)

    def present_stats(self) -> FlatStats:
        """Totals so far."""
        sizes = ((b if isinstance(b, DeviceBuffers) else b.of).num_bytes for _, b in self._buffers.values())
        return replace(
            self.stats,
            payload_sent_bytes=self.transport.sent_bytes,
            payload_received_bytes=self.transport.received_bytes,
            buffer_bytes=sum(sizes),
        )

    def close(self) -> None:
        """Nothing to end."""
