"""Predicts the time of a training step, bucket by bucket, from measured speeds, for `thinwire doctor` and ``auto``.

A step is a timeline: DDP's buckets become ready one after the other while backward runs, each is sent as soon as it is
ready and the link is free, and the step continues when all are received. The time that counts is not all that
communication takes but the part of it that backward does not hide.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from thinwire.collectives import Algorithm, Hierarchical, ScatterReduceAllGather, World
from thinwire.compressors import Coded, Compressor, Summed

_UNEVEN = 1.25
_DEPTH = 2
"""Number of buckets that are under way at once, in gloo's all-reduces and in thinwire's exchanges."""
_STAR = ScatterReduceAllGather()
FEW_BITS = "gaussian(bits=2)"
"""Compressor of `CompressedAdamW`'s gradients. Local updates send as few bits, in larger buckets."""
_INTERVALS = (10, 25, 50, 100, 250, 500)
_HIDDEN_SHARE = 0.05
"""Share of a step below which exchanges count as free."""


@dataclass(frozen=True)
class Curve:
    """Seconds of a message as a function of a rank's bytes, straight between those measured."""

    points: tuple[tuple[float, float], ...]
    """Pairs of bytes and seconds, ascending by bytes."""

    def __post_init__(self) -> None:
        sizes = [size for size, _ in self.points]
        if not sizes or sizes != sorted(set(sizes)) or min(s for _, s in self.points) < 0:
            raise ValueError(f"a curve is (bytes, seconds) by ascending bytes, not {self.points}")

    def seconds(self, num_bytes: float) -> float:
        """Return the seconds of a message of ``num_bytes``; sizes beyond the measured ones by `per_byte`."""
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

    def at_rate(self, rate: float) -> Curve:
        """Return the times of messages over a link that carries at most ``rate`` bytes per second each way."""
        return Curve(tuple((size, max(seconds, self.latency_s + size / rate)) for size, seconds in self.points))

    @property
    def per_byte(self) -> float:
        """Seconds that one more byte adds to a large message, also to one behind another."""
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
class HierarchyTimes:
    """Times of a hierarchy's messages, inside nodes and between them, by the bytes that a rank sends."""

    world: World
    inside: Curve
    """Curve of messages from every rank to all others of its node at once."""
    across: Curve
    """Curve of messages from every rank to its counterparts on all other nodes at once."""

    @property
    def shares(self) -> tuple[float, float]:
        """Shares of an encoded bucket that the busiest rank sends inside its node, and to other nodes, in each hop."""
        sizes = [len(ranks) for ranks in self.world.members]
        return 1 - 1 / max(sizes), (len(sizes) - 1) / (len(sizes) * min(sizes))

    def seconds(self, num_bytes: float, inner_bytes: float) -> tuple[float, float]:
        """Return the seconds of a bucket, by itself and behind another one, from its bytes as encoded between nodes,
        and inside them on the way up."""
        near, far = self.shares
        hops = [
            (self.inside, near * inner_bytes),
            *[(self.across, far * num_bytes)] * 2,
            (self.inside, near * num_bytes),
        ]
        return sum(curve.seconds(size) for curve, size in hops), sum(curve.per_byte * size for curve, size in hops)


@dataclass(frozen=True)
class Links:
    """Times of communication between these ranks, by the bytes that a rank sends."""

    native: Curve
    """Curve of the backend's own all-reduce of fp32, as in stock training."""
    exchange: Curve
    """Curve of messages from every rank to every other at once. Coded ones take it twice where an owner adds them."""
    num_ranks: int
    native_cpu: float = 0.0
    """Seconds of processor time that a byte of an all-reduce takes on the sender's machine."""
    exchange_cpu: float = 0.0
    """Seconds of processor time that a byte of an exchange takes."""
    legs: HierarchyTimes | None = None
    """Times of hierarchies, if there are several nodes and one of them has several ranks."""
    rates: tuple[float, ...] = ()
    """Rate of each rank's link relative to the fastest; empty if it was not measured."""

    def adapted(self, algorithm: Algorithm) -> Algorithm | None:
        """Return the algorithm for these links, its rates measured; None if it needs measurements that they lack."""
        if algorithm.needs_nodes:
            return algorithm if self.legs is not None else None
        if isinstance(algorithm, ScatterReduceAllGather) and algorithm.rates == "measured":
            return replace(algorithm, rates=self.rates) if _uneven(self.rates) else None
        return algorithm

    def coded_seconds(self, algorithm: Algorithm, num_bytes: float, inner_bytes: float) -> tuple[float, float]:
        """Return the seconds of the layers of a bucket that owners add up, by themselves and behind another bucket,
        from their encoded bytes between nodes, and inside them on the way up."""
        if isinstance(algorithm, Hierarchical) and self.legs is not None:
            return self.legs.seconds(num_bytes, inner_bytes)
        sent = self.ring * num_bytes * self._balance(algorithm)
        return 2 * self.exchange.seconds(sent / 2), sent * self.exchange.per_byte

    def _balance(self, algorithm: Algorithm) -> float:
        """Return the factor by which the slowest link ends sooner with this algorithm's shares than with equal ones."""
        n = self.num_ranks
        if (
            not isinstance(algorithm, ScatterReduceAllGather)
            or isinstance(algorithm.rates, str)
            or len(self.rates) != n
        ):
            return 1.0
        shares = algorithm.shares(World(n))
        busy = [(1 + (n - 2) * share / sum(shares)) / rate for share, rate in zip(shares, self.rates, strict=True)]
        return max(busy) * min(self.rates) / (1 + (n - 2) / n)

    def at_rate(self, rate: float) -> Links:
        """Return these links at no more than ``rate`` bytes per second each way; every rank alone on its node."""
        native, exchange = self.native.at_rate(rate), self.exchange.at_rate(rate)
        return replace(self, native=native, exchange=exchange, legs=None, rates=())

    def sent(self, algorithm: Algorithm, compressor: Compressor, shape: Sequence[int], dtype: torch.dtype) -> float:
        """Return the bytes that a rank sends for a layer: of a hierarchy, the busiest one."""
        num_bytes = compressor.wire_bytes(shape, dtype)
        if not isinstance(compressor, Coded):
            return self.ring * num_bytes
        if compressor.gathered:
            return (self.num_ranks - 1) * num_bytes
        if isinstance(algorithm, Hierarchical) and self.legs is not None:
            near, far = self.legs.shares
            form, wide = inner_form(algorithm, compressor, dtype)
            return near * (form.wire_bytes(shape, wide) + num_bytes) + 2 * far * num_bytes
        return self.ring * num_bytes

    @property
    def ring(self) -> float:
        """Ratio of the bytes that a rank sends to those that are all-reduced."""
        return 2 * self.others

    @property
    def others(self) -> float:
        """Ratio of the bytes that a rank sends to those that are gathered, or reduced in shards."""
        return (self.num_ranks - 1) / self.num_ranks


def _uneven(rates: Sequence[float]) -> bool:
    """Whether ranks' links differ so much that slow ones should own less."""
    return bool(rates) and max(rates) >= _UNEVEN * min(rates)


def inner_form(algorithm: Hierarchical, compressor: Coded, dtype: torch.dtype) -> tuple[Coded, torch.dtype]:
    """Return the compressor of a part inside a node, and the dtype of sums if that is another."""
    form = algorithm.inner(compressor)
    return form, dtype if form is compressor else torch.promote_types(dtype, torch.float32)


@dataclass(frozen=True)
class Transfer:
    """Times of the communication of one bucket."""

    alone_s: float
    """Seconds from ready to received, if nothing else is sent."""
    after_s: float
    """Least seconds after the bucket before it was received: bytes queue, latencies do not."""
    cpu_s: float = 0.0
    """Seconds of processor time, part of both."""
    codec_s: float = 0.0
    """Seconds of ``cpu_s`` that nothing overlaps with: encoding and decoding."""


Span = tuple[float, float, float]
"""Start and end of a transfer, and the seconds of processor time that it takes in between."""


def finish(
    ready: Sequence[float], transfers: Sequence[Transfer], *, shared: float = 0.0, depth: int | None = None
) -> list[float]:
    """Return the time at which each bucket is received.

    Args:
        ready: seconds since the step began at which each would be ready if nothing were sent.
        transfers: the times of each.
        shared: share of the transfers' processor time that backward loses; see `Pace`.
        depth: how many may be under way at once; any number if None.
    """
    done: list[float] = []
    spans: list[Span] = []
    for i, (at, transfer) in enumerate(zip(ready, transfers, strict=True)):
        begins = computed_at(0.0, at, spans, shared)
        if depth is not None and i >= depth:
            begins = max(begins, done[i - depth])
        # A core that backward uses, too, encodes at half its speed for so long.
        slowed = shared * min(transfer.codec_s, max(0.0, ready[-1] - begins))
        before = done[-1] if done else 0.0
        done.append(max(begins + transfer.alone_s + slowed, before + transfer.after_s))
        spans.append((max(begins, before), done[-1], transfer.cpu_s))
    return done


def computed_at(now: float, work: float, spans: Sequence[Span], shared: float) -> float:
    """Return the time at which ``work`` seconds of computing, begun at ``now``, are done: transfers take their share of
    the core."""
    work = max(0.0, work)
    end = now + work
    for _ in range(50 if shared and work else 0):
        taken = sum(cpu * (_part(end, start, stop) - _part(now, start, stop)) for start, stop, cpu in spans)
        late = now + work + shared * taken
        if late - end < 1e-7:
            break
        end = late
    return end


def _part(now: float, start: float, end: float) -> float:
    return min(1.0, max(0.0, (now - start) / (end - start))) if end > start else float(now >= end)


@dataclass(frozen=True)
class Bucket:
    """A DDP bucket, in a step without waits."""

    ready_s: float
    """Seconds since the step began."""
    layers: tuple[tuple[str, tuple[int, ...]], ...]
    """Names and shapes of the layers."""
    itemsize: int = 4
    """Bytes of an element of the gradients."""

    @property
    def numel(self) -> int:
        return sum(math.prod(shape) for _, shape in self.layers)

    @property
    def num_bytes(self) -> int:
        return self.itemsize * self.numel

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the gradients, as far as sizes matter."""
        return torch.float32 if self.itemsize == 4 else torch.bfloat16


@dataclass(frozen=True)
class Pace:
    """A training step without its communication."""

    buckets: tuple[Bucket, ...]
    """Buckets in the order in which they are sent."""
    compute_s: float
    """Seconds of the whole step: forward, backward, optimizer, and what else the script does."""
    shared: float = 0.0
    """Share of communication's processor time that is taken from backward: 0 where a core is free for it, 1 where none
    is."""

    @property
    def backward_end_s(self) -> float:
        """Seconds until the last bucket is ready."""
        return self.buckets[-1].ready_s


def native_transfer(bucket: Bucket, links: Links) -> Transfer:
    """Return the transfer of a bucket by the backend's own all-reduce, as in DDP."""
    sent = links.ring * bucket.num_bytes
    return Transfer(links.native.seconds(sent), sent * links.native.per_byte, sent * links.native_cpu)


def coded_transfer(
    bucket: Bucket,
    layers: Mapping[str, Compressor],
    links: Links,
    codec_s: Mapping[Compressor, float],
    algorithm: Algorithm = _STAR,
) -> Transfer:
    """Return the transfer of a bucket whose layers have these compressors.

    Coded layers are exchanged, added up by their owners and exchanged again; whole ones gathered by all; sums go
    through the native all-reduce, one round after the other. All three are under way together, and share the link.

    Args:
        bucket: the layers.
        layers: the compressor of each, by name.
        links: the times of messages.
        codec_s: seconds that an element costs a rank in a step; see `Speeds`.
        algorithm: the collective algorithm; one that is no hierarchy is taken for a scatter-reduce-all-gather.
    """
    n, ring, dtype = links.num_ranks, links.ring, bucket.dtype
    reduced = inner = gathered = codec = 0.0
    rounds: dict[int, float] = {}
    for name, shape in bucket.layers:
        compressor = layers[name]
        codec += math.prod(shape) * codec_s.get(compressor, 0.0)
        if isinstance(compressor, Summed):
            for r, part in enumerate(compressor.sums(shape, dtype)):
                if part.packed is None:
                    rounds[r] = rounds.get(r, 0.0) + ring * part.num_bytes
                else:
                    reduced += part.num_bytes
        elif isinstance(compressor, Coded) and compressor.gathered:
            gathered += (n - 1) * compressor.wire_bytes(shape, dtype)
        else:
            reduced += compressor.wire_bytes(shape, dtype)
            if isinstance(algorithm, Hierarchical) and isinstance(compressor, Coded):
                form, wide = inner_form(algorithm, compressor, dtype)
                inner += form.wire_bytes(shape, wide)
                if form is not compressor:
                    # With two ranks a node, half of the elements are coded otherwise there, and half as many encoded as
                    # the layer's; decoding means stays the same.
                    plain = codec_s.get(compressor, 0.0)
                    codec += math.prod(shape) * (codec_s.get(form, plain) / 2 - plain / 4)
    kinds = [
        links.coded_seconds(algorithm, reduced, inner),
        (links.exchange.seconds(gathered), gathered * links.exchange.per_byte),
        (sum(map(links.native.seconds, rounds.values())), sum(rounds.values()) * links.native.per_byte),
    ]
    on_wire = sum(wire for _, wire in kinds)
    alone = max(alone + on_wire - wire for alone, wire in kinds)
    traffic = (ring * reduced + gathered) * links.exchange_cpu + sum(rounds.values()) * links.native_cpu
    return Transfer(alone + codec, max(on_wire, codec), codec + traffic, codec)


def exposed_seconds(pace: Pace, transfers: Sequence[Transfer]) -> float:
    """Return the seconds that communication adds to a step: from when the last bucket is ready to when the last one is
    received."""
    ready = [bucket.ready_s for bucket in pace.buckets]
    return max(0.0, finish(ready, transfers, shared=pace.shared, depth=_DEPTH)[-1] - ready[-1])


def native_step(pace: Pace, links: Links) -> float:
    """Return the seconds of a step of stock DDP."""
    transfers = [native_transfer(bucket, links) for bucket in pace.buckets]
    return pace.compute_s + exposed_seconds(pace, transfers)


def planned_step(
    pace: Pace,
    links: Links,
    layers: Mapping[str, Compressor],
    codec_s: Mapping[Compressor, float],
    algorithm: Algorithm = _STAR,
) -> float:
    """Return the seconds of a step with these compressors, by layer. ``codec_s``: see `Speeds`."""
    transfers = [coded_transfer(bucket, layers, links, codec_s, algorithm) for bucket in pace.buckets]
    return pace.compute_s + exposed_seconds(pace, transfers)


def accumulated(pace: Pace, step: float, times: int) -> float:
    """Return the seconds of one of ``times`` batches between two exchanges (``no_sync``), from ``step`` with one."""
    return (step + (times - 1) * pace.backward_end_s) / times


def local_step(
    pace: Pace, links: Links, layers: Mapping[str, Compressor], codec_s: Mapping[Compressor, float], every: int
) -> float:
    """Return the seconds of a step of local updates that exchange all layers every ``every`` steps."""
    return pace.compute_s + exchange_seconds(pace, links, layers, codec_s) / every


def hiding_interval(
    pace: Pace, links: Links, layers: Mapping[str, Compressor], codec_s: Mapping[Compressor, float]
) -> int:
    """Return the least number of steps, 10 to 500, between exchanges that hides these; 500 if none does."""
    took = exchange_seconds(pace, links, layers, codec_s)
    hidden = (every for every in _INTERVALS if took / every <= _HIDDEN_SHARE * pace.compute_s)
    return next(hidden, _INTERVALS[-1])


def exchange_seconds(
    pace: Pace, links: Links, layers: Mapping[str, Compressor], codec_s: Mapping[Compressor, float]
) -> float:
    """Return the seconds in which all layers are exchanged at once, in fp32 before compression."""
    whole = Bucket(0.0, tuple(layer for bucket in pace.buckets for layer in bucket.layers))
    return coded_transfer(whole, layers, links, codec_s).alone_s


def sent_in_step(
    pace: Pace, links: Links, layers: Mapping[str, Compressor] | None, algorithm: Algorithm = _STAR
) -> float:
    """Return the bytes that a rank sends in a step: with these compressors, or without any."""
    if layers is None:
        return sum(links.ring * bucket.num_bytes for bucket in pace.buckets)
    return sum(
        links.sent(algorithm, layers[name], shape, bucket.dtype)
        for bucket in pace.buckets
        for name, shape in bucket.layers
    )
