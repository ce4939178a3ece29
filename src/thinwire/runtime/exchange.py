"""The interface of a collective on a flat buffer that goes through a `Channel`, and the messages that it goes in."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Hashable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from thinwire.collectives import (
    Buffers,
    CollectiveCall,
    DeviceBuffers,
    DeviceTransport,
    Layer,
    Layout,
    Shard,
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
from thinwire.compressors import Clipping, Coded, Compressor, Count, Saturating, Segments, State, find_mixin

Kind = Literal["all_reduce", "reduce_scatter", "all_gather"]
Key = tuple[Kind, Hashable, torch.dtype]


class Contents(NamedTuple):
    """The layers in a buffer that is all-reduced (``layers``), or in each rank's part of a sharded one (``shards``)."""

    key: Hashable
    """Key that distinguishes these contents from others."""
    layers: tuple[Layer, ...]
    shards: tuple[tuple[Shard, ...], ...] = ()
    """Shards in each rank's part, where parts differ or belong together; ``layers`` is empty then."""
    part_numel: int = 0
    """Number of elements of each part, where there are shards."""

    @property
    def numel(self) -> int:
        return self.part_numel or sum(layer.numel for layer in self.layers)

    @property
    def names(self) -> str:
        if self.shards:
            return ", ".join(dict.fromkeys(shard.name for part in self.shards for shard in part))
        return ", ".join(layer.name for layer in self.layers)


NOTHING = Contents((), ())


@dataclass(kw_only=True)
class Exchange(ABC):
    """A collective on a flat buffer: its contents, where they come from, and what becomes of the result.

    Each kind of traffic has a subclass. Methods run in the channel's executor, in the order of submission: `begin`
    and `start` before the messages, `finish` after them.
    """

    kind: Kind
    dtype: torch.dtype
    contents: Contents = NOTHING
    """Contents of the buffer, the same on all ranks; `begin` sets them where they are known only then."""
    scale: float | None = None
    """Factor of the sum; None for the mean."""
    number: int | None = None
    """Number of the exchange in its messages and random draws; None for the channel's own count."""
    draw: int | None = None
    """Number that overrides ``number`` in the key of random draws; equal values repeat the draws."""
    out: Tensor | None = None
    """Flat tensor in which a reduce-scatter leaves this rank's part."""
    kept: dict[int, Tensor] | None = None
    """Last messages of this rank in an all-gather (`thinwire.collectives.all_gather`)."""
    turns: int = 2
    """Number of exchanges of the same contents that may be under way at a time: each has messages of its own."""
    alone: bool = False
    """Whether no other exchange may be under way meanwhile: this one calls native collectives, which have one order."""
    failed: Exception | None = None
    """Error that this rank has met already: the other ranks, which wait for its messages, are told of it instead."""

    @property
    def key(self) -> Key:
        """Key of the route: exchanges with equal keys use the same one."""
        return self.kind, self.contents.key, self.dtype

    def begin(self) -> None:  # noqa: B027 - most have nothing to do
        """Prepare the exchange, in turn, even while earlier exchanges are under way."""

    @abstractmethod
    def start(self, route: Route) -> tuple[Tensor, State | None]:
        """Return the flat buffer and the slots of its compressors. The buffer of an all-gather holds this rank's part
        in its place."""

    def finish(self, x: Tensor, route: Route) -> None:  # noqa: B027 - most have nothing to do
        """Use the buffer ``x``, which holds the result now."""

    def fail(self) -> None:  # noqa: B027 - most have nothing to do
        """Note, in place of `finish`, that something but the link has failed: the other ranks know of it, or will."""

    @property
    def held_bytes(self) -> int:
        """Bytes of memory that are in use from `start` to `finish` alone; see `Job.held_bytes`."""
        return 0

    @property
    def result(self) -> Tensor:
        """Result of the exchange's future."""
        return torch.empty(0, dtype=torch.float32, device="cpu")


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
        for compressor, segments, message in self.encoded(rank) if self._saturating else ():
            if (saturating := self._saturating.get(compressor)) is not None:
                more, over = saturating.limits(message, segments)
                saturated, overflowed = saturated + more, overflowed + over
        return saturated, overflowed

    @cached_property
    def _saturating(self) -> dict[Compressor, Saturating]:
        groups = (group for chunk in (*self.layout.chunks, *self.layout.gathered) for group in chunk.groups)
        found = {compressor: find_mixin(compressor, Saturating) for compressor, _ in groups}
        return {compressor: mixin for compressor, mixin in found.items() if mixin is not None}

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
        super().__init__(layout, sent_bytes_in(kind, layout, transport))
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
        sent = self._buffers.sent_bytes if kind == "all_reduce" else sent_bytes_in(kind, layout, transport)
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


def sent_bytes_in(kind: Kind, layout: Layout, transport: Transport) -> int:
    """Return the bytes that a rank hands to the transport for one collective, headers included."""
    if kind == "all_reduce":
        return layout.sent_bytes(transport.rank, transport)
    traffic = layout.reduction_traffic(up=kind != "all_gather", down=kind != "reduce_scatter")
    return sent_bytes(traffic, transport.rank)


def dense_bytes(kind: Kind, num_bytes: int, world_size: int) -> int:
    """Return the bytes that each rank sends by a ring, for a buffer of ``num_bytes`` or one of parts of this size."""
    return ring_bytes(num_bytes, world_size) if kind == "all_reduce" else (world_size - 1) * num_bytes
