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
from harness import on_ranks
from thinwire.local import DiLoCo
from thinwire.optim import CompressedAdamW, QuantizedAdam

OPTIONS: dict[str, Any] = {"min_numel": 0, "skip_if_slower": False}
Optimizer = Callable[..., torch.optim.Optimizer] | None


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4))


def _ddp(spec: str, make: Optimizer = None) -> None:
    model = DistributedDataParallel(_model())
    optimizer = None if make is None else make(model.parameters(), lr=0.01)
    thinwire.compress(model, spec, optimizer=optimizer, **OPTIONS)


def _fsdp(spec: str, make: Optimizer = None) -> None:
    model = fully_shard(_model())
    optimizer = None if make is None else make(model.parameters(), lr=0.01)
    thinwire.compress(model, weights="raw", gradients=spec, optimizer=optimizer, **OPTIONS)


def _diloco(spec: str, make: Optimizer = None) -> None:
    model = _model()
    DiLoCo(model, torch.optim.SGD(model.parameters(), 0.1), every=2, compressor=spec)


@on_ranks(2)
def test_every_attachment_warns_once_of_feedback_that_grows_and_not_of_what_contracts(rank: int) -> None:
    # Optimizers that send momenta put error feedback around what they are given.
    ways = [(attach, None) for attach in (_ddp, _fsdp, _diloco)]
    ways += [(_ddp, QuantizedAdam), (_ddp, CompressedAdamW), (_fsdp, CompressedAdamW)]
    for attach, make in ways:
        for bits in (1, 4):
            with warnings.catch_warnings(record=True) as warned:
                warnings.simplefilter("always")
                attach(f"minmax(bits={bits})" if make else f"ef(minmax(bits={bits}))", make)
            said = sum("can err by more than its input" in str(w.message) for w in warned)
            assert said == (bits == 1), (attach, make, bits)
