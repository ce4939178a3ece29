"""All-reduce of coded chunks by any collective algorithm, and its two halves: reduce-scatter and all-gather.

An all-reduce has three stages:

1. Encode and send. Every rank encodes its values of each chunk and sends them toward the chunk's owner.
2. Reduce. A rank that receives contributions adds its own values to them. If it owns the chunk, it encodes the mean and
   sends it; otherwise it encodes the partial sum and sends that on to the owner. Where values are so large that partial
   sums of a mean might overflow, ranks divide before they add, and say so in the header of the message.
3. Decode. The owner's message is forwarded unchanged to all ranks, and every rank decodes it, the owner included, so
   all of them end with the same bytes.

If every rank sends to the owner directly, this is a scatter-reduce-all-gather: every value is encoded twice, whatever
the number of ranks (thesis, section 3.5.1).
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from thinwire.collectives.layout import Chunk, Layout
from thinwire.collectives.message import OWNER, WORKER, CollectiveCall, Messages
from thinwire.collectives.rounds import Rounds
from thinwire.collectives.transport import Buffers, Transport
from thinwire.compressors import CodecCall, Segments
from thinwire.kernels import before_sum, rows_add


def all_reduce(
    x: Tensor, layout: Layout, transport: Transport, buffers: Buffers | Rounds, call: CollectiveCall
) -> Generator[None]:
    """Replace the chunks of the flat tensor ``x`` by their sum over all ranks times ``call.scale``, by default by
    their mean.

    It is a generator that yields once, when this rank's first messages have been sent. The caller may resume it later
    or in another thread, and start the next bucket in between, so that the link is busy while values are encoded and
    decoded. `complete` runs it to its end.

    Args:
        x: values of ``layout.dtype``, at least ``layout.numel`` of them.
        layout: owners and messages, the same on every rank.
        transport: sends the messages.
        buffers: opened with `Layout.reduction_traffic`; on a device, its `Rounds`.
        call: its number and seed, the factor of the sum, and this rank's slots.

    Raises:
        TransportError: a rank is gone or silent.
        PeerFailedError: another rank failed.
        MessageError: a message is damaged or of another step.
    """
    with _messages(layout, transport, buffers, call) as messages:
        run = _Run(x, layout, transport.rank, messages, call)
        run.send_contributions()
        yield
        for k in run.reductions:
            if run.owns(k):
                run.send_mean(k)
            else:
                run.send_partial_sum(k)
        run.receive_means()


def reduce_scatter(
    x: Tensor,
    layout: Layout,
    transport: Transport,
    buffers: Buffers | Rounds,
    call: CollectiveCall,
    *,
    out: Tensor | None = None,
) -> Generator[None]:
    """Run the first half of `all_reduce`: the chunks of each owner become their sum times ``call.scale``, not encoded.

    The other elements of ``x`` are undefined afterwards. Yields and raises as `all_reduce` does, whose arguments it
    has, except:

    Args:
        buffers: opened with ``reduction_traffic(down=False)``.
        out: with a `part_layout` or `sharded_layout`: a flat tensor of this rank's part that receives the sum. All of
            ``x`` is undefined then.
    """
    with _messages(layout, transport, buffers, call) as messages:
        run = _Run(x, layout, transport.rank, messages, call)
        run.send_contributions()
        yield
        for k in run.reductions:
            if run.owns(k):
                run.store_sum(k, out)
            else:
                run.send_partial_sum(k)


def all_gather(
    x: Tensor,
    layout: Layout,
    transport: Transport,
    buffers: Buffers | Rounds,
    call: CollectiveCall,
    *,
    kept: dict[int, Tensor] | None = None,
) -> Generator[None]:
    """Run the second half of `all_reduce`: all ranks receive the chunks of every owner, who decodes its own, too.

    Yields and raises as `all_reduce` does, whose arguments it has, except:

    Args:
        buffers: opened with ``reduction_traffic(up=False)``.
        kept: this rank's previous messages, by chunk. If a chunk's values are what its previous message decodes to,
            that message is sent again, bit for bit; otherwise the new message replaces it.
    """
    with _messages(layout, transport, buffers, call) as messages:
        run = _Run(x, layout, transport.rank, messages, call)
        run.send_own(kept)
        yield
        run.receive_means()


def _messages(
    layout: Layout, transport: Transport, buffers: Buffers | Rounds, call: CollectiveCall
) -> AbstractContextManager[Messages | Rounds]:
    if isinstance(buffers, Rounds):
        return buffers.over(transport)
    return Messages(transport, buffers, step=call.step, digest=layout.digest)


def is_unchanged(x: Tensor, chunk: Chunk, message: Tensor) -> Tensor:
    """Return whether the values of ``chunk`` in ``x`` are what ``message`` decodes to, as a tensor on their device."""
    decoded = torch.empty_like(x)
    for compressor, segments in chunk.groups:
        compressor.decode(message, decoded, CodecCall(segments))
    pieces = [piece for _, segments in chunk.groups for piece in segments.pieces]
    return torch.stack([(decoded[piece.elements] == x[piece.elements]).all() for piece in pieces]).all()


@dataclass
class _Run:
    """One rank's side of an exchange."""

    x: Tensor
    layout: Layout
    rank: int
    messages: Messages | Rounds
    call: CollectiveCall

    def __post_init__(self) -> None:
        if self.x.dtype != self.layout.dtype or self.x.numel() < self.layout.numel:
            raise TypeError(
                f"a {self.x.dtype} tensor of {self.x.numel()} elements, laid out as {self.layout.dtype} of "
                f"{self.layout.numel}"
            )

    @cached_property
    def wide(self) -> Tensor:
        """A copy of ``x`` in the dtype of sums."""
        return self.x.to(self.layout.wide_dtype)

    @property
    def scale(self) -> float:
        """Factor of the sum over all ranks."""
        return self.call.factor(self.layout.world_size)

    @cached_property
    def is_large(self) -> bool:
        """Whether partial sums of values like this rank's might overflow although their mean does not.

        Ranks that send their values to each owner directly need not look: `Coded.add_up` divides before it adds.
        Between devices none looks, because the host would wait: a sum that overflows makes the step not finite.
        """
        if isinstance(self.messages, Rounds) or not self.layout.has_partial_sums or before_sum(self.scale) == 1.0:
            return False
        low, high = torch.aminmax(self.x[: self.layout.numel])
        # A quarter of what is left: a residual is added to the values, and some formats need their range.
        return max(-float(low), float(high)) > torch.finfo(self.x.dtype).max * before_sum(self.scale) / 4

    @cached_property
    def divided(self) -> Tensor:
        """Values of ``x``, divided such that no sum over ranks overflows."""
        return self.x * before_sum(self.scale)

    @property
    def reductions(self) -> tuple[int, ...]:
        """Chunks of which this rank receives contributions, in the order in which these can be complete."""
        return self.layout.schedule(self.rank).reductions

    def owns(self, k: int) -> bool:
        return self.layout.chunks[k].owner == self.rank

    def send_contributions(self) -> None:
        """Run stage 1 for chunks of which this rank receives no contributions: encode its values and send them."""
        for k, parent in self.layout.schedule(self.rank).sends:
            with self.call.clock.stage("encode"):
                chunk = self.layout.sent_chunk(k, self.rank, parent)
                values = self.divided if self.is_large else self.x
                if chunk is not self.layout.chunks[k]:
                    values = values.to(self.layout.wide_dtype) if self.is_large else self.wide
                for compressor, segments in chunk.groups:
                    call = self._codec_call(segments, WORKER, divided=self.is_large)
                    compressor.encode(values, self.messages.outgoing(k), call)
                self.messages.send(k, divided=self.is_large)

    def send_partial_sum(self, k: int) -> None:
        """Run stage 2 for a chunk of another owner: add the contributions to this rank's values and send the sum."""
        parent = self.layout.trees[self.layout.chunks[k].owner].parents[self.rank]
        assert parent is not None
        own, messages, divided = self._receive_contributions(k)
        with self.call.clock.stage("reduce"):
            chunk = self.layout.sent_chunk(k, self.rank, parent)
            # x may be overwritten: its values of this chunk are not read again before the mean replaces them.
            decoded = self.x if chunk is self.layout.chunks[k] else self.wide
            for compressor, segments in chunk.groups:
                call = self._codec_call(segments, WORKER, divided=divided)
                compressor.reduce(messages, own, self.messages.outgoing(k), decoded, call)
            self.messages.send(k, divided=divided)

    def send_mean(self, k: int) -> None:
        """Run stage 2 as owner: reduce the chunk, encode the result, send it, and keep its decoded value."""
        mean = self._mean_message(k)
        own, messages, divided = self._receive_contributions(k)
        scale = self.scale / before_sum(self.scale) if divided else self.scale
        with self.call.clock.stage("reduce"):
            for compressor, segments in self.layout.chunks[k].groups:
                compressor.reduce(messages, own, mean, self.x, self._codec_call(segments, OWNER, scale))
            self._send_mean_message(k)

    def store_sum(self, k: int, out: Tensor | None) -> None:
        """Run stage 2 of a reduce-scatter, as owner: reduce the chunk into ``x`` or ``out``."""
        own, messages, divided = self._receive_contributions(k)
        scale = self.scale / before_sum(self.scale) if divided else self.scale
        chunk, total = self.layout.chunks[k], self.x
        if out is not None:
            chunk, total, own = self.layout.local[k], out, own[self.rank * self.layout.part_numel :]
        with self.call.clock.stage("reduce"):
            for compressor, segments in chunk.groups:
                compressor.add_up(messages, own, total, CodecCall(segments, scale=scale))

    def send_own(self, kept: dict[int, Tensor] | None) -> None:
        """Run stage 2 of an all-gather: encode this rank's own chunks, send them, and keep their decoded values."""
        for k, chunk in enumerate(self.layout.chunks):
            if not self.owns(k):
                continue
            with self.call.clock.stage("encode"):
                message, last = self._mean_message(k), None if kept is None else kept.get(k)
                same = None if last is None else is_unchanged(self.x, chunk, last)
                if last is not None and isinstance(self.messages, Messages) and same:
                    message.copy_(last)
                else:
                    for compressor, segments in chunk.groups:
                        compressor.encode(self.x, message, self._codec_call(segments, OWNER))
                    if last is not None and same is not None:
                        message.copy_(torch.where(same, last, message))
                    for compressor, segments in chunk.groups:
                        compressor.decode(message, self.x, CodecCall(segments))
                    if kept is not None:
                        kept[k] = message.clone()
                self._send_mean_message(k)

    def receive_means(self) -> None:
        """Run stage 3: receive the chunks of other owners, forward them to ranks that expect them, and decode them."""
        for k, parent in self.layout.schedule(self.rank).means:
            chunk, phase = self.layout.chunks[k], len(self.layout.chunks) + k
            with self.call.clock.stage("wire"):
                message = self.messages.receive(phase, parent)
                if self.layout.trees[chunk.owner].children[self.rank]:
                    self.messages.forward(phase, parent)
            with self.call.clock.stage("decode"):
                for compressor, segments in chunk.groups:
                    compressor.decode(message, self.x, CodecCall(segments))

    def _receive_contributions(self, k: int) -> tuple[Tensor, list[Tensor], bool]:
        """Return this rank's values, the messages to add to them, and whether the values are divided.

        Messages that a compressor other than the chunk's has encoded are decoded here and added to the values. So are
        all messages if this rank's values are large or another rank's are.
        """
        chunk = self.layout.chunks[k]
        children = self.layout.trees[chunk.owner].children[self.rank]
        with self.call.clock.stage("wire"):
            received = [
                (self.layout.sent_chunk(k, child, self.rank), self.messages.receive(k, child)) for child in children
            ]
        divided = [self.messages.is_divided(k, child) for child in children]
        if self.is_large or any(divided):
            with self.call.clock.stage("reduce"):
                return self._added_divided(chunk, received, divided), [], True
        values, others = self.x, [(sent, message) for sent, message in received if sent is not chunk]
        if others:
            values = self.wide
            with self.call.clock.stage("reduce"):
                for sent, message in others:
                    for compressor, segments in sent.groups:
                        compressor.decode(message, values, CodecCall(segments), add=True)
        return values, [message for sent, message in received if sent is chunk], False

    def _added_divided(self, chunk: Chunk, received: list[tuple[Chunk, Tensor]], divided: list[bool]) -> Tensor:
        """Return the sum of this rank's values and those received, all of them divided."""
        before = before_sum(self.scale)
        total = self.wide * before
        for (sent, message), is_divided in zip(received, divided, strict=True):
            values = torch.empty_like(self.x if sent is chunk else total)
            for compressor, segments in sent.groups:
                compressor.decode(message, values, CodecCall(segments, scale=1.0 if is_divided else before))
                rows_add(total, values, segments.table, total)
        return total

    def _codec_call(self, segments: Segments, stage: int, scale: float = 1.0, *, divided: bool = False) -> CodecCall:
        state = self.call.state
        if divided and state is not None:
            state = replace(state, loss_scale=state.loss_scale * before_sum(self.scale))
        return CodecCall(segments, self.call.key(stage, self.rank), state, scale)

    def _mean_message(self, k: int) -> Tensor:
        if self.layout.world_size > 1:
            return self.messages.outgoing(len(self.layout.chunks) + k)
        return torch.empty(self.layout.chunks[k].message_bytes, dtype=torch.uint8, device=self.x.device)

    def _send_mean_message(self, k: int) -> None:
        if self.layout.world_size > 1:
            self.messages.send(len(self.layout.chunks) + k)


def encoded(layout: Layout, rank: int) -> list[tuple[Chunk, int]]:
    """Return the chunks that ``rank`` encodes in an `all_reduce`, as it sends them, each with its message's phase."""
    chunks = []
    for k, chunk in enumerate(layout.chunks):
        parent = layout.trees[chunk.owner].parents[rank]
        if parent is None:
            chunks.append((chunk, len(layout.chunks) + k))
        else:
            chunks.append((layout.sent_chunk(k, rank, parent), k))
    return chunks
