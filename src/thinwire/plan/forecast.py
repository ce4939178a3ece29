"""How long a training step will take, bucket by bucket, from measured speeds: behind `thinwire doctor` and ``auto``.

A step is a timeline: DDP's buckets become ready one after the other while backward runs, each travels as soon as it is
ready and the link is free, and the step goes on when the last one has arrived. So what counts is not the time that
communication takes but the part of it that backward does not hide.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from thinwire.collectives import Hierarchical, ScatterReduceAllGather, Topology, World
from thinwire.compressors import Coded, Compressor, Summed

_NATIVE_DEPTH = 2
"""All-reduces that gloo has under way at once."""
_STAR = ScatterReduceAllGather()
_UNEVEN = 1.25


@dataclass(frozen=True)
class Curve:
    """Seconds that a message takes by the bytes that a rank sends, straight between those measured."""

    points: tuple[tuple[float, float], ...]
    """(bytes, seconds), ascending by bytes."""

    def __post_init__(self) -> None:
        sizes = [size for size, _ in self.points]
        if not sizes or sizes != sorted(set(sizes)) or min(s for _, s in self.points) < 0:
            raise ValueError(f"a curve is (bytes, seconds) by ascending bytes, not {self.points}")

    def seconds(self, num_bytes: float) -> float:
        """Of a message of so many bytes: beyond what was measured by `per_byte`; 0 of none."""
        if num_bytes <= 0:
            return 0.0
        sizes = [size for size, _ in self.points]
        at = bisect_left(sizes, num_bytes)
        if at == 0:
            return self.points[0][1]
        if at == len(sizes):
            return self.points[-1][1] + (num_bytes - sizes[-1]) * self.per_byte
        (low, before), (high, after) = self.points[at - 1 : at + 1]
        return before + (after - before) * (num_bytes - low) / (high - low)

    @property
    def per_byte(self) -> float:
        """Seconds that one more byte costs a large message: what it costs behind another one, too."""
        if len(self.points) == 1:
            return self.points[0][1] / max(1.0, self.points[0][0])
        # The messages before the largest one are short, and their slope is mostly noise.
        (low, before), (high, after) = self.points[0], self.points[-1]
        return max(after - before, 0.0) / (high - low)

    @property
    def bandwidth(self) -> float:
        """Bytes per second of large messages."""
        return 1 / self.per_byte if self.per_byte > 0 else math.inf

    @property
    def latency_s(self) -> float:
        """Seconds of the smallest message."""
        return self.points[0][1]


@dataclass(frozen=True)
class Legs:
    """What a hierarchy's messages take, inside nodes and between them, by the bytes that a rank sends."""

    world: World
    inside: Curve
    """Every rank sends to all others of its node at once."""
    across: Curve
    """Every rank sends to its counterparts on all other nodes at once."""

    @property
    def shares(self) -> tuple[float, float]:
        """Of an encoded bucket, how much the busiest rank sends inside its node, and to other nodes, in each hop."""
        sizes = [len(ranks) for ranks in self.world.members]
        return 1 - 1 / max(sizes), (len(sizes) - 1) / (len(sizes) * min(sizes))

    def seconds(self, num_bytes: float, inner_bytes: float) -> tuple[float, float]:
        """Of a bucket that takes so many bytes encoded as between nodes, and as inside them on the way up: by itself,
        and behind another one."""
        near, far = self.shares
        hops = [
            (self.inside, near * inner_bytes),
            *[(self.across, far * num_bytes)] * 2,
            (self.inside, near * num_bytes),
        ]
        return sum(curve.seconds(size) for curve, size in hops), sum(curve.per_byte * size for curve, size in hops)


@dataclass(frozen=True)
class Links:
    """What communication between these ranks takes, by the bytes that a rank sends."""

    native: Curve
    """The backend's own all-reduce of fp32: what stock training has."""
    exchange: Curve
    """Every rank sends to every other at once: what coded messages do, twice where an owner adds them up."""
    num_ranks: int
    native_cpu: float = 0.0
    """Seconds of processor time that a byte of an all-reduce takes on the sender's machine."""
    exchange_cpu: float = 0.0
    """The same of an exchange."""
    legs: Legs | None = None
    """The same of hierarchies, where there are several nodes and one of them has several ranks."""
    rates: tuple[float, ...] = ()
    """By rank, how fast its link is beside the fastest; empty where nobody asked."""

    def way(self, topology: Topology) -> Topology | None:
        """A topology as it is over these links, its rates measured; None if they have nothing for it."""
        if topology.needs_nodes:
            return topology if self.legs is not None else None
        if isinstance(topology, ScatterReduceAllGather) and topology.rates == "measured":
            return replace(topology, rates=self.rates) if _uneven(self.rates) else None
        return topology

    def coded_seconds(self, topology: Topology, num_bytes: float, inner_bytes: float) -> tuple[float, float]:
        """Of the layers of a bucket that owners add up, by their encoded bytes between nodes, and inside them on the
        way up: by themselves, and behind another bucket."""
        if isinstance(topology, Hierarchical) and self.legs is not None:
            return self.legs.seconds(num_bytes, inner_bytes)
        sent = self.ring * num_bytes * self._balance(topology)
        return 2 * self.exchange.seconds(sent / 2), sent * self.exchange.per_byte

    def _balance(self, topology: Topology) -> float:
        """By how much the slowest link ends sooner with this topology's shares than with equal ones."""
        n = self.num_ranks
        if not isinstance(topology, ScatterReduceAllGather) or isinstance(topology.rates, str) or len(self.rates) != n:
            return 1.0
        shares = topology.shares(World(n))
        busy = [(1 + (n - 2) * share / sum(shares)) / rate for share, rate in zip(shares, self.rates, strict=True)]
        return max(busy) * min(self.rates) / (1 + (n - 2) / n)

    def sent(self, topology: Topology, compressor: Compressor, shape: Sequence[int], dtype: torch.dtype) -> float:
        """Bytes that a rank sends for a layer: of a hierarchy, the busiest one."""
        num_bytes = compressor.wire_bytes(shape, dtype)
        if not isinstance(compressor, Coded):
            return self.ring * num_bytes
        if compressor.gathered:
            return (self.num_ranks - 1) * num_bytes
        if isinstance(topology, Hierarchical) and self.legs is not None:
            near, far = self.legs.shares
            form, wide = _inner(topology, compressor, dtype)
            return near * (form.wire_bytes(shape, wide) + num_bytes) + 2 * far * num_bytes
        return self.ring * num_bytes

    @property
    def ring(self) -> float:
        """Bytes that a rank sends for each byte that is all-reduced."""
        return 2 * self.others

    @property
    def others(self) -> float:
        """Bytes that a rank sends for each byte that is gathered, or reduced in shards."""
        return (self.num_ranks - 1) / self.num_ranks


def _uneven(rates: Sequence[float]) -> bool:
    """Whether ranks' links differ by so much that slow ones had better own less."""
    return bool(rates) and max(rates) >= _UNEVEN * min(rates)


@dataclass(frozen=True)
class Bucket:
    """A DDP bucket, in a step that waits for nothing."""

    ready_s: float
    """Since the step began."""
    layers: tuple[tuple[str, tuple[int, ...]], ...]
    """Names and shapes."""
    itemsize: int = 4
    """Bytes of an element of its gradients."""

    @property
    def numel(self) -> int:
        return sum(math.prod(shape) for _, shape in self.layers)

    @property
    def num_bytes(self) -> int:
        return self.itemsize * self.numel

    @property
    def dtype(self) -> torch.dtype:
        """Of its gradients, as far as sizes go."""
        return torch.float32 if self.itemsize == 4 else torch.bfloat16


@dataclass(frozen=True)
class Pace:
    """A training step without its communication."""

    buckets: tuple[Bucket, ...]
    """In the order in which they leave."""
    compute_s: float
    """The whole step: forward, backward, optimizer, and what the script does besides."""
    shared: float = 0.0
    """How much of the processor time that communication takes is taken from backward: 0 where a core is free for it, 1
    where there is none."""

    @property
    def backward_end_s(self) -> float:
        """When the last bucket is ready."""
        return self.buckets[-1].ready_s


@dataclass(frozen=True)
class Transfer:
    """What the communication of one bucket takes."""

    alone_s: float
    """From ready to arrived, if nothing else is under way."""
    after_s: float
    """At least, after the bucket before it has arrived: bytes queue, latencies do not."""
    cpu_s: float = 0.0
    """Processor time, part of both."""
    codec_s: float = 0.0
    """Of that, what nothing else goes on beside: encoding and decoding."""


def finish(
    ready: Sequence[float], transfers: Sequence[Transfer], *, shared: float = 0.0, depth: int | None = None
) -> list[float]:
    """When each bucket has arrived.

    Args:
        ready: seconds since the step began at which each would be ready if nothing were sent.
        transfers: what each takes.
        shared: share of the transfers' processor time that backward loses, as of `Pace`.
        depth: how many may be under way at once; any number if None.
    """
    done: list[float] = []
    spans: list[tuple[float, float, float]] = []
    for i, (at, transfer) in enumerate(zip(ready, transfers, strict=True)):
        begins = at + _lost(at, spans, shared)
        if depth is not None and i >= depth:
            begins = max(begins, done[i - depth])
        # A core that backward uses, too, encodes at half its speed as long as that lasts.
        slowed = shared * min(transfer.codec_s, max(0.0, ready[-1] - begins))
        before = done[-1] if done else 0.0
        done.append(max(begins + transfer.alone_s + slowed, before + transfer.after_s))
        spans.append((max(begins, before), done[-1], transfer.cpu_s))
    return done


def _lost(at: float, spans: Sequence[tuple[float, float, float]], shared: float) -> float:
    """Seconds by which what backward would have reached at ``at`` is late: transfers took the core for so long."""
    late = 0.0
    for _ in range(50 if shared and spans else 0):
        now = at + late
        spent = sum(cpu * _part(now, start, end) for start, end, cpu in spans)
        if shared * spent - late < 1e-7:
            break
        late = shared * spent
    return late


def _part(now: float, start: float, end: float) -> float:
    return min(1.0, max(0.0, (now - start) / (end - start))) if end > start else float(now >= end)


def _inner(topology: Hierarchical, compressor: Coded, dtype: torch.dtype) -> tuple[Coded, torch.dtype]:
    """What a part is encoded with inside a node, and the dtype in which sums are taken where that is another."""
    form = topology.inner(compressor)
    return form, dtype if form is compressor else torch.promote_types(dtype, torch.float32)


def native_transfer(bucket: Bucket, links: Links) -> Transfer:
    """A bucket by the backend's own all-reduce: what DDP does."""
    sent = links.ring * bucket.num_bytes
    return Transfer(links.native.seconds(sent), sent * links.native.per_byte, sent * links.native_cpu)


def coded_transfer(
    bucket: Bucket,
    layers: Mapping[str, Compressor],
    links: Links,
    codec_s: Mapping[Compressor, float],
    topology: Topology = _STAR,
) -> Transfer:
    """A bucket whose layers have these compressors.

    Coded layers are exchanged, added up by their owners and exchanged again; whole ones gathered by all; sums go
    through the native all-reduce, one round after the other. All three are under way together, and share the link.

    Args:
        bucket: which layers.
        layers: compressor of each, by name.
        links: what messages take.
        codec_s: seconds that an element costs a rank in a step, as of `Speeds`.
        topology: how messages meet: one that is no hierarchy is taken for a scatter-reduce-all-gather.
    """
    n, ring, dtype = links.num_ranks, links.ring, bucket.dtype
    reduced = inner = gathered = codec = 0.0
    rounds: dict[int, float] = {}
    for name, shape in bucket.layers:
        compressor = layers[name]
        codec += math.prod(shape) * codec_s.get(compressor, 0.0)
        if isinstance(compressor, Summed):
            width = compressor.part_dtype(dtype).itemsize
            for r in range(compressor.rounds):
                rounds[r] = rounds.get(r, 0.0) + ring * width * compressor.part_numel(r, shape)
        elif isinstance(compressor, Coded) and compressor.gathered:
            gathered += (n - 1) * compressor.wire_bytes(shape, dtype)
        else:
            reduced += compressor.wire_bytes(shape, dtype)
            if isinstance(topology, Hierarchical) and isinstance(compressor, Coded):
                form, wide = _inner(topology, compressor, dtype)
                inner += form.wire_bytes(shape, wide)
                if form is not compressor:
                    # Of two ranks a node, half of the elements are coded otherwise there, and half as many encoded as
                    # the layer's; decoding means stays the same.
                    plain = codec_s.get(compressor, 0.0)
                    codec += math.prod(shape) * (codec_s.get(form, plain) / 2 - plain / 4)
    ways = [
        links.coded_seconds(topology, reduced, inner),
        (links.exchange.seconds(gathered), gathered * links.exchange.per_byte),
        (sum(map(links.native.seconds, rounds.values())), sum(rounds.values()) * links.native.per_byte),
    ]
    on_wire = sum(wire for _, wire in ways)
    alone = max(alone + on_wire - wire for alone, wire in ways)
    traffic = (ring * reduced + gathered) * links.exchange_cpu + sum(rounds.values()) * links.native_cpu
    return Transfer(alone + codec, max(on_wire, codec), codec + traffic, codec)


def exposed_seconds(pace: Pace, transfers: Sequence[Transfer], *, depth: int | None = None) -> float:
    """What communication adds to a step: from when the last bucket would be ready to when the last one has arrived."""
    ready = [bucket.ready_s for bucket in pace.buckets]
    return max(0.0, finish(ready, transfers, shared=pace.shared, depth=depth)[-1] - ready[-1])


def native_step(pace: Pace, links: Links) -> float:
    """Seconds of a step of stock DDP."""
    transfers = [native_transfer(bucket, links) for bucket in pace.buckets]
    return pace.compute_s + exposed_seconds(pace, transfers, depth=_NATIVE_DEPTH)


def planned_step(
    pace: Pace,
    links: Links,
    layers: Mapping[str, Compressor],
    codec_s: Mapping[Compressor, float],
    topology: Topology = _STAR,
) -> float:
    """Seconds of a step with these compressors, by layer. ``codec_s``: as of `Speeds`."""
    transfers = [coded_transfer(bucket, layers, links, codec_s, topology) for bucket in pace.buckets]
    return pace.compute_s + exposed_seconds(pace, transfers)


def accumulated(pace: Pace, step: float, times: int) -> float:
    """Seconds for one of ``times`` batches between two exchanges (``no_sync``), from those of a step that has one."""
    return (step + (times - 1) * pace.backward_end_s) / times


def sent_in_step(
    pace: Pace, links: Links, layers: Mapping[str, Compressor] | None, topology: Topology = _STAR
) -> float:
    """Bytes that a rank sends in a step: with these compressors, or without any."""
    if layers is None:
        return sum(links.ring * bucket.num_bytes for bucket in pace.buckets)
    return sum(
        links.sent(topology, layers[name], shape, bucket.dtype)
        for bucket in pace.buckets
        for name, shape in bucket.layers
    )
