"""A step of a pipeline, computed from the times of its stages and of its messages."""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter
from typing import Literal, NamedTuple

from thinwire_tools.planner.schedules import Schedule, Task


@dataclass(frozen=True)
class StageTimes:
    """Seconds that a stage computes for a micro-batch."""

    forward_s: float
    backward_s: float
    """Of the gradients of the input and of the weights."""
    weights_s: float = 0.0
    """The part of ``backward_s`` that only the weights need."""


@dataclass(frozen=True)
class LinkCost:
    """What a micro-batch's message costs in one direction of a stage boundary, in seconds."""

    link_s: float = 0.0
    """For which the link carries nothing else of this direction: bytes over rate. Longer where lines are shared."""
    latency_s: float = 0.0
    """Until the last byte has arrived, after it has left."""
    encode_s: float = 0.0
    """Beside the sender's computing, one message after the other."""
    decode_s: float = 0.0
    """Beside the receiver's computing, one message of this boundary and direction after the other."""
    rate: float = math.inf
    """Of the link, in bytes per second: needed only where lines are shared."""


@dataclass(frozen=True)
class Boundary:
    """The two directions of the boundary behind a stage."""

    forward: LinkCost = LinkCost()
    backward: LinkCost = LinkCost()


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
    """By rank, in order."""
    messages: tuple[tuple[Span, ...], ...]
    """By boundary, both directions, from when the link is occupied until the message has arrived."""
    ahead: bool = True
    lines: tuple[float, ...] | None = None

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
        boundaries = [Boundary() if i == boundary else kept for i, kept in enumerate(self.boundaries)]
        return self.step_s - self._over(boundaries).step_s

    def _over(self, boundaries: Sequence[Boundary]) -> Simulated:
        return simulate(self.schedule, self.stages, boundaries, ahead=self.ahead, lines=self.lines)


def simulate(
    schedule: Schedule,
    stages: Sequence[StageTimes],
    boundaries: Sequence[Boundary],
    *,
    ahead: bool = True,
    lines: Sequence[float] | None = None,
) -> Simulated:
    """A step of a pipeline. Messages from one rank to another queue on a link of their own.

    Args:
        schedule: the tasks of each rank.
        stages: what each stage computes.
        boundaries: what lies behind each stage but the last.
        ahead: whether receives are posted before a step and nothing waits for a send, as in the stages that
            `thinwire.compress_stage` returns. Otherwise as in PyTorch's over gloo: a message leaves when its receiver
            has nothing to do before it. 1F1B computes nothing while it sends, and asks for the next message behind what
            it sends to the same rank: the two go one after the other.
        lines: by rank, the bytes per second that all its links carry together, each way. What is under way at a time
            shares them evenly, as TCP's connections nearly do. None: every link has a line of its own.

    Raises:
        ValueError: there are not as many stages as the schedule has, or not one boundary less.
    """
    if len(stages) != schedule.num_stages or len(boundaries) != schedule.num_stages - 1:
        raise ValueError(
            f"{len(stages)} stages with {len(boundaries)} boundaries, in a schedule of {schedule.num_stages} stages"
        )
    run = _Run(schedule, stages, boundaries, ahead, lines)
    run.follow()
    tasks, messages = tuple(map(tuple, run.tasks)), tuple(map(tuple, run.messages))
    kept = None if lines is None else tuple(lines)
    return Simulated(schedule, tuple(stages), tuple(boundaries), tasks, messages, ahead, kept)


_Pair = tuple[int, int]
"""The rank that sends, and the one that receives."""


@dataclass
class _UnderWay:
    """A message that a link carries."""

    message: Task
    cost: LinkCost
    begin_s: float
    end_s: float
    """When it has left, at the present rate."""
    rate: float


class _Run:
    """A step under way, from one event to the next. A message is named by the task that needs it."""

    def __init__(
        self,
        schedule: Schedule,
        stages: Sequence[StageTimes],
        boundaries: Sequence[Boundary],
        ahead: bool,
        lines: Sequence[float] | None,
    ) -> None:
        self._schedule, self._stages, self._boundaries = schedule, stages, boundaries
        self._ahead, self._lines = ahead, lines
        num_ranks = len(schedule.ranks)
        self._num_ranks, self._last = num_ranks, schedule.num_stages - 1
        self._sends_first = not ahead and schedule.name == "1f1b"
        self._now = 0.0
        self._events: list[tuple[float, int, Callable[[Task], None], Task]] = []
        self._num_events = 0
        self._left = [list(reversed(tasks)) for tasks in schedule.ranks]
        self._busy = [False] * num_ranks
        self._own: list[Task | None] = [None] * num_ranks
        """The message that a rank sent last, if it waits for that."""
        self._held: list[Task | None] = [None] * num_ranks
        """The one before, without which it computes nothing more."""
        self._encoded = [0.0] * num_ranks
        self._decoded: dict[tuple[str, int], float] = {}
        self._asked: set[Task] = set()
        """Messages whose receiver is ready for them."""
        self._posted: set[Task] = set()
        """Those of them whose sender knows that."""
        self._notices: dict[_Pair, list[Task]] = {}
        """Those whose sender learns it behind what a link carries."""
        self._gone: set[Task] = set()
        self._ready: set[Task] = set()
        self._queues: dict[_Pair, list[Task]] = {}
        self._under_way: dict[_Pair, _UnderWay] = {}
        self.tasks: list[list[Span]] = [[] for _ in range(num_ranks)]
        self.messages: list[list[Span]] = [[] for _ in boundaries]

    def follow(self) -> None:
        """To the end of the step."""
        for rank in range(self._num_ranks):
            self._go_on(rank)
        while self._events:
            self._now, _, act, task = heapq.heappop(self._events)
            act(task)
        if any(self._left):
            raise ValueError("the schedule waits for itself")

    def _at(self, seconds: float, act: Callable[[Task], None], task: Task) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (seconds, self._num_events, act, task))

    def _go_on(self, rank: int) -> None:
        """Compute the rank's next task, if what it waits for is there."""
        held, own, done = self._held[rank], self._own[rank], self.tasks[rank]
        if self._busy[rank] or not self._left[rank] or (held is not None and held not in self._gone):
            return
        task = self._left[rank][-1]
        kind, stage, chunk = task
        received = kind != "weights" and stage != (0 if kind == "forward" else self._last)
        if received and not self._ahead and task not in self._asked:
            self._asked.add(task)
            self._post(task)
        # 1F1B waits for a send before it turns from forward to backward or back, otherwise after the next task.
        if own is not None and own not in self._gone and done and done[-1].kind != kind:
            return
        if received and task not in self._ready:
            return
        self._left[rank].pop()
        self._busy[rank], self._held[rank], self._own[rank] = True, own, None
        end = self._now + self._seconds(task)
        done.append(Span(kind, stage, chunk, self._now, end))
        self._at(end, self._computed, task)

    def _computed(self, task: Task) -> None:
        kind, stage, chunk = task
        rank = stage % self._num_ranks
        self._busy[rank] = False
        if kind != "weights" and stage != (self._last if kind == "forward" else 0):
            message = Task(kind, stage + 1 if kind == "forward" else stage - 1, chunk)
            if self._sends_first:
                self._own[rank] = message
            self._encoded[rank] = max(self._encoded[rank], self._now) + self._link_cost(message).encode_s
            if self._encoded[rank] > self._now:
                self._at(self._encoded[rank], self._queue, message)
            else:
                self._queue(message)
        self._go_on(rank)

    def _post(self, message: Task) -> None:
        """Let the sender of a message know that its receiver is ready."""
        source, rank = self._pair(message)
        if self._sends_first and (rank, source) in self._under_way:
            self._notices.setdefault((rank, source), []).append(message)
        else:
            self._posted.add(message)
            self._carry((source, rank))

    def _queue(self, message: Task) -> None:
        pair = self._pair(message)
        self._queues.setdefault(pair, []).append(message)
        self._carry(pair)

    def _carry(self, pair: _Pair) -> None:
        """Let a link that carries nothing carry the next message, if there is one that may leave."""
        queue = self._queues.get(pair)
        if not queue or pair in self._under_way:
            return
        message = next((waiting for waiting in queue if self._ahead or waiting in self._posted), None)
        if message is None:
            return
        queue.remove(message)
        cost = self._link_cost(message)
        self._under_way[pair] = _UnderWay(message, cost, self._now, self._now + cost.link_s, cost.rate)
        self._at(self._now + cost.link_s, self._carried, message)
        if self._lines is not None:
            self._share(self._lines)

    def _carried(self, message: Task) -> None:
        """A message has left, unless others have made it slower since this was to be; it arrives, and is decoded behind
        the one before."""
        pair = self._pair(message)
        transfer = self._under_way.get(pair)
        if transfer is None or transfer.message != message or transfer.end_s != self._now:
            return
        del self._under_way[pair]
        self._gone.add(message)
        kind, stage, chunk = message
        source = stage - 1 if kind == "forward" else stage + 1
        arrived = self._now + transfer.cost.latency_s
        if pair[0] != pair[1]:
            self.messages[min(source, stage)].append(Span(kind, source, chunk, transfer.begin_s, arrived))
        key = kind, stage
        self._decoded[key] = max(self._decoded.get(key, 0.0), arrived) + transfer.cost.decode_s
        self._at(self._decoded[key], self._arrived, message)
        for notice in self._notices.pop(pair, []):
            self._post(notice)
        self._carry(pair)
        if self._lines is not None:
            self._share(self._lines)
        self._go_on(pair[0])

    def _arrived(self, message: Task) -> None:
        self._ready.add(message)
        self._go_on(message.stage % self._num_ranks)

    def _share(self, lines: Sequence[float]) -> None:
        """Give each message that is under way as many bytes per second as the others, but where its link or one of its
        lines carries fewer (max-min fairness)."""
        open_ = {pair: transfer for pair, transfer in self._under_way.items() if transfer.end_s > self._now}
        used = {pair: (pair, ("from", pair[0]), ("to", pair[1])) for pair in open_}
        room: dict[object, float] = {}
        for pair, transfer in open_.items():
            room |= zip(used[pair], (transfer.cost.rate, lines[pair[0]], lines[pair[1]]), strict=True)
        while open_:
            users = Counter(name for pair in open_ for name in used[pair])
            rate, tightest = min(((room[name] / count, name) for name, count in users.items()), key=itemgetter(0))
            for pair in [pair for pair in open_ if tightest in used[pair]]:
                transfer = open_.pop(pair)
                if rate != transfer.rate:
                    transfer.end_s, transfer.rate = (
                        self._now + (transfer.end_s - self._now) * transfer.rate / rate,
                        rate,
                    )
                    self._at(transfer.end_s, self._carried, transfer.message)
                for name in used[pair]:
                    room[name] -= rate

    def _pair(self, message: Task) -> _Pair:
        source = message.stage - 1 if message.kind == "forward" else message.stage + 1
        return source % self._num_ranks, message.stage % self._num_ranks

    def _link_cost(self, message: Task) -> LinkCost:
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


_NONE = LinkCost()
