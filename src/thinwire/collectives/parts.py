"""Layouts of buffers with one part for each rank, as in reduce-scatter and all-gather of flat buffers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from thinwire.collectives.algorithms import Algorithm, ScatterReduceAllGather, World
from thinwire.collectives.layout import Chunk, Cut, Layer, Layout, owned_chunks
from thinwire.compressors import Coded


class Shard(NamedTuple):
    """The elements of a layer in one rank's part."""

    name: str
    """Name of the layer, on which random draws depend."""
    start: int
    """Its first element in the part."""
    numel: int
    index0: int
    """Index of its first random draw, a multiple of its compressor's grain: no two shards of a layer share draws."""
    compressor: Coded


def part_layout(layers: Sequence[Layer], world_size: int, dtype: torch.dtype) -> Layout:
    """The layout of a flat buffer of ``world_size`` parts, each of which holds ``layers``; rank r owns the r-th.

    The parts are independent of each other, and so are their random draws. Layers with a summed compressor are not
    coded and are left out.
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
    algorithm: Algorithm | None = None,
) -> Layout:
    """The layout of a flat buffer in which rank r owns ``parts[r]``, from element ``r · part_numel`` on.

    It is the layout of `reduce_scatter` and `all_gather`: every value is coded once, and once more for each further hop
    to its owner if ``algorithm`` has several. Elements between shards are not sent.
    """
    chunks: list[Chunk] = []
    local: list[Chunk] = []
    placed: list[Layer] = []
    for owner, shards in enumerate(parts):
        at = owner * part_numel
        placed += [Layer(f"{s.name} from {s.index0}", at + s.start, (s.numel,), s.compressor) for s in shards]
        chunks += owned_chunks([_cut(shard, at) for shard in shards], dtype, owner)
        local += owned_chunks([_cut(shard, 0) for shard in shards], dtype, owner)
    algorithm = algorithm or ScatterReduceAllGather()
    return Layout(tuple(placed), tuple(chunks), (), (), dtype, algorithm, world, part_numel, tuple(local))


def _cut(shard: Shard, at: int) -> Cut:
    # As a piece of a layer that starts index0 elements before its shard.
    layer = Layer(shard.name, at + shard.start - shard.index0, (shard.numel,), shard.compressor)
    return Cut(layer, shard.compressor, shard.index0, shard.numel)
