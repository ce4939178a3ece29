"""Who owns which part of a DDP bucket, and what each message holds: agreed by construction, allocated once."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import torch

from thinwire.collectives.message import HEADER_BYTES, SIZE_BYTES
from thinwire.collectives.topology import ScatterReduceAllGather, Topology, Tree, World
from thinwire.collectives.traffic import Outgoing, Traffic, sent_bytes
from thinwire.collectives.transport import Transport, ring_bytes
from thinwire.compressors import Coded, Part, Piece, Reduction, Segments, Slot, Summed
from thinwire.kernels import site_id

_LEAST_PIECE = 1024
"""Elements. Smaller pieces would spend much of their bytes on padding; in buckets of 128, multiples need none."""

_SLICE = 1 << 20
"""Elements that one message carries, about: while one is on the wire, the next is encoded and the last one decoded."""


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
    """What one message carries: a part of what one rank owns of a bucket, or of the layers that every rank gathers."""

    groups: tuple[Group, ...]
    message_bytes: int
    """Size of its messages, header included; of bounded compressors, at most."""
    owner: int = -1
    """Rank that adds it up; −1 if it is gathered."""

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
    """What one native all-reduce adds, or takes the largest of: the parts of all layers of one round and dtype."""

    round: int
    op: Reduction
    dtype: torch.dtype
    members: tuple[Members, ...]
    numel: int


class Schedule(NamedTuple):
    """The order in which one rank works through the chunks. No two ranks can wait for each other in it: whatever one
    waits for was sent at a lower height of its tree, and everybody works upwards, and then downwards."""

    leaves: tuple[tuple[int, int], ...]
    """Chunks of which nobody sends it parts, and to whom it sends its own."""
    inner: tuple[int, ...]
    """Chunks of which it gets parts."""
    means: tuple[tuple[int, int], ...]
    """Chunks of others, and who sends it their mean."""

    @staticmethod
    def of(layout: Layout, rank: int) -> Schedule:
        seen: dict[int, int] = {}
        ups, downs = [], []
        for k, chunk in enumerate(layout.chunks):
            tree = layout.trees[chunk.owner]
            part = seen[chunk.owner] = seen.get(chunk.owner, -1) + 1
            ups.append((tree.height[rank], part, (chunk.owner - rank) % layout.world_size, k))
            downs.append((tree.depth[rank], part, (rank - chunk.owner) % layout.world_size, k))
        parents = [layout.trees[chunk.owner].parents[rank] for chunk in layout.chunks]
        leaves = [(k, parent) for height, _, _, k in sorted(ups) if not height and (parent := parents[k]) is not None]
        inner = [k for height, _, _, k in sorted(ups) if height or parents[k] is None]
        means = [(k, parent) for _, _, _, k in sorted(downs) if (parent := parents[k]) is not None]
        return Schedule(tuple(leaves), tuple(inner), tuple(means))


@dataclass(frozen=True)
class Layout:
    """How the layers of one flat tensor travel. A pure function of layers, world, dtype and topology.

    Coded layers are cut among the ranks, in chunks that each have an owner, or gathered by all of them; summed layers
    share a few sums.
    """

    layers: tuple[Layer, ...]
    chunks: tuple[Chunk, ...]
    gathered: tuple[Chunk, ...]
    sums: tuple[Sum, ...]
    dtype: torch.dtype
    topology: Topology
    world: World
    part_numel: int = 0
    """Elements of each rank's part, in a buffer that has one for each (`part_layout`)."""
    local: tuple[Chunk, ...] = ()
    """In such a buffer, its chunks as seen from where their part begins."""

    @staticmethod
    def build(
        layers: Sequence[Layer],
        world: World | int,
        dtype: torch.dtype,
        topology: Topology | None = None,
    ) -> Layout:
        """Lay out ``layers`` for ``world`` (or a world of so many ranks), by default as scatter-reduce-all-gather.

        Raises:
            ValueError: a layer's compressor and the topology do not go together.
        """
        world = World(world) if isinstance(world, int) else world
        topology = topology or ScatterReduceAllGather()
        whole, shared = [], []
        for layer in layers:
            if not layer.numel or not isinstance(layer.compressor, Coded):
                continue
            if layer.compressor.gathered or topology.gathers:
                whole.append(Cut(layer, layer.compressor, 0, layer.numel))
            else:
                _check_sum(layer, topology)
                shared.append((layer, layer.compressor))
        chunks = []
        shares = topology.shares(world)
        owned: list[list[Cut]] = [[] for _ in range(world.size)]
        for layer, compressor in shared:
            for owner, begin, end in owned_parts(layer.name, compressor, layer.numel, shares):
                owned[owner].append(Cut(layer, compressor, begin, end - begin))
        for owner, cuts in enumerate(owned):
            chunks += [_chunk(part, dtype, owner) for part in _slices(cuts)]
        # A size that depends on the data is told once for everything.
        bounded = any(cut.compressor.size == "bounded" for cut in whole)
        gathered = tuple(_chunk(part, dtype) for part in ([whole] if bounded else _slices(whole)))
        return Layout(tuple(layers), tuple(chunks), gathered, _sums(layers, dtype), dtype, topology, world)

    @property
    def world_size(self) -> int:
        return self.world.size

    @property
    def numel(self) -> int:
        return sum(layer.numel for layer in self.layers)

    @property
    def has_owned(self) -> bool:
        """Whether any layer is cut among the ranks."""
        return bool(self.chunks)

    @property
    def has_gathered(self) -> bool:
        return bool(self.gathered)

    @cached_property
    def num_coded(self) -> int:
        """Elements that a rank encodes in a step: each of its coded layers' once, as worker or as owner."""
        return sum(layer.numel for layer in self.layers if isinstance(layer.compressor, Coded))

    @property
    def slots(self) -> tuple[Slot, ...]:
        """The state that its layers need."""
        return tuple(dict.fromkeys(slot for layer in self.layers for slot in layer.compressor.slots))

    @property
    def wide_dtype(self) -> torch.dtype:
        """The dtype of sums, and of what travels in another form than its chunk's."""
        return torch.promote_types(self.dtype, torch.float32)

    @cached_property
    def trees(self) -> tuple[Tree, ...]:
        """By owner, the way of its chunks."""
        return tuple(self.topology.tree(owner, self.world) for owner in range(self.world.size))

    def schedule(self, rank: int) -> Schedule:
        """When ``rank`` does what with which chunk."""
        if rank not in self._schedules:
            self._schedules[rank] = Schedule.of(self, rank)
        return self._schedules[rank]

    @cached_property
    def _schedules(self) -> dict[int, Schedule]:
        return {}

    def form(self, k: int, rank: int, parent: int) -> Chunk:
        """How ``rank`` encodes its part of chunk ``k`` for ``parent``: most often as the chunk itself."""
        # Asked in every step: a topology may have to parse a spec for its answer.
        key = (k, rank, parent)
        if key not in self._forms:
            chunk = self.chunks[k]
            forms = [self.topology.form(group.compressor, rank, parent, self.world) for group in chunk.groups]
            same = all(form is group.compressor for form, group in zip(forms, chunk.groups, strict=True))
            self._forms[key] = chunk if same else _formed(chunk, forms, self.wide_dtype)
        return self._forms[key]

    @cached_property
    def _forms(self) -> dict[tuple[int, int, int], Chunk]:
        return {}

    def reduction_traffic(self, *, up: bool = True, down: bool = True) -> Traffic:
        """The messages of its chunks. Phase k: parts of chunk k on their way to its owner (``up``); phase K + k of K
        chunks: its mean on the way back (``down``)."""
        traffic: list[list[Outgoing]] = [[] for _ in range(self.world.size)]
        for k, chunk in enumerate(self.chunks):
            tree = self.trees[chunk.owner]
            for rank, parent in enumerate(tree.parents):
                if up and parent is not None:
                    traffic[rank].append(Outgoing(k, self.form(k, rank, parent).message_bytes, (parent,)))
                if down and tree.children[rank]:
                    maker = None if parent is None else chunk.owner
                    mean = Outgoing(len(self.chunks) + k, chunk.message_bytes, tree.children[rank], maker=maker)
                    traffic[rank].append(mean)
        return traffic

    def gather_traffic(self) -> Traffic:
        """The messages of its gathered chunks: phase k is chunk k. If bounded, phase 0 tells the size of phase 1."""
        traffic = []
        for rank in range(self.world.size):
            others = tuple(other for other in range(self.world.size) if other != rank)
            if any(chunk.bounded for chunk in self.gathered):
                told = Outgoing(0, SIZE_BYTES, others)
                traffic.append([told, Outgoing(1, self.gathered[0].message_bytes, others, late=True)])
            else:
                traffic.append([Outgoing(k, chunk.message_bytes, others) for k, chunk in enumerate(self.gathered)])
        return traffic

    def sent_bytes(self, rank: int, transport: Transport | None = None) -> int:
        """Bytes that ``rank`` hands to the transport for it: at most, if it gathers what is bounded.

        Of a sum, 2(n−1)/n of its size, unless ``transport`` has it otherwise.
        """
        if transport is None:
            sums = sum(ring_bytes(s.numel * s.dtype.itemsize, self.world_size) for s in self.sums)
        else:
            sums = sum(transport.all_reduce_bytes(s.numel, s.dtype) for s in self.sums)
        return sums + sent_bytes(self.reduction_traffic(), rank) + sent_bytes(self.gather_traffic(), rank)

    @cached_property
    def digest(self) -> int:
        """64 bits over everything that two ranks must have in common to understand each other's messages."""
        text = "\n".join(f"{layer.name} {layer.start} {layer.shape} {layer.compressor}" for layer in self.layers)
        text += f"\n{self.world_size} {self.world.nodes} {self.dtype} {self.topology} {_SLICE}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


class Cut(NamedTuple):
    """Consecutive elements of a coded layer, from its ``index0``-th on."""

    layer: Layer
    compressor: Coded
    index0: int
    numel: int


def _check_sum(layer: Layer, topology: Topology) -> None:
    assert isinstance(layer.compressor, Coded)
    if not topology.is_star and not layer.compressor.plain_sum:
        raise ValueError(
            f"{layer.name} has {layer.compressor}, whose votes an owner must count itself: "
            f"use the topology sra or parameter_server with it, not {topology}"
        )


def owned_parts(name: str, compressor: Coded, numel: int, shares: Sequence[int]) -> list[tuple[int, int, int]]:
    """Which elements of a coded layer which rank owns: (owner, begin, end) of each piece, none of them empty.

    Pieces have at least `_LEAST_PIECE` elements. Who owns an element depends on its layer alone, not on the layers that
    happen to be in the same DDP bucket: the result of a step is the same bit for bit however DDP forms its buckets,
    also right after a resume.
    """
    # Layers with fewer pieces than there are owners begin with different owners.
    owners = [rank for rank, share in enumerate(shares) if share]
    first = site_id(name) % len(owners)
    owners = owners[first:] + owners[:first]
    grain = compressor.grain
    if grain is None:
        return [(owners[0], 0, numel)] if numel else []
    unit = _unit(grain)
    units, total = -(-numel // unit), sum(shares)
    ends = [min(numel, end * units // total * unit) for end in accumulate(shares[owner] for owner in owners)]
    parts = zip(owners, [0, *ends], ends, strict=False)
    return [(owner, begin, end) for owner, begin, end in parts if end > begin]


def _unit(grain: int) -> int:
    return -(-_LEAST_PIECE // grain) * grain


def _slices(cuts: Sequence[Cut]) -> list[list[Cut]]:
    """Share pieces out among messages of about the same size, cutting those that can be cut."""
    numel = sum(cut.numel for cut in cuts)
    if not numel:
        return []
    size = -(-numel // max(1, round(numel / _SLICE)))
    slices: list[list[Cut]] = [[]]
    room = size
    for layer, compressor, index0, left in cuts:
        while left:
            grain = None if compressor.gathered else compressor.grain
            take = left if grain is None else min(left, -(-room // _unit(grain)) * _unit(grain))
            slices[-1].append(Cut(layer, compressor, index0, take))
            index0, left, room = index0 + take, left - take, room - take
            if room <= 0:
                slices.append([])
                room = size
    return [part for part in slices if part]


def owned_chunks(cuts: Sequence[Cut], dtype: torch.dtype, owner: int) -> list[Chunk]:
    """Chunks of these elements, for one owner."""
    return [_chunk(part, dtype, owner) for part in _slices([cut for cut in cuts if cut.numel])]


def _chunk(cuts: Sequence[Cut], dtype: torch.dtype, owner: int = -1) -> Chunk:
    by_compressor: dict[Coded, list[Cut]] = {}
    for cut in cuts:
        by_compressor.setdefault(cut.compressor, []).append(cut)
    groups = []
    for compressor, members in by_compressor.items():
        pieces = [Piece(c.layer.name, c.layer.start + c.index0, c.numel, c.index0, 0, c.layer.shape) for c in members]
        groups.append((compressor, pieces))
    return _placed(groups, dtype, owner)


def _formed(chunk: Chunk, forms: Sequence[Coded], dtype: torch.dtype) -> Chunk:
    """The same elements, encoded otherwise."""
    groups = [(form, group.segments.pieces) for form, group in zip(forms, chunk.groups, strict=True)]
    return _placed(groups, dtype, chunk.owner)


def _placed(groups: Sequence[tuple[Coded, Sequence[Piece]]], dtype: torch.dtype, owner: int) -> Chunk:
    """Give every piece its place in the message."""
    at, placed = HEADER_BYTES, []
    for compressor, pieces in groups:
        moved = []
        for piece in pieces:
            moved.append(piece._replace(payload=at))
            at += compressor.payload_bytes(piece.numel, dtype)
        placed.append(Group(compressor, Segments.build(moved)))
    return Chunk(tuple(placed), at, owner)


def _sums(layers: Sequence[Layer], dtype: torch.dtype) -> tuple[Sum, ...]:
    members: dict[tuple[int, Reduction, str], dict[Summed, list[Part]]] = {}
    dtypes: dict[str, torch.dtype] = {}
    ends: dict[tuple[int, Reduction, str], int] = {}
    for layer in layers:
        compressor = layer.compressor
        if not isinstance(compressor, Summed) or not layer.numel:
            continue
        part_dtype = compressor.part_dtype(dtype)
        dtypes[str(part_dtype)] = part_dtype
        piece = Piece(layer.name, layer.start, layer.numel, 0, 0, layer.shape)
        for round in range(compressor.rounds):
            place = (round, compressor.operation(round), str(part_dtype))
            start = ends.get(place, 0)
            ends[place] = start + compressor.part_numel(round, layer.shape)
            members.setdefault(place, {}).setdefault(compressor, []).append(Part(piece, slice(start, ends[place])))
    # Sorted: all ranks must enter the all-reduces in one order, and a round must end before the next.
    return tuple(
        Sum(place[0], place[1], dtypes[place[2]], tuple(Members(c, tuple(p)) for c, p in members[place].items()), end)
        for place, end in sorted(ends.items())
    )
