"""Collectives on a device: kernels and native collectives that are enqueued on a stream without host waits.

They send the payloads of `all_reduce`, `gather_mean`, `summed_all_reduce`, `reduce_scatter` and `all_gather`, and end
with the same bytes. All messages of one kind share a tensor: one kernel launch encodes for all owners, one collective
sends, and one launch decodes the means of all owners. There is room for headers, but none are written, because the host
would have to wait to read them. Where ranks do not send to owners directly, messages travel in `Rounds` instead.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from thinwire.collectives.device_transport import DeviceTransport
from thinwire.collectives.layout import Chunk, Group, Layout
from thinwire.collectives.message import OWNER, WORKER, CollectiveCall, complete
from thinwire.collectives.reduction import all_gather, all_reduce, encoded, is_unchanged, reduce_scatter
from thinwire.collectives.rounds import Rounds
from thinwire.collectives.summed import PackedSum, sum_buffers, summed_all_reduce
from thinwire.collectives.transport import Transport, ring_bytes
from thinwire.compressors import CodecCall, Coded, Piece, Segments

_WASTE = 1.25
"""Largest ratio of bytes for which means are padded to the largest and sent by an all-gather, rather than by an
all-to-all."""


@dataclass(frozen=True)
class DeviceBuffers:
    """The messages of one bucket on one rank's device, allocated once, and the groups of pieces in them."""

    others: tuple[Group, ...]
    """Pieces of all other owners, with their places in ``sent``."""
    mine: tuple[Group, ...]
    """Pieces that this rank owns, with their places in ``mean``, and in each of ``parts`` unless those differ."""
    widened: tuple[Group, ...]
    """Pieces that this rank owns, with their places in each of ``parts``, where these have fewer bits than means; empty
    if there are none."""
    theirs: tuple[Group, ...]
    """Pieces of all other owners, with their places in ``means``."""
    sent: Tensor
    received: Tensor
    means: Tensor
    """Means of all owners, this rank included."""
    spread: Tensor
    """Copies of this rank's mean, one for each rank; empty if means are padded."""
    sizes: list[int]
    """Bytes of each owner's chunks."""
    part_sizes: list[int]
    """Bytes of a contribution to each owner's chunks."""
    padded: bool
    """Whether means are padded to the size of the largest and sent by an all-gather."""
    rank: int
    gathered: tuple[Group, ...]
    work: Tensor
    """Gathered layers of every rank, (ranks, bytes)."""
    sums: tuple[Tensor, ...]
    sent_bytes: int
    """Number of bytes that this rank hands to the transport."""
    packed: Mapping[int, PackedSum]
    """Sums, by number, that are sent in messages of few bits."""
    local: tuple[Group, ...]
    """Pieces that this rank owns in a `sharded_layout`, with offsets from the start of its part, and their places in
    each of ``parts``."""
    part_numel: int
    rounds: Rounds | None
    """Messages of an algorithm whose ranks do not send to owners directly; the other messages are of no size then."""

    @staticmethod
    def allocate(
        layout: Layout, rank: int, device: torch.device, *, up: bool = True, down: bool = True
    ) -> DeviceBuffers:
        """Allocate the buffers of ``rank``.

        Args:
            layout: the bucket's layout.
            rank: this rank.
            device: the device of the buffers.
            up: whether contributions are sent to owners.
            down: whether means are sent from owners.

        Raises:
            ValueError: partial sums might overflow.
        """
        num_ranks = layout.world_size
        rounds, direct = None, layout.chunks
        if not layout.algorithm.is_star and direct and num_ranks > 1:
            rounds, direct = Rounds(layout, rank, device, up=up, down=down), ()
        numbers = [[k for k, chunk in enumerate(direct) if chunk.owner == peer] for peer in range(num_ranks)]
        owned = [[layout.chunks[k] for k in of] for of in numbers]
        # Contributions are those of other ranks, which are all alike.
        given = owned
        if num_ranks > 1:
            given = [
                [layout.sent_chunk(k, (peer + 1) % num_ranks, peer) for k in of] for peer, of in enumerate(numbers)
            ]
        sizes, part_sizes = ([sum(chunk.message_bytes for chunk in of) for of in each] for each in (owned, given))
        padded = num_ranks * max(sizes) <= _WASTE * sum(sizes)
        rooms = [max(sizes)] * num_ranks if padded else sizes
        without_mine = [0 if peer == rank else size for peer, size in enumerate(part_sizes)]
        others = [(given[peer], at) for peer, at in enumerate(_starts(without_mine)) if peer != rank]
        theirs = [(owned[peer], at) for peer, at in enumerate(_starts(rooms)) if peer != rank]
        width = sum(chunk.message_bytes for chunk in layout.gathered)
        packed, sent_bytes = dict[int, PackedSum](), up * sum(without_mine) + (num_ranks - 1) * width
        sent_bytes += 0 if rounds is None else rounds.sent_bytes
        for number, s in enumerate(layout.sums):
            if s.packed is None:
                sent_bytes += ring_bytes(s.numel * s.dtype.itemsize, num_ranks)
            else:
                of = layout.packed_layout(s)
                buffers = DeviceBuffers.allocate(of, rank, device)
                packed[number] = PackedSum(s, buffers.num_bytes, partial(_reduce_packed, of, buffers), device)
                sent_bytes += buffers.sent_bytes

        def room(num_bytes: int) -> Tensor:
            return torch.zeros(num_bytes, dtype=torch.uint8, device=device)

        return DeviceBuffers(
            others=_merged(others),
            mine=_merged([(owned[rank], 0)]),
            widened=_merged([(given[rank], 0)]) if given != owned else (),
            theirs=_merged(theirs),
            sent=room(up * sum(without_mine)),
            received=room(up * (num_ranks - 1) * part_sizes[rank]),
            means=room(down * sum(rooms)),
            spread=room(0 if padded else down * num_ranks * sizes[rank]),
            sizes=sizes,
            part_sizes=part_sizes,
            padded=padded,
            rank=rank,
            gathered=_merged([(layout.gathered, 0)]),
            work=room(num_ranks * width).view(num_ranks, width),
            sums=sum_buffers(layout, device),
            sent_bytes=sent_bytes + down * (num_ranks - 1) * rooms[rank],
            packed=packed,
            local=_merged([([chunk for chunk in layout.local if chunk.owner == rank], 0)]),
            part_numel=layout.part_numel,
            rounds=rounds,
        )

    @property
    def num_bytes(self) -> int:
        """Memory in use, in bytes."""
        tensors = (self.sent, self.received, self.means, self.spread, self.work, *self.sums)
        others = (*self.packed.values(), *([self.rounds] if self.rounds is not None else []))
        return sum(tensor.nbytes for tensor in tensors) + sum(other.num_bytes for other in others)

    @property
    def parts(self) -> list[Tensor]:
        """Contributions of the other ranks to the pieces that this rank owns, in the order of ranks."""
        own = self.part_sizes[self.rank]
        return list(self.received.split(own)) if own and self.received.numel() else []

    @property
    def mean(self) -> Tensor:
        """This rank's part of ``means``."""
        at = self.rank * max(self.sizes) if self.padded else sum(self.sizes[: self.rank])
        return self.means[at : at + self.sizes[self.rank]]

    def encoded(self, layout: Layout) -> Iterator[tuple[Group, Tensor]]:
        """Yield the groups of ``layout`` that this rank has encoded, each with its message."""
        if self.rounds is not None:
            for chunk, phase in encoded(layout, self.rank):
                yield from ((group, self.rounds.outbox[phase]) for group in chunk.groups)
        for groups, message in ((self.others, self.sent), (self.mine, self.mean)):
            yield from ((group, message) for group in groups)
        yield from ((group, self.work[self.rank]) for group in self.gathered)


def device_all_reduce(
    x: Tensor, layout: Layout, transport: DeviceTransport, buffers: DeviceBuffers, call: CollectiveCall
) -> None:
    """Replace the flat tensor ``x`` by its sum over all ranks times ``call.scale``, by default by its mean, on the
    current stream.

    Raises:
        TransportError: a collective could not be started.
    """
    summed = summed_all_reduce(x, layout, transport, buffers.sums, call, buffers.packed)
    next(summed)  # their first round runs while the other layers are encoded
    if buffers.rounds is not None:
        complete(all_reduce(x, layout, transport, buffers.rounds, call))
    elif layout.chunks:
        _reduce_owned(x, transport, buffers, call)
    if layout.gathered:
        _gather_rest(x, transport, buffers, call)
    complete(summed)


def device_reduce_scatter(
    x: Tensor, out: Tensor, layout: Layout, transport: DeviceTransport, buffers: DeviceBuffers, call: CollectiveCall
) -> None:
    """Set ``out`` to this rank's part of the sum of all ranks' ``x`` times ``call.scale``, as `reduce_scatter` does."""
    if buffers.rounds is not None:
        complete(reduce_scatter(x, layout, transport, buffers.rounds, call, out=out))
        return
    _send_to_owners(x, transport, buffers, call)
    with call.clock.stage("reduce"):
        mine = x[transport.rank * buffers.part_numel :]
        scale = call.factor(transport.world_size)
        for compressor, segments in buffers.local:
            compressor.add_up(buffers.parts, mine, out, CodecCall(segments, scale=scale))


def device_all_gather(
    x: Tensor,
    layout: Layout,
    transport: DeviceTransport,
    buffers: DeviceBuffers,
    call: CollectiveCall,
    *,
    kept: dict[int, Tensor] | None = None,
) -> None:
    """Fill ``x``, in which this rank's part is set, with all ranks' parts decoded, as `all_gather` does."""
    if buffers.rounds is not None:
        complete(all_gather(x, layout, transport, buffers.rounds, call, kept=kept))
        return
    rank, mean = transport.rank, buffers.mean
    with call.clock.stage("encode"):
        for compressor, segments in buffers.mine:
            compressor.encode(x, mean, CodecCall(segments, call.key(OWNER, rank), state=call.state))
        if kept is not None:
            owned = [(k, chunk) for k, chunk in enumerate(layout.chunks) if chunk.owner == rank]
            messages = mean.split([chunk.message_bytes for _, chunk in owned])
            for (k, chunk), message in zip(owned, messages, strict=True):
                if k in kept:
                    message.copy_(torch.where(is_unchanged(x, chunk, kept[k]), kept[k], message))
                kept[k] = message.clone()
        for compressor, segments in buffers.mine:
            compressor.decode(mean, x, CodecCall(segments))
    _send_means(x, transport, buffers, call)


def _reduce_owned(x: Tensor, transport: DeviceTransport, buffers: DeviceBuffers, call: CollectiveCall) -> None:
    _send_to_owners(x, transport, buffers, call)
    with call.clock.stage("reduce"):
        key, received, mean = call.key(OWNER, transport.rank), buffers.parts, buffers.mean
        scale = call.factor(transport.world_size)
        for compressor, segments in buffers.widened:
            compressor.add_up(received, x, x, CodecCall(segments))
        received = [] if buffers.widened else received
        for compressor, segments in buffers.mine:
            compressor.reduce(received, x, mean, x, CodecCall(segments, key, state=call.state, scale=scale))
    _send_means(x, transport, buffers, call)


def _send_to_owners(x: Tensor, transport: DeviceTransport, buffers: DeviceBuffers, call: CollectiveCall) -> None:
    """Send every other owner its pieces of ``x``, and receive ``buffers.parts``."""
    rank, sizes = transport.rank, buffers.part_sizes
    with call.clock.stage("encode"):
        key = call.key(WORKER, rank)
        for compressor, segments in buffers.others:
            compressor.encode(x, buffers.sent, CodecCall(segments, key, state=call.state))
    with call.clock.stage("wire"):
        received = [0 if peer == rank else sizes[rank] for peer in range(len(sizes))]
        sent = [0 if peer == rank else size for peer, size in enumerate(sizes)]
        transport.all_to_all(buffers.received, buffers.sent, received, sent)


def _send_means(x: Tensor, transport: DeviceTransport, buffers: DeviceBuffers, call: CollectiveCall) -> None:
    """Send ``buffers.mean`` to all ranks, and decode into ``x`` what other owners sent."""
    rank, num_ranks, sizes = transport.rank, transport.world_size, buffers.sizes
    with call.clock.stage("wire"):
        if buffers.padded:
            transport.all_gather_into(buffers.means, buffers.means.view(num_ranks, -1)[rank])
        else:
            buffers.spread.view(num_ranks, sizes[rank]).copy_(buffers.mean)
            transport.all_to_all(buffers.means, buffers.spread, sizes, [sizes[rank]] * num_ranks)
    with call.clock.stage("decode"):
        for compressor, segments in buffers.theirs:
            compressor.decode(buffers.means, x, CodecCall(segments))


def _reduce_packed(
    layout: Layout, buffers: DeviceBuffers, x: Tensor, transport: Transport, call: CollectiveCall
) -> Generator[None]:
    assert isinstance(transport, DeviceTransport)
    yield
    device_all_reduce(x, layout, transport, buffers, call)


def _gather_rest(x: Tensor, transport: DeviceTransport, buffers: DeviceBuffers, call: CollectiveCall) -> None:
    rank, work, clock = transport.rank, buffers.work, call.clock
    with clock.stage("encode"):
        key = call.key(WORKER, rank)
        for compressor, segments in buffers.gathered:
            compressor.encode(x, work[rank], CodecCall(segments, key, state=call.state))
    with clock.stage("wire"):
        transport.all_gather_into(work, work[rank])
    with clock.stage("decode"):
        for compressor, segments in buffers.gathered:
            compressor.mean(list(work), x, CodecCall(segments, scale=call.factor(transport.world_size)))


def _starts(sizes: Iterable[int]) -> list[int]:
    return [0, *accumulate(sizes)][:-1]


def _merged(placed: Iterable[tuple[Sequence[Chunk], int]]) -> tuple[Group, ...]:
    """Return one group for each compressor, with all pieces of chunks that lie end to end from byte ``at`` on."""
    pieces: dict[Coded, list[Piece]] = {}
    for chunks, at in placed:
        for chunk in chunks:
            for compressor, segments in chunk.groups:
                moved = [piece._replace(payload=at + piece.payload) for piece in segments.pieces]
                pieces.setdefault(compressor, []).extend(moved)
            at += chunk.message_bytes
    return tuple(Group(compressor, Segments.build(members)) for compressor, members in pieces.items())
