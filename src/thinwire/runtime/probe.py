"""How fast links, codecs and cores are, measured between the ranks themselves."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch

from thinwire.collectives import (
    Algorithm,
    DeviceTransport,
    Hierarchical,
    Outgoing,
    ScatterReduceAllGather,
    Transport,
    World,
    check_star,
    node_identity,
    number_nodes,
)
from thinwire.compressors import CodecCall, Coded, Compressor, Key, Part, Piece, Segments, SumCall, Summed, first_state
from thinwire.plan.cost import Speeds, codec_seconds
from thinwire.plan.forecast.links import Curve, Legs, Links
from thinwire.runtime.executor import elapsed

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_REPEATS = 3
_FIRST_PROBE_BYTES = 64 << 10
_LAST_PROBE_BYTES = 16 << 20
_LONG_ENOUGH_S, _LONG_ENOUGH_LATENCIES = 0.02, 8
"""Of a message that a bandwidth is taken of: TCP sends little in the first round trips, whatever the link carries."""
_ALL_PAIRS = 8
_ROUNDS = 4
_CURVE_FROM_BYTES, _CURVE_TO_BYTES = 4 << 10, 16 << 20
_CURVE_LONG_S = 0.15
_CURVE_REPEATS = 2
_MOST_RATED = 16


def settle(algorithm: Algorithm, transport: Transport, *, nodes_too: bool = False) -> tuple[Algorithm, World]:
    """The collective algorithm with its measured parameters filled in, and the world, with its nodes if the algorithm
    needs them or with ``nodes_too``. The same on every rank.

    Raises:
        ValueError: it does not fit this world.
        TransportError: a rank is gone or silent.
    """
    if isinstance(transport, DeviceTransport):
        check_star(algorithm)
    nodes: tuple[int, ...] = ()
    if algorithm.needs_nodes or nodes_too:
        nodes = find_nodes(transport)
    world = World(transport.world_size, nodes)
    if isinstance(algorithm, ScatterReduceAllGather) and algorithm.rates == "measured":
        # Two digits say enough, and the spec stays readable.
        rates = tuple(float(f"{rate:.2g}") for rate in measure_rates(transport))
        algorithm = replace(algorithm, rates=rates)
    algorithm.shares(world)
    return algorithm, world


def find_nodes(transport: Transport) -> tuple[int, ...]:
    """By rank, the number of its node; all must call it."""
    return number_nodes([bytes(row.tolist()) for row in transport.all_gather(node_identity())])


def measure_link(transport: Transport) -> tuple[float, float]:
    """Bytes per second that every rank sends while all send, and the seconds of an empty exchange."""
    everybody = range(transport.world_size)
    return _speed(transport, [(rank, other) for rank in everybody for other in everybody if other != rank])


def measure_native(transport: Transport) -> float:
    """Bytes per second that every rank sends in the transport's own all-reduce, of fp32: what stock training has.

    It may take another way than messages do: beside shared memory it goes over the network, even inside a node.
    """
    device = transport.device if isinstance(transport, DeviceTransport) else torch.device("cpu")
    num_bytes = _FIRST_PROBE_BYTES
    while True:
        x = torch.zeros(num_bytes // 4, device=device)
        transport.all_gather(torch.zeros(1))
        took = median(elapsed(lambda x=x: transport.all_reduce(x), device) for _ in range(_REPEATS))
        took = float(transport.all_gather(torch.tensor([took], dtype=torch.float64)).max())
        if took >= _LONG_ENOUGH_S or num_bytes >= _LAST_PROBE_BYTES:
            return transport.all_reduce_bytes(x.numel(), x.dtype) / max(took, 1e-6)
        num_bytes *= 4


def measure_rates(transport: Transport) -> list[float]:
    """By rank, the bytes per second of its link: what it sends to all others while they all send to it."""
    rates = []
    for rank in range(transport.world_size):
        others = [other for other in range(transport.world_size) if other != rank]
        pairs = [(rank, other) for other in others] + [(other, rank) for other in others]
        mine = torch.tensor([_speed(transport, pairs)[0]], dtype=torch.float64)
        rates.append(float(transport.all_gather(mine)[rank]))
    return rates


def measure_one_way(transport: Transport, pairs: Sequence[tuple[int, int]]) -> list[float]:
    """Bytes per second from the first to the second rank of each pair, one pair after the other. The same everywhere.

    Raises:
        TransportError: a rank is gone or silent.
    """
    return [_speed(transport, [pair])[0] for pair in pairs]


@dataclass(frozen=True)
class Pair:
    """The link between two ranks, both directions busy at once."""

    first: int
    second: int
    bandwidth: float
    """Bytes per second, each way."""
    latency_s: float
    """Of an empty message, one way."""


def measure_pairs(transport: Transport) -> list[Pair]:
    """Every two ranks' link, one after the other while the others wait; the same on every rank.

    Of more than 8 ranks those alone that are neighbours in a ring: all would take minutes.
    """
    n = transport.world_size
    neighbours = sorted({tuple(sorted((rank, (rank + 1) % n))) for rank in range(n) if n > 1})
    chosen = neighbours if n > _ALL_PAIRS else [(a, b) for b in range(n) for a in range(b)]
    found = []
    for a, b in chosen:
        bandwidth, latency = _speed(transport, [(a, b), (b, a)])
        # Who takes no part measures nothing but the wait for the others.
        mine = torch.tensor([bandwidth, latency], dtype=torch.float64)
        measured = transport.all_gather(mine)[[a, b]]
        found.append(Pair(a, b, float(measured[:, 0].min()), float(measured[:, 1].max())))
    return found


def measure_links(
    transport: Transport, rounds: int = _ROUNDS, long_s: float = _CURVE_LONG_S, world: World | None = None
) -> list[Links]:
    """What all-reduces and exchanges take by their bytes, measured ``rounds`` times; the same on every rank.

    With messages of up to 16 MB, or of the size that takes ``long_s``. With a ``world``, hierarchies' messages are
    measured, too, if its nodes can have one; if each of at most 16 ranks has a node of its own, how fast its link is.
    """
    return [_links(transport, long_s, world) for _ in range(rounds)]


def _links(transport: Transport, long_s: float, world: World | None) -> Links:
    device = transport.device if isinstance(transport, DeviceTransport) else torch.device("cpu")
    everybody = range(transport.world_size)
    pairs = [(rank, other) for rank in everybody for other in everybody if other != rank]

    def all_reduce(num_bytes: int) -> _Took:
        x = torch.zeros(num_bytes // 4, device=device)
        transport.all_gather(torch.zeros(1))
        before = time.process_time()
        seconds = elapsed(lambda: transport.all_reduce(x), device)
        return _Took(seconds, time.process_time() - before)

    native, native_cpu = _curve(
        transport, long_s, all_reduce, lambda size: transport.all_reduce_bytes(size // 4, torch.float32)
    )
    exchange, exchange_cpu = _curve(transport, long_s, lambda size: _probe(transport, pairs, size), lambda size: size)
    legs = _legs(transport, long_s, world) if world is not None else None
    rates: tuple[float, ...] = ()
    if world is not None and 2 < world.size <= _MOST_RATED and len(world.members) == world.size:
        measured = measure_rates(transport)
        # Two digits say enough, and the spec stays readable.
        rates = tuple(float(f"{rate / max(measured):.2g}") for rate in measured)
    return Links(native, exchange, transport.world_size, native_cpu, exchange_cpu, legs, rates)


def _legs(transport: Transport, long_s: float, world: World) -> Legs | None:
    """Along a hierarchy inside nodes and between them, where there is something to both."""
    if not 1 < len(world.members) < world.size:
        return None
    ranks, tree = range(world.size), Hierarchical()
    edges = [(rank, tree.parent(rank, owner, world)) for rank in ranks for owner in ranks if rank != owner]
    pairs = sorted({*edges, *((parent, rank) for rank, parent in edges)})

    def curve(*, inside: bool) -> Curve:
        of = [(a, b) for a, b in pairs if (world.nodes[a] == world.nodes[b]) == inside]
        return _curve(transport, long_s, lambda size: _probe(transport, of, size), lambda size: size)[0]

    return Legs(world, curve(inside=True), curve(inside=False))


def _curve(
    transport: Transport, long_s: float, run: Callable[[int], _Took], sent: Callable[[int], int]
) -> tuple[Curve, float]:
    """Seconds of messages by the bytes sent, until they take long; and processor seconds of each byte of the last."""
    points = []
    run(_CURVE_FROM_BYTES)
    num_bytes = _CURVE_FROM_BYTES
    while True:
        # The faster one: what comes between is not the link's. All ranks must take the same turns, so the longest time
        # is everybody's.
        mine = torch.tensor(min(run(num_bytes) for _ in range(_CURVE_REPEATS)), dtype=torch.float64)
        took, spent = transport.all_gather(mine).amax(0).tolist()
        points.append((float(sent(num_bytes)), took))
        if took >= long_s or num_bytes >= _CURVE_TO_BYTES:
            return Curve(tuple(points)), spent / sent(num_bytes)
        num_bytes *= 4


def measure_cores(transport: Transport) -> float:
    """Cores of this machine for each rank on it, the fewest that any rank has. Emulated hosts are one machine."""
    mine = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    try:
        machine = _BOOT_ID.read_text()
    except OSError:
        machine = os.uname().nodename
    digest = hashlib.blake2b(f"{machine}{mine}".encode(), digest_size=16).digest()
    digests = transport.all_gather(torch.frombuffer(bytearray(digest), dtype=torch.uint8))
    beside = int((digests == digests[transport.rank]).all(1).sum())
    return float(transport.all_gather(torch.tensor([len(mine) / beside], dtype=torch.float64)).min())


def shared_part(cores: float, threads: int) -> float:
    """How much of communication's processor time backward loses (`Pace.shared`), by a rank's cores and threads."""
    return min(1.0, max(0.0, 1.0 - (cores - threads)))


def _speed(transport: Transport, pairs: Sequence[tuple[int, int]]) -> tuple[float, float]:
    """Bytes per second that the busiest sender of ``pairs`` sends, and the seconds of messages without content."""
    _probe(transport, pairs, 64)
    latency = median(_probe(transport, pairs, 64).seconds for _ in range(_REPEATS))
    num_bytes = _FIRST_PROBE_BYTES
    while True:
        mine = [_probe(transport, pairs, num_bytes).seconds - latency, latency]
        # All ranks must take the same turn: the longest time is everybody's.
        took, wait = transport.all_gather(torch.tensor(mine, dtype=torch.float64)).amax(0).tolist()
        if took >= max(_LONG_ENOUGH_S, _LONG_ENOUGH_LATENCIES * wait) or num_bytes >= _LAST_PROBE_BYTES:
            return num_bytes / max(took, 1e-6), max(latency, 0.0)
        num_bytes *= 4


class _Took(NamedTuple):
    seconds: float
    cpu_s: float = 0.0
    """Processor time of this process."""


def _probe(transport: Transport, pairs: Sequence[tuple[int, int]], num_bytes: int) -> _Took:
    """Time in which the busiest sender sends ``num_bytes``, the others as much to each receiver."""
    if isinstance(transport, DeviceTransport):
        return _Took(_probe_devices(transport, pairs, num_bytes))
    receivers = [tuple(target for source, target in pairs if source == rank) for rank in range(transport.world_size)]
    share = -(-num_bytes // max(len(of) for of in receivers))
    buffers = transport.open([[Outgoing(0, share, of)] if of else [] for of in receivers])
    transport.all_gather(torch.zeros(1))
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
    transport.all_gather(torch.zeros(1))
    return elapsed(lambda: transport.all_to_all(out, x, received, sent), transport.device)


_SHAPE = (1 << 10, 1 << 10)
_NUMEL = 1 << 20


def measure_speeds(
    compressors: Collection[Compressor], transport: Transport, algorithm: Algorithm, world: World
) -> Speeds:
    """How fast the slowest rank compresses and sends. The same on every rank; all must call it.

    Takes a few milliseconds for each compressor and some tens for the link.

    Raises:
        TransportError: a rank is gone or silent.
    """
    ordered = sorted(compressors, key=str)
    device = transport.device if isinstance(transport, DeviceTransport) else torch.device("cpu")
    passes = [_passes(compressor, device) for compressor in ordered]
    mine = [codec_seconds(c, transport.world_size, seconds) for c, seconds in zip(ordered, passes, strict=True)]
    bandwidth, latency = measure_link(transport)
    # The slowest rank decides for all.
    figures = torch.tensor([*mine, 1 / bandwidth, latency, 1 / measure_native(transport)], dtype=torch.float64)
    *slowest, per_byte, latency, per_native_byte = transport.all_gather(figures).amax(0).tolist()
    codec_s = dict(zip(ordered, slowest, strict=True))
    crossings = algorithm.crossings(world)
    return Speeds(codec_s, 1 / per_byte, latency, transport.world_size, crossings, native=1 / per_native_byte)


def measure_codecs(compressors: Collection[Compressor], transport: Transport) -> dict[Compressor, tuple[float, float]]:
    """Seconds in which the slowest rank encodes an element, and decodes one. The same on every rank; all must call it.

    Raises:
        TransportError: a rank is gone or silent.
    """
    ordered = sorted(compressors, key=str)
    device = transport.device if isinstance(transport, DeviceTransport) else torch.device("cpu")
    mine = torch.tensor([list(_passes(c, device).values()) for c in ordered], dtype=torch.float64)
    slowest = transport.all_gather(mine).amax(0).tolist()
    return {compressor: (encode, decode) for compressor, (encode, decode) in zip(ordered, slowest, strict=True)}


def _passes(compressor: Compressor, device: torch.device) -> dict[str, float]:
    """Seconds of an element: ``encode``, ``decode``."""
    x = torch.randn(_NUMEL, generator=torch.Generator().manual_seed(0)).to(device)
    piece = Piece("probe", 0, _NUMEL, 0, 0, _SHAPE)
    segments = Segments.build([piece])
    state = first_state(compressor, x, segments)
    if isinstance(compressor, Coded):
        message = torch.zeros(compressor.payload_bytes(_NUMEL, x.dtype), dtype=torch.uint8, device=device)
        encode = _seconds(lambda: compressor.encode(x, message, CodecCall(segments, Key.of(1), state=state)), device)
        y = torch.empty_like(x)
        decode = _seconds(lambda: compressor.decode(message, y, CodecCall(segments)), device)
    else:
        assert isinstance(compressor, Summed)
        y = x.clone()
        sums = compressor.sums(_SHAPE, x.dtype)
        buffers = tuple(torch.zeros(s.numel, dtype=s.dtype, device=device) for s in sums)
        parts = tuple((Part(piece, slice(0, s.numel)),) for s in sums)
        call = SumCall(parts, buffers, Key.of(1), state)

        def run() -> tuple[float, float]:
            rounds = compressor.rounds(x, y, call)
            return elapsed(lambda: next(rounds), device), elapsed(lambda: list(rounds), device)

        run()
        # Each half is timed by itself: as the difference of two medians, a short one could come out as nothing.
        encode, decode = map(median, zip(*(run() for _ in range(_REPEATS)), strict=True))
    return {"encode": encode / _NUMEL, "decode": decode / _NUMEL}


def _seconds(run: Callable[[], None], device: torch.device) -> float:
    run()
    return median(elapsed(run, device) for _ in range(_REPEATS))
