"""Scatter-reduce-all-gather: every value is quantised twice, whatever the number of ranks (thesis, section 3.5.1)."""

from __future__ import annotations

from collections.abc import Generator

from torch import Tensor

from thinwire.collectives.exchange import Buffers, Exchange
from thinwire.collectives.keys import OWNER, WORKER, stage_key
from thinwire.collectives.layout import Layout
from thinwire.collectives.stages import Clock, NoClock
from thinwire.collectives.transport import Transport
from thinwire.compressors import State


def scatter_reduce_allgather(
    x: Tensor,
    layout: Layout,
    transport: Transport,
    buffers: Buffers,
    *,
    seed: int,
    step: int,
    state: State | None = None,
    clock: Clock | None = None,
) -> Generator[None]:
    """Replace the coded layers of the flat tensor ``x`` by their mean; every rank ends with the same bytes.

    1. Each rank encodes every other owner's chunk and sends it. 2. The owner adds what it decodes to its own exact
    values, encodes the mean, decodes its own payload like everybody else, and sends it to all. 3. All decode.

    Yields once, when its first messages are on their way: whoever runs it may go on with it later or in another thread,
    and start the next bucket's in between, so that the link never waits for arithmetic. `complete` runs it in one go.

    Raises:
        TransportError: a rank is gone or silent.
        PeerFailedError: another rank could not do its part.
        MessageError: a message is damaged or of another step.
    """
    clock = clock or NoClock()
    rank, num_ranks = transport.rank, transport.world_size
    # Each rank starts with its right neighbour, so that no owner is everybody's first target.
    peers = [(rank + shift) % num_ranks for shift in range(1, num_ranks)]
    mine = layout.chunks[rank]
    with Exchange(transport, buffers, step=step, digest=layout.digest, phases=2) as exchange:
        key = stage_key(seed, step, WORKER, rank)
        for peer in peers:
            with clock.stage("encode"):
                for compressor, segments in layout.chunks[peer].groups:
                    compressor.encode(x, segments, buffers.outbox[0, peer], key=key, state=state)
                exchange.send(0, peer)
        yield

        with clock.stage("wire"):
            received = [exchange.receive(0, peer) for peer in sorted(peers)]
        with clock.stage("reduce"):
            key, mean = stage_key(seed, step, OWNER, rank), buffers.outbox[1, peers[0]]
            for compressor, segments in mine.groups:
                compressor.reduce(received, x, segments, mean, x, key=key, scale=1.0 / num_ranks, state=state)
            exchange.send(1, *peers)

        for peer in reversed(peers):
            with clock.stage("wire"):
                message = exchange.receive(1, peer)
            with clock.stage("decode"):
                for compressor, segments in layout.chunks[peer].groups:
                    compressor.decode(message, segments, x)
