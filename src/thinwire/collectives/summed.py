"""Native all-reduces of summed compressors: one for all layers of a round, operation and dtype."""

from __future__ import annotations

from collections.abc import Generator, Sequence

import torch
from torch import Tensor

from thinwire.collectives.layout import Layout, Sum
from thinwire.collectives.stages import CollectiveCall
from thinwire.collectives.transport import Transport
from thinwire.compressors import Part, SumCall, Summed


def sum_buffers(layout: Layout, device: torch.device | None = None) -> tuple[Tensor, ...]:
    """The operands of the all-reduces, one for each sum of the layout."""
    return tuple(torch.zeros(s.numel, dtype=s.dtype, device=device) for s in layout.sums)


def summed_all_reduce(
    x: Tensor, layout: Layout, transport: Transport, buffers: Sequence[Tensor], call: CollectiveCall
) -> Generator[None]:
    """Replace the summed layers of the flat tensor ``x`` by their sum over all ranks times ``call.scale``, by
    default by their mean.

    It is a generator that yields once, as `all_reduce` does: when the all-reduces of the first round have been started.
    Later rounds use the transport's second lane, so that they do not delay the first round of the next bucket.

    Raises:
        TransportError: A rank is gone or silent.
    """
    clock, started = call.clock, []
    running = SumRounds(x, layout, buffers, call, rank=transport.rank, num_ranks=transport.world_size)
    with clock.stage("encode"):
        running.start()
    for s, buffer in zip(layout.sums, buffers, strict=True):
        if s.round == 0:
            started.append((s, transport.start_all_reduce(buffer, op=s.op)))
    yield

    for s, pending in started:
        with clock.stage("wire"):
            pending.wait()
        with clock.stage("decode"):
            running.go_on(s)
    for s, buffer in zip(layout.sums, buffers, strict=True):
        if s.round > 0:
            with clock.stage("wire"):
                transport.all_reduce(buffer, lane=1, op=s.op)
            with clock.stage("decode"):
                running.go_on(s)


class SumRounds:
    """The summed compressors of a layout, each in its round: `Summed.rounds`."""

    def __init__(
        self, x: Tensor, layout: Layout, buffers: Sequence[Tensor], call: CollectiveCall, *, rank: int, num_ranks: int
    ) -> None:
        """Replace the layers of ``x``. ``buffers``: one for each sum of the layout, as `sum_buffers` makes them."""
        places: dict[Summed, list[tuple[tuple[Part, ...], Tensor]]] = {}
        for s, buffer in zip(layout.sums, buffers, strict=True):
            for compressor, parts in s.members:
                places.setdefault(compressor, []).append((parts, buffer))
        self._running = {}
        for compressor, rounds in places.items():
            parts_by_round, buffer_by_round = zip(*rounds, strict=True)
            sums = SumCall(parts_by_round, buffer_by_round, call.sum_key(rank), call.state, call.factor(num_ranks))
            self._running[compressor] = compressor.rounds(x, x, sums)

    def start(self) -> None:
        """Fill the buffers of the first round."""
        for rounds in self._running.values():
            next(rounds)

    def go_on(self, s: Sum) -> None:
        """Take a sum of all ranks, and fill the buffers of the next round or set the layers."""
        for compressor, _ in s.members:
            next(self._running[compressor], None)
