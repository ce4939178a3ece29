"""What is sent through a `Channel`: one collective on one flat buffer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from torch import Tensor

from thinwire.collectives import Layer, Shard
from thinwire.compressors import State

if TYPE_CHECKING:
    from thinwire.runtime.route import Route

Kind = Literal["all_reduce", "reduce_scatter", "all_gather"]
Key = tuple[Kind, Hashable, torch.dtype]


class Contents(NamedTuple):
    """The layers in a buffer that is all-reduced (``layers``), or in each rank's part of a sharded one (``shards``)."""

    key: Hashable
    """Distinguishes these contents from others."""
    layers: tuple[Layer, ...]
    shards: tuple[tuple[Shard, ...], ...] = ()
    """By rank, the shards in its part, where parts differ or belong together; ``layers`` is empty then."""
    part_numel: int = 0
    """Elements of each part, where there are shards."""

    @property
    def numel(self) -> int:
        return self.part_numel or sum(layer.numel for layer in self.layers)

    @property
    def names(self) -> str:
        if self.shards:
            return ", ".join(dict.fromkeys(shard.name for part in self.shards for shard in part))
        return ", ".join(layer.name for layer in self.layers)


NOTHING = Contents((), ())


@dataclass(kw_only=True)
class Exchange(ABC):
    """One collective on one flat buffer: what it holds, where it comes from, and what becomes of the result.

    A subclass for each kind of traffic. Methods run in the channel's executor, in the order of submission: `begin`
    and `start` before the messages, `finish` after them.
    """

    kind: Kind
    dtype: torch.dtype
    contents: Contents = NOTHING
    """All ranks have the same; `begin` sets it where it is known only then."""
    scale: float | None = None
    """The factor of the sum; None for the mean."""
    number: int | None = None
    """Numbers the messages and the random draws; None for the channel's own count."""
    draw: int | None = None
    """Overrides ``number`` in the key of random draws; equal values repeat the draws."""
    out: Tensor | None = None
    """Where a reduce-scatter leaves this rank's part, flat."""
    kept: dict[int, Tensor] | None = None
    """In an all-gather, this rank's last messages (`thinwire.collectives.all_gather`)."""
    turns: int = 2
    """Exchanges of the same contents that may be under way at a time: each has messages of its own."""
    alone: bool = False
    """Whether no other may be under way at the same time, because it calls native collectives, which have one order."""
    failed: Exception | None = None
    """What has gone wrong on this rank already: the other ranks, which wait for its messages, are told instead."""

    @property
    def key(self) -> Key:
        """Equal for exchanges that use the same route."""
        return self.kind, self.contents.key, self.dtype

    def begin(self) -> None:  # noqa: B027 - most have nothing to do
        """Called first, in turn, even while earlier exchanges are under way."""

    @abstractmethod
    def start(self, route: Route) -> tuple[Tensor, State | None]:
        """Return the flat buffer and the slots of its compressors. The buffer of an all-gather holds this rank's part
        in its place."""

    def finish(self, x: Tensor, route: Route) -> None:  # noqa: B027 - most have nothing to do
        """Called with the buffer once it holds the result."""

    def fail(self) -> None:  # noqa: B027 - most have nothing to do
        """Called in place of `finish` if something but the link has failed: the other ranks know, or will."""

    @property
    def result(self) -> Tensor:
        """What the future of the exchange gets."""
        return torch.empty(0, dtype=torch.float32, device="cpu")
