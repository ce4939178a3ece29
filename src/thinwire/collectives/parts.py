"""Buffers that have one part for each rank, as reduce-scatter and all-gather of flat buffers have them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from thinwire.collectives.layout import Chunk, Cut, Layer, Layout, owned_chunks
from thinwire.collectives.topology import ScatterReduceAllGather, Topology, World
from thinwire.compressors import Coded


class Shard(NamedTuple):
    """What a rank's part holds of a layer."""

    name: str
    """Of the layer: random draws depend on it."""
    start: int
    """Where it starts in the part, in elements."""
    numel: int
    index0: int
    """Where its draws are counted from, a multiple of its compressor's grain: no two shards of a layer draw alike."""
    compressor: Coded


def part_layout(layers: Sequence[Layer], world_size: int, dtype: torch.dtype) -> Layout:
    """The layout of a flat buffer of ``world_size`` parts, each of which holds ``layers``; rank r owns the r-th.

    Nothing is known of how the parts belong together: each draws by itself. Layers of a summed compressor have no bytes
    of their own, and are left out.
    """
    coded = [(layer, layer.compressor) for layer in layers if isinstance(layer.compressor, Coded)]
    parts = [
        [Shard(f"{layer.name}, part {owner}", layer.start, layer.numel, 0, compressor) for layer, compressor in coded]
        for owner in range(world_size)
    ]
    return sharded_layout(parts, sum(layer.numel for layer in layers), dtype, World(world_size))


def sharded_layout(
    parts: Sequence[Sequence[Shard]],
    part_numel: int,
    dtype: torch.dtype,
    world: World,
    topology: Topology | None = None,
) -> Layout:
    """The layout of a flat buffer in which rank r owns ``parts[r]``, from element ``r · part_numel`` on.

    `reduce_scatter` and `all_gather` move it: every value is coded once, and once more for each further hop of a
    ``topology`` on the way to its owner. What lies between shards does not travel.
    """
    chunks: list[Chunk] = []
    local: list[Chunk] = []
    placed: list[Layer] = []
    for owner, shards in enumerate(parts):
        at = owner * part_numel
        placed += [Layer(f"{s.name} from {s.index0}", at + s.start, (s.numel,), s.compressor) for s in shards]
        chunks += owned_chunks([_cut(shard, at) for shard in shards], dtype, owner)
        local += owned_chunks([_cut(shard, 0) for shard in shards], dtype, owner)
    topology = topology or ScatterReduceAllGather()
    return Layout(tuple(placed), tuple(chunks), (), (), dtype, topology, world, part_numel, tuple(local))


def _cut(shard: Shard, at: int) -> Cut:
    # As of a layer that begins so far before its shard.
    layer = Layer(shard.name, at + shard.start - shard.index0, (shard.numel,), shard.compressor)
    return Cut(layer, shard.compressor, shard.index0, shard.numel)
