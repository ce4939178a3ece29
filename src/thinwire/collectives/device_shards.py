"""Reduce-scatter and all-gather of sharded buffers on a device, enqueued on the current stream without host waits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.collectives.device import DeviceBuffers, _merged
from thinwire.collectives.device_transport import DeviceTransport
from thinwire.collectives.layout import Group, Layout
from thinwire.collectives.stages import OWNER, WORKER, CollectiveCall
from thinwire.compressors import CodecCall


@dataclass(frozen=True)
class ShardBuffers:
    """The messages of one direction of a `sharded_layout` on one rank's device, allocated once."""

    messages: DeviceBuffers
    local: tuple[Group, ...]
    """The pieces that this rank owns, with offsets from the start of its part, and their places in each of
    ``messages.parts``."""
    part_numel: int

    @staticmethod
    def open(layout: Layout, rank: int, device: torch.device, *, up: bool) -> ShardBuffers:
        """Allocate buffers for a reduce-scatter (``up``) or an all-gather.

        Raises:
            ValueError: The collective algorithm does not send directly to owners.
        """
        mine = [chunk for chunk in layout.local if chunk.owner == rank]
        buffers = DeviceBuffers.allocate(layout, rank, device, up=up, down=not up)
        return ShardBuffers(buffers, _merged([(mine, 0)]), layout.part_numel)


def device_reduce_scatter(
    x: Tensor, out: Tensor, transport: DeviceTransport, buffers: ShardBuffers, call: CollectiveCall
) -> None:
    """Set ``out`` to this rank's part of the sum of all ranks' ``x`` times ``call.scale``, as `reduce_scatter` does."""
    clock, messages, rank, num_ranks = call.clock, buffers.messages, transport.rank, transport.world_size
    own = messages.sizes[rank]
    with clock.stage("encode"):
        key = call.key(WORKER, rank)
        for compressor, segments in messages.others:
            compressor.encode(x, messages.sent, CodecCall(segments, key, state=call.state))
    with clock.stage("wire"):
        received = [0 if peer == rank else own for peer in range(num_ranks)]
        sent = [0 if peer == rank else size for peer, size in enumerate(messages.sizes)]
        transport.all_to_all(messages.received, messages.sent, received, sent)
    with clock.stage("reduce"):
        mine = x[rank * buffers.part_numel :]
        for compressor, segments in buffers.local:
            compressor.add_up(messages.parts, mine, out, CodecCall(segments, scale=call.factor(num_ranks)))


def device_all_gather(x: Tensor, transport: DeviceTransport, buffers: ShardBuffers, call: CollectiveCall) -> None:
    """Fill ``x``, which holds this rank's part, with all ranks' parts decoded, as `all_gather` does."""
    clock, messages, rank, num_ranks = call.clock, buffers.messages, transport.rank, transport.world_size
    own, mean = messages.sizes[rank], messages.mean
    with clock.stage("encode"):
        key = call.key(OWNER, rank)
        for compressor, segments in messages.mine:
            compressor.encode(x, mean, CodecCall(segments, key, state=call.state))
            compressor.decode(mean, x, CodecCall(segments))
    with clock.stage("wire"):
        if messages.padded:
            transport.all_gather_into(messages.means, messages.means.view(num_ranks, -1)[rank])
        else:
            messages.spread.view(num_ranks, own).copy_(mean)
            transport.all_to_all(messages.means, messages.spread, list(messages.sizes), [own] * num_ranks)
    with clock.stage("decode"):
        for compressor, segments in messages.theirs:
            compressor.decode(messages.means, x, CodecCall(segments))
