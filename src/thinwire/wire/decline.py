"""Never slower than without: measure this machine's codecs and this link once, and leave raw what would not pay."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from statistics import median

import torch

from thinwire.collectives import Transport
from thinwire.compressors import Coded, Compressor, Key, Part, Piece, Raw, Segments, Summed, first_state
from thinwire.plan import Plan
from thinwire.plan.cost import Speeds, codec_seconds, declined

_SHAPE = (1 << 10, 1 << 10)
_NUMEL = 1 << 20
_REPEATS = 3
_FIRST_PROBE_BYTES = 64 << 10
_LAST_PROBE_BYTES = 16 << 20
_LONG_ENOUGH_S = 0.02


def decline(plan: Plan, transport: Transport) -> tuple[Plan, Speeds]:
    """The plan without what would make a step slower, and the speeds that say so. The same on every rank.

    Takes a few milliseconds for each compressor and some tens for the link.

    Raises:
        TransportError: a rank is gone or silent.
    """
    compressors = sorted({c for c in plan.layers.values() if not isinstance(c, Raw)}, key=str)
    mine = [_codec(compressor, transport.world_size) for compressor in compressors]
    bandwidth, latency = _link(transport)
    # The slowest rank decides for all.
    figures = torch.tensor([*mine, 1 / bandwidth, latency], dtype=torch.float64)
    slowest = transport.all_gather(figures).amax(0).tolist()
    codec_s = dict(zip(compressors, slowest, strict=False))
    speeds = Speeds(codec_s, 1 / slowest[-2], slowest[-1], transport.world_size)
    return declined(plan, speeds), speeds


def _codec(compressor: Compressor, num_ranks: int) -> float:
    x = torch.randn(_NUMEL, generator=torch.Generator().manual_seed(0))
    piece = Piece("probe", 0, _NUMEL, 0, 0, _SHAPE)
    segments = Segments.build([piece])
    state = first_state(compressor, x, segments)
    if isinstance(compressor, Coded):
        message = torch.zeros(compressor.payload_bytes(_NUMEL, x.dtype), dtype=torch.uint8)
        encode = _seconds(lambda: compressor.encode(x, segments, message, key=Key.of(1), state=state))
        y = torch.empty_like(x)
        decode = _seconds(lambda: compressor.decode(message, segments, y))
    else:
        assert isinstance(compressor, Summed)
        y = x.clone()
        encode = decode = 0.0
        for round in range(compressor.rounds):
            numel = compressor.part_numel(round, _SHAPE)
            buffer, parts = torch.zeros(numel, dtype=compressor.part_dtype(x.dtype)), [Part(piece, slice(0, numel))]
            part, absorb = (
                partial(compressor.part, round, key=Key.of(1), state=state),
                partial(compressor.absorb, round),
            )
            encode += _seconds(partial(part, x, parts, buffer, scale=1.0))
            decode += _seconds(partial(absorb, buffer, y, parts, key=Key.of(1), state=state))
    return codec_seconds(compressor, num_ranks, {"encode": encode / _NUMEL, "decode": decode / _NUMEL})


def _seconds(run: Callable[[], None]) -> float:
    run()
    times = []
    for _ in range(_REPEATS):
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return median(times)


def _link(transport: Transport) -> tuple[float, float]:
    """Bytes per second that every rank sends while all send, and the seconds of an empty exchange."""
    _exchange(transport, 64)
    latency = median(_exchange(transport, 64) for _ in range(_REPEATS))
    num_bytes = _FIRST_PROBE_BYTES
    while True:
        took = _exchange(transport, num_bytes) - latency
        # All ranks must take the same turn: the longest time is everybody's.
        took = float(transport.all_gather(torch.tensor([took], dtype=torch.float64)).max())
        if took >= _LONG_ENOUGH_S or num_bytes >= _LAST_PROBE_BYTES:
            return num_bytes / max(took, 1e-6), max(latency, 0.0)
        num_bytes *= 4


def _exchange(transport: Transport, num_bytes: int) -> float:
    """Seconds in which every rank sends ``num_bytes``, shared out among all others, and receives as much."""
    peers = [peer for peer in range(transport.world_size) if peer != transport.rank]
    share = -(-num_bytes // len(peers))
    out = torch.zeros(share, dtype=torch.uint8)
    inbox = {peer: torch.empty(share, dtype=torch.uint8) for peer in peers}
    tag = transport.new_tag(1)
    transport.all_gather(torch.zeros(1))
    started = time.perf_counter()
    arriving = [transport.receive(buffer, peer, tag) for peer, buffer in inbox.items()]
    leaving = [transport.send(out, peer, tag) for peer in peers]
    for pending in (*arriving, *leaving):
        pending.wait()
    return time.perf_counter() - started
