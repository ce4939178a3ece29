"""Reduce-scatter and all-gather of sharded buffers on a device: enqueued on the current stream, no host waits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.collectives.device import DeviceBuffers, _merged
from thinwire.collectives.device_transport import DeviceTransport
from thinwire.collectives.keys import OWNER, WORKER, stage_key
from thinwire.collectives.layout import Group, Layout
from thinwire.collectives.stages import Clock, NoClock
from thinwire.compressors import State


@dataclass(frozen=True)
class ShardBuffers:
    """The messages of one direction of a `sharded_layout` on one rank's device, allocated once."""

    of: DeviceBuffers
    local: tuple[Group, ...]
    """My own pieces, as seen from where my part begins, with their places in one of ``of.parts``."""
    part_numel: int

    @staticmethod
    def open(layout: Layout, rank: int, device: torch.device, *, up: bool) -> ShardBuffers:
        """``up``: for a reduce-scatter, else for an all-gather. Raises ``ValueError`` if the topology is no star."""
        mine = [chunk for chunk in layout.local if chunk.owner == rank]
        buffers = DeviceBuffers.of(layout, rank, device, up=up, down=not up)
        return ShardBuffers(buffers, _merged([(mine, 0)]), layout.part_numel)


def device_reduce_scatter(
    x: Tensor,
    out: Tensor,
    transport: DeviceTransport,
    buffers: ShardBuffers,
    *,
    seed: int,
    draw: int,
    scale: float,
    state: State | None = None,
    clock: Clock | None = None,
) -> None:
    """Set ``out`` to this rank's part of ``scale`` times the sum of all ranks' ``x``, as `reduce_scatter` does."""
    clock, of, rank, num_ranks = clock or NoClock(), buffers.of, transport.rank, transport.world_size
    own = of.sizes[rank]
    with clock.stage("encode"):
        key = stage_key(seed, draw, WORKER, rank)
        for compressor, segments in of.others:
            compressor.encode(x, segments, of.sent, key=key, state=state)
    with clock.stage("wire"):
        received = [0 if peer == rank else own for peer in range(num_ranks)]
        sent = [0 if peer == rank else size for peer, size in enumerate(of.sizes)]
        transport.all_to_all(of.received, of.sent, received, sent)
    with clock.stage("reduce"):
        mine = x[rank * buffers.part_numel :]
        for compressor, segments in buffers.local:
            compressor.add_up(of.parts, mine, segments, out, scale=scale)


def device_all_gather(
    x: Tensor,
    transport: DeviceTransport,
    buffers: ShardBuffers,
    *,
    seed: int,
    draw: int,
    state: State | None = None,
    clock: Clock | None = None,
) -> None:
    """Fill ``x``, which holds this rank's part, with all ranks' parts as they decode, as `all_gather` does."""
    clock, of, rank, num_ranks = clock or NoClock(), buffers.of, transport.rank, transport.world_size
    own, mean = of.sizes[rank], of.mean
    with clock.stage("encode"):
        key = stage_key(seed, draw, OWNER, rank)
        for compressor, segments in of.mine:
            compressor.encode(x, segments, mean, key=key, state=state)
            compressor.decode(mean, segments, x)
    with clock.stage("wire"):
        if of.padded:
            transport.all_gather_into(of.means, of.means.view(num_ranks, -1)[rank])
        else:
            of.spread.view(num_ranks, own).copy_(mean)
            transport.all_to_all(of.means, of.spread, list(of.sizes), [own] * num_ranks)
    with clock.stage("decode"):
        for compressor, segments in of.theirs:
            compressor.decode(of.means, segments, x)
