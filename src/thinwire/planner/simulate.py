"""A step of a pipeline, computed from the times of its stages and of its messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from thinwire.planner.schedules import Schedule, Task


@dataclass(frozen=True)
class StageTimes:
    """Seconds that a stage computes for a micro-batch."""

    forward_s: float
    backward_s: float
    """Of the gradients of the input and of the weights."""
    weights_s: float = 0.0
    """The part of ``backward_s`` that only the weights need."""


@dataclass(frozen=True)
class Wire:
    """What a micro-batch's message costs in one direction of a stage boundary, in seconds."""

    link_s: float = 0.0
    """For which the link carries nothing else of this direction: bytes over rate."""
    latency_s: float = 0.0
    """Until the last byte has arrived, after it has left."""
    encode_s: float = 0.0
    """Beside the sender's computing, one message after the other."""
    decode_s: float = 0.0
    """For which the receiver computes nothing else."""


@dataclass(frozen=True)
class Boundary:
    """The two directions of the boundary behind a stage."""

    forward: Wire = Wire()
    backward: Wire = Wire()


class Span(NamedTuple):
    """A bar of a timeline: one task of a rank, or one message."""

    kind: Literal["forward", "backward", "weights"]
    """Of a message: its direction."""
    stage: int
    """Of a message: the stage that sends it."""
    chunk: int
    begin_s: float
    end_s: float


@dataclass(frozen=True)
class Simulated:
    """A simulated step."""

    schedule: Schedule
    stages: tuple[StageTimes, ...]
    boundaries: tuple[Boundary, ...]
    tasks: tuple[tuple[Span, ...], ...]
    """By rank, in order; what is decoded for a task belongs to it."""
    messages: tuple[tuple[Span, ...], ...]
    """By boundary, both directions, from when the link is occupied until the message has arrived."""
    ahead: bool = True

    @property
    def step_s(self) -> float:
        """Seconds from the first rank's first task to the end of the last one."""
        return max(spans[-1].end_s for spans in self.tasks)

    @cached_property
    def unbound(self) -> Simulated:
        """The same step over infinitely fast links, with nothing to encode."""
        return simulate(self.schedule, self.stages, [Boundary()] * len(self.boundaries))

    @property
    def bubble_s(self) -> tuple[float, ...]:
        """By rank, the seconds in which it has nothing to compute even over infinitely fast links."""
        step = self.unbound.step_s
        return tuple(step - sum(span.end_s - span.begin_s for span in spans) for spans in self.unbound.tasks)

    @property
    def exposed_s(self) -> float:
        """Seconds by which communication makes the step longer."""
        return self.step_s - self.unbound.step_s

    def exposed_at(self, boundary: int) -> float:
        """Seconds by which the step would be shorter if this boundary's link were infinitely fast."""
        boundaries = [Boundary() if i == boundary else of for i, of in enumerate(self.boundaries)]
        return self.step_s - simulate(self.schedule, self.stages, boundaries, ahead=self.ahead).step_s


def simulate(
    schedule: Schedule, stages: Sequence[StageTimes], boundaries: Sequence[Boundary], *, ahead: bool = True
) -> Simulated:
    """A step of a pipeline. Messages from one rank to another queue on a link of their own.

    Args:
        schedule: the tasks of each rank.
        stages: what each stage computes.
        boundaries: what lies behind each stage but the last.
        ahead: whether receives are posted before a step and nothing waits for a send, as in the stages that
            `thinwire.compress_stage` returns. Otherwise as in PyTorch's over gloo: a message leaves when its receiver
            has nothing to do before it, and 1F1B computes nothing while it sends.

    Raises:
        ValueError: there are not as many stages as the schedule has, or not one boundary less.
    """
    if len(stages) != schedule.num_stages or len(boundaries) != schedule.num_stages - 1:
        raise ValueError(
            f"{len(stages)} stages with {len(boundaries)} boundaries, in a schedule of {schedule.num_stages} stages"
        )
    run = _Run(schedule, stages, boundaries, ahead)
    # Each time depends on its rank's earlier tasks and on messages alone, so that ranks may be followed in any order.
    left = [list(reversed(tasks)) for tasks in schedule.ranks]
    while any(left):
        before = sum(map(len, left))
        for rank, tasks in enumerate(left):
            while tasks and run.take(rank, tasks[-1]):
                tasks.pop()
        if sum(map(len, left)) == before:
            raise ValueError("the schedule waits for itself")
    tasks, messages = tuple(map(tuple, run.tasks)), tuple(map(tuple, run.messages))
    return Simulated(schedule, tuple(stages), tuple(boundaries), tasks, messages, ahead)


class _Run:
    """A step under way. A message is named by the task that needs it."""

    def __init__(
        self, schedule: Schedule, stages: Sequence[StageTimes], boundaries: Sequence[Boundary], ahead: bool
    ) -> None:
        self._schedule, self._stages, self._boundaries, self._ahead = schedule, stages, boundaries, ahead
        self._num_ranks, self._last = len(schedule.ranks), schedule.num_stages - 1
        self._waits_for_sends = not ahead and schedule.name == "1f1b"
        self._clock = [0.0] * self._num_ranks
        self._thread = [0.0] * self._num_ranks
        self._link: dict[tuple[int, int], float] = {}
        self._sent: dict[Task, float] = {}
        self._posted: dict[Task, float] = {}
        self._left: dict[Task, float] = {}
        self._arrived: dict[Task, float] = {}
        self._own: list[Task | None] = [None] * self._num_ranks
        self.tasks: list[list[Span]] = [[] for _ in range(self._num_ranks)]
        self.messages: list[list[Span]] = [[] for _ in boundaries]

    def take(self, rank: int, task: Task) -> bool:
        """Compute a task, if what it waits for is known."""
        kind, stage, chunk = task
        own, received = self._own[rank], kind != "weights" and stage != (0 if kind == "forward" else self._last)
        self._posted.setdefault(task, self._clock[rank])
        if (received and not self._moved(task)) or (own is not None and not self._moved(own)):
            return False
        # 1F1B waits for a send before it turns from forward to backward or back, otherwise after the next task.
        turns = bool(self.tasks[rank]) and self.tasks[rank][-1].kind != kind
        sent = 0.0 if own is None else self._left[own]
        begin = max(self._clock[rank], self._arrived[task] if received else 0.0, sent if turns else 0.0)
        end = begin + (self._wire(task).decode_s if received else 0.0) + self._seconds(task)
        self.tasks[rank].append(Span(kind, stage, chunk, begin, end))
        self._clock[rank] = max(end, sent)
        self._own[rank] = None
        if kind != "weights" and stage != (self._last if kind == "forward" else 0):
            message = Task(kind, stage + 1 if kind == "forward" else stage - 1, chunk)
            self._thread[rank] = max(self._thread[rank], end) + self._wire(message).encode_s
            self._sent[message] = self._thread[rank]
            if self._waits_for_sends:
                self._own[rank] = message
            if self._ahead:
                self._moved(message)  # a link carries messages in the order in which they were sent
        return True

    def _moved(self, message: Task) -> bool:
        """Whether it is known when a message has left and arrived."""
        if message in self._arrived:
            return True
        if message not in self._sent or not (self._ahead or message in self._posted):
            return False
        kind, stage, chunk = message
        source = stage - 1 if kind == "forward" else stage + 1
        pair = source % self._num_ranks, stage % self._num_ranks
        wire = self._wire(message)
        possible = self._sent[message] if self._ahead else max(self._sent[message], self._posted[message])
        begin = max(possible, self._link.get(pair, 0.0))
        self._link[pair] = self._left[message] = begin + wire.link_s
        self._arrived[message] = begin + wire.link_s + wire.latency_s
        if pair[0] != pair[1]:
            self.messages[min(source, stage)].append(Span(kind, source, chunk, begin, self._arrived[message]))
        return True

    def _wire(self, message: Task) -> Wire:
        if self._num_ranks == 1:
            return _NONE
        if message.kind == "forward":
            return self._boundaries[message.stage - 1].forward
        return self._boundaries[message.stage].backward

    def _seconds(self, task: Task) -> float:
        times = self._stages[task.stage]
        if task.kind == "forward":
            return times.forward_s
        if not self._schedule.splits_backward:
            return times.backward_s
        # The first stage's input needs no gradient: PyTorch computes all of its gradients with those of the weights.
        weights = times.weights_s if task.stage else times.backward_s
        return weights if task.kind == "weights" else times.backward_s - weights


_NONE = Wire()
