"""Paired training: the steps, learning rates and bytes that are the same for all variants."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from thinwire_tools.compare import tasks

_WARM_UP_SHARE = 0.1


def learning_rate(highest: float, step: int, steps: int) -> float:
    """Return the learning rate of ``step`` (from 0): a linear warm-up over the first tenth, then a cosine to zero."""
    warm_up = math.ceil(steps * _WARM_UP_SHARE)
    if step < warm_up:
        return highest * (step + 1) / warm_up
    return highest * 0.5 * (1 + math.cos(math.pi * (step - warm_up + 1) / (steps - warm_up + 1)))


def ring_factor(num_ranks: int) -> float:
    """Return the bytes that each rank sends in a ring all-reduce, per byte that is reduced."""
    return 2 * (num_ranks - 1) / num_ranks


def gradient_bytes(model: nn.Module) -> int:
    return 4 * sum(parameter.numel() for parameter in model.parameters())


def train(
    task: tasks.Task,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterable[Any],
    rate: Callable[[int], float],
) -> Iterator[tuple[float, float]]:
    """Train one step per batch at its learning rate; yields each step's loss on this rank, and its seconds."""
    for step, batch in enumerate(batches):
        started = time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        optimizer.zero_grad(set_to_none=True)
        loss = task.loss(model, batch)
        loss.backward()
        optimizer.step()
        seconds = time.perf_counter() - started
        yield loss.item(), seconds


def digest(tensors: Iterable[torch.Tensor]) -> str:
    """Return a hash of the bytes of tensors, such as all parameters: equal on two ranks exactly where these are."""
    state = hashlib.sha256()
    for tensor in tensors:
        state.update(tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes())
    return state.hexdigest()
