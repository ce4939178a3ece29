"""The positions of layers in flat buffers: whole, as in a DDP bucket, or cut into a part for every rank."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from thinwire.collectives import Shard
from thinwire.compressors import Coded

LayerSpan = tuple[str, int, int]
"""Name, start and size of a layer, or a part of one, in a flat tensor."""


@dataclass(frozen=True)
class ShardedLayer:
    """A layer that is cut along ``dim`` into one chunk of ``ceil(size / num_ranks)`` for each rank.

    The last chunks may be smaller or empty. A flat buffer has room for a full chunk in every rank's part.
    """

    name: str
    shape: tuple[int, ...]
    num_ranks: int = 1
    dim: int = 0

    @cached_property
    def rows(self) -> tuple[int, ...]:
        """Size of each rank's chunk along ``dim``."""
        size = self.shape[self.dim]
        chunk = -(-size // self.num_ranks)
        return tuple(max(0, min(chunk, size - rank * chunk)) for rank in range(self.num_ranks))

    def chunk_shape(self, rank: int) -> tuple[int, ...]:
        """Return the shape of a rank's chunk."""
        if self.num_ranks == 1:
            return self.shape
        return (*self.shape[: self.dim], self.rows[rank], *self.shape[self.dim + 1 :])

    def chunk_numel(self, rank: int) -> int:
        return math.prod(self.chunk_shape(rank))

    def cut(self, whole: Tensor, rank: int) -> Tensor:
        """Return a rank's chunk of a tensor of the layer's shape, flat."""
        if self.num_ranks == 1:
            return whole.reshape(-1)
        return whole.narrow(self.dim, sum(self.rows[:rank]), self.rows[rank]).reshape(-1)

    def spread(self, chunk: Tensor, rank: int) -> Tensor:
        """Return a tensor of the layer's shape with a flat chunk in a rank's place, and zeros elsewhere."""
        whole = chunk.new_zeros(self.shape)
        whole.narrow(self.dim, sum(self.rows[:rank]), self.rows[rank]).copy_(chunk.view(self.chunk_shape(rank)))
        return whole

    def shard(self, rank: int, start: int, compressor: Coded) -> Shard:
        """Return a rank's shard, which starts at ``start`` in its part.

        Random draws of different ranks do not overlap: a rank's begin at a multiple of the largest chunk, rounded up to
        the compressor's grain. A compressor without a grain treats the shard as a layer of its own.
        """
        numel, grain = self.chunk_numel(rank), compressor.grain
        if grain is None:
            return Shard(self.part_name(rank), start, numel, 0, compressor)
        return Shard(self.name, start, numel, rank * (-(-self.padded_numel // grain) * grain), compressor)

    def part_name(self, rank: int) -> str:
        """Return the name of a rank's shard where it is a layer of its own."""
        return self.name if self.num_ranks == 1 else f"{self.name}, part {rank}"

    @property
    def padded_numel(self) -> int:
        """Number of elements in each rank's part: that of the largest chunk."""
        return self.chunk_numel(0)


class Placement:
    """The positions of layers in a flat buffer that has a part for each rank, one after the other.

    A DDP bucket has one part, with whole layers. A buffer may also have the part of one rank alone (``only``): there
    the rest of every layer is zero.
    """

    def __init__(self, layers: Sequence[ShardedLayer], num_ranks: int = 1, *, only: int | None = None) -> None:
        self.layers = tuple(layers)
        self.num_ranks = num_ranks
        self.only = only
        self.starts: dict[str, int] = {}
        self.part_numel = 0
        for layer in layers:
            self.starts[layer.name] = self.part_numel
            self.part_numel += layer.padded_numel
        self.by_name = {layer.name: layer for layer in layers}

    @property
    def ranks(self) -> Sequence[int]:
        """Ranks whose parts are in the buffer."""
        return range(self.num_ranks) if self.only is None else (self.only,)

    @property
    def numel(self) -> int:
        """Number of elements of the whole buffer."""
        return self.part_numel * len(self.ranks)

    def spans(self, name: str) -> list[LayerSpan]:
        """Return the positions of a layer in the buffer, one for each part that has elements of it."""
        layer, start = self.by_name[name], self.starts[name]
        spans = [
            (layer.part_name(rank), start + i * self.part_numel, layer.chunk_numel(rank))
            for i, rank in enumerate(self.ranks)
        ]
        return [span for span in spans if span[2]]

    def shards(self, compressors: Mapping[str, Coded]) -> tuple[tuple[Shard, ...], ...]:
        """Return the shards of each rank's part."""
        return tuple(
            tuple(
                layer.shard(rank, self.starts[layer.name], compressors[layer.name])
                for layer in self.layers
                if layer.chunk_numel(rank)
            )
            for rank in self.ranks
        )

    def part(self, flat: Tensor, rank: int) -> Tensor:
        """Return a rank's part of a flat buffer."""
        at = (rank if self.only is None else 0) * self.part_numel
        return flat[at : at + self.part_numel]

    def shard(self, flat: Tensor, name: str, rank: int) -> Tensor:
        """Return a rank's shard of a layer in a flat buffer, in the shard's shape."""
        return self.local(self.part(flat, rank), name, rank)

    def local(self, part: Tensor, name: str, rank: int) -> Tensor:
        """Return a rank's shard of a layer in the rank's own part."""
        layer, start = self.by_name[name], self.starts[name]
        return part[start : start + layer.chunk_numel(rank)].view(layer.chunk_shape(rank))

    def whole(self, flat: Tensor, name: str) -> Tensor:
        """Return a layer in its own shape, joined from all parts; where there is one part, it is a view."""
        layer = self.by_name[name]
        shards = [self.shard(flat, name, rank) for rank in self.ranks]
        if self.only is not None:
            return layer.spread(shards[0].reshape(-1), self.only)
        return shards[0] if self.num_ranks == 1 else torch.cat(shards, layer.dim)

    def write(self, flat: Tensor, name: str, value: Tensor) -> None:
        """Write a layer (in its own shape, or flat) to the buffer."""
        layer = self.by_name[name]
        for rank in self.ranks:
            shard = self.shard(flat, name, rank)
            shard.copy_(layer.cut(value.view(layer.shape), rank).view(shard.shape))
