"""Predicts the time of messages of a given size on measured links."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from thinwire.collectives import Algorithm, Hierarchical, ScatterReduceAllGather, World
from thinwire.compressors import Coded, Compressor

_UNEVEN = 1.25


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
class Legs:
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
    legs: Legs | None = None
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
