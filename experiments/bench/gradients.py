"""Gradients of a real training run, recorded for measuring compressors on them."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Literal

import torch
from torch import Tensor

from thinwire.plan import Filter
from thinwire_tools.compare.tasks import SIZES, Task
from thinwire_tools.compare.train import learning_rate

TaskName = Literal["gpt", "digits"]


@dataclass(frozen=True)
class Moment:
    """One step's gradient and that of the step before, from which what compressors keep or learn is made: fp32, flat,
    all layers end to end."""

    step: int
    before: Tensor
    now: Tensor


@dataclass(frozen=True)
class Gradients:
    """``layers`` (name to shape, in their order in the flat tensors) are those that a plan compresses."""

    layers: dict[str, tuple[int, ...]]
    moments: tuple[Moment, ...]

    @property
    def numel(self) -> int:
        return self.moments[0].now.numel()


def make_task(name: TaskName, *, smoke: bool = False) -> Task:
    """The training whose gradients are recorded: the demo's GPT, or the CNN on digits of ``python -m experiments fft``.

    Raises ``ImportError`` where what it trains on is missing.
    """
    if name == "gpt":
        return SIZES["smoke" if smoke else "demo"]
    try:
        task: Task = importlib.import_module("experiments.tasks.resnet").ImageTask()
        task.build(0)
    except ImportError as error:
        raise ImportError(
            f"--task digits is the training of `python -m experiments fft`, which is missing: {error}"
        ) from error
    return task


def record(task: Task, steps: Sequence[int]) -> Gradients:
    """Train ``task`` in this process and keep the gradients of ``steps`` (ascending, from 1) and of those before them.

    Biases, norms and other layers that a plan leaves raw are left out.

    Raises:
        ValueError: the steps are not within the task's, or not ascending.
    """
    if not steps or list(steps) != sorted(set(steps)) or not 1 <= steps[0] <= steps[-1] < task.steps:
        raise ValueError(f"steps {list(steps)}: ascending, from 1 to {task.steps - 1}")
    model, keep = task.build(0), Filter()
    chosen = {n: p for n, p in model.named_parameters() if not keep.keeps_raw(n, p.shape)}
    optimizer, wanted = task.optimizer(model), {at for step in steps for at in (step - 1, step)}
    kept: dict[int, Tensor] = {}
    for step, batch in enumerate(islice(task.batches(0, 0, 1), steps[-1] + 1)):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(task.learning_rate, step, task.steps)
        optimizer.zero_grad(set_to_none=True)
        task.loss(model, batch).backward()
        if step in wanted:
            kept[step] = torch.cat([_gradient(p).flatten() for p in chosen.values()])
        optimizer.step()
    layers = {name: tuple(p.shape) for name, p in chosen.items()}
    return Gradients(layers, tuple(Moment(step, kept[step - 1], kept[step]) for step in steps))


def _gradient(parameter: torch.nn.Parameter) -> Tensor:
    """A copy of its gradient in fp32; zeros where it has none."""
    if parameter.grad is None:
        return torch.zeros_like(parameter, dtype=torch.float32)
    return parameter.grad.detach().to(torch.float32, copy=True)
