"""Native all-reduces of what summed compressors contribute: all layers of one round and dtype together."""

from __future__ import annotations

from collections.abc import Generator, Sequence

import torch
from torch import Tensor

from thinwire.collectives.keys import sum_key
from thinwire.collectives.layout import Layout, Sum
from thinwire.collectives.stages import Clock, NoClock
from thinwire.collectives.transport import Transport
from thinwire.compressors import State


def sum_buffers(layout: Layout) -> tuple[Tensor, ...]:
    """The tensors that are added, one for each sum of the layout."""
    return tuple(torch.zeros(s.numel, dtype=s.dtype) for s in layout.sums)


def summed_all_reduce(
    x: Tensor,
    layout: Layout,
    transport: Transport,
    buffers: Sequence[Tensor],
    *,
    seed: int,
    step: int,
    scale: float | None = None,
    state: State | None = None,
    clock: Clock | None = None,
) -> Generator[None]:
    """Replace the summed layers of the flat tensor ``x`` by ``scale`` times their sum over all ranks, by default their
    mean.

    Yields once, when the sums of the first round are on their way, as `all_reduce` does; later rounds take the
    transport's second lane, so that the next bucket's first round need not wait for them.

    Raises:
        TransportError: a rank is gone or silent.
    """
    clock = clock or NoClock()
    key = sum_key(seed, step, transport.rank)
    scale = 1.0 / transport.world_size if scale is None else scale

    def encode(s: Sum, buffer: Tensor) -> None:
        with clock.stage("encode"):
            for compressor, parts in s.members:
                compressor.part(s.round, x, parts, buffer, key=key, scale=scale, state=state)

    def decode(s: Sum, buffer: Tensor) -> None:
        with clock.stage("decode"):
            for compressor, parts in s.members:
                compressor.absorb(s.round, buffer, x, parts, key=key, state=state)

    sums = list(zip(layout.sums, buffers, strict=True))
    started = []
    for s, buffer in sums:
        if s.round == 0:
            encode(s, buffer)
            started.append((s, buffer, transport.start_all_reduce(buffer, op=s.op)))
    yield

    for s, buffer, pending in started:
        with clock.stage("wire"):
            pending.wait()
        decode(s, buffer)
    for s, buffer in sums:
        if s.round > 0:
            encode(s, buffer)
            with clock.stage("wire"):
                transport.all_reduce(buffer, lane=1, op=s.op)
            decode(s, buffer)
