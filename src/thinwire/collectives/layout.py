"""The layout of a flat tensor: the owner of every element, and the contents of every message.

Every rank computes it from the same facts, so nothing about it is sent.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import torch

from thinwire.collectives.algorithms import Algorithm, ScatterReduceAllGather, Tree, World
from thinwire.collectives.message import HEADER_BYTES, SIZE_BYTES
from thinwire.collectives.transport import OutgoingMessage, Traffic, Transport, arriving, ring_bytes, sent_bytes
from thinwire.compressors import Coded, Packed, Parts, Piece, Reduction, Segments, Slot, Summed, SumShape
from thinwire.kernels import site_id

_LEAST_PIECE = 1024
"""Least number of elements of a piece: smaller ones would spend a large share of their bytes on padding. Multiples of
it need no padding in buckets of 128."""

SLICE = 1 << 20
"""Elements of a message, about. While one message is sent, the next is encoded and the previous one decoded."""


class Layer(NamedTuple):
    """A layer of a flat tensor: its first element, its shape, and the compressor that the plan gives it."""

    name: str
    start: int
    shape: tuple[int, ...]
    compressor: Coded | Summed

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


_Cut = tuple[Coded, Piece]
"""Consecutive elements of a layer and their compressor, without a place in a message yet."""


class Group(NamedTuple):
    """The pieces of a chunk that share a compressor: one kernel call handles all of them."""

    compressor: Coded
    segments: Segments


@dataclass(frozen=True)
class Chunk:
    """The contents of one message: some of the elements that one rank owns, or of those that all ranks gather."""

    groups: tuple[Group, ...]
    message_bytes: int
    """Size of the chunk's messages, header included. An upper bound for compressors whose size is bounded."""
    owner: int = -1
    """Rank that reduces the chunk; −1 if it is gathered."""

    @property
    def bounded(self) -> bool:
        """Whether messages may be smaller."""
        return any(group.compressor.traits.bounded for group in self.groups)


@dataclass(frozen=True)
class Sum:
    """The operand of one all-reduce: the contributions of all layers of one round, operation and dtype."""

    round: int
    op: Reduction
    dtype: torch.dtype
    members: tuple[tuple[Summed, Parts], ...]
    """Layers that share a compressor, with their places in the operand."""
    numel: int
    packed: Packed | None = None
    """Messages of few bits in which the sum is sent; None for a native all-reduce."""


class Schedule(NamedTuple):
    """The order in which one rank handles the chunks.

    It cannot deadlock: a contribution that a rank waits for was sent at a lower height of its tree, and every rank
    handles contributions by increasing height, and then means by increasing depth.
    """

    sends: tuple[tuple[int, int], ...]
    """Chunks of which the rank receives no contributions, and the rank to which it sends its own."""
    reductions: tuple[int, ...]
    """Chunks of which the rank receives contributions: it owns them, or sends the partial sum on."""
    means: tuple[tuple[int, int], ...]
    """Chunks of other owners, and the rank that sends their mean."""

    @staticmethod
    def from_layout(layout: Layout, rank: int) -> Schedule:
        slices: dict[int, int] = {}
        up, down = [], []
        for k, chunk in enumerate(layout.chunks):
            tree = layout.trees[chunk.owner]
            number = slices[chunk.owner] = slices.get(chunk.owner, -1) + 1
            # Of several owners each rank starts with its neighbor, so that no owner is the first target of all ranks.
            up.append((tree.height[rank], number, (chunk.owner - rank) % layout.world_size, k))
            down.append((tree.depth[rank], number, (rank - chunk.owner) % layout.world_size, k))
        parents = [layout.trees[chunk.owner].parents[rank] for chunk in layout.chunks]
        sends = [(k, parent) for height, _, _, k in sorted(up) if not height and (parent := parents[k]) is not None]
        reductions = [k for height, _, _, k in sorted(up) if height or parents[k] is None]
        means = [(k, parent) for _, _, _, k in sorted(down) if (parent := parents[k]) is not None]
        return Schedule(tuple(sends), tuple(reductions), tuple(means))


@dataclass(frozen=True)
class Layout:
    """The messages in which the layers of one flat tensor are sent: a pure function of layers, world, dtype and
    algorithm.

    Coded layers are divided among owners, in chunks, or gathered by all ranks. Summed layers share a few sums.
    """

    layers: tuple[Layer, ...]
    chunks: tuple[Chunk, ...]
    """Layers that are divided among owners."""
    gathered: tuple[Chunk, ...]
    """Layers that all ranks gather."""
    sums: tuple[Sum, ...]
    dtype: torch.dtype
    algorithm: Algorithm
    world: World
    part_numel: int = 0
    """Number of elements of each rank's part, in a buffer with one part for each rank (`part_layout`)."""
    local: tuple[Chunk, ...] = ()
    """Chunks of such a buffer, with offsets from the start of their part."""

    @staticmethod
    def build(
        layers: Sequence[Layer], world: World | int, dtype: torch.dtype, algorithm: Algorithm | None = None
    ) -> Layout:
        """Return the layout of ``layers`` for a world (or its size), by default for scatter-reduce-all-gather.

        Raises:
            ValueError: a layer's compressor does not work with the algorithm.
        """
        world = World(world) if isinstance(world, int) else world
        algorithm = algorithm or ScatterReduceAllGather()
        shares = algorithm.shares(world)
        whole: list[_Cut] = []
        owned: list[list[_Cut]] = [[] for _ in range(world.size)]
        for layer in layers:
            compressor = layer.compressor
            if not layer.numel or not isinstance(compressor, Coded):
                continue
            if compressor.gathered or algorithm.gathers:
                whole.append((compressor, Piece(layer.name, layer.start, layer.numel, 0, 0, layer.shape)))
                continue
            if not algorithm.is_star and not compressor.traits.plain_sum:
                raise ValueError(
                    f"{layer.name} has {compressor}, whose votes an owner must count itself: "
                    f"use the collective algorithm sra or parameter_server with it, not {algorithm}"
                )
            for owner, begin, end in owned_parts(layer.name, compressor, layer.numel, shares):
                piece = Piece(layer.name, layer.start + begin, end - begin, begin, 0, layer.shape)
                owned[owner].append((compressor, piece))
        chunks = [chunk for owner, cuts in enumerate(owned) for chunk in _chunks(cuts, dtype, owner)]
        # Messages of bounded size are packed into one, so that a single size is sent beforehand.
        bounded = any(compressor.traits.bounded for compressor, _ in whole)
        gathered = [_chunk(whole, dtype)] if bounded else _chunks(whole, dtype)
        return Layout(tuple(layers), tuple(chunks), tuple(gathered), _sums(layers, dtype), dtype, algorithm, world)

    @property
    def world_size(self) -> int:
        return self.world.size

    @property
    def numel(self) -> int:
        return sum(layer.numel for layer in self.layers)

    @cached_property
    def num_coded(self) -> int:
        """Number of elements that a rank encodes in a step: those of coded layers, each once, as worker or as owner."""
        return sum(layer.numel for layer in self.layers if isinstance(layer.compressor, Coded))

    @cached_property
    def slots(self) -> tuple[Slot, ...]:
        """State that the layers need."""
        return tuple(dict.fromkeys(slot for layer in self.layers for slot in layer.compressor.slots))

    @property
    def wide_dtype(self) -> torch.dtype:
        """Dtype of sums, and of messages that a compressor other than the chunk's encodes."""
        return torch.promote_types(self.dtype, torch.float32)

    @cached_property
    def trees(self) -> tuple[Tree, ...]:
        """Reduction tree of each owner's chunks."""
        return tuple(self.algorithm.tree(owner, self.world) for owner in range(self.world.size))

    @cached_property
    def has_partial_sums(self) -> bool:
        """Whether ranks other than its owner add up contributions to a chunk."""
        return any(max(self.trees[owner].depth) > 1 for owner in {chunk.owner for chunk in self.chunks})

    def schedule(self, rank: int) -> Schedule:
        """Return the order in which ``rank`` handles the chunks."""
        if rank not in self._schedules:
            self._schedules[rank] = Schedule.from_layout(self, rank)
        return self._schedules[rank]

    @cached_property
    def _schedules(self) -> dict[int, Schedule]:
        return {}

    def sent_chunk(self, k: int, rank: int, parent: int) -> Chunk:
        """Return chunk ``k`` as ``rank`` sends it to ``parent``: the chunk itself, unless the algorithm has another
        compressor between these ranks."""
        # Cached, because it is needed in every step and an algorithm may parse a spec.
        key = (k, rank, parent)
        if key not in self._sent_chunks:
            chunk = self.chunks[k]
            compressors = [self._sent_by(group.compressor, chunk.owner, rank, parent) for group in chunk.groups]
            same = all(c is group.compressor for c, group in zip(compressors, chunk.groups, strict=True))
            self._sent_chunks[key] = chunk if same else _with_compressors(chunk, compressors, self.wide_dtype)
        return self._sent_chunks[key]

    def _sent_by(self, compressor: Coded, owner: int, rank: int, parent: int) -> Coded:
        if isinstance(compressor, Packed):
            # Exact on all links, and as wide as the sum of so many ranks' integers.
            return compressor.of(self.trees[owner].sizes[rank])
        return self.algorithm.compressor_between(compressor, rank, parent, self.world)

    @cached_property
    def _sent_chunks(self) -> dict[tuple[int, int, int], Chunk]:
        return {}

    def packed_layout(self, s: Sum) -> Layout:
        """Return the layout of the messages of a packed sum."""
        assert s.packed is not None
        layer = Layer("sum", 0, (s.packed.spread_numel(s.numel),), s.packed.of(self.world.size))
        algorithm = ScatterReduceAllGather() if self.algorithm.gathers else self.algorithm
        return Layout.build([layer], self.world, torch.float32, algorithm)

    def reduction_traffic(self, *, up: bool = True, down: bool = True) -> Traffic:
        """Return the messages of K chunks. Phase k: contributions to chunk k, toward its owner (``up``). Phase K + k:
        the mean of chunk k, from its owner (``down``)."""
        traffic: list[list[OutgoingMessage]] = [[] for _ in range(self.world.size)]
        for k, chunk in enumerate(self.chunks):
            tree = self.trees[chunk.owner]
            for rank, parent in enumerate(tree.parents):
                if up and parent is not None:
                    traffic[rank].append(OutgoingMessage(k, self.sent_chunk(k, rank, parent).message_bytes, (parent,)))
                if down and tree.children[rank]:
                    source = None if parent is None else chunk.owner
                    mean = OutgoingMessage(
                        len(self.chunks) + k, chunk.message_bytes, tree.children[rank], source=source
                    )
                    traffic[rank].append(mean)
        return traffic

    def gather_traffic(self) -> Traffic:
        """Return the messages of gathered chunks: phase k is chunk k. If sizes are bounded, phase 0 has the size of
        phase 1."""
        traffic = []
        for rank in range(self.world.size):
            others = tuple(other for other in range(self.world.size) if other != rank)
            if any(chunk.bounded for chunk in self.gathered):
                size = OutgoingMessage(0, SIZE_BYTES, others)
                traffic.append([size, OutgoingMessage(1, self.gathered[0].message_bytes, others, late=True)])
            else:
                traffic.append(
                    [OutgoingMessage(k, chunk.message_bytes, others) for k, chunk in enumerate(self.gathered)]
                )
        return traffic

    def sent_bytes(self, rank: int, transport: Transport | None = None) -> int:
        """Return the bytes that ``rank`` sends in one step. An upper bound if sizes depend on the data.

        A native sum counts as 2(n−1)/n of its size, unless ``transport`` counts it differently.
        """
        sums = 0
        for s in self.sums:
            if s.packed is not None and (transport is None or transport.aggregator is None):
                sums += self.packed_layout(s).sent_bytes(rank)
            elif transport is None:
                sums += ring_bytes(s.numel * s.dtype.itemsize, self.world_size)
            else:
                sums += transport.all_reduce_bytes(s.numel, s.dtype, 0 if s.packed is None else s.packed.limit)
        return sums + sent_bytes(self.reduction_traffic(), rank) + sent_bytes(self.gather_traffic(), rank)

    def message_bytes(self, rank: int) -> int:
        """Return the bytes of the messages that ``rank`` sends and receives, each once."""
        total = self.world_size * sum(chunk.message_bytes for chunk in self.gathered if chunk.bounded)
        for traffic in (self.reduction_traffic(), self.gather_traffic()):
            made = [message for message in traffic[rank] if message.source is None]
            total += sum(message.num_bytes for message in (*made, *arriving(traffic, rank).values()))
        return total

    def sum_bytes(self, rank: int) -> int:
        """Return the bytes of the operands of sums, and of what is needed to send them packed."""
        packed = [(s.packed.spread_numel(s.numel), self.packed_layout(s)) for s in self.sums if s.packed is not None]
        plain = sum(s.numel * s.dtype.itemsize for s in self.sums)
        return plain + sum(4 * numel + layout.message_bytes(rank) for numel, layout in packed)

    @cached_property
    def digest(self) -> int:
        """A 64-bit hash of everything that two ranks must share to read each other's messages."""
        text = "\n".join(f"{layer.name} {layer.start} {layer.shape} {layer.compressor}" for layer in self.layers)
        text += f"\n{self.world_size} {self.world.nodes} {self.dtype} {self.algorithm} {SLICE}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def owned_parts(name: str, compressor: Coded, numel: int, shares: Sequence[int]) -> list[tuple[int, int, int]]:
    """Return the pieces of a coded layer as (owner, begin, end), none of them empty.

    A piece has at least `_LEAST_PIECE` elements, where the layer has that many. The owner of an element depends on its
    layer alone, not on other layers of the same DDP bucket: results are bit-identical however DDP forms buckets, also
    right after a resume.
    """
    # Layers with fewer pieces than there are owners start with different owners.
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


def _chunks(cuts: Sequence[_Cut], dtype: torch.dtype, owner: int = -1) -> list[Chunk]:
    """Distribute cuts over messages of about the same size, dividing those that can be divided."""
    numel = sum(piece.numel for _, piece in cuts)
    size = -(-numel // max(1, round(numel / SLICE)))
    slices: list[list[_Cut]] = [[]]
    room = size
    for compressor, piece in cuts:
        grain = None if compressor.gathered else compressor.grain
        at = 0
        while at < piece.numel:
            left = piece.numel - at
            take = left if grain is None else min(left, -(-room // _unit(grain)) * _unit(grain))
            part = piece._replace(start=piece.start + at, numel=take, index0=piece.index0 + at)
            slices[-1].append((compressor, part))
            at, room = at + take, room - take
            if room <= 0:
                slices.append([])
                room = size
    return [_chunk(part, dtype, owner) for part in slices if part]


def _chunk(cuts: Sequence[_Cut], dtype: torch.dtype, owner: int = -1) -> Chunk:
    groups: dict[Coded, list[Piece]] = {}
    for compressor, piece in cuts:
        groups.setdefault(compressor, []).append(piece)
    return _placed(list(groups.items()), dtype, owner)


def _with_compressors(chunk: Chunk, compressors: Sequence[Coded], dtype: torch.dtype) -> Chunk:
    """Return the same elements with other compressors, one for each group, at whose grain they may not be cut."""
    groups = []
    for compressor, group in zip(compressors, chunk.groups, strict=True):
        pieces, grain, cut_at = group.segments.pieces, compressor.grain, group.compressor.grain
        if grain is not None and cut_at is not None and cut_at % grain:
            # Draws begin at a multiple of the grain, and no two pieces of a layer share any.
            pieces = [piece._replace(index0=piece.index0 * grain) for piece in pieces]
        groups.append((compressor, pieces))
    return _placed(groups, dtype, chunk.owner)


def _placed(groups: Sequence[tuple[Coded, Sequence[Piece]]], dtype: torch.dtype, owner: int) -> Chunk:
    """Return the chunk of these pieces, each with its place in the message."""
    at, placed = HEADER_BYTES, []
    for compressor, pieces in groups:
        moved = []
        for piece in pieces:
            moved.append(piece._replace(payload=at))
            at += compressor.payload_bytes(piece.numel, dtype)
        placed.append(Group(compressor, Segments.build(moved)))
    return Chunk(tuple(placed), at, owner)


def _sums(layers: Sequence[Layer], dtype: torch.dtype) -> tuple[Sum, ...]:
    places: dict[tuple[int, Reduction, str, str], dict[Summed, list[tuple[Piece, SumShape]]]] = {}
    for layer in layers:
        compressor = layer.compressor
        if not isinstance(compressor, Summed) or not layer.numel:
            continue
        piece = Piece(layer.name, layer.start, layer.numel, 0, 0, layer.shape)
        for round, part in enumerate(compressor.sums(layer.shape, dtype)):
            assert part.packed is None or round == 0, "later rounds have no messages of their own"
            place = (round, part.op, str(part.dtype), str(part.packed or ""))
            places.setdefault(place, {}).setdefault(compressor, []).append((piece, part))
    # Sorted: all ranks must start all-reduces in the same order, and a round must end before the next one.
    return tuple(_sum(place[0], members) for place, members in sorted(places.items(), key=lambda item: item[0]))


def _sum(round: int, members: Mapping[Summed, Sequence[tuple[Piece, SumShape]]]) -> Sum:
    """Return the sum of parts of one operation and dtype. Those of a compressor lie end to end."""
    end, placed = 0, list[tuple[Summed, Parts]]()
    for compressor, parts in members.items():
        own = Parts.build([(piece, part.numel) for piece, part in parts], end)
        end = own.where.stop
        placed.append((compressor, own))
    kind = next(iter(members.values()))[0][1]
    return Sum(round, kind.op, kind.dtype, tuple(placed), end, kind.packed)


class Shard(NamedTuple):
    """Elements of a layer in one rank's part."""

    name: str
    """Name of the layer, on which random draws depend."""
    start: int
    """First element in the part."""
    numel: int
    index0: int
    """Index of the first random draw, a multiple of the compressor's grain: no two shards of a layer share draws."""
    compressor: Coded

    def piece(self, at: int) -> Piece:
        """Return the shard as a piece of a buffer in which its part starts at element ``at``."""
        return Piece(self.name, at + self.start, self.numel, self.index0, 0, (self.numel,))


def part_layout(layers: Sequence[Layer], world_size: int, dtype: torch.dtype) -> Layout:
    """Return the layout of a flat buffer of ``world_size`` parts, each with ``layers``; rank r owns the r-th.

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
    """Return the layout of a flat buffer in which rank r owns ``parts[r]``, from element ``r · part_numel`` on.

    It is the layout of `reduce_scatter` and `all_gather`: every value is coded once, and once more for each further hop
    to its owner if ``algorithm`` has several. Elements between shards are not sent.
    """
    chunks: list[Chunk] = []
    local: list[Chunk] = []
    placed: list[Layer] = []
    for owner, shards in enumerate(parts):
        at = owner * part_numel
        placed += [Layer(f"{s.name} from {s.index0}", at + s.start, (s.numel,), s.compressor) for s in shards]
        for where, start in ((chunks, at), (local, 0)):
            where += _chunks([(s.compressor, s.piece(start)) for s in shards], dtype, owner)
    algorithm = algorithm or ScatterReduceAllGather()
    return Layout(tuple(placed), tuple(chunks), (), (), dtype, algorithm, world, part_numel, tuple(local))
