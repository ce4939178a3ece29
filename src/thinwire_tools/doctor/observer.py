"""Finds the model that trains, and watches its steps without changing what it computes."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from thinwire.plan import named_parameters
from thinwire.runtime.executor import mark
from thinwire.trainers import on_first_forward
from thinwire_tools.doctor.observer_ddp import DDPObserver
from thinwire_tools.doctor.observer_fsdp import ShardedObserver
from thinwire_tools.doctor.watched import DoctorError, Step, Watched

WARM_UP = 4
"""Number of steps that do not count: DDP forms other buckets after the first one or two."""
LEAST_STEPS = 6


class Observer:
    """Finds the model that trains in this process, wrapped in DDP or sharded, and watches ``steps`` of its steps.

    A context manager: within it every module's forward pass is looked at until one is such a model's. ``done`` is
    called at the beginning of the step after the last one that is watched, on every rank.
    """

    def __init__(
        self,
        steps: int,
        done: Callable[[Observer], None],
        on_step: Callable[[int, int], None] = lambda step, total: None,
    ) -> None:
        """Prepare to watch. ``on_step`` is called as each step begins, with its index and how many there are to be."""
        self.model: nn.Module | None = None
        self.present: Step | None = None
        """Step under way, while it is watched."""
        self.finished = False
        self._observer: DDPObserver | ShardedObserver | None = None
        self._total, self._done, self._on_step = steps, done, on_step
        self._steps: list[Step] = []
        self._synced = True
        self._batches = 0
        self._handles: list[RemovableHandle] = []

    def __enter__(self) -> Observer:
        self._handles.append(on_first_forward(self._watch_first))
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _watch_first(self, model: nn.Module) -> None:
        self.watch(model)
        self._before_forward(model, ())

    def watch(self, model: nn.Module) -> None:
        """Begin with this model, before its first backward pass.

        Raises:
            DoctorError: something else changes its communication already, or there is no other rank.
        """
        wrapped = isinstance(model, DistributedDataParallel)
        self._observer = DDPObserver(self, model) if wrapped else ShardedObserver(self, model)
        self.model = model
        # The hook runs before FSDP2's own, which gathers the root's weights.
        self._handles.append(model.register_forward_pre_hook(self._before_forward, prepend=True))

    @property
    def group(self) -> dist.ProcessGroup:
        """Process group that the model communicates in."""
        assert self._observer is not None
        return self._observer.group

    @property
    def sharded(self) -> bool:
        return isinstance(self._observer, ShardedObserver)

    @property
    def layers(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(p.shape) for name, p in self._parameters().items() if p.requires_grad}

    def _parameters(self) -> dict[str, nn.Parameter]:
        assert self.model is not None
        inner = self.model.module if isinstance(self.model, DistributedDataParallel) else self.model
        return named_parameters(inner)

    def _before_forward(self, model: nn.Module, inputs: object) -> None:
        if self.finished or not (model.training and torch.is_grad_enabled()):
            return
        self._batches += 1
        if not self._synced:
            return
        self._synced = False
        device = next(model.parameters()).device
        if self.present is not None:
            self.present.ended = mark(device)
            self._steps.append(self.present)
        count = len(self._steps)
        if count == WARM_UP + self._total:
            self.finished = True
            self.present = None
            self._done(self)
            return
        self._on_step(count, WARM_UP + self._total)
        self._batches = 1
        self.present = Step(mark(device), serial=count % 2 == 1)

    def synced(self) -> None:
        """Note that gradients were reduced: the next forward pass begins another step."""
        self._synced = True
        if self.present is not None:
            self.present.batches = self._batches

    def result(self) -> Watched:
        """Return the observations of all ranks together. All must call it; nothing else may be under way.

        Raises:
            DoctorError: the buckets changed from step to step, or no step was seen.
        """
        assert self._observer is not None
        counted = self._steps[WARM_UP:]
        if any(step.buckets != counted[-1].buckets for step in counted):
            raise DoctorError(
                "the gradients of this model come in other buckets from step to step, so steps cannot be predicted: "
                "does it use all parameters in every step?"
            )
        paces, times, took = self._observer.watched(counted)
        trained = [p for p in self._parameters().values() if p.requires_grad]
        return Watched(
            paces,
            tuple(times),
            tuple(map(tuple, took)),
            counted[-1].batches,
            sum(p.numel() for p in trained),
            tuple(sorted({str(p.dtype).removeprefix("torch.") for p in trained})),
        )
