"""What a rank costs beside stock DistributedDataParallel: memory at its peak, threads, connections."""

from __future__ import annotations

import ctypes
import os
import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thinwire
from harness import on_ranks, run_ranks

LAYER, LAYERS = 1 << 22, 12
"""Bytes of a layer's gradient, and number of layers, each in a bucket of its own."""
_MMAP_THRESHOLD = -3


def _model(layer: int = LAYER) -> DistributedDataParallel:
    width = int((layer / 4) ** 0.5)
    layers = [nn.Linear(width, width, bias=False) for _ in range(LAYERS)]
    return DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=layer / (1 << 20))


def _train(model: DistributedDataParallel, steps: int = 5) -> None:
    for _ in range(steps):
        model.zero_grad()
        model(torch.ones(1, next(model.parameters()).shape[1])).sum().backward()


def _peak(rank: int, spec: str | None, start: int) -> tuple[int, int]:
    """Return the high-water mark of a fresh process's memory, and what the Wire tells before training."""
    # Memory of a mebibyte and more goes back to the system when it is freed, so that only what is in use counts.
    assert ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, 1 << 20)
    model, told = _model(), 0
    if spec is not None:
        told = thinwire.compress(model, spec, start=start, skip_if_slower=False).memory
    Path("/proc/self/clear_refs").write_text("5")
    _train(model)
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return 1024 * int(found[1]), told


@pytest.fixture(scope="module")
def stock() -> int:
    return max(peak for peak, _ in run_ranks(_peak, 2, None, 0))


@pytest.mark.parametrize("start", [0, 3])
@pytest.mark.parametrize("spec", ["minmax(bits=4)", "ef(minmax(bits=4))", "ef(minmax(bits=4), bits=8)"])
def test_at_its_peak_memory_is_what_the_wire_tells(stock: int, spec: str, start: int) -> None:
    """From the first step on, in which DDP has one bucket of all layers, or from the first compressed one on."""
    peak, told = max(run_ranks(_peak, 2, spec, start))
    more, told = (peak - stock) / (LAYERS * LAYER), told / (LAYERS * LAYER)
    assert more < told + 0.1, f"{more:.2f} of the gradients' bytes, told were {told:.2f}"


def _counts() -> tuple[int, int]:
    threads, files = (len(os.listdir(f"/proc/self/{folder}")) for folder in ("task", "fd"))
    return threads, files


@on_ranks(4)
def test_threads_are_four_more_and_connections_one_for_each_rank(rank: int) -> None:
    model = _model(1 << 14)
    _train(model)
    threads, files = _counts()
    wire = thinwire.compress(model, "ef(minmax(bits=4))", start=2, min_numel=0, skip_if_slower=False)
    _train(model)
    assert wire.stats.compressed_steps == 3
    more_threads, more_files = _counts()
    assert more_threads - threads <= 4
    # Rank 0 serves PyTorch's store, in which every rank has a client of its own.
    assert more_files - files <= 3 + 3 + (4 if rank == 0 else 0)
