"""Who owns which part of a DDP bucket, and what each message holds: agreed by construction, allocated once."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import torch

from thinwire.collectives.message import HEADER_BYTES, SIZE_BYTES
from thinwire.collectives.transport import ring_bytes
from thinwire.compressors import Coded, Part, Piece, Segments, Slot, Summed
from thinwire.kernels import site_id

_LEAST_PIECE = 1024
"""Elements. Smaller pieces would spend much of their bytes on padding; in buckets of 128, multiples need none."""


class Layer(NamedTuple):
    """A layer in a flat gradient tensor: where it starts, in elements, and the compressor that its plan gives it."""

    name: str
    start: int
    shape: tuple[int, ...]
    compressor: Coded | Summed

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


class Group(NamedTuple):
    """The pieces of one chunk that share a compressor: one kernel call."""

    compressor: Coded
    segments: Segments


@dataclass(frozen=True)
class Chunk:
    """What one message carries: of a bucket, the part that one rank owns, or all layers that every rank gathers."""

    groups: tuple[Group, ...]
    message_bytes: int
    """Size of its messages, header included; of bounded compressors, at most."""

    @property
    def bounded(self) -> bool:
        """Whether its messages may be smaller."""
        return any(group.compressor.size == "bounded" for group in self.groups)


class Members(NamedTuple):
    """Layers of one compressor, and their places in a sum."""

    compressor: Summed
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Sum:
    """What one native all-reduce adds: the parts of all summed layers of one round and dtype."""

    round: int
    dtype: torch.dtype
    members: tuple[Members, ...]
    numel: int


@dataclass(frozen=True)
class Layout:
    """How the layers of one flat tensor travel. A pure function of layers, world size and dtype.

    Coded layers are cut among the ranks, one chunk each, or gathered whole by all of them; summed layers share a few
    sums.
    """

    layers: tuple[Layer, ...]
    chunks: tuple[Chunk, ...]
    gathered: Chunk
    sums: tuple[Sum, ...]
    dtype: torch.dtype

    @staticmethod
    def build(layers: Sequence[Layer], world_size: int, dtype: torch.dtype) -> Layout:
        owned = _cut(layers, world_size)
        chunks = tuple(_chunk(pieces, dtype) for pieces in owned)
        whole = []
        for layer in layers:
            if layer.numel and isinstance(layer.compressor, Coded) and layer.compressor.gathered:
                whole.append(_Cut(layer, layer.compressor, 0, layer.numel))
        return Layout(tuple(layers), chunks, _chunk(whole, dtype), _sums(layers, dtype), dtype)

    @property
    def world_size(self) -> int:
        return len(self.chunks)

    @property
    def numel(self) -> int:
        return sum(layer.numel for layer in self.layers)

    @property
    def has_owned(self) -> bool:
        """Whether any layer is cut among the ranks."""
        return any(chunk.groups for chunk in self.chunks)

    @property
    def has_gathered(self) -> bool:
        return bool(self.gathered.groups)

    @cached_property
    def num_coded(self) -> int:
        """Elements that a rank encodes in a step: each of its coded layers' once, as worker or as owner."""
        return sum(layer.numel for layer in self.layers if isinstance(layer.compressor, Coded))

    @property
    def slots(self) -> tuple[Slot, ...]:
        """The state that its layers need."""
        return tuple(dict.fromkeys(slot for layer in self.layers for slot in layer.compressor.slots))

    def sent_bytes(self, rank: int) -> int:
        """Bytes that ``rank`` hands to the transport for it.

        Of coded layers, the others' chunks and then its own to each of them; of gathered ones, its message to each
        (at most, if it is bounded); of sums, 2(n−1)/n of their size.
        """
        peers = self.world_size - 1
        sent = sum(ring_bytes(s.numel * s.dtype.itemsize, self.world_size) for s in self.sums)
        if self.has_owned:
            sent += sum(chunk.message_bytes for owner, chunk in enumerate(self.chunks) if owner != rank)
            sent += peers * self.chunks[rank].message_bytes
        if self.has_gathered:
            sent += peers * (self.gathered.message_bytes + (SIZE_BYTES if self.gathered.bounded else 0))
        return sent

    @cached_property
    def digest(self) -> int:
        """64 bits over everything that two ranks must have in common to understand each other's messages."""
        text = "\n".join(f"{layer.name} {layer.start} {layer.shape} {layer.compressor}" for layer in self.layers)
        text += f"\n{self.world_size} {self.dtype}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


class _Cut(NamedTuple):
    layer: Layer
    compressor: Coded
    index0: int
    numel: int


def _cut(layers: Sequence[Layer], world_size: int) -> list[list[_Cut]]:
    """Share every layer out among the owners, in pieces of at least `_LEAST_PIECE` elements.

    Who owns an element depends on its layer alone, not on the layers that happen to be in the same DDP bucket: the
    result of a step is the same bit for bit however DDP forms its buckets, also right after a resume.
    """
    owned: list[list[_Cut]] = [[] for _ in range(world_size)]
    for layer in layers:
        if isinstance(layer.compressor, Coded) and not layer.compressor.gathered:
            for owner, begin, end in owned_parts(layer.name, layer.compressor, layer.numel, world_size):
                owned[owner].append(_Cut(layer, layer.compressor, begin, end - begin))
    return owned


def owned_parts(name: str, compressor: Coded, numel: int, world_size: int) -> list[tuple[int, int, int]]:
    """Which elements of a coded layer which rank owns: (owner, begin, end) of each piece, none of them empty."""
    # Layers with fewer pieces than there are owners begin with different owners.
    first = site_id(name) % world_size
    parts = enumerate(_parts(compressor, numel, world_size))
    return [((first + part) % world_size, begin, end) for part, (begin, end) in parts if end > begin]


def _parts(compressor: Coded, numel: int, world_size: int) -> list[tuple[int, int]]:
    grain = compressor.grain
    if grain is None:
        return [(0, numel)]
    unit = -(-_LEAST_PIECE // grain) * grain
    units = -(-numel // unit)
    edges = [min(numel, part * units // world_size * unit) for part in range(world_size + 1)]
    return list(pairwise(edges))


def _chunk(cuts: Sequence[_Cut], dtype: torch.dtype) -> Chunk:
    by_compressor: dict[Coded, list[_Cut]] = {}
    for cut in cuts:
        by_compressor.setdefault(cut.compressor, []).append(cut)
    at, groups = HEADER_BYTES, []
    for compressor, members in by_compressor.items():
        pieces = []
        for layer, _, index0, numel in members:
            pieces.append(Piece(layer.name, layer.start + index0, numel, index0, at, layer.shape))
            at += compressor.payload_bytes(numel, dtype)
        groups.append(Group(compressor, Segments.build(pieces)))
    return Chunk(tuple(groups), at)


def _sums(layers: Sequence[Layer], dtype: torch.dtype) -> tuple[Sum, ...]:
    members: dict[tuple[int, str], dict[Summed, list[Part]]] = {}
    dtypes: dict[str, torch.dtype] = {}
    ends: dict[tuple[int, str], int] = {}
    for layer in layers:
        compressor = layer.compressor
        if not isinstance(compressor, Summed) or not layer.numel:
            continue
        part_dtype = compressor.part_dtype(dtype)
        dtypes[str(part_dtype)] = part_dtype
        piece = Piece(layer.name, layer.start, layer.numel, 0, 0, layer.shape)
        for round in range(compressor.rounds):
            place = (round, str(part_dtype))
            start = ends.get(place, 0)
            ends[place] = start + compressor.part_numel(round, layer.shape)
            members.setdefault(place, {}).setdefault(compressor, []).append(Part(piece, slice(start, ends[place])))
    # Sorted: all ranks must enter the all-reduces in one order, and a round must end before the next.
    return tuple(
        Sum(round, dtypes[name], tuple(Members(c, tuple(p)) for c, p in members[round, name].items()), end)
        for (round, name), end in sorted(ends.items())
    )
