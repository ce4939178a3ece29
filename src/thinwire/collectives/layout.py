"""Who owns which part of a DDP bucket, and what each message holds: agreed by construction, allocated once."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import torch

from thinwire.collectives.message import HEADER_BYTES
from thinwire.compressors import Coded, Piece, Segments
from thinwire.kernels import site_id

_LEAST_PIECE = 1024
"""Elements. Smaller pieces would spend much of their bytes on padding; in buckets of 128, multiples need none."""


class Layer(NamedTuple):
    """A layer in a flat gradient tensor: where it starts, in elements, and the compressor that its plan gives it."""

    name: str
    start: int
    numel: int
    compressor: Coded


class Group(NamedTuple):
    """The pieces of one chunk that share a compressor: one kernel call."""

    compressor: Coded
    segments: Segments


@dataclass(frozen=True)
class Chunk:
    """The part of a bucket that one rank owns: it sums the part and hands the mean to the others."""

    groups: tuple[Group, ...]
    message_bytes: int
    """Size of its messages, header included: of each that comes to its owner, and of the one that the owner sends."""


@dataclass(frozen=True)
class Layout:
    """How the layers of one flat tensor are cut among the ranks. A pure function of layers, world size and dtype."""

    layers: tuple[Layer, ...]
    chunks: tuple[Chunk, ...]
    dtype: torch.dtype

    @staticmethod
    def build(layers: Sequence[Layer], world_size: int, dtype: torch.dtype) -> Layout:
        owned = _cut(layers, world_size)
        return Layout(tuple(layers), tuple(_chunk(pieces, dtype) for pieces in owned), dtype)

    @property
    def world_size(self) -> int:
        return len(self.chunks)

    @property
    def numel(self) -> int:
        return sum(layer.numel for layer in self.layers)

    def sent_bytes(self, rank: int) -> int:
        """Bytes that ``rank`` sends in one scatter-reduce-all-gather: the others' chunks, then its own to each."""
        others = sum(chunk.message_bytes for owner, chunk in enumerate(self.chunks) if owner != rank)
        return others + (self.world_size - 1) * self.chunks[rank].message_bytes

    @cached_property
    def digest(self) -> int:
        """64 bits over everything that two ranks must have in common to understand each other's messages."""
        text = "\n".join(f"{layer.name} {layer.start} {layer.numel} {layer.compressor}" for layer in self.layers)
        text += f"\n{self.world_size} {self.dtype}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


class _Cut(NamedTuple):
    layer: Layer
    index0: int
    numel: int


def _cut(layers: Sequence[Layer], world_size: int) -> list[list[_Cut]]:
    """Share every layer out among the owners, in pieces of at least `_LEAST_PIECE` elements.

    Who owns an element depends on its layer alone, not on the layers that happen to be in the same DDP bucket: the
    result of a step is the same bit for bit however DDP forms its buckets, also right after a resume.
    """
    owned: list[list[_Cut]] = [[] for _ in range(world_size)]
    for layer in layers:
        # Layers with fewer pieces than there are owners begin with different owners.
        first = site_id(layer.name) % world_size
        for part, (begin, end) in enumerate(_parts(layer, world_size)):
            if end > begin:
                owned[(first + part) % world_size].append(_Cut(layer, begin, end - begin))
    return owned


def _parts(layer: Layer, world_size: int) -> list[tuple[int, int]]:
    grain = layer.compressor.grain
    if grain is None:
        return [(0, layer.numel)]
    unit = -(-_LEAST_PIECE // grain) * grain
    units = -(-layer.numel // unit)
    edges = [min(layer.numel, part * units // world_size * unit) for part in range(world_size + 1)]
    return list(pairwise(edges))


def _chunk(cuts: Sequence[_Cut], dtype: torch.dtype) -> Chunk:
    by_compressor: dict[Coded, list[_Cut]] = {}
    for cut in cuts:
        by_compressor.setdefault(cut.layer.compressor, []).append(cut)
    at, groups = HEADER_BYTES, []
    for compressor, members in by_compressor.items():
        pieces = []
        for layer, index0, numel in members:
            pieces.append(Piece(layer.name, layer.start + index0, numel, index0, at))
            at += compressor.payload_bytes(numel, dtype)
        groups.append(Group(compressor, Segments.build(pieces)))
    return Chunk(tuple(groups), at)
