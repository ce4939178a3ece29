"""Watches the steps of a DistributedDataParallel model without changing what it computes.

The hook that it registers takes the mean of each bucket by the very all-reduce that stock DDP does. Every other step it
waits for each all-reduce on the spot, so that backward and communication take turns: such a step shows what computing
takes and when buckets become ready, and the steps between show what training takes as it is.
"""

# No `from __future__ import annotations` here: DDP checks the annotations of a communication hook as objects.

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from statistics import median

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from thinwire.plan.forecast import Bucket, Pace
from thinwire.wire import Follower

GradBucket = dist.GradBucket  # pyright: ignore[reportPrivateImportUsage] - documented, yet not exported
WARM_UP = 4
"""Steps that do not count: DDP forms its buckets anew after the first one or two."""
LEAST_STEPS = 6


class DoctorError(Exception):
    """Nothing can be said about this training; the message says what to do."""


@dataclass
class _Step:
    """One step of this rank, in seconds since it began."""

    began: float
    serial: bool
    ready: list[float] = field(default_factory=list)
    took: list[float] = field(default_factory=list)
    """By bucket, from ready to arrived."""
    buckets: list[Bucket] = field(default_factory=list)
    waited: float = 0.0
    seconds: float = 0.0
    batches: int = 1


@dataclass(frozen=True)
class Watched:
    """What some steps have shown, the same on every rank: that of the slowest one."""

    paces: tuple[Pace, ...]
    """One for each step in which communication was waited for."""
    step_s: tuple[float, ...]
    """Steps as they are without being watched."""
    bucket_s: tuple[tuple[float, ...], ...]
    """Seconds of each bucket's all-reduce with nothing beside it, by step: of the rank that waited least."""
    batches: int
    """Forward passes of a step: above 1 where gradients are accumulated already."""
    parameters: int
    dtypes: tuple[str, ...]

    @property
    def compute_s(self) -> float:
        return median(pace.compute_s for pace in self.paces)

    @property
    def exposed_share(self) -> float:
        """Part of a step that goes to communication which backward does not hide."""
        return max(0.0, 1 - self.compute_s / median(self.step_s))


class Observer:
    """Finds the DDP model that trains in this process, and watches ``steps`` of its steps.

    A context manager: within it every module's forward pass is looked at until one is a ``DistributedDataParallel``.
    ``done`` is called at the beginning of the step after the last one that is watched, on every rank.
    """

    def __init__(self, steps: int, done: Callable[["Observer"], None]) -> None:
        if steps < LEAST_STEPS:
            raise ValueError(f"--steps {steps}: at least {LEAST_STEPS}, half of them without overlap")
        self.model: DistributedDataParallel | None = None
        self.finished = False
        self._total, self._done = steps, done
        self._steps: list[_Step] = []
        self._names: dict[torch.Tensor, str] = {}
        self._present: _Step | None = None
        self._synced = True
        self._batches = 0
        self._follower = Follower("thinwire doctor")
        self._handles: list[RemovableHandle] = []

    def __enter__(self) -> "Observer":
        self._handles.append(register_module_forward_pre_hook(self._look))
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _look(self, module: nn.Module, inputs: object) -> None:
        if isinstance(module, DistributedDataParallel) and module.training and torch.is_grad_enabled():
            self._handles.pop().remove()
            self.watch(module)
            self._before_forward(module, inputs)

    def watch(self, model: DistributedDataParallel) -> None:
        """Begin with this model, before its first backward pass.

        Raises:
            DoctorError: it has a communication hook, or no other rank to talk to.
        """
        group = model.process_group
        assert isinstance(group, dist.ProcessGroup)
        if group.size() < 2:
            raise DoctorError("one rank alone sends nothing: start at least 2, with torchrun --nproc-per-node 2")
        try:
            model.register_comm_hook(self, _hook)
        except RuntimeError as error:
            raise DoctorError(
                "this model has a communication hook already, and doctor looks at training without one: take "
                f"thinwire.compress() or register_comm_hook() out of the script for now ({error})"
            ) from error
        self.model = model
        self._names = {p: name for name, p in model.module.named_parameters()}
        self._handles.append(model.register_forward_pre_hook(self._before_forward))

    def _before_forward(self, model: nn.Module, inputs: object) -> None:
        if self.finished or not (model.training and torch.is_grad_enabled()):
            return
        self._batches += 1
        if not self._synced:
            return
        self._synced = False
        now = time.perf_counter()
        if self._present is not None:
            self._present.seconds = now - self._present.began
            self._steps.append(self._present)
        count = len(self._steps)
        if count == WARM_UP + self._total:
            self.finished = True
            self._present = None
            self._done(self)
            return
        self._batches = 1
        self._present = _Step(time.perf_counter(), serial=count % 2 == 1)

    def reduce(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """The hook: the mean of a bucket, as stock DDP takes it."""
        assert self.model is not None
        group = self.model.process_group
        assert isinstance(group, dist.ProcessGroup)
        flat, step = bucket.buffer(), self._present
        if step is not None and step.serial:
            _await_device(flat)
        ready = time.perf_counter()
        future = self._follower.mean(flat, group)
        if bucket.is_last():
            self._synced = True
        if step is None:
            return future
        step.batches = self._batches
        layers = tuple((self._names[p], tuple(p.shape)) for p in bucket.parameters())
        step.buckets.append(Bucket(0.0, layers, flat.element_size()))
        step.ready.append(ready - step.began - step.waited)
        if step.serial:
            future.wait()
            _await_device(flat)
            took = time.perf_counter() - ready
            step.took.append(took)
            step.waited += took
        return future

    def result(self) -> Watched:
        """What was watched, of all ranks together. All must call it; nothing else may be under way.

        Raises:
            DoctorError: the buckets changed from step to step, or no step was seen.
        """
        assert self.model is not None
        counted = self._steps[WARM_UP:]
        serial = [step for step in counted if step.serial]
        plain = [step.seconds for step in counted if not step.serial]
        buckets = counted[-1].buckets
        if any(step.buckets != buckets for step in counted):
            raise DoctorError(
                "the gradients of this model come in other buckets from step to step, so steps cannot be foretold: "
                "does it use all parameters in every step?"
            )
        device = next(self.model.parameters()).device
        rows, took, times = (
            torch.tensor(values, dtype=torch.float64, device=device)
            for values in ([[*s.ready, s.seconds - s.waited] for s in serial], [s.took for s in serial], plain)
        )
        group = self.model.process_group
        dist.all_reduce(rows, op=dist.ReduceOp.MAX, group=group)
        dist.all_reduce(times, op=dist.ReduceOp.MAX, group=group)
        # Who came last waited for the others' bytes alone.
        dist.all_reduce(took, op=dist.ReduceOp.MIN, group=group)
        paces = tuple(
            Pace(tuple(replace(of, ready_s=at) for at, of in zip(row[:-1], buckets, strict=True)), row[-1])
            for row in rows.tolist()
        )
        trained = [p for p in self.model.module.parameters() if p.requires_grad]
        return Watched(
            paces,
            tuple(times.tolist()),
            tuple(map(tuple, took.tolist())),
            counted[-1].batches,
            sum(p.numel() for p in trained),
            tuple(sorted({str(p.dtype).removeprefix("torch.") for p in trained})),
        )


def _await_device(flat: torch.Tensor) -> None:
    if flat.is_cuda:
        torch.cuda.synchronize(flat.device)


def _hook(state: Observer, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    return state.reduce(bucket)
