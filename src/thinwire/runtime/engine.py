"""The base of a `Wire`'s engines, which those for all kinds of models share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from thinwire.collectives import Algorithm, Transport
from thinwire.plan import Plan, Site
from thinwire.runtime import checkpoint
from thinwire.runtime.adapt import Adapter
from thinwire.runtime.channel import Channel
from thinwire.runtime.stats import Stats

_T = TypeVar("_T")


class Engine(ABC):
    """The exchanges of one model, with their plan, slots and statistics. Attachments call it."""

    device: torch.device | None = None
    """The device on which gradients are compressed and sent; None if they go over the host."""
    simulated = False
    """Whether only the effect of compression is simulated, without its communication."""

    def __init__(
        self,
        plan: Plan,
        shapes: Mapping[str, Sequence[int]],
        channels: Sequence[Channel[Stats]],
        *,
        start: int,
        rank: int,
        world_size: int,
    ) -> None:
        """``rank`` and ``world_size`` index this process's part of a checkpoint."""
        self.plan = self.asked = plan
        """Plan in use; ``asked`` is that of the rules, before ``skip_if_slower`` and policies."""
        self.shapes = {name: tuple(shape) for name, shape in shapes.items()}
        self.channels = tuple(channels)
        self.start, self.rank, self.world_size = start, rank, world_size
        self.attached = True
        self.step = -1
        """Index of the last backward pass that communicated; −1 before the first."""
        self.adapter: Adapter | None = None
        self.stats = Stats()
        """Totals so far, which grow during training."""

    @property
    def seed(self) -> int:
        return self.channels[0].seed

    @property
    def algorithm(self) -> Algorithm:
        return self.channels[0].algorithm

    def reset_stats(self) -> None:
        """Start counting from zero."""
        self.stats = Stats()
        for channel in self.channels:
            channel.count_in(self.stats)

    def present_stats(self) -> Stats:
        """Return a copy of the totals so far, which holds part of what is under way."""
        adapt_s = self.adapter.adapt_s if self.adapter else 0.0
        total = replace(self.stats, alpha=list(self.stats.alpha), slot_bytes=self.slot_bytes, adapt_s=adapt_s)
        for channel in self.channels:
            channel.add_to(total)
        return total

    @property
    @abstractmethod
    def slot_bytes(self) -> int:
        """Bytes of memory that slots, and other state kept between steps, take now."""

    @property
    @abstractmethod
    def foreseen_bytes(self) -> int:
        """Bytes of memory that slots, and other state kept between steps, take, by formula."""

    @abstractmethod
    def sent_bytes(self, site: Site) -> int:
        """Return the bytes that this rank sends, headers included; see `Wire.sent_bytes`."""

    @abstractmethod
    def table(self, declined: Mapping[str, str], loaded: Collection[str]) -> str:
        """Return the layers as a table. ``declined`` are raw because compressing them would have been slower, or, where
        they are in ``loaded``, because they were raw in a checkpoint."""

    # Checkpoints, between two steps.

    @abstractmethod
    def collect(self) -> dict[str, Tensor]:
        """Return the state without an optimizer's moments and without a policy's entries."""

    @abstractmethod
    def template(self, plan: Plan, world_size: int) -> dict[str, Tensor]:
        """Return what `collect` returns on all ranks of a world of this size, merged, with slots of zeros."""

    @abstractmethod
    def read(self, state: Mapping[str, Tensor]) -> checkpoint.Checked:
        """Return a state that is valid on this rank, before it is compared between ranks. Raises ``ValueError``."""

    def alone(self, job: Callable[[], _T]) -> _T:
        """Run a job while no exchange is under way, and return its result."""
        return job()

    @abstractmethod
    def whole_world(self) -> Transport:
        """Return the transport between all ranks that have a part of the state."""

    def on_any_rank(self, conditions: Tensor) -> Tensor:
        """Return which conditions hold on any rank: of each channel in turn. A collective call."""
        for channel in self.channels:
            conditions = channel.alone(partial(channel.transport.all_gather, conditions)).any(0)
        return conditions

    def close(self) -> None:
        """Accept no more exchanges, and close connections once those submitted have ended."""
        for channel in self.channels:
            channel.close()
