"""What ranks find out about their links before they train: who shares a node, how fast each link is."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from statistics import median

import torch

from thinwire.collectives import (
    DeviceTransport,
    Outgoing,
    ScatterReduceAllGather,
    Topology,
    Transport,
    World,
    check_star,
    node_identity,
    number_nodes,
)
from thinwire.wire.stream import elapsed

_REPEATS = 3
_FIRST_PROBE_BYTES = 64 << 10
_LAST_PROBE_BYTES = 16 << 20
_LONG_ENOUGH_S = 0.02


def settle(topology: Topology, transport: Transport) -> tuple[Topology, World]:
    """The topology with what it left to be measured, and the world as it must know it. The same on every rank.

    Raises:
        ValueError: it does not fit this world.
        TransportError: a rank is gone or silent.
    """
    if isinstance(transport, DeviceTransport):
        check_star(topology)
    nodes: tuple[int, ...] = ()
    if topology.needs_nodes:
        nodes = number_nodes([bytes(row.tolist()) for row in transport.all_gather(node_identity())])
    world = World(transport.world_size, nodes)
    if isinstance(topology, ScatterReduceAllGather) and topology.rates == "measured":
        # Two digits say enough, and the spec stays readable.
        rates = tuple(float(f"{rate:.2g}") for rate in measure_rates(transport))
        topology = replace(topology, rates=rates)
    topology.shares(world)
    return topology, world


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


def measure_pairs(transport: Transport, pairs: Sequence[tuple[int, int]]) -> list[float]:
    """Bytes per second from the first to the second rank of each pair, one pair after the other. The same everywhere.

    Raises:
        TransportError: a rank is gone or silent.
    """
    return [_speed(transport, [pair])[0] for pair in pairs]


def _speed(transport: Transport, pairs: Sequence[tuple[int, int]]) -> tuple[float, float]:
    """Bytes per second that the busiest sender of ``pairs`` sends, and the seconds of messages without content."""
    _probe(transport, pairs, 64)
    latency = median(_probe(transport, pairs, 64) for _ in range(_REPEATS))
    num_bytes = _FIRST_PROBE_BYTES
    while True:
        took = _probe(transport, pairs, num_bytes) - latency
        # All ranks must take the same turn: the longest time is everybody's.
        took = float(transport.all_gather(torch.tensor([took], dtype=torch.float64)).max())
        if took >= _LONG_ENOUGH_S or num_bytes >= _LAST_PROBE_BYTES:
            return num_bytes / max(took, 1e-6), max(latency, 0.0)
        num_bytes *= 4


def _probe(transport: Transport, pairs: Sequence[tuple[int, int]], num_bytes: int) -> float:
    """Seconds in which the busiest sender sends ``num_bytes``, the others as much to each receiver."""
    if isinstance(transport, DeviceTransport):
        return _probe_devices(transport, pairs, num_bytes)
    receivers = [tuple(target for source, target in pairs if source == rank) for rank in range(transport.world_size)]
    share = -(-num_bytes // max(len(of) for of in receivers))
    buffers = transport.open([[Outgoing(0, share, of)] if of else [] for of in receivers])
    transport.all_gather(torch.zeros(1))
    started = time.perf_counter()
    transport.begin(buffers)
    pending = [transport.receive_into(buffers, *address) for address in buffers.inbox]
    if buffers.outgoing:
        pending += transport.send_from(buffers, 0, share)
    for message in pending:
        message.wait()
    transport.end(buffers)
    return time.perf_counter() - started


def _probe_devices(transport: DeviceTransport, pairs: Sequence[tuple[int, int]], num_bytes: int) -> float:
    ranks, mine = range(transport.world_size), transport.rank
    share = -(-num_bytes // max(sum(source == rank for source, _ in pairs) for rank in ranks))
    sent = [share * ((mine, rank) in pairs) for rank in ranks]
    received = [share * ((rank, mine) in pairs) for rank in ranks]
    out, x = (torch.zeros(sum(sizes), dtype=torch.uint8, device=transport.device) for sizes in (received, sent))
    transport.all_gather(torch.zeros(1))
    return elapsed(lambda: transport.all_to_all(out, x, received, sent), transport.device)
