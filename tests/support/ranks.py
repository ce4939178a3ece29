"""What ranks have, whether all have the same, and what they leave behind."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist


def alike(a: Any, b: Any) -> bool:
    """Whether two are equal: tensors, also within mappings and sequences, to the bit."""
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, Mapping):
        return a.keys() == b.keys() and all(alike(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(alike, a, b))
    return a == b


def of_ranks(value: Any) -> list[Any]:
    """What each rank has given."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return everyone


def assert_alike(*values: Any) -> None:
    """All ranks have the same."""
    for rank, theirs in enumerate(of_ranks(values)):
        assert alike(values, theirs), f"rank {rank} has something else"


def settled(wanted: tuple[int, int] | None) -> tuple[int, int]:
    """Threads and open files, once threads that were told to end have ended."""
    end = time.monotonic() + (0.5 if wanted is None else 20.0)
    while True:
        gc.collect()
        counts = len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))
        if time.monotonic() > end or (wanted and all(a <= b for a, b in zip(counts, wanted, strict=True))):
            return counts
        time.sleep(0.05)
