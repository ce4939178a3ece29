"""What is seen of training steps, whatever model they train."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Protocol

import torch.distributed as dist

from thinwire.plan.forecast.ddp import Bucket, Pace
from thinwire.plan.forecast.sharded import Event, ShardedPace
from thinwire_tools.exits import CommandError


class DoctorError(CommandError):
    """This training cannot be examined; the message says what to do."""


@dataclass
class Step:
    """One step of this rank, in seconds since it began."""

    began: float
    serial: bool
    """Whether communication is waited for on the spot."""
    ready: list[float] = field(default_factory=list)
    took: list[float] = field(default_factory=list)
    """By bucket, from ready to arrived."""
    buckets: list[Bucket] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    """Of a sharded model, in place of ``ready``."""
    waited: float = 0.0
    seconds: float = 0.0
    batches: int = 1

    @property
    def computed(self) -> float:
        """Seconds so far in which nothing was waited for."""
        return time.perf_counter() - self.began - self.waited


@dataclass(frozen=True)
class Watched:
    """What some steps have shown, the same on every rank: that of the slowest one."""

    paces: tuple[Pace, ...] | tuple[ShardedPace, ...]
    """One for each step in which communication was waited for."""
    step_s: tuple[float, ...]
    """Steps as they are without being watched."""
    bucket_s: tuple[tuple[float, ...], ...]
    """Seconds of each bucket's collective with nothing beside it, by step: of the rank that waited least."""
    batches: int
    """Forward passes of a step: above 1 where gradients are accumulated already."""
    parameters: int
    dtypes: tuple[str, ...]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of the layers that are sent, by name."""
        return {name: shape for bucket in self.paces[0].buckets for name, shape in bucket.layers}

    @property
    def compute_s(self) -> float:
        return median(pace.compute_s for pace in self.paces)

    @property
    def exposed_share(self) -> float:
        """Part of a step that goes to communication which backward does not hide."""
        return max(0.0, 1 - self.compute_s / median(self.step_s))


class Watcher(Protocol):
    """What counts the steps."""

    present: Step | None
    """The step under way, while it is watched."""

    def synced(self) -> None:
        """Gradients were reduced: the next forward pass begins another step."""
        ...


class StepObserver(Protocol):
    """What sees the communication of a model of one kind."""

    group: dist.ProcessGroup
    """That the model communicates in."""

    def watched(self, steps: Sequence[Step]) -> tuple[tuple[Any, ...], list[float], list[list[float]]]:
        """Paces of the steps, seconds of steps as they are, seconds of each bucket's collective: the same everywhere.

        Raises:
            DoctorError: the steps are not alike.
        """
        ...


def check_size(group: dist.ProcessGroup) -> None:
    """Raise `DoctorError` if there is no other rank."""
    if group.size() < 2:
        raise DoctorError("one rank alone sends nothing: start at least 2, with torchrun --nproc-per-node 2")
