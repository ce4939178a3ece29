"""Buffers that have one part for each rank, as reduce-scatter and all-gather of flat buffers have them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from thinwire.collectives.layout import Chunk, Layer, Layout, owned_chunks
from thinwire.collectives.topology import ScatterReduceAllGather, World


def part_layout(layers: Sequence[Layer], world_size: int, dtype: torch.dtype) -> Layout:
    """The layout of a flat buffer of ``world_size`` parts, each of which holds ``layers``; rank r owns the r-th.

    `reduce_scatter` and `all_gather` move it: every value is coded once. Layers of a summed compressor have no bytes of
    their own, and are left out.
    """
    numel = sum(layer.numel for layer in layers)
    chunks: list[Chunk] = []
    local: list[Chunk] = []
    placed: list[Layer] = []
    for owner in range(world_size):
        # A name for each part: draws depend on it.
        part = [
            layer._replace(name=f"{layer.name}, part {owner}", start=owner * numel + layer.start) for layer in layers
        ]
        placed += part
        chunks += owned_chunks(part, dtype, owner)
        local += owned_chunks(layers, dtype, owner)
    topology, world = ScatterReduceAllGather(), World(world_size)
    return Layout(tuple(placed), tuple(chunks), (), (), dtype, topology, world, numel, tuple(local))
