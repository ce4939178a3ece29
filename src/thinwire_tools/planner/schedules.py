"""The order in which each rank of a pipeline computes: PyTorch's schedules as lists."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, NamedTuple

ScheduleName = Literal["gpipe", "1f1b", "interleaved", "zero-bubble"]
SCHEDULES: tuple[ScheduleName, ...] = ("1f1b", "gpipe", "interleaved", "zero-bubble")
PYTORCH_CLASSES: dict[ScheduleName, str] = {
    "1f1b": "Schedule1F1B",
    "gpipe": "ScheduleGPipe",
    "interleaved": "ScheduleInterleaved1F1B",
    "zero-bubble": "ScheduleInterleavedZeroBubble",
}
"""Of ``torch.distributed.pipelining``."""


class Task(NamedTuple):
    """What a rank computes for one micro-batch in one go."""

    kind: Literal["forward", "backward", "weights"]
    """``weights`` are the gradients of the weights, where a schedule computes them apart from those of the input."""
    stage: int
    chunk: int
    """The micro-batch."""


@dataclass(frozen=True)
class Schedule:
    """The tasks of each rank, in order. Stage ``s`` is on rank ``s`` modulo the number of ranks."""

    name: ScheduleName
    num_chunks: int
    per_rank: int
    """Stages of each rank."""
    ranks: tuple[tuple[Task, ...], ...]

    @property
    def num_stages(self) -> int:
        return self.per_rank * len(self.ranks)

    @property
    def splits_backward(self) -> bool:
        """Whether gradients of weights are computed apart."""
        return self.name == "zero-bubble"

    @property
    def most_held(self) -> int:
        """The most micro-batches whose activations a rank holds at once, each of one stage: a stage lets go of them
        when the last of their gradients is computed."""
        ends = "weights" if self.splits_backward else "backward"
        changes = ([(task.kind == "forward") - (task.kind == ends) for task in tasks] for tasks in self.ranks)
        return max(max(accumulate(steps)) for steps in changes)

    @staticmethod
    def build(name: ScheduleName, num_ranks: int, num_chunks: int, per_rank: int = 1) -> Schedule:
        """A schedule of PyTorch's.

        GPipe (Huang et al. 2019) computes all forward passes, then all backward passes. 1F1B (Narayanan et al. 2019)
        begins backward as soon as it can. Interleaved 1F1B (Narayanan et al. 2021) gives each rank several stages.
        Zero-bubble is ZB1P (Qi et al. 2024): gradients of weights fill what would be bubbles.

        Raises:
            ValueError: the schedule takes one stage a rank, or not this many micro-batches.
        """
        if num_ranks < 1 or num_chunks < 1 or per_rank < 1:
            raise ValueError(f"{num_ranks} ranks, {num_chunks} micro-batches, {per_rank} stages: at least 1 each")
        if name in ("gpipe", "1f1b"):
            if per_rank != 1:
                raise ValueError(f"{name} has one stage on each rank, not {per_rank}")
            warm_up = [num_chunks if name == "gpipe" else num_ranks - 1 - rank for rank in range(num_ranks)]
            each = num_chunks
        else:
            rounds = max(1, num_chunks // num_ranks)
            if num_chunks % rounds:
                raise ValueError(
                    f"{name} on {num_ranks} ranks cuts micro-batches into {rounds} rounds, not {num_chunks}"
                )
            each = num_chunks // rounds
            ahead = 1 if name == "zero-bubble" else 2
            warm_up = [(per_rank - 1) * each + ahead * (num_ranks - 1 - rank) for rank in range(num_ranks)]
        split = name == "zero-bubble"
        ranks = (_tasks(rank, num_ranks, num_chunks, per_rank, each, warm_up[rank], split) for rank in range(num_ranks))
        return Schedule(name, num_chunks, per_rank, tuple(map(tuple, ranks)))


def _tasks(
    rank: int, num_ranks: int, num_chunks: int, per_rank: int, each: int, warm_up: int, split: bool
) -> list[Task]:
    """``warm_up`` forward passes, then one forward and one backward in turn, then the rest. A rank takes ``each``
    micro-batches through one of its stages before it turns to the next."""

    def stage(i: int, *, forward: bool) -> int:
        turn = i // each % per_rank
        return (turn if forward else per_rank - 1 - turn) * num_ranks + rank

    def chunk(i: int) -> int:
        return i // (each * per_rank) * each + i % each

    total = per_rank * num_chunks
    forward = [Task("forward", stage(i, forward=True), chunk(i)) for i in range(total)]
    backward = [Task("backward", stage(i, forward=False), chunk(i)) for i in range(total)]
    weights = [Task("weights", task.stage, task.chunk) for task in backward] if split else []
    warm_up = min(warm_up, total)
    tasks = forward[:warm_up]
    for i in range(total):
        tasks += forward[warm_up + i : warm_up + i + 1]
        tasks.append(backward[i])
        # The further behind a rank is, the longer it keeps gradients of weights for the bubbles at the end.
        tasks += weights[i - rank : i - rank + 1] if i >= rank else []
    return tasks + weights[total - rank if total > rank else 0 :]
