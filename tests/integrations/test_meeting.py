"""Whatever fails on one rank until ranks have agreed reaches the others at once, long before their timeout."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import sharded
import thinwire
from harness import run_ranks
from nets import make
from thinwire.integrations import transports


def _attach(kind: str, rank: int) -> Callable[[], object]:
    """A call in which all ranks meet."""
    if kind == "ddp":
        model: Any = make(rank)
        return lambda: thinwire.compress(model, skip_if_slower=False)
    if kind == "fsdp":
        model = sharded.build()
        return lambda: thinwire.compress(model, skip_if_slower=False)
    if kind == "local":
        model = nn.Linear(8, 8)
        return lambda: thinwire.local.DiLoCo(model, torch.optim.SGD(model.parameters()))
    # As the stages of a pipeline do in their first step.
    world = dist.group.WORLD
    assert world is not None
    return lambda: transports.bare_transport(world, timedelta(seconds=100))


@contextmanager
def _threads(left: int) -> Iterator[None]:
    """So many threads can be started."""

    def start(self: threading.Thread) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise RuntimeError("can't start new thread")
        real(self)

    with pytest.MonkeyPatch.context() as patched:
        real = threading.Thread.start
        patched.setattr(threading.Thread, "start", start)
        yield


@contextmanager
def _no_groups() -> Iterator[None]:
    """gloo makes no process groups."""

    def gloo_group(*_: object, **__: object) -> None:
        raise RuntimeError("no more files")

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(transports, "gloo_group", gloo_group)
        yield


def _fails(rank: int, kind: str, shortages: list[int | None]) -> list[tuple[int | None, str]]:
    attach, answers = _attach(kind, rank), []
    for left in shortages:
        if rank == 0:
            with pytest.raises(thinwire.CommunicationError) as failed:
                attach()
            answers.append((failed.value.rank, failed.value.reason))
        else:
            with pytest.raises(RuntimeError), _no_groups() if left is None else _threads(left):
                attach()
    attach()  # nothing of this stands in the way of another try
    return answers


@pytest.mark.parametrize("kind", ["ddp", "fsdp", "local", "stage"])
def test_a_rank_that_is_short_of_something_is_named_at_once(kind: str) -> None:
    shortages = [0, 1] if kind == "stage" else [0, 1, 2, None]
    answers = run_ranks(_fails, 2, kind, shortages, timeout_s=60.0, group_timeout_s=100.0)[0]
    for left, (rank, reason) in zip(shortages, answers, strict=True):
        assert rank == 1
        assert ("no more files" if left is None else "can't start new thread") in reason
