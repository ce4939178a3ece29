"""Predicts the time of a training step, bucket by bucket, from measured speeds, for `thinwire doctor` and ``auto``.

A step is a timeline: DDP's buckets become ready one after the other while backward runs, each is sent as soon as it is
ready and the link is free, and the step continues when all are received. The time that counts is not all that
communication takes but the part of it that backward does not hide.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from thinwire.collectives import Algorithm, Hierarchical, ScatterReduceAllGather
from thinwire.compressors import Coded, Compressor, Summed
from thinwire.plan.forecast.links import Links, inner_form


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
    spans: list[tuple[float, float, float]] = []
    for i, (at, transfer) in enumerate(zip(ready, transfers, strict=True)):
        begins = at + _lost(at, spans, shared)
        if depth is not None and i >= depth:
            begins = max(begins, done[i - depth])
        # A core that backward uses, too, encodes at half its speed for so long.
        slowed = shared * min(transfer.codec_s, max(0.0, ready[-1] - begins))
        before = done[-1] if done else 0.0
        done.append(max(begins + transfer.alone_s + slowed, before + transfer.after_s))
        spans.append((max(begins, before), done[-1], transfer.cpu_s))
    return done


def _lost(at: float, spans: Sequence[tuple[float, float, float]], shared: float) -> float:
    """Return the seconds by which backward is late at ``at``, because transfers took the core for so long."""
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


_NATIVE_DEPTH = 2
"""Number of all-reduces that gloo has under way at once."""
_STAR = ScatterReduceAllGather()
FEW_BITS = "gaussian(bits=2)"
"""Compressor of `CompressedAdamW`'s gradients. Local updates send as few bits, in larger buckets."""
_INTERVALS = (10, 25, 50, 100, 250, 500)
_HIDDEN_SHARE = 0.05
"""Share of a step below which exchanges count as free."""


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


def exposed_seconds(pace: Pace, transfers: Sequence[Transfer], *, depth: int | None = None) -> float:
    """Return the seconds that communication adds to a step: from when the last bucket is ready to when the last one is
    received."""
    ready = [bucket.ready_s for bucket in pace.buckets]
    return max(0.0, finish(ready, transfers, shared=pace.shared, depth=depth)[-1] - ready[-1])


def native_step(pace: Pace, links: Links) -> float:
    """Return the seconds of a step of stock DDP."""
    transfers = [native_transfer(bucket, links) for bucket in pace.buckets]
    return pace.compute_s + exposed_seconds(pace, transfers, depth=_NATIVE_DEPTH)


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
