"""All-reduces of summed compressors: one for all layers of a round, operation and dtype.

Integers may be sent in messages of few bits, which widen as they sum more ranks' integers.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace

import torch
from torch import Tensor

from thinwire.collectives.layout import Layout, Sum
from thinwire.collectives.message import CollectiveCall, complete
from thinwire.collectives.reduction import all_reduce
from thinwire.collectives.transport import Pending, Transport
from thinwire.compressors import Parts, SumCall, Summed

_Exchange = Callable[[Tensor, Transport, CollectiveCall], Generator[None]]
"""A function that replaces a flat tensor by its sum over all ranks; a generator as `all_reduce`."""


class PackedSum:
    """One sum of a layout whose integers are sent packed, and the memory for it."""

    def __init__(self, s: Sum, message_bytes: int, exchange: _Exchange, device: torch.device | None = None) -> None:
        assert s.packed is not None
        self._packed, self._exchange = s.packed, exchange
        self._values = torch.zeros(s.packed.spread_numel(s.numel), dtype=torch.float32, device=device)
        """Integers as the kernels take them: fp32, in buckets."""
        self.num_bytes = self._values.nbytes + message_bytes
        """Memory in use, in bytes."""

    def run(self, buffer: Tensor, transport: Transport, call: CollectiveCall) -> Generator[None]:
        """Replace the integers in ``buffer`` by their sums over all ranks. Yields as `all_reduce` does."""
        with call.clock.stage("encode"):
            self._packed.spread(buffer, self._values)
        yield from self._exchange(self._values, transport, replace(call, scale=1.0, state=None))
        with call.clock.stage("decode"):
            self._packed.collect(self._values, buffer)


def packed_sums(layout: Layout, transport: Transport) -> dict[int, PackedSum]:
    """Return the packed sums of a layout by their number; none where an aggregator adds integers."""
    sums = layout.sums if transport.aggregator is None else ()
    return {number: _packed_sum(s, layout, transport) for number, s in enumerate(sums) if s.packed is not None}


def _packed_sum(s: Sum, layout: Layout, transport: Transport) -> PackedSum:
    of = layout.packed_layout(s)
    buffers = transport.open(of.reduction_traffic())
    return PackedSum(s, buffers.num_bytes, lambda x, transport, call: all_reduce(x, of, transport, buffers, call))


_NONE: Mapping[int, PackedSum] = {}


def sum_buffers(layout: Layout, device: torch.device | None = None) -> tuple[Tensor, ...]:
    """Return the operands of the all-reduces, one for each sum of the layout."""
    return tuple(torch.zeros(s.numel, dtype=s.dtype, device=device) for s in layout.sums)


def summed_all_reduce(
    x: Tensor,
    layout: Layout,
    transport: Transport,
    buffers: Sequence[Tensor],
    call: CollectiveCall,
    packed: Mapping[int, PackedSum] = _NONE,
) -> Generator[None]:
    """Replace the summed layers of the flat tensor ``x`` by their sum over all ranks times ``call.scale``, by
    default by their mean.

    It is a generator that yields once, as `all_reduce` does: when the all-reduces of the first round have been started.
    Later rounds use the transport's second lane, so that they do not delay the first round of the next bucket.
    ``packed``: the sums, by their number in the layout, sent in messages of few bits (`packed_sums`); others are
    added by native all-reduces.

    Raises:
        TransportError: a rank is gone or silent.
    """
    clock = call.clock
    running = SumRounds(x, layout, buffers, call, rank=transport.rank, num_ranks=transport.world_size)
    with ExitStack() as stack:
        with clock.stage("encode"):
            running.start()
        started: list[tuple[Sum, Pending | Generator[None]]] = []
        for number, (s, buffer) in enumerate(zip(layout.sums, buffers, strict=True)):
            if number in packed:
                # An error in another sum closes it early, and it reports the failure to its peers.
                messages = stack.enter_context(closing(packed[number].run(buffer, transport, call)))
                next(messages)
                started.append((s, messages))
            elif s.round == 0:
                limit = 0 if s.packed is None else s.packed.limit
                started.append((s, transport.start_all_reduce(buffer, op=s.op, limit=limit)))
        yield

        for s, pending in started:
            if isinstance(pending, Generator):
                complete(pending)
            else:
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
    """Summed compressors of a layout, each in its round: `Summed.rounds`."""

    def __init__(
        self, x: Tensor, layout: Layout, buffers: Sequence[Tensor], call: CollectiveCall, *, rank: int, num_ranks: int
    ) -> None:
        """Prepare to replace the layers of ``x``. ``buffers``: one for each sum, as `sum_buffers` makes them."""
        places: dict[Summed, list[tuple[Parts, Tensor]]] = {}
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
