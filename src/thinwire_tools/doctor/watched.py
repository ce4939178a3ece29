"""Observations of training steps, whatever model they train."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median

import torch.distributed as dist

from thinwire.plan.forecast import Bucket, Pace
from thinwire.runtime.executor import Mark
from thinwire_tools.doctor.forecast import ShardedPace
from thinwire_tools.exits import CommandError


class DoctorError(CommandError):
    """An error of a training that cannot be examined; the message says what to do."""


@dataclass
class Step:
    """One step of this rank. What seconds are asked for, a device has passed by then, or is waited for."""

    began: Mark
    serial: bool
    """Whether communication is waited for on the spot."""
    moves: list[tuple[Mark, Mark]] = field(default_factory=list)
    """Marks of each bucket that was waited for: when waiting began, and when the bucket was received."""
    buckets: list[Bucket] = field(default_factory=list)
    events: list[tuple[Mark, int, bool]] = field(default_factory=list)
    """Requests of a sharded model's moves, and needs for them: when, the number of the move, and whether needed."""
    ended: Mark | None = None
    batches: int = 1

    @property
    def ready(self) -> list[float]:
        """Seconds of computing until each bucket was ready."""
        return [self.computed(ready) for ready, _ in self.moves]

    @property
    def took(self) -> list[float]:
        """Seconds from ready to received, by bucket."""
        return [received.since(ready) for ready, received in self.moves]

    @property
    def seconds(self) -> float:
        assert self.ended is not None, "the step has ended"
        return self.ended.since(self.began)

    @property
    def compute_s(self) -> float:
        """Seconds of the step in which nothing was waited for."""
        assert self.ended is not None, "the step has ended"
        return self.computed(self.ended)

    def computed(self, now: Mark) -> float:
        """Return the seconds until ``now`` in which nothing was waited for."""
        waited = zip(self.moves, self.took, strict=True)
        return now.since(self.began) - sum(min(max(0.0, now.since(ready)), took) for (ready, _), took in waited)


@dataclass(frozen=True)
class Watched:
    """Observations of some steps, the same on every rank: those of the slowest one."""

    paces: tuple[Pace, ...] | tuple[ShardedPace, ...]
    """Paces, one for each step in which communication was waited for."""
    step_s: tuple[float, ...]
    """Seconds of steps without waits for observation."""
    bucket_s: tuple[tuple[float, ...], ...]
    """Seconds of each bucket's collective with nothing else under way, by step: of the rank that waited least."""
    batches: int
    """Number of forward passes of a step: above 1 where gradients are accumulated already."""
    parameters: int
    dtypes: tuple[str, ...]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: shape for bucket in self.paces[0].buckets for name, shape in bucket.layers}

    @property
    def compute_s(self) -> float:
        return median(pace.compute_s for pace in self.paces)

    @property
    def exposed_share(self) -> float:
        """Share of a step that is communication which backward does not hide."""
        return max(0.0, 1 - self.compute_s / median(self.step_s))


def check_size(group: dist.ProcessGroup) -> None:
    """Raise `DoctorError` if there is no other rank."""
    if group.size() < 2:
        raise DoctorError("one rank alone sends nothing: start at least 2, with torchrun --nproc-per-node 2")
