"""The interface of a collective on a flat buffer that goes through a `Channel`."""

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
    """Key that distinguishes these contents from others."""
    layers: tuple[Layer, ...]
    shards: tuple[tuple[Shard, ...], ...] = ()
    """Shards in each rank's part, where parts differ or belong together; ``layers`` is empty then."""
    part_numel: int = 0
    """Number of elements of each part, where there are shards."""

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
    """A collective on a flat buffer: its contents, where they come from, and what becomes of the result.

    Each kind of traffic has a subclass. Methods run in the channel's executor, in the order of submission: `begin`
    and `start` before the messages, `finish` after them.
    """

    kind: Kind
    dtype: torch.dtype
    contents: Contents = NOTHING
    """Contents of the buffer, the same on all ranks; `begin` sets them where they are known only then."""
    scale: float | None = None
    """Factor of the sum; None for the mean."""
    number: int | None = None
    """Number of the exchange in its messages and random draws; None for the channel's own count."""
    draw: int | None = None
    """Number that overrides ``number`` in the key of random draws; equal values repeat the draws."""
    out: Tensor | None = None
    """Flat tensor in which a reduce-scatter leaves this rank's part."""
    kept: dict[int, Tensor] | None = None
    """Last messages of this rank in an all-gather (`thinwire.collectives.all_gather`)."""
    turns: int = 2
    """Number of exchanges of the same contents that may be under way at a time: each has messages of its own."""
    alone: bool = False
    """Whether no other exchange may be under way meanwhile: this one calls native collectives, which have one order."""
    failed: Exception | None = None
    """Error that this rank has met already: the other ranks, which wait for its messages, are told of it instead."""

    @property
    def key(self) -> Key:
        """Key of the route: exchanges with equal keys use the same one."""
        return self.kind, self.contents.key, self.dtype

    def begin(self) -> None:  # noqa: B027 - most have nothing to do
        """Prepare the exchange, in turn, even while earlier exchanges are under way."""

    @abstractmethod
    def start(self, route: Route) -> tuple[Tensor, State | None]:
        """Return the flat buffer and the slots of its compressors. The buffer of an all-gather holds this rank's part
        in its place."""

    def finish(self, x: Tensor, route: Route) -> None:  # noqa: B027 - most have nothing to do
        """Use the buffer ``x``, which holds the result now."""

    def fail(self) -> None:  # noqa: B027 - most have nothing to do
        """Note, in place of `finish`, that something but the link has failed: the other ranks know of it, or will."""

    @property
    def result(self) -> Tensor:
        """Result of the exchange's future."""
        return torch.empty(0, dtype=torch.float32, device="cpu")
