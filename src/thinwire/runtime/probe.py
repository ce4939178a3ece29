"""Measurement of the speeds of links, codecs and cores, between the ranks themselves."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor

from thinwire.collectives import (
    Algorithm,
    DeviceTransport,
    Hierarchical,
    OutgoingMessage,
    ScatterReduceAllGather,
    Transport,
    World,
    node_identity,
    number_nodes,
)
from thinwire.compressors import (
    CodecCall,
    Coded,
    Compressor,
    Key,
    Packed,
    Parts,
    Piece,
    Segments,
    SumCall,
    Summed,
    first_state,
)
from thinwire.plan.cost import Speeds, codec_seconds
from thinwire.plan.forecast import Curve, HierarchyTimes, Links
from thinwire.runtime.executor import elapsed

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_REPEATS = 3
_FIRST_PROBE_BYTES = 64 << 10
_LAST_PROBE_BYTES = 16 << 20
_LONG_ENOUGH_S, _LONG_ENOUGH_LATENCIES = 0.02, 8
"""Least duration, in seconds and latencies, of messages that give a bandwidth: TCP begins slowly on any link."""
_ALL_PAIRS = 8
_CURVE_FROM_BYTES, _CURVE_TO_BYTES = 4 << 10, 16 << 20
_CURVE_LONG_S = 0.15
_CURVE_REPEATS = 2
_MOST_RATED = 16


def settle(algorithm: Algorithm, transport: Transport, *, nodes_too: bool = False) -> tuple[Algorithm, World]:
    """Return the collective algorithm with its measured parameters, and the world.

    The world has nodes if the algorithm needs them or ``nodes_too`` is set. The result is the same on every rank.

    Raises:
        ValueError: the algorithm does not fit this world.
        TransportError: a rank has failed or does not answer.
    """
    nodes: tuple[int, ...] = ()
    if algorithm.needs_nodes or nodes_too:
        nodes = find_nodes(transport)
    world = World(transport.world_size, nodes)
    if isinstance(algorithm, ScatterReduceAllGather) and algorithm.rates == "measured":
        algorithm = replace(algorithm, rates=_readable(measure_rates(transport)))
    algorithm.shares(world)
    return algorithm, world


def _readable(rates: Iterable[float]) -> tuple[float, ...]:
    """Return two digits of each rate: enough, and the spec that has them stays readable."""
    return tuple(float(f"{rate:.2g}") for rate in rates)


def find_nodes(transport: Transport) -> tuple[int, ...]:
    """Return the node number of each rank. All ranks must call it."""
    return number_nodes([bytes(row.tolist()) for row in transport.all_gather(node_identity())])


def _all_pairs(transport: Transport) -> list[tuple[int, int]]:
    ranks = range(transport.world_size)
    return [(rank, other) for rank in ranks for other in ranks if other != rank]


def measure_native(transport: Transport) -> float:
    """Return the bytes per second that every rank sends in the transport's own fp32 all-reduce, as stock training does.

    Its route may differ from that of messages: it uses the network where messages use shared memory inside a node.
    """
    device, num_bytes = transport.device, _FIRST_PROBE_BYTES
    while True:
        x = torch.zeros(num_bytes // 4, dtype=torch.float32, device=device)
        transport.all_gather(torch.zeros(1, dtype=torch.float32, device="cpu"))
        took = median(elapsed(lambda x=x: transport.native_all_reduce(x), device) for _ in range(_REPEATS))
        took = float(transport.all_gather(torch.tensor([took], dtype=torch.float64, device="cpu")).max())
        if took >= _LONG_ENOUGH_S or num_bytes >= _LAST_PROBE_BYTES:
            return transport.all_reduce_bytes(x.numel(), x.dtype) / max(took, 1e-6)
        num_bytes *= 4


def measure_rates(transport: Transport) -> list[float]:
    """Return the bytes per second of each rank's link: what it sends to all others while they all send to it."""
    rates = []
    for rank in range(transport.world_size):
        others = [other for other in range(transport.world_size) if other != rank]
        pairs = [(rank, other) for other in others] + [(other, rank) for other in others]
        mine = torch.tensor([_speed(transport, pairs)[0]], dtype=torch.float64, device="cpu")
        rates.append(float(transport.all_gather(mine)[rank]))
    return rates


def measure_one_way(transport: Transport, pairs: Sequence[tuple[int, int]]) -> list[float]:
    """Return the bytes per second from the first to the second rank of each pair, measured one pair after the other.

    The result is the same on every rank.

    Raises:
        TransportError: a rank has failed or does not answer.
    """
    return [_speed(transport, [pair])[0] for pair in pairs]


@dataclass(frozen=True)
class Pair:
    """The link between two ranks, measured while both send."""

    first: int
    second: int
    bandwidth: float
    """Bytes per second in each direction."""
    latency_s: float
    """Seconds of an empty message in one direction."""


def measure_pairs(transport: Transport) -> list[Pair]:
    """Measure the link of every two ranks, one after the other while the others wait.

    Of more than 8 ranks only neighbors in a ring are measured: all pairs would take minutes. The result is the same on
    every rank.
    """
    n = transport.world_size
    neighbors = sorted({tuple(sorted((rank, (rank + 1) % n))) for rank in range(n) if n > 1})
    chosen = neighbors if n > _ALL_PAIRS else [(a, b) for b in range(n) for a in range(b)]
    pairs = []
    for a, b in chosen:
        bandwidth, latency = _speed(transport, [(a, b), (b, a)])
        # Other ranks measure only how long they wait.
        mine = torch.tensor([bandwidth, latency], dtype=torch.float64, device="cpu")
        measured = transport.all_gather(mine)[[a, b]]
        pairs.append(Pair(a, b, float(measured[:, 0].min()), float(measured[:, 1].max())))
    return pairs


def measure_links(transport: Transport, long_s: float = _CURVE_LONG_S, world: World | None = None) -> Links:
    """Measure the seconds of all-reduces and exchanges by their bytes.

    Messages grow to 16 MB, or until one takes ``long_s`` seconds. With a ``world``, messages along a hierarchy are
    measured as well if its nodes can form one, and so is each rank's link if each of at most 16 ranks has a node of its
    own. The result is the same on every rank.
    """
    device = transport.device
    pairs = _all_pairs(transport)

    def all_reduce(num_bytes: int) -> _Took:
        x = torch.zeros(num_bytes // 4, dtype=torch.float32, device=device)
        transport.all_gather(torch.zeros(1, dtype=torch.float32, device="cpu"))
        before = time.process_time()
        seconds = elapsed(lambda: transport.native_all_reduce(x), device)
        return _Took(seconds, time.process_time() - before)

    native, native_cpu = _curve(
        transport, long_s, all_reduce, lambda size: transport.all_reduce_bytes(size // 4, torch.float32)
    )
    exchange, exchange_cpu = _curve(transport, long_s, lambda size: _probe(transport, pairs, size), lambda size: size)
    legs = _legs(transport, long_s, world) if world is not None else None
    rates: tuple[float, ...] = ()
    if world is not None and 2 < world.size <= _MOST_RATED and len(world.members) == world.size:
        measured = measure_rates(transport)
        rates = _readable(rate / max(measured) for rate in measured)
    return Links(native, exchange, transport.world_size, native_cpu, exchange_cpu, legs, rates)


def _legs(transport: Transport, long_s: float, world: World) -> HierarchyTimes | None:
    """Measure messages inside nodes and between them, along a hierarchy; return None unless the world has both."""
    if not 1 < len(world.members) < world.size:
        return None
    ranks, tree = range(world.size), Hierarchical()
    edges = [(rank, tree.parent(rank, owner, world)) for rank in ranks for owner in ranks if rank != owner]
    pairs = sorted({*edges, *((parent, rank) for rank, parent in edges)})

    def curve(*, inside: bool) -> Curve:
        chosen = [(a, b) for a, b in pairs if (world.nodes[a] == world.nodes[b]) == inside]
        return _curve(transport, long_s, lambda size: _probe(transport, chosen, size), lambda size: size)[0]

    return HierarchyTimes(world, curve(inside=True), curve(inside=False))


def _curve(
    transport: Transport, long_s: float, run: Callable[[int], _Took], sent: Callable[[int], int]
) -> tuple[Curve, float]:
    """Return the seconds of messages by the bytes sent, up to ``long_s``, and the processor seconds of a byte."""
    points = []
    run(_CURVE_FROM_BYTES)
    num_bytes = _CURVE_FROM_BYTES
    while True:
        # The faster repeat is the link's. All ranks must take the same number of turns: the longest time counts.
        mine = torch.tensor(min(run(num_bytes) for _ in range(_CURVE_REPEATS)), dtype=torch.float64, device="cpu")
        took, spent = transport.all_gather(mine).amax(0).tolist()
        points.append((float(sent(num_bytes)), took))
        if took >= long_s or num_bytes >= _CURVE_TO_BYTES:
            return Curve(tuple(points)), spent / sent(num_bytes)
        num_bytes *= 4


def measure_cores(transport: Transport) -> float:
    """Return the cores of a machine for each rank on it, the minimum over ranks. Emulated hosts are one machine."""
    mine = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    try:
        machine = _BOOT_ID.read_text()
    except OSError:
        machine = os.uname().nodename
    digest = hashlib.blake2b(f"{machine}{mine}".encode(), digest_size=16).digest()
    digests = transport.all_gather(torch.frombuffer(bytearray(digest), dtype=torch.uint8))
    beside = int((digests == digests[transport.rank]).all(1).sum())
    return float(transport.all_gather(torch.tensor([len(mine) / beside], dtype=torch.float64, device="cpu")).min())


def shared_part(cores: float, threads: int) -> float:
    """Return the share of communication's processor time that backward loses (`Pace.shared`)."""
    return min(1.0, max(0.0, 1.0 - (cores - threads)))


def _speed(transport: Transport, pairs: Sequence[tuple[int, int]]) -> tuple[float, float]:
    """Return the bytes per second of the busiest sender of ``pairs``, and the seconds of an empty message."""
    _probe(transport, pairs, 64)
    latency = median(_probe(transport, pairs, 64).seconds for _ in range(_REPEATS))
    num_bytes = _FIRST_PROBE_BYTES
    while True:
        mine = [_probe(transport, pairs, num_bytes).seconds - latency, latency]
        # All ranks must take the same number of turns: the longest time counts.
        took, wait = transport.all_gather(torch.tensor(mine, dtype=torch.float64, device="cpu")).amax(0).tolist()
        if took >= max(_LONG_ENOUGH_S, _LONG_ENOUGH_LATENCIES * wait) or num_bytes >= _LAST_PROBE_BYTES:
            return num_bytes / max(took, 1e-6), max(latency, 0.0)
        num_bytes *= 4


class _Took(NamedTuple):
    seconds: float
    cpu_s: float = 0.0
    """Processor time of this process."""


def _probe(transport: Transport, pairs: Sequence[tuple[int, int]], num_bytes: int) -> _Took:
    """Time an exchange in which the busiest sender sends ``num_bytes``, and the others as much to each receiver."""
    if isinstance(transport, DeviceTransport):
        return _Took(_probe_devices(transport, pairs, num_bytes))
    receivers = [tuple(target for source, target in pairs if source == rank) for rank in range(transport.world_size)]
    share = -(-num_bytes // max(map(len, receivers)))
    buffers = transport.open([[OutgoingMessage(0, share, targets)] if targets else [] for targets in receivers])
    transport.all_gather(torch.zeros(1, dtype=torch.float32, device="cpu"))
    started, before = time.perf_counter(), time.process_time()
    transport.begin(buffers)
    pending = [transport.receive_into(buffers, *address) for address in buffers.inbox]
    if buffers.outgoing:
        pending += transport.send_from(buffers, 0, share)
    for message in pending:
        message.wait()
    transport.end(buffers)
    return _Took(time.perf_counter() - started, time.process_time() - before)


def _probe_devices(transport: DeviceTransport, pairs: Sequence[tuple[int, int]], num_bytes: int) -> float:
    ranks, mine = range(transport.world_size), transport.rank
    share = -(-num_bytes // max(sum(source == rank for source, _ in pairs) for rank in ranks))
    sent = [share * ((mine, rank) in pairs) for rank in ranks]
    received = [share * ((rank, mine) in pairs) for rank in ranks]
    out, x = (torch.zeros(sum(sizes), dtype=torch.uint8, device=transport.device) for sizes in (received, sent))
    transport.all_gather(torch.zeros(1, dtype=torch.float32, device="cpu"))
    return elapsed(lambda: transport.all_to_all(out, x, received, sent), transport.device)


_SHAPE = (1 << 10, 1 << 10)
_NUMEL = 1 << 20


def measure_speeds(
    compressors: Collection[Compressor], transport: Transport, algorithm: Algorithm, world: World
) -> Speeds:
    """Measure how fast the slowest rank compresses and sends.

    All ranks must call it, and the result is the same on every rank. It takes a few milliseconds for each compressor
    and some tens of milliseconds for the link.

    Raises:
        TransportError: a rank has failed or does not answer.
    """
    passes = measure_codecs(compressors, transport)
    codec_s = {c: codec_seconds(c, transport.world_size, {"encode": e, "decode": d}) for c, (e, d) in passes.items()}
    bandwidth, latency = _speed(transport, _all_pairs(transport))
    # The slowest rank decides for all.
    figures = torch.tensor([1 / bandwidth, latency, 1 / measure_native(transport)], dtype=torch.float64, device="cpu")
    per_byte, latency, per_native_byte = transport.all_gather(figures).amax(0).tolist()
    crossings = algorithm.crossings(world)
    return Speeds(codec_s, 1 / per_byte, latency, transport.world_size, crossings, native=1 / per_native_byte)


def measure_codecs(compressors: Collection[Compressor], transport: Transport) -> dict[Compressor, tuple[float, float]]:
    """Return the seconds in which the slowest rank encodes an element and decodes one, by compressor.

    All ranks must call it, and the result is the same on every rank.

    Raises:
        TransportError: a rank has failed or does not answer.
    """
    if not compressors:
        return {}
    ordered = sorted(compressors, key=str)
    device = transport.device
    mine = torch.tensor([list(codec_passes(c, device).values()) for c in ordered], dtype=torch.float64, device="cpu")
    slowest = transport.all_gather(mine).amax(0).tolist()
    return {compressor: (encode, decode) for compressor, (encode, decode) in zip(ordered, slowest, strict=True)}


def codec_passes(compressor: Compressor, device: torch.device) -> dict[str, float]:
    """Return the seconds that an element takes to ``encode`` and to ``decode``."""
    x = torch.randn(_NUMEL, generator=torch.Generator().manual_seed(0), dtype=torch.float32, device="cpu").to(device)
    piece = Piece("probe", 0, _NUMEL, 0, 0, _SHAPE)
    segments = Segments.build([piece])
    state = first_state(compressor, x, segments)
    if isinstance(compressor, Coded):
        message = torch.zeros(compressor.payload_bytes(_NUMEL, x.dtype), dtype=torch.uint8, device=device)
        encode = _seconds(
            lambda: compressor.encode(x, message, CodecCall(segments, Key.derive(1), state=state)), device
        )
        y = torch.empty_like(x)
        decode = _seconds(lambda: compressor.decode(message, y, CodecCall(segments)), device)
    else:
        assert isinstance(compressor, Summed)
        y = x.clone()
        sums = compressor.sums(_SHAPE, x.dtype)
        buffers = tuple(torch.zeros(s.numel, dtype=s.dtype, device=device) for s in sums)
        parts = tuple(Parts.build([(piece, s.numel)]) for s in sums)
        call = SumCall(parts, buffers, Key.derive(1), state)

        def run() -> tuple[float, float]:
            rounds = compressor.rounds(x, y, call)
            return elapsed(lambda: next(rounds), device), elapsed(lambda: list(rounds), device)

        run()
        # Each half is timed by itself: the difference of two medians could be zero for a short one.
        encode, decode = map(median, zip(*(run() for _ in range(_REPEATS)), strict=True))
        for s, buffer in zip(sums, buffers, strict=True):
            if s.packed is not None:
                pack, unpack = _packing_seconds(s.packed, buffer, device)
                encode, decode = encode + pack, decode + unpack
    return {"encode": encode / _NUMEL, "decode": decode / _NUMEL}


def _packing_seconds(packed: Packed, buffer: Tensor, device: torch.device) -> tuple[float, float]:
    """Return the seconds in which the integers in a buffer get into a message, and sums out of one."""
    values = torch.zeros(packed.spread_numel(buffer.numel()), dtype=torch.float32, device=device)
    call = CodecCall(Segments.build([Piece("probe", 0, values.numel(), 0, 0)]))
    message = torch.zeros(packed.payload_bytes(values.numel(), values.dtype), dtype=torch.uint8, device=device)

    def pack() -> None:
        packed.spread(buffer, values)
        packed.encode(values, message, call)

    def unpack() -> None:
        packed.decode(message, values, call)
        packed.collect(values, buffer)

    return _seconds(pack, device), _seconds(unpack, device)


def _seconds(run: Callable[[], None], device: torch.device) -> float:
    run()
    return median(elapsed(run, device) for _ in range(_REPEATS))
