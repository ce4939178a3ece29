"""Steps whose computation is replayed, so that ranks do not fight over the cores that they share.

One rank, while all others wait, trains some steps and notes when gradients are ready (`record`). From then on the same
model sleeps for as long instead of computing, and hands out recorded gradients (`ReplayedTask`); whatever communicates
does so for real. A rank is taken for one with a single core: while its communication uses the processor, its
computation stands still.

With more ranks than cores time runs slower: computation takes so many times as long, what communication does on the
processor, too, and so must links.
"""

# No `from __future__ import annotations` here: DDP checks the annotations of a communication hook as objects.

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

Gradients = Mapping[str, Tensor]
"""Gradients of one rank and batch, by parameter."""

_RECORDED_STEPS = 16
_WARM_UP_STEPS = 4


@dataclass(frozen=True)
class Compute:
    """Seconds that a rank with a core of its own computes in a step."""

    forward_s: float
    gradients_s: Mapping[str, float]
    """Seconds of the backward pass until each parameter's gradient is ready, from the one before, in that order."""
    optimizer_s: float
    """Seconds from the last gradient to the end of the optimizer's step."""

    @property
    def step_s(self) -> float:
        return self.forward_s + sum(self.gradients_s.values()) + self.optimizer_s


def record(task: Any) -> Compute:
    """Train ``task`` (a `thinwire_tools.compare.tasks.Task`) on this thread; return the medians of the steps' parts.

    They are seconds of the processor, which do not count what else the machine does.
    """
    model = task.build(0)
    optimizer = task.optimizer(model)
    arrived: dict[str, float] = {}
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(_noting(arrived, name))
    steps: list[Compute] = []
    for batch in islice(task.batches(0, 0, 1), _WARM_UP_STEPS + _RECORDED_STEPS):
        arrived.clear()
        started = time.thread_time()
        optimizer.zero_grad(set_to_none=True)
        loss = task.loss(model, batch)
        at = forward_ended = time.thread_time()
        loss.backward()
        optimizer.step()
        ended = time.thread_time()
        gradients_s = {}
        for name, arrival in arrived.items():
            gradients_s[name], at = arrival - at, arrival
        steps.append(Compute(forward_ended - started, gradients_s, ended - at))
    steps = steps[_WARM_UP_STEPS:]
    return Compute(
        median(step.forward_s for step in steps),
        {name: median(step.gradients_s[name] for step in steps) for name in steps[0].gradients_s},
        median(step.optimizer_s for step in steps),
    )


def gradients_along(task: Any, batches: Iterable[Any]) -> list[Gradients]:
    """Return this rank's own gradients along an uncompressed training by all ranks, a step for each of ``batches``."""
    model, recorded = task.build(0), []
    optimizer = task.optimizer(model)
    for batch in batches:
        optimizer.zero_grad(set_to_none=True)
        task.loss(model, batch).backward()
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        recorded.append({name: gradient.clone() for name, gradient in gradients.items()})
        # In one piece: over a link with a long round-trip time each all-reduce takes many of them.
        mean = torch.cat([gradient.flatten() for gradient in gradients.values()])
        dist.all_reduce(mean)
        mean /= dist.get_world_size()
        for gradient, part in zip(gradients.values(), mean.split([g.numel() for g in gradients.values()]), strict=True):
            gradient.copy_(part.view_as(gradient))
        optimizer.step()
    return recorded


def _noting(arrived: dict[str, float], name: str) -> Callable[[Tensor], None]:
    def note(_: Tensor) -> None:
        arrived[name] = time.thread_time()

    return note


def pin(core: int) -> None:
    """Keep all threads of this process on one core."""
    for thread in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(thread), {core})


class Clock:
    """Lets time pass instead of computing, ``slowdown`` times as much; none until it is started.

    All other work of this process takes so many times as long where another rank wants the core at the same time. What
    it did while the core was free is made up for once a step, by `settle`.
    """

    def __init__(self, slowdown: int) -> None:
        self._slowdown, self._running = slowdown, False
        self._beside_s = self._between_s = self._until = self._waited_s = self._late_s = 0.0

    def start(self) -> None:
        """Let time pass from now on; work done until now does not count."""
        self._running = True
        self._beside_s = self._between_s = self._late_s = 0.0
        self._until, self._waited_s = time.process_time(), _waited_s()

    def compute(self, seconds: float, gradient: Tensor | None = None) -> Tensor | None:
        """Return when a core would have computed for ``seconds`` and done what other threads do meanwhile.

        The result is a copy of ``gradient``.
        """
        started, others = time.perf_counter(), _others_s()
        self._note_work_between()
        copy = gradient.clone() if gradient is not None else None
        while self._running:
            due = self._slowdown * (seconds + _others_s() - others) - self._late_s
            left = due - (time.perf_counter() - started)
            if left <= 0:
                # Sleep ends late, by a tenth of a millisecond; the next computation is shorter by it.
                self._late_s = -left
                break
            time.sleep(left)
        self._beside_s += _others_s() - others
        self._until = time.process_time()
        return copy

    def settle(self) -> None:
        """Wait for as long as the work between computations would have waited for its share of a core."""
        self._note_work_between()
        worked_s, waited_s = self._beside_s + self._between_s, _waited_s()
        if self._running and worked_s:
            # Waiting was spread over all of the work; that during a computation has cost no time.
            waited = (waited_s - self._waited_s) * self._between_s / worked_s
            time.sleep(max(0.0, (self._slowdown - 1) * self._between_s - waited))
        self._beside_s, self._between_s, self._waited_s = 0.0, 0.0, waited_s

    def _note_work_between(self) -> None:
        now = time.process_time()
        self._between_s += now - self._until
        self._until = now


def _others_s() -> float:
    """Return the processor seconds of this process's other threads."""
    return time.process_time() - time.thread_time()


def _waited_s() -> float:
    """Return the seconds that threads of this process were ready and had no core."""
    waited_ns = 0
    for thread in os.listdir("/proc/self/task"):
        with suppress(OSError):
            waited_ns += int(Path(f"/proc/self/task/{thread}/schedstat").read_text().split()[1])
    return waited_ns / 1e9


@dataclass(frozen=True)
class ReplayedTask:
    """A substitute for ``task``: models of the same parameters, which sleep by ``clock`` instead of computing. A
    batch is the gradients that a model has for it."""

    task: Any
    compute: Compute
    clock: Clock
    bucket_cap_mb: float
    recorded: Sequence[Gradients] = ()

    def batches(self, seed: int, rank: int, num_ranks: int) -> Sequence[Gradients]:
        return self.recorded

    def build(self, seed: int) -> nn.Module:
        """Return the task's own model, with a forward pass that takes gradients and returns a scalar."""
        model = self.task.build(seed)
        parameters = dict(model.named_parameters())

        def forward(gradients: Gradients) -> Tensor:
            self.clock.compute(self.compute.forward_s)
            result = torch.zeros((), requires_grad=True)
            # The operation that is applied last is first in the backward pass.
            for name, seconds in reversed(list(self.compute.gradients_s.items())):
                computed = partial(self.clock.compute, seconds, gradients[name])
                result = _Computed.apply(result, parameters[name], computed)
            return result

        model.forward = forward
        return model

    def distribute(self, model: nn.Module) -> DistributedDataParallel:
        return replace(self.task, bucket_cap_mb=self.bucket_cap_mb).distribute(model)

    def optimizer(self, model: nn.Module) -> "ReplayedOptimizer":
        return ReplayedOptimizer(self.task.optimizer(model), self.clock, self.compute.optimizer_s)

    def loss(self, model: nn.Module, batch: Gradients) -> Tensor:
        return model(batch)


class _Computed(torch.autograd.Function):
    """A function that does nothing in the forward pass, and computes a parameter's gradient in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, parameter: Tensor, compute: Callable[[], Tensor]) -> Tensor:
        ctx.compute = compute
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        return grads[0], ctx.compute(), None


class ReplayedOptimizer(torch.optim.Optimizer):
    """An optimizer with the parameters and settings of another one, and its time; weights stay as they are."""

    def __init__(self, replayed: torch.optim.Optimizer, clock: Clock, seconds: float) -> None:
        super().__init__(replayed.param_groups, replayed.defaults)
        self._clock, self._seconds = clock, seconds

    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        self._clock.settle()
        self._clock.compute(self._seconds)
