"""Predicts the time of a training step, bucket by bucket, from measured speeds, for `thinwire doctor` and ``auto``.

A step is a timeline: DDP's buckets become ready one after the other while backward runs, each is sent as soon as it is
ready and the link is free, and the step goes on when the last one has arrived. So what counts is not the time that
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
    """The time that the communication of one bucket takes."""

    alone_s: float
    """Seconds from ready to arrived, if nothing else is sent."""
    after_s: float
    """At least, after the bucket before it has arrived: bytes queue, latencies do not."""
    cpu_s: float = 0.0
    """Processor time, part of both."""
    codec_s: float = 0.0
    """The part of ``cpu_s`` that nothing overlaps with: encoding and decoding."""


def finish(
    ready: Sequence[float], transfers: Sequence[Transfer], *, shared: float = 0.0, depth: int | None = None
) -> list[float]:
    """The time at which each bucket has arrived.

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


_NATIVE_DEPTH = 2
"""All-reduces that gloo has under way at once."""
_STAR = ScatterReduceAllGather()
FEW_BITS = "gaussian(bits=2)"
"""What `CompressedAdamW` sends its gradients with. Local updates send as few bits, in larger buckets."""
_INTERVALS = (10, 25, 50, 100, 250, 500)
_HIDDEN_SHARE = 0.05
"""Of a step: exchanges that take less are as good as none."""


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
    """Buckets in the order in which they are sent."""
    compute_s: float
    """The whole step: forward, backward, optimizer, and what the script does besides."""
    shared: float = 0.0
    """How much of the processor time that communication takes is taken from backward: 0 where a core is free for it, 1
    where there is none."""

    @property
    def backward_end_s(self) -> float:
        """Seconds until the last bucket is ready."""
        return self.buckets[-1].ready_s


def native_transfer(bucket: Bucket, links: Links) -> Transfer:
    """A bucket by the backend's own all-reduce: what DDP does."""
    sent = links.ring * bucket.num_bytes
    return Transfer(links.native.seconds(sent), sent * links.native.per_byte, sent * links.native_cpu)


def coded_transfer(
    bucket: Bucket,
    layers: Mapping[str, Compressor],
    links: Links,
    codec_s: Mapping[Compressor, float],
    algorithm: Algorithm = _STAR,
) -> Transfer:
    """A bucket whose layers have these compressors.

    Coded layers are exchanged, added up by their owners and exchanged again; whole ones gathered by all; sums go
    through the native all-reduce, one round after the other. All three are under way together, and share the link.

    Args:
        bucket: which layers.
        layers: compressor of each, by name.
        links: what messages take.
        codec_s: seconds that an element costs a rank in a step, as of `Speeds`.
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
                    # Of two ranks a node, half of the elements are coded otherwise there, and half as many encoded as
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
    """Seconds that communication adds to a step: from when the last bucket is ready to when the last one has
    arrived."""
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
    algorithm: Algorithm = _STAR,
) -> float:
    """Seconds of a step with these compressors, by layer. ``codec_s``: as of `Speeds`."""
    transfers = [coded_transfer(bucket, layers, links, codec_s, algorithm) for bucket in pace.buckets]
    return pace.compute_s + exposed_seconds(pace, transfers)


def accumulated(pace: Pace, step: float, times: int) -> float:
    """Seconds for one of ``times`` batches between two exchanges (``no_sync``), from those of a step that has one."""
    return (step + (times - 1) * pace.backward_end_s) / times


def local_step(
    pace: Pace, links: Links, layers: Mapping[str, Compressor], codec_s: Mapping[Compressor, float], every: int
) -> float:
    """Seconds of a step of local updates: every ``every`` steps all layers are exchanged, and nothing else is done."""
    return pace.compute_s + exchange_seconds(pace, links, layers, codec_s) / every


def hiding_interval(
    pace: Pace, links: Links, layers: Mapping[str, Compressor], codec_s: Mapping[Compressor, float]
) -> int:
    """The least number of steps, from 10 to 500, between exchanges of local updates that hides these; 500 if none."""
    took = exchange_seconds(pace, links, layers, codec_s)
    hidden = (every for every in _INTERVALS if took / every <= _HIDDEN_SHARE * pace.compute_s)
    return next(hidden, _INTERVALS[-1])


def exchange_seconds(
    pace: Pace, links: Links, layers: Mapping[str, Compressor], codec_s: Mapping[Compressor, float]
) -> float:
    """Seconds in which all layers are exchanged at once, in fp32 before compression."""
    whole = Bucket(0.0, tuple(layer for bucket in pace.buckets for layer in bucket.layers))
    return coded_transfer(whole, layers, links, codec_s).alone_s


def sent_in_step(
    pace: Pace, links: Links, layers: Mapping[str, Compressor] | None, algorithm: Algorithm = _STAR
) -> float:
    """Bytes that a rank sends in a step: with these compressors, or without any."""
    if layers is None:
        return sum(links.ring * bucket.num_bytes for bucket in pace.buckets)
    return sum(
        links.sent(algorithm, layers[name], shape, bucket.dtype)
        for bucket in pace.buckets
        for name, shape in bucket.layers
    )
