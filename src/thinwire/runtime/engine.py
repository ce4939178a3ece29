"""The base of a `Wire`'s engines: what a step, its slots and checkpoints need, whatever kind of model it is."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from thinwire.arguments import check_int
from thinwire.collectives import Algorithm, ScatterReduceAllGather, Transport
from thinwire.compressors import not_finite
from thinwire.kernels import FORMAT_VERSION
from thinwire.plan import Plan, Site
from thinwire.policies import Policy
from thinwire.runtime import checkpoint
from thinwire.runtime.adapt import Adapter
from thinwire.runtime.channel import Channel
from thinwire.runtime.consistency import library_version, machine_record
from thinwire.runtime.executor import AsyncReadback
from thinwire.runtime.slots import Slots
from thinwire.runtime.stats import Stats

_T = TypeVar("_T")
_SUSPECT_AFTER = 3
_LOST = (
    "gradients of a backward pass are gone without an optimizer's step, and what compression left out of them goes "
    "into the next steps. Where a loop drops a step, call wire.discard_step() on every rank; where it keeps gradients "
    "elsewhere and applies them later, all is well"
)


@dataclass(frozen=True)
class WireSettings:
    """Settings of a `Wire`'s communication.

    Raises:
        ValueError: ``seed`` or ``start`` is out of range.
    """

    seed: int = 0
    """Seed of the random draws."""
    start: int = 0
    """Number of steps at the beginning that stay uncompressed."""
    skip_if_slower: bool = False
    """Whether to measure, and leave raw what would not be faster compressed."""
    algorithm: Algorithm = field(default_factory=ScatterReduceAllGather)
    """The collective algorithm."""
    adapt: Policy | None = None
    """Policy that changes the plan during training."""

    def __post_init__(self) -> None:
        check_int("start", self.start, 0)
        check_int("seed", self.seed, 0, 2**63 - 1)


class PoisonMonitor:
    """Detects that the state of compressors, rather than a gradient, makes means non-finite.

    A gradient of 1e38 is finite, and so may be the residual or the factor that it leaves behind. Yet what later steps
    compute with it may overflow, in every one of them: steps that are not finite leave slots as they were. All ranks
    see the same means, so they count alike. After `_SUSPECT_AFTER` steps in a row without a finite mean they compare
    whether their own gradients were finite in them; each rank looks at its own only while it counts.
    """

    def __init__(self) -> None:
        self._nonfinite_steps = 0
        self._finite_gradients = True
        self._gradients = AsyncReadback()

    def note_gradients(self, flat: Tensor) -> None:
        """Note whether this rank's gradients are finite, before anything is added to them, if the last mean was not."""
        if self._nonfinite_steps:
            self._gradients.note(not_finite(flat))

    def end_step(self, *, finite: bool) -> None:
        """Count a step whose means are known."""
        noted = self._gradients.read_finite()
        if finite:
            self._nonfinite_steps, self._finite_gradients = 0, True
            return
        self._nonfinite_steps += 1
        self._finite_gradients &= noted

    @property
    def suspected(self) -> bool:
        """Whether ranks should compare what they know. The answer is the same on all of them."""
        return self._nonfinite_steps >= _SUSPECT_AFTER

    def take_finite_gradients(self) -> bool:
        """Return whether this rank's gradients were finite while it looked at them, and restart counting."""
        mine, self._finite_gradients, self._nonfinite_steps = self._finite_gradients, True, 1
        return mine


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
        self.slots = Slots()
        self.failed = False
        """Whether an exchange of the present step has failed, though not by its link."""
        self.used: dict[str, Tensor] = {}
        """Share (0 to 1) of the last step's result that was used, by layer."""
        self.lost = False
        """Whether the result of the last step is gone without an optimizer's step."""
        self._told_of_loss = False
        self._poison = PoisonMonitor()
        # On a device the host reads these when the next step begins: by then they have long been computed.
        self._means = AsyncReadback()
        self.stats = Stats()
        """Totals so far, which grow during training."""

    @property
    def seed(self) -> int:
        return self.channels[0].seed

    @property
    def algorithm(self) -> Algorithm:
        return self.channels[0].algorithm

    @property
    @abstractmethod
    def shares(self) -> Sequence[int]:
        """Share of each rank of what slots depend on, in proportion; part of a checkpoint."""

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
    def slot_bytes(self) -> int:
        """Bytes of memory that slots, and other state kept between steps, take now."""
        return self.slots.num_bytes

    @property
    @abstractmethod
    def planned_bytes(self) -> int:
        """Bytes of memory that slots, and other state kept between steps, take, by formula."""

    @property
    def planned_exchange_bytes(self) -> int:
        """Bytes of memory that exchanges take at most, by formula; 0 where only training shows them."""
        return 0

    @abstractmethod
    def sent_bytes(self, site: Site) -> int:
        """Return the bytes that this rank sends, headers included; see `Wire.sent_bytes`."""

    @abstractmethod
    def table(self, declined: Mapping[str, str], loaded: Collection[str]) -> str:
        """Return the layers as a table. ``declined`` are raw because compressing them would have been slower, or, where
        they are in ``loaded``, because they were raw in a checkpoint."""

    # The end of a step, before the next one begins.

    @abstractmethod
    def discard_step(self) -> None:
        """Leave slots as they were before the last step, whose means are not used."""

    @abstractmethod
    def settle(self) -> None:
        """Commit what the last step wrote to the slots, unless it failed or some rank met NaN or Inf in it."""

    def note_mean(self, flat: Tensor) -> None:
        """Note whether a mean is finite: if one of a step's is not, no slot changes in it, on any rank."""
        self._means.note(not_finite(flat))

    def _commit(self, *, finite: bool) -> None:
        if finite and self.slots.touched:
            if self.lost and not self._told_of_loss:
                self._told_of_loss = True
                warnings.warn(_LOST, stacklevel=2)
            self.slots.keep_rest(self.used)
            self.slots.commit()
        elif not finite:
            self.slots.discard()
            self.stats.nonfinite_steps += 1
        self.used, self.lost = {}, False

    def _reset_if_poisoned(self, step: int, on_all_ranks: Callable[[bool], bool]) -> bool:
        """Reset slots if means were not finite although all ranks' gradients were; return whether that is so."""
        if not self._poison.suspected or not on_all_ranks(self._poison.take_finite_gradients()):
            return False
        self.slots.reset()
        self.stats.state_resets += 1
        warnings.warn(
            f"before step {step}, {_SUSPECT_AFTER} means in a row were not finite although all ranks' gradients were: "
            "a large gradient has left residuals or factors with which sums overflow. They start anew on all ranks "
            "(wire.stats.state_resets counts it)",
            stacklevel=2,
        )
        return True

    # Checkpoints, between two steps.

    def collect(self) -> dict[str, Tensor]:
        """Return the state without an optimizer's moments and without a policy's entries."""
        self.settle()
        options = {"step": self.step, "seed": self.seed, "rank": self.rank, "shares": self.shares}
        return checkpoint.write(self.slots, self.plan, self.shapes, **options)

    def template(self, plan: Plan, world_size: int) -> dict[str, Tensor]:
        """Return what `collect` returns on all ranks of a world of this size, merged, with slots of zeros."""
        return checkpoint.template(plan, self.shapes, world_size)

    @abstractmethod
    def read(self, state: Mapping[str, Tensor]) -> checkpoint.CheckedState:
        """Return a state that is valid on this rank, before it is compared between ranks. Raises ``ValueError``."""

    def _take_over(self, loaded: checkpoint.LoadedState) -> None:
        self.plan, self.step = loaded.plan, loaded.step
        self.used = {}
        self.slots.replace(loaded.slots)
        for channel in self.channels:
            channel.seed = loaded.seed

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


def agreed_facts(plan: Plan, facts: Mapping[str, str], device: torch.device | None = None) -> dict[str, str]:
    """Return what must be equal on all ranks, in the order in which a difference is best reported."""
    record = {"thinwire version": library_version(), "wire format": str(FORMAT_VERSION)}
    record |= {**facts, **machine_record(plan.layers.values(), device)}
    return record | {f"layer {name}": str(compressor) for name, compressor in plan.layers.items()}
