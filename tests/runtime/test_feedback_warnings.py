"""Error feedback around what can err by more than its input is said to diverge, by whatever it is attached."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import thinwire
from harness import run_ranks
from thinwire.local import DiLoCo
from thinwire.optim import CompressedAdamW, QuantizedAdam

SPEC = "ef(minmax(bits=1))"
OPTIONS: dict[str, Any] = {"min_numel": 0, "skip_if_slower": False}


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4))


def _ddp(spec: str, make: Callable[..., torch.optim.Optimizer] | None = None) -> None:
    model = DistributedDataParallel(_model())
    optimizer = None if make is None else make(model.parameters(), lr=0.01)
    thinwire.compress(model, spec, optimizer=optimizer, **OPTIONS)


def _fsdp(spec: str, make: Callable[..., torch.optim.Optimizer] | None = None) -> None:
    model = fully_shard(_model())
    optimizer = None if make is None else make(model.parameters(), lr=0.01)
    thinwire.compress(model, weights="raw", gradients=spec, optimizer=optimizer, **OPTIONS)


def _diloco(spec: str) -> None:
    model = _model()
    DiLoCo(model, torch.optim.SGD(model.parameters(), 0.1), every=2, compressor=spec)


# Optimizers that send momenta put error feedback around what they are given.
WAYS: dict[str, Callable[[], None]] = {
    "ddp": lambda: _ddp(SPEC),
    "ddp, QuantizedAdam": lambda: _ddp("minmax(bits=1)", QuantizedAdam),
    "ddp, CompressedAdamW": lambda: _ddp("minmax(bits=1)", CompressedAdamW),
    "fsdp": lambda: _fsdp(SPEC),
    "fsdp, CompressedAdamW": lambda: _fsdp("minmax(bits=1)", CompressedAdamW),
    "diloco": lambda: _diloco(SPEC),
}


def _warned(rank: int) -> dict[str, int]:
    counts = {}
    for name, attach in WAYS.items():
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            attach()
        counts[name] = sum("can err by more than its input" in str(w.message) for w in warned)
    return counts


def test_every_attachment_warns_once_of_feedback_that_grows() -> None:
    for counts in run_ranks(_warned, 2):
        assert counts == dict.fromkeys(WAYS, 1)


def _silent(rank: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for attach in (_ddp, _fsdp, _diloco):
            attach("ef(minmax(bits=4))")


def test_none_warns_of_feedback_that_contracts() -> None:
    run_ranks(_silent, 2)
