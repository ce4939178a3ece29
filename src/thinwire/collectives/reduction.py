"""All-reduce of coded chunks along the trees of a topology, and its two halves: reduce-scatter and all-gather.

Parts of a chunk go up its tree: whoever gets parts adds them to its own values and hands the sum on, encoded anew. The
owner encodes the mean, and that one message goes down the tree, verbatim, to everybody. In a star that is a
scatter-reduce-all-gather: two codings a value, whatever the number of ranks (thesis, section 3.5.1).
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from thinwire.collectives.exchange import Exchange
from thinwire.collectives.keys import OWNER, WORKER, stage_key
from thinwire.collectives.layout import Chunk, Layout
from thinwire.collectives.message import HEADER_BYTES
from thinwire.collectives.stages import Clock, NoClock
from thinwire.collectives.transport import Buffers, Transport
from thinwire.compressors import Key, State


def all_reduce(
    x: Tensor,
    layout: Layout,
    transport: Transport,
    buffers: Buffers,
    *,
    seed: int,
    step: int,
    scale: float | None = None,
    state: State | None = None,
    clock: Clock | None = None,
    draw: int | None = None,
) -> Generator[None]:
    """Replace the chunks of the flat tensor ``x`` by ``scale`` times their sum over all ranks, by default their mean.

    ``buffers`` are those of `Layout.reduction_traffic`. Every rank ends with the same bytes: the owner, too, decodes
    its own message.

    Yields once, when its first messages are on their way: whoever runs it may go on with it later or in another thread,
    and start the next bucket's in between, so that the link never waits for arithmetic. `complete` runs it in one go.

    Raises:
        TransportError: a rank is gone or silent.
        PeerFailedError: another rank could not do its part.
        MessageError: a message is damaged or of another step.
    """
    scale = 1.0 / layout.world_size if scale is None else scale
    with Exchange(transport, buffers, step=step, digest=layout.digest) as exchange:
        run = _Run(x, layout, transport.rank, exchange, seed, step, state, clock or NoClock(), draw)
        run.send_leaves()
        yield
        for k in run.inner():
            if layout.chunks[k].owner == transport.rank:
                run.encode_mean(k, scale)
            else:
                run.pass_on(k)
        run.receive_means()


def reduce_scatter(
    x: Tensor,
    layout: Layout,
    transport: Transport,
    buffers: Buffers,
    *,
    seed: int,
    step: int,
    scale: float | None = None,
    state: State | None = None,
    clock: Clock | None = None,
    out: Tensor | None = None,
    draw: int | None = None,
) -> Generator[None]:
    """The first half of `all_reduce`: each owner's chunks become ``scale`` times the sum, exactly as it adds them up.

    ``buffers`` are those of ``reduction_traffic(down=False)``. What ``x`` holds elsewhere is undefined. With a
    `part_layout` or `sharded_layout`, ``out`` (flat, of a part's size) may be given: it gets the sum, and what ``x``
    holds is undefined then. ``draw`` stands for the step in the keys of random draws, if given. Yields and raises as
    `all_reduce` does.
    """
    scale = 1.0 / layout.world_size if scale is None else scale
    with Exchange(transport, buffers, step=step, digest=layout.digest) as exchange:
        run = _Run(x, layout, transport.rank, exchange, seed, step, state, clock or NoClock(), draw)
        run.send_leaves()
        yield
        for k in run.inner():
            if layout.chunks[k].owner == transport.rank:
                run.keep_sum(k, scale, out)
            else:
                run.pass_on(k)


def all_gather(
    x: Tensor,
    layout: Layout,
    transport: Transport,
    buffers: Buffers,
    *,
    seed: int,
    step: int,
    state: State | None = None,
    clock: Clock | None = None,
    draw: int | None = None,
    kept: dict[int, Tensor] | None = None,
) -> Generator[None]:
    """The second half: every owner's chunks reach everybody, as they decode; the owner's own are replaced, too.

    ``buffers`` are those of ``reduction_traffic(up=False)``. ``draw`` stands for the step in the keys of random draws,
    if given. ``kept`` holds this rank's last messages by chunk: where its values are what such a message decodes to, it
    is sent once more, bit for bit; others take its place. Yields and raises as `all_reduce` does.
    """
    with Exchange(transport, buffers, step=step, digest=layout.digest) as exchange:
        run = _Run(x, layout, transport.rank, exchange, seed, step, state, clock or NoClock(), draw)
        run.send_own(kept)
        yield
        run.receive_means()


@dataclass
class _Run:
    """One rank's part in one exchange."""

    x: Tensor
    layout: Layout
    rank: int
    exchange: Exchange
    seed: int
    step: int
    state: State | None
    clock: Clock
    draw: int | None = None
    _wide: Tensor | None = field(default=None)

    def __post_init__(self) -> None:
        if self.x.dtype != self.layout.dtype or self.x.numel() < self.layout.numel:
            raise TypeError(
                f"a {self.x.dtype} tensor of {self.x.numel()} elements, laid out as {self.layout.dtype} of "
                f"{self.layout.numel}"
            )

    @property
    def wide(self) -> Tensor:
        """The values in the dtype in which sums are taken."""
        if self._wide is None:
            self._wide = self.x.to(self.layout.wide_dtype)
        return self._wide

    def key(self, site: int) -> Key:
        """Of this rank's draws in this step, as worker or as owner."""
        return stage_key(self.seed, self.step if self.draw is None else self.draw, site, self.rank)

    def send_leaves(self) -> None:
        """Encode what nobody sends parts of to this rank. It starts with its right neighbour's chunks, slice by slice,
        so that no owner is everybody's first target."""
        layout, key = self.layout, self.key(WORKER)
        for k, parent in layout.schedule(self.rank).leaves:
            chunk = layout.form(k, self.rank, parent)
            with self.clock.stage("encode"):
                message = self.exchange.outgoing(k)
                values = self.x if chunk is layout.chunks[k] else self.wide
                for compressor, segments in chunk.groups:
                    compressor.encode(values, segments, message, key=key, state=self.state)
                self.exchange.send(k)

    def inner(self) -> tuple[int, ...]:
        """Chunks of which this rank gets parts, those first whose parts can be there first."""
        return self.layout.schedule(self.rank).inner

    def encode_mean(self, k: int, scale: float) -> None:
        """As owner of chunk k: add up its parts, encode the result, keep what it decodes to, send it."""
        out = self._mean_message(k)
        own, parts = self._parts(k)
        with self.clock.stage("reduce"):
            key = self.key(OWNER)
            for compressor, segments in self.layout.chunks[k].groups:
                compressor.reduce(parts, own, segments, out, self.x, key=key, scale=scale, state=self.state)
            self._send_mean(k)

    def pass_on(self, k: int) -> None:
        """On the way to the owner of chunk k: add the parts received to this rank's own, and send the sum."""
        layout = self.layout
        parent = layout.trees[layout.chunks[k].owner].parents[self.rank]
        assert parent is not None
        own, parts = self._parts(k)
        chunk = layout.form(k, self.rank, parent)
        with self.clock.stage("reduce"):
            key, out = self.key(WORKER), self.exchange.outgoing(k)
            # What x held of the chunk was needed for the last time: its mean is to come.
            into = self.x if chunk is layout.chunks[k] else self.wide
            for compressor, segments in chunk.groups:
                compressor.reduce(parts, own, segments, out, into, key=key, scale=1.0, state=self.state)
            self.exchange.send(k)

    def keep_sum(self, k: int, scale: float, out: Tensor | None) -> None:
        """As owner of chunk k: add up its parts, and leave it at that."""
        own, parts = self._parts(k)
        chunk, into = self.layout.chunks[k], self.x
        if out is not None:
            chunk, into, own = self.layout.local[k], out, own[self.rank * self.layout.part_numel :]
        with self.clock.stage("reduce"):
            for compressor, segments in chunk.groups:
                compressor.add_up(parts, own, segments, into, scale=scale)

    def send_own(self, kept: dict[int, Tensor] | None) -> None:
        """Encode this rank's own chunks, as they are, and keep what they decode to."""
        key = self.key(OWNER)
        for k, chunk in enumerate(self.layout.chunks):
            if chunk.owner != self.rank:
                continue
            with self.clock.stage("encode"):
                message = self._mean_message(k)
                if kept is not None and k in kept and self._holds(chunk, kept[k]):
                    message[HEADER_BYTES:] = kept[k][HEADER_BYTES:]
                else:
                    for compressor, segments in chunk.groups:
                        compressor.encode(self.x, segments, message, key=key, state=self.state)
                        compressor.decode(message, segments, self.x)
                    if kept is not None:
                        kept[k] = message.clone()
                self._send_mean(k)

    def _holds(self, chunk: Chunk, message: Tensor) -> bool:
        """Whether this rank's values of a chunk are, to the bit, what ``message`` decodes to."""
        decoded = torch.empty_like(self.x)
        same = True
        for compressor, segments in chunk.groups:
            compressor.decode(message, segments, decoded)
            same &= all(torch.equal(decoded[p.elements], self.x[p.elements]) for p in segments.pieces)
        return same

    def receive_means(self) -> None:
        """Take the others' chunks as they come down the trees, and hand them on."""
        layout = self.layout
        for k, parent in layout.schedule(self.rank).means:
            phase = len(layout.chunks) + k
            with self.clock.stage("wire"):
                message = self.exchange.receive(phase, parent)
                if layout.trees[layout.chunks[k].owner].children[self.rank]:
                    self.exchange.forward(phase, parent)
            with self.clock.stage("decode"):
                for compressor, segments in layout.chunks[k].groups:
                    compressor.decode(message, segments, self.x)

    def _parts(self, k: int) -> tuple[Tensor, list[Tensor]]:
        """This rank's values, with what came in another form than the chunk's added, and the messages that remain."""
        layout, chunk = self.layout, self.layout.chunks[k]
        children = layout.trees[chunk.owner].children[self.rank]
        with self.clock.stage("wire"):
            received = [(layout.form(k, child, self.rank), self.exchange.receive(k, child)) for child in children]
        own, parts = self.x, [message for form, message in received if form is chunk]
        others = [(form, message) for form, message in received if form is not chunk]
        if others:
            own = self.wide
            with self.clock.stage("reduce"):
                for form, message in others:
                    for compressor, segments in form.groups:
                        compressor.decode(message, segments, own, add=True)
        return own, parts

    def _mean_message(self, k: int) -> Tensor:
        phase = len(self.layout.chunks) + k
        if self.layout.world_size > 1:
            return self.exchange.outgoing(phase)
        return torch.empty(self.layout.chunks[k].message_bytes, dtype=torch.uint8)

    def _send_mean(self, k: int) -> None:
        if self.layout.world_size > 1:
            self.exchange.send(len(self.layout.chunks) + k)


def encoded(layout: Layout, rank: int) -> list[tuple[Chunk, int]]:
    """What ``rank`` encodes in an `all_reduce`: each chunk in its form, and the phase in which it leaves."""
    found = []
    for k, chunk in enumerate(layout.chunks):
        parent = layout.trees[chunk.owner].parents[rank]
        if parent is None:
            found.append((chunk, len(layout.chunks) + k))
        else:
            found.append((layout.form(k, rank, parent), k))
    return found
