"""The layout of a buffer and the messages in which it is sent: made once, used in every step."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass

from torch import Tensor

from thinwire.collectives import (
    Buffers,
    CollectiveCall,
    DeviceBuffers,
    DeviceTransport,
    Layout,
    Transport,
    all_gather,
    all_reduce,
    device_all_gather,
    device_all_reduce,
    device_reduce_scatter,
    encoded,
    gather_buffers,
    gather_mean,
    packed_sums,
    reduce_scatter,
    ring_bytes,
    sent_bytes,
    sum_buffers,
    summed_all_reduce,
)
from thinwire.compressors import Clipping, Coded, Count, Saturating, Segments, State, find_mixin
from thinwire.runtime.exchange import Exchange, Kind


@dataclass
class Route:
    """The layout of a buffer and the messages in which it is sent: made once, used in every step."""

    layout: Layout
    sent_bytes: int
    """Bytes that this rank hands to the transport each time, at most."""

    @property
    def num_bytes(self) -> int:
        """Bytes of memory that messages take."""
        return 0

    def collectives(
        self, x: Tensor, transport: Transport, call: CollectiveCall, exchange: Exchange
    ) -> list[Generator[None]]:
        """Return the collectives of this buffer; each yields once, when its first messages are on their way."""
        raise NotImplementedError("a simulated buffer is not sent")

    def encoded(self, rank: int) -> Iterator[tuple[Coded, Segments, Tensor]]:
        """Return the messages that this rank encoded last, by compressor."""
        return iter(())

    def limits(self, rank: int) -> tuple[Count, Count]:
        """Return how many values saturated in this rank's last messages, and how many found no room in them."""
        saturated: Count = 0
        overflowed: Count = 0
        for compressor, segments, message in self.encoded(rank):
            if (saturating := find_mixin(compressor, Saturating)) is not None:
                more, over = saturating.limits(message, segments)
                saturated, overflowed = saturated + more, overflowed + over
        return saturated, overflowed

    def clipped(self, state: State | None) -> tuple[Count, int]:
        """Return how many values this rank clipped to fit into integers in the last step, of how many made integers."""
        clipped: Count = 0
        rounded = 0
        for s in self.layout.sums:
            for compressor, parts in s.members:
                clipping = find_mixin(compressor, Clipping)
                if clipping is not None and s.round == 0:
                    clipped += clipping.clipped(parts.parts, state)
                    rounded += sum(part.piece.numel for part in parts)
        return clipped, rounded


class HostRoute(Route):
    """Messages in the host's memory: between process groups of gloo, and in shared memory."""

    def __init__(self, kind: Kind, layout: Layout, transport: Transport) -> None:
        super().__init__(layout, sent_bytes_of(kind, layout, transport))
        traffic = layout.reduction_traffic(up=kind != "all_gather", down=kind != "reduce_scatter")
        self._kind: Kind = kind
        # Layers that are cut among owners, layers that every rank gathers, and layers that are summed.
        self._reduction: Buffers | None = transport.open(traffic) if layout.chunks else None
        self._gathering: Buffers | None = gather_buffers(layout, transport) if layout.gathered else None
        self._sums = sum_buffers(layout)
        self._packed = packed_sums(layout, transport)

    @property
    def num_bytes(self) -> int:
        held = sum(buffers.num_bytes for buffers in (self._reduction, self._gathering) if buffers is not None)
        held += sum(s.num_bytes for s in self._packed.values())
        return held + sum(buffer.numel() * buffer.element_size() for buffer in self._sums)

    def collectives(
        self, x: Tensor, transport: Transport, call: CollectiveCall, exchange: Exchange
    ) -> list[Generator[None]]:
        started = []
        if self._kind == "all_gather":
            if self._reduction is not None:
                started.append(all_gather(x, self.layout, transport, self._reduction, call, kept=exchange.kept))
            return started
        if self._kind == "reduce_scatter":
            if self._reduction is not None:
                started.append(reduce_scatter(x, self.layout, transport, self._reduction, call, out=exchange.out))
            return started
        if self._reduction is not None:
            started.append(all_reduce(x, self.layout, transport, self._reduction, call))
        if self._gathering is not None:
            started.append(gather_mean(x, self.layout, transport, self._gathering, call))
        if self._sums:
            started.append(summed_all_reduce(x, self.layout, transport, self._sums, call, self._packed))
        return started

    def encoded(self, rank: int) -> Iterator[tuple[Coded, Segments, Tensor]]:
        messages = []
        if self._reduction is not None:
            messages += [(chunk, self._reduction.outbox[phase]) for chunk, phase in encoded(self.layout, rank)]
        if self._gathering is not None:
            work, outbox = self._gathering.work, self._gathering.outbox
            messages += [(chunk, work[rank] if work else outbox[k]) for k, chunk in enumerate(self.layout.gathered)]
        for chunk, message in messages:
            for compressor, segments in chunk.groups:
                yield compressor, segments, message


class DeviceRoute(Route):
    """Messages in a device's memory: a collective is only enqueued there, and has ended as far as the host knows."""

    def __init__(self, kind: Kind, layout: Layout, transport: DeviceTransport) -> None:
        up, down = kind != "all_gather", kind != "reduce_scatter"
        self._buffers = DeviceBuffers.allocate(layout, transport.rank, transport.device, up=up, down=down)
        self._kind: Kind = kind
        sent = self._buffers.sent_bytes if kind == "all_reduce" else sent_bytes_of(kind, layout, transport)
        super().__init__(layout, sent)

    @property
    def num_bytes(self) -> int:
        return self._buffers.num_bytes

    def collectives(
        self, x: Tensor, transport: Transport, call: CollectiveCall, exchange: Exchange
    ) -> list[Generator[None]]:
        return [self._enqueue(x, transport, call, exchange.out)]

    def _enqueue(self, x: Tensor, transport: Transport, call: CollectiveCall, out: Tensor | None) -> Generator[None]:
        assert isinstance(transport, DeviceTransport)
        if self._kind == "all_reduce":
            device_all_reduce(x, self.layout, transport, self._buffers, call)
        elif out is not None:
            device_reduce_scatter(x, out, transport, self._buffers, call)
        else:
            device_all_gather(x, transport, self._buffers, call)
        yield

    def encoded(self, rank: int) -> Iterator[tuple[Coded, Segments, Tensor]]:
        if self._kind == "all_reduce":
            for (compressor, segments), message in self._buffers.encoded():
                yield compressor, segments, message


def sent_bytes_of(kind: Kind, layout: Layout, transport: Transport) -> int:
    """Return the bytes that a rank hands to the transport for one collective, headers included."""
    if kind == "all_reduce":
        return layout.sent_bytes(transport.rank, transport)
    traffic = layout.reduction_traffic(up=kind != "all_gather", down=kind != "reduce_scatter")
    return sent_bytes(traffic, transport.rank)


def dense_bytes(kind: Kind, num_bytes: int, world_size: int) -> int:
    """Return the bytes that each rank sends by a ring, for a buffer of ``num_bytes`` or one of parts of this size."""
    return ring_bytes(num_bytes, world_size) if kind == "all_reduce" else (world_size - 1) * num_bytes
