"""Layers cut among ranks along one dimension, as FSDP cuts them, and where each shard lies in a flat buffer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from thinwire.collectives import Shard
from thinwire.compressors import Coded


@dataclass(frozen=True)
class ShardedLayer:
    """A layer of this shape, cut along ``dim`` into chunks of ``ceil(size / num_ranks)``, as many as there are ranks.

    The last ones may be smaller, or empty; a flat buffer has room for a whole one in every rank's part.
    """

    name: str
    shape: tuple[int, ...]
    num_ranks: int
    dim: int = 0

    @cached_property
    def rows(self) -> tuple[int, ...]:
        """Size of each rank's chunk along ``dim``."""
        size = self.shape[self.dim]
        chunk = -(-size // self.num_ranks)
        return tuple(max(0, min(chunk, size - rank * chunk)) for rank in range(self.num_ranks))

    def shape_of(self, rank: int) -> tuple[int, ...]:
        """Shape of a rank's chunk."""
        return (*self.shape[: self.dim], self.rows[rank], *self.shape[self.dim + 1 :])

    def numel_of(self, rank: int) -> int:
        return math.prod(self.shape_of(rank))

    def shard(self, rank: int, start: int, compressor: Coded) -> Shard:
        """A rank's shard, which starts at ``start`` in its part.

        Its draws are counted from so far behind those of other ranks as the largest chunk needs, at a multiple of what
        the layer may be cut at, wherever chunks really begin; what must stay whole is a layer of its own in each part.
        """
        numel, grain = self.numel_of(rank), compressor.grain
        if grain is None:
            return Shard(f"{self.name}, part {rank}", start, numel, 0, compressor)
        return Shard(self.name, start, numel, rank * (-(-self.padded_numel // grain) * grain), compressor)

    @property
    def padded_numel(self) -> int:
        """Elements that each rank's part has for it: those of the largest chunk."""
        return self.numel_of(0)


class Placement:
    """Where the shards of some layers lie in a flat buffer that has a part for each rank."""

    def __init__(self, layers: Sequence[ShardedLayer], num_ranks: int) -> None:
        self.layers = tuple(layers)
        self.num_ranks = num_ranks
        self.starts: dict[str, int] = {}
        self.part_numel = 0
        for layer in layers:
            self.starts[layer.name] = self.part_numel
            self.part_numel += layer.padded_numel
        self.by_name = {layer.name: layer for layer in layers}

    @property
    def numel(self) -> int:
        """Elements of the whole buffer."""
        return self.part_numel * self.num_ranks

    @property
    def padded(self) -> bool:
        """Whether some elements of the buffer belong to no layer."""
        return self.numel > sum(math.prod(layer.shape) for layer in self.layers)

    def shards(self, compressors: Mapping[str, Coded]) -> tuple[tuple[Shard, ...], ...]:
        """By rank, the shards of its part."""
        return tuple(
            tuple(
                layer.shard(rank, self.starts[layer.name], compressors[layer.name])
                for layer in self.layers
                if layer.numel_of(rank)
            )
            for rank in range(self.num_ranks)
        )

    def part(self, flat: Tensor, rank: int) -> Tensor:
        """A rank's part of a flat buffer."""
        return flat[rank * self.part_numel : (rank + 1) * self.part_numel]

    def shard(self, flat: Tensor, name: str, rank: int) -> Tensor:
        """A rank's shard of a layer in a flat buffer, in its shape."""
        return self.local(self.part(flat, rank), name, rank)

    def local(self, part: Tensor, name: str, rank: int) -> Tensor:
        """The same in the rank's part alone."""
        layer, start = self.by_name[name], self.starts[name]
        return part[start : start + layer.numel_of(rank)].view(layer.shape_of(rank))

    def whole(self, flat: Tensor, name: str) -> Tensor:
        """A copy of a layer in its own shape, put together from all parts."""
        shards = [self.shard(flat, name, rank) for rank in range(self.num_ranks)]
        return torch.cat(shards, self.by_name[name].dim)

    def write(self, flat: Tensor, name: str, value: Tensor) -> None:
        """Put a layer (of its own shape, or flat) into the buffer."""
        layer = self.by_name[name]
        parts = value.view(layer.shape).split(list(layer.rows), layer.dim)
        for rank, part in enumerate(parts):
            self.shard(flat, name, rank).copy_(part)
