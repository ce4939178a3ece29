"""How a DDP bucket travels: its layout, its messages, and what the last of them could not hold."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.collectives import Buffers, Chunk, Layout, all_reduce, encoded, gather_mean
from thinwire.compressors import State

BucketLayers = tuple[tuple[str, tuple[int, ...]], ...]
"""Names and shapes of the layers of a bucket, in order."""

RouteKey = tuple[BucketLayers, torch.dtype, int]
"""Layers and dtype of a bucket, and which of the plan's forms holds where it has a schedule."""


@dataclass
class Route:
    """How a bucket travels: its layout, its buffers, and when it was last used."""

    layout: Layout
    reduction: Buffers | None
    """Messages of the layers that are cut among owners."""
    gathering: Buffers | None
    """Messages of the layers that every rank gathers."""
    sums: Sequence[Tensor]
    last_step: int
    sent_bytes: int
    """What this rank hands to the transport for it in a compressed step, at most."""

    @property
    def exchanges(self) -> Iterator[tuple[Callable[..., Generator[None]], Buffers]]:
        """The collectives of its coded layers, and their messages."""
        if self.reduction is not None:
            yield all_reduce, self.reduction
        if self.gathering is not None:
            yield gather_mean, self.gathering

    @property
    def num_bytes(self) -> int:
        held = sum(buffers.num_bytes for _, buffers in self.exchanges)
        return held + sum(buffer.numel() * buffer.element_size() for buffer in self.sums)

    def limits(self, rank: int) -> tuple[int, int]:
        """Values that saturated in this rank's last messages, and values that found no room in them."""
        saturated = overflowed = 0
        for chunk, message in self._encoded(rank):
            for compressor, segments in chunk.groups:
                more, over = compressor.limits(message, segments)
                saturated, overflowed = saturated + more, overflowed + over
        return saturated, overflowed

    def clipped(self, state: State | None) -> tuple[int, int]:
        """Values that this rank clipped to fit into integers in the last step, and all that it made integers of."""
        clipped = rounded = 0
        for s in self.layout.sums:
            for compressor, parts in s.members:
                found = compressor.clipped(parts, state) if s.round == compressor.rounds - 1 else None
                if found is not None:
                    clipped, rounded = clipped + found, rounded + sum(part.piece.numel for part in parts)
        return clipped, rounded

    def _encoded(self, rank: int) -> Iterator[tuple[Chunk, Tensor]]:
        if self.reduction is not None:
            for chunk, phase in encoded(self.layout, rank):
                yield chunk, self.reduction.outbox[phase]
        if self.gathering is not None:
            for k, chunk in enumerate(self.layout.gathered):
                yield chunk, self.gathering.work[rank] if self.gathering.work else self.gathering.outbox[k]
