"""Predicts the time of a step of a sharded model (FSDP2): when weights are gathered, and what waits for them.

As in `thinwire.plan.forecast` a step is a timeline. PyTorch's own collectives stop it on a CPU until they have ended;
thinwire's, and on a GPU PyTorch's, stop it where their result is needed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple

from thinwire.compressors import Coded, Compressor
from thinwire.plan.forecast import Bucket, Links, Span, Transfer, computed_at
from thinwire.plan.sites import at_site

Collective = Literal["all_gather", "reduce_scatter"]

_DEPTH = 2
"""Default depth of `thinwire.prefetch`."""


@dataclass(frozen=True)
class Move(Bucket):
    """A buffer of one module's weights that is gathered, or of its gradients that are reduced. ``ready_s`` is the time
    at which it is requested, ``itemsize`` that of the elements that are sent."""

    kind: Collective = "all_gather"
    module: str = ""
    late: bool = True
    """Whether nothing reads the gradients of a reduction before backward has ended."""

    @property
    def site(self) -> Literal["weights", "gradients"]:
        return "weights" if self.kind == "all_gather" else "gradients"


class Event(NamedTuple):
    """The request of a move, or the need for its weights."""

    at_s: float
    """Seconds of computing done so far in this step."""
    move: int
    needed: bool


@dataclass(frozen=True)
class ShardedPace:
    """A training step of a sharded model without its communication."""

    moves: tuple[Move, ...]
    """Moves in the order in which they are requested."""
    events: tuple[Event, ...]
    """Events in their order. Every move is requested once; gathers are needed once, after that."""
    compute_s: float
    """Seconds of the whole step, of ranks that meet in every collective: between two of them the slowest one counts."""
    alone_s: float
    """Seconds of the whole step of the slowest rank, if ranks never meet."""
    shared: float = 0.0
    """Share of communication's processor time that computing loses; see `Pace`."""
    batches: int = 1
    """Number of forward passes in the step."""
    overlaps: bool = False
    """Whether PyTorch's own collectives are under way while the model computes."""

    @property
    def buckets(self) -> tuple[Move, ...]:
        """Moves, under the name that `Pace` has for what is sent."""
        return self.moves

    @property
    def backward_end_s(self) -> float:
        """Seconds until the last gradients are ready."""
        return max((event.at_s for event in self.events if self.moves[event.move].kind == "reduce_scatter"), default=0)

    def kept(self) -> ShardedPace:
        """Return the step of a model whose weights stay after forward: each module gathers once for a batch."""
        left = [i for i in range(len(self.moves)) if self._passes.get(i, 0) % 2 == 0]
        number = {i: at for at, i in enumerate(left)}
        events = tuple(event._replace(move=number[event.move]) for event in self.events if event.move in number)
        return replace(self, moves=tuple(self.moves[i] for i in left), events=events)

    def unreduced(self) -> ShardedPace:
        """Return a batch that gathers, goes forward and backward, and leaves its gradients to a later one."""
        events = tuple(event for event in self.events if self.moves[event.move].kind == "all_gather")
        return replace(self, events=events, compute_s=self.backward_end_s)

    @cached_property
    def _passes(self) -> dict[int, int]:
        """Pass of each gather: 0 is the first batch's forward, 1 its backward, 2 the second batch's forward.

        A module that gathers no more than once for a batch keeps its weights for backward.
        """
        gathers: dict[str, list[int]] = {}
        for i, move in enumerate(self.moves):
            if move.kind == "all_gather":
                gathers.setdefault(move.module, []).append(i)
        each = {module: 2 if len(indices) <= self.batches else 1 for module, indices in gathers.items()}
        return {i: each[module] * k for module, indices in gathers.items() for k, i in enumerate(indices)}

    def ahead(self) -> ShardedPace:
        """Return the step after ``thinwire.prefetch(model)``: a gather is requested as soon as the weights of the
        module `_DEPTH` before it are there, in forward and in backward; nothing later than now."""
        events = list(self.events)
        phases: dict[int, list[int]] = {}
        for event in self.events:
            if event.needed:
                phases.setdefault(self._passes[event.move], []).append(event.move)
        for gathers in phases.values():
            for k, move in enumerate(gathers[1:], 1):
                place = 1 + _index(events, gathers[max(0, k - _DEPTH)], needed=True)
                asked = _index(events, move, needed=False)
                at_s = events[place - 1].at_s
                # The request is behind those that are there already.
                while place < asked and not events[place].needed and events[place].at_s == at_s:
                    place += 1
                if place < asked:
                    events.insert(place, events.pop(asked)._replace(at_s=at_s))
        return replace(self, events=tuple(events))


def _index(events: Sequence[Event], move: int, *, needed: bool) -> int:
    return next(i for i, event in enumerate(events) if event.move == move and event.needed == needed)


def shares(kind: Collective, num_ranks: int) -> tuple[float, float]:
    """Return the shares of a buffer's elements that a rank encodes and decodes."""
    others = (num_ranks - 1) / num_ranks
    return (1 / num_ranks, 1.0) if kind == "all_gather" else (others, others)


def move_transfer(
    move: Move, layers: Mapping[str, Compressor], links: Links, codecs: Mapping[Compressor, tuple[float, float]]
) -> Transfer:
    """Return the seconds that the messages of a move take.

    Args:
        move: the layers.
        layers: the compressor of each, by names as `at_site` makes them.
        links: the times of messages.
        codecs: seconds that an element takes to encode, and to decode.
    """
    encoded, decoded = shares(move.kind, links.num_ranks)
    num_bytes = codec = 0.0
    for name, shape in move.layers:
        compressor = layers[at_site(move.site, name)]
        assert isinstance(compressor, Coded)
        num_bytes += compressor.wire_bytes(shape, move.dtype)
        encode, decode = codecs.get(compressor, (0.0, 0.0))
        codec += math.prod(shape) * (encoded * encode + decoded * decode)
    sent = links.others * num_bytes
    per_byte = links.exchange.per_byte
    cpu = codec + sent * links.exchange_cpu
    return Transfer(links.exchange.seconds(sent) + codec, max(sent * per_byte, codec), cpu, codec)


def sharded_step(pace: ShardedPace, transfers: Sequence[Transfer]) -> float:
    """Return the seconds of a step whose moves take this, one behind the other, next to computing."""
    now = done = 0.0
    arrived: dict[int, float] = {}
    spans: list[Span] = []
    needs = {event.move: event.at_s for event in pace.events if event.needed}
    for event in pace.events:
        now, done = computed_at(now, event.at_s - done, spans, pace.shared), event.at_s
        move, transfer = pace.moves[event.move], transfers[event.move]
        if not event.needed:
            before = max(arrived.values(), default=0.0)
            # A core that computes, too, encodes at half its speed for so long.
            meanwhile = needs.get(event.move, pace.backward_end_s if move.late else event.at_s) - event.at_s
            slowed = pace.shared * min(transfer.codec_s, meanwhile)
            end = max(now + transfer.alone_s + slowed, before + transfer.after_s)
            arrived[event.move] = end
            spans.append((max(now, before), end, transfer.cpu_s))
        if event.needed or (move.kind == "reduce_scatter" and not move.late):
            now = max(now, arrived[event.move])
    now, done = computed_at(now, pace.backward_end_s - done, spans, pace.shared), max(done, pace.backward_end_s)
    # Gradients that are late end with backward; the optimizer follows.
    now = max([now, *(end for i, end in arrived.items() if pace.moves[i].kind == "reduce_scatter")])
    return now + pace.compute_s - done


def native_sharded_step(pace: ShardedPace, took: Sequence[float]) -> float:
    """Return the seconds of a step by PyTorch's own collectives, each of which takes so long by itself."""
    if pace.overlaps:
        return sharded_step(pace, [Transfer(seconds, seconds, 0.0, 0.0) for seconds in took])
    return pace.compute_s + sum(took[event.move] for event in pace.events if not event.needed)


def sharded_bytes(pace: ShardedPace, links: Links, layers: Mapping[str, Compressor] | None) -> float:
    """Return the bytes that a rank sends in a step: with these compressors, or without any."""
    if layers is None:
        return links.others * sum(move.num_bytes for move in pace.moves)
    return links.others * sum(
        layers[at_site(move.site, name)].wire_bytes(shape, move.dtype)
        for move in pace.moves
        for name, shape in move.layers
    )
