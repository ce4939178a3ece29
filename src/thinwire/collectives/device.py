"""The all-reduce of a bucket on a device: a straight line of kernels and collectives, for which no host waits.

It moves the payloads of `all_reduce` along a star, of `gather_mean` and of `summed_all_reduce`, behind headers of the
same size, and ends with the same bytes. What differs is where they lie: all messages of one kind share a tensor, so
that one launch encodes for all owners, one exchange carries it, and one launch decodes what all owners send. Headers
are not written: to look at one, the host would have to wait.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.collectives.device_transport import DeviceTransport
from thinwire.collectives.keys import OWNER, WORKER, stage_key
from thinwire.collectives.layout import Chunk, Group, Layout
from thinwire.collectives.stages import Clock, NoClock, complete
from thinwire.collectives.summed import sum_buffers, summed_all_reduce
from thinwire.collectives.topology import Topology
from thinwire.collectives.transport import ring_bytes
from thinwire.compressors import Coded, Piece, Segments, State

_WASTE = 1.25
"""Means are gathered padded to the largest, unless that sends so many times their bytes."""


@dataclass(frozen=True)
class DeviceBuffers:
    """The messages of one bucket on one rank's device, allocated once, and the groups of pieces that lie in them."""

    others: tuple[Group, ...]
    """All other owners' pieces, with their places in ``sent``."""
    mine: tuple[Group, ...]
    """My own pieces, with their places in one of ``parts`` and in ``mean``."""
    theirs: tuple[Group, ...]
    """All other owners' pieces, with their places in ``means``."""
    sent: Tensor
    received: Tensor
    means: Tensor
    """All owners' means, mine too."""
    spread: Tensor
    """My mean, once for each rank; empty where means are gathered."""
    sizes: tuple[int, ...]
    """Bytes of each owner's messages together."""
    padded: bool
    """Whether means are gathered, each in as much room as the largest takes."""
    rank: int
    gathered: tuple[Group, ...]
    work: Tensor
    """(ranks, bytes): every rank's gathered layers."""
    sums: tuple[Tensor, ...]
    sent_bytes: int
    """Bytes that this rank hands to the transport."""

    @staticmethod
    def of(layout: Layout, rank: int, device: torch.device, *, up: bool = True, down: bool = True) -> DeviceBuffers:
        """``up``, ``down``: whether parts travel to their owners, and their means back.

        Raises ``ValueError`` for a topology that is no star."""
        check_star(layout.topology)
        owned = [[chunk for chunk in layout.chunks if chunk.owner == peer] for peer in range(layout.world_size)]
        sizes = [sum(chunk.message_bytes for chunk in chunks) for chunks in owned]
        own, total, num_ranks = sizes[rank], sum(sizes), len(sizes)
        widest = max(sizes)
        padded = num_ranks * widest <= _WASTE * total
        starts = [peer * widest for peer in range(num_ranks)] if padded else _starts(sizes)
        ends_at = num_ranks * widest if padded else total
        without_mine = [0 if peer == rank else size for peer, size in enumerate(sizes)]
        others = [(owned[peer], at) for peer, at in enumerate(_starts(without_mine)) if peer != rank]
        theirs = [(owned[peer], at) for peer, at in enumerate(starts) if peer != rank]
        width = sum(chunk.message_bytes for chunk in layout.gathered)
        summed = sum(ring_bytes(s.numel * s.dtype.itemsize, num_ranks) for s in layout.sums)
        means_bytes = (num_ranks - 1) * (widest if padded else own)

        def room(num_bytes: int) -> Tensor:
            return torch.zeros(num_bytes, dtype=torch.uint8, device=device)

        return DeviceBuffers(
            others=_merged(others),
            mine=_merged([(owned[rank], 0)]),
            theirs=_merged(theirs),
            sent=room(up * (total - own)),
            received=room(up * (num_ranks - 1) * own),
            means=room(down * ends_at),
            spread=room(0 if padded else down * num_ranks * own),
            sizes=tuple(sizes),
            padded=padded,
            rank=rank,
            gathered=_merged([(layout.gathered, 0)]),
            work=room(num_ranks * width).view(num_ranks, width),
            sums=sum_buffers(layout, device),
            sent_bytes=up * (total - own) + down * means_bytes + (num_ranks - 1) * width + summed,
        )

    @property
    def num_bytes(self) -> int:
        """Memory held."""
        tensors = (self.sent, self.received, self.means, self.spread, self.work, *self.sums)
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    @property
    def parts(self) -> list[Tensor]:
        """What the other ranks sent of my pieces, in the order of ranks."""
        own = self.sizes[self.rank]
        return list(self.received.split(own)) if own and self.received.numel() else []

    @property
    def mean(self) -> Tensor:
        """My place in ``means``."""
        own = self.sizes[self.rank]
        widest = self.means.numel() // len(self.sizes)
        at = self.rank * widest if self.padded else _starts(self.sizes)[self.rank]
        return self.means[at : at + own]

    def encoded(self) -> Iterator[tuple[Group, Tensor]]:
        """What this rank encoded last, and where."""
        for groups, message in ((self.others, self.sent), (self.mine, self.mean)):
            yield from ((group, message) for group in groups)
        yield from ((group, self.work[self.rank]) for group in self.gathered)


def check_star(topology: Topology) -> None:
    """Raise ``ValueError`` unless owners hear from everybody and speak to everybody themselves, or nobody owns."""
    if not topology.is_star and not topology.gathers:
        raise ValueError(
            f"the topology {topology} is for messages over the host: between devices messages meet as sra, "
            "parameter_server or allgather"
        )


def device_all_reduce(
    x: Tensor,
    layout: Layout,
    transport: DeviceTransport,
    buffers: DeviceBuffers,
    *,
    seed: int,
    step: int,
    state: State | None = None,
    clock: Clock | None = None,
) -> None:
    """Replace the flat tensor ``x`` by its mean over all ranks, on the current stream.

    Raises:
        TransportError: a collective could not be started.
    """
    clock = clock or NoClock()
    summed = summed_all_reduce(x, layout, transport, buffers.sums, seed=seed, step=step, state=state, clock=clock)
    next(summed)  # their first round is added while the rest is encoded
    if layout.has_owned:
        _reduce_owned(x, transport, buffers, seed, step, state, clock)
    if layout.has_gathered:
        _gather_rest(x, transport, buffers, seed, step, state, clock)
    complete(summed)


def _reduce_owned(
    x: Tensor,
    transport: DeviceTransport,
    buffers: DeviceBuffers,
    seed: int,
    step: int,
    state: State | None,
    clock: Clock,
) -> None:
    rank, num_ranks = transport.rank, transport.world_size
    sizes, own = list(buffers.sizes), buffers.sizes[rank]
    parts = [0 if peer == rank else own for peer in range(num_ranks)]
    without_mine = [0 if peer == rank else size for peer, size in enumerate(sizes)]
    with clock.stage("encode"):
        key = stage_key(seed, step, WORKER, rank)
        for compressor, segments in buffers.others:
            compressor.encode(x, segments, buffers.sent, key=key, state=state)
    with clock.stage("wire"):
        transport.all_to_all(buffers.received, buffers.sent, parts, without_mine)
    with clock.stage("reduce"):
        key, received, mean = stage_key(seed, step, OWNER, rank), buffers.parts, buffers.mean
        for compressor, segments in buffers.mine:
            compressor.reduce(received, x, segments, mean, x, key=key, scale=1.0 / num_ranks, state=state)
    with clock.stage("wire"):
        if buffers.padded:
            transport.all_gather_into(buffers.means, buffers.means.view(num_ranks, -1)[rank])
        else:
            buffers.spread.view(num_ranks, own).copy_(mean)
            transport.all_to_all(buffers.means, buffers.spread, sizes, [own] * num_ranks)
    with clock.stage("decode"):
        for compressor, segments in buffers.theirs:
            compressor.decode(buffers.means, segments, x)


def _gather_rest(
    x: Tensor,
    transport: DeviceTransport,
    buffers: DeviceBuffers,
    seed: int,
    step: int,
    state: State | None,
    clock: Clock,
) -> None:
    rank, work = transport.rank, buffers.work
    with clock.stage("encode"):
        key = stage_key(seed, step, WORKER, rank)
        for compressor, segments in buffers.gathered:
            compressor.encode(x, segments, work[rank], key=key, state=state)
    with clock.stage("wire"):
        transport.all_gather_into(work, work[rank])
    with clock.stage("decode"):
        for compressor, segments in buffers.gathered:
            compressor.mean(list(work), segments, x, scale=1.0 / transport.world_size)


def _starts(sizes: Iterable[int]) -> list[int]:
    starts, at = [], 0
    for size in sizes:
        starts.append(at)
        at += size
    return starts


def _merged(placed: Iterable[tuple[Sequence[Chunk], int]]) -> tuple[Group, ...]:
    """One group a compressor, of all pieces of chunks that lie end to end from byte ``at`` on."""
    pieces: dict[Coded, list[Piece]] = {}
    for chunks, at in placed:
        for chunk in chunks:
            for compressor, segments in chunk.groups:
                moved = [piece._replace(payload=at + piece.payload) for piece in segments.pieces]
                pieces.setdefault(compressor, []).extend(moved)
            at += chunk.message_bytes
    return tuple(Group(compressor, Segments.build(members)) for compressor, members in pieces.items())
