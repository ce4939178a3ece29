"""How fast this machine compresses and its links carry: what declining, and policies that mind the time, go by."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from statistics import median

import torch

from thinwire.collectives import DeviceTransport, Topology, Transport, World
from thinwire.compressors import Coded, Compressor, Key, Part, Piece, Segments, Summed, first_state
from thinwire.plan.cost import Speeds, codec_seconds
from thinwire.wire.link import measure_link, measure_native
from thinwire.wire.stream import elapsed

_SHAPE = (1 << 10, 1 << 10)
_NUMEL = 1 << 20
_REPEATS = 3


def measure_speeds(
    compressors: Collection[Compressor], transport: Transport, topology: Topology, world: World
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
    crossings = topology.crossings(world)
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
        encode = _seconds(lambda: compressor.encode(x, segments, message, key=Key.of(1), state=state), device)
        y = torch.empty_like(x)
        decode = _seconds(lambda: compressor.decode(message, segments, y), device)
    else:
        assert isinstance(compressor, Summed)
        y = x.clone()
        encode = decode = 0.0
        for round in range(compressor.rounds):
            numel = compressor.part_numel(round, _SHAPE)
            buffer = torch.zeros(numel, dtype=compressor.part_dtype(x.dtype), device=device)
            parts = [Part(piece, slice(0, numel))]
            part, absorb = (
                partial(compressor.part, round, key=Key.of(1), state=state),
                partial(compressor.absorb, round),
            )
            encode += _seconds(partial(part, x, parts, buffer, scale=1.0), device)
            decode += _seconds(partial(absorb, buffer, y, parts, key=Key.of(1), state=state), device)
    return {"encode": encode / _NUMEL, "decode": decode / _NUMEL}


def _seconds(run: Callable[[], None], device: torch.device) -> float:
    run()
    return median(elapsed(run, device) for _ in range(_REPEATS))
