"""Ranks that are given different arguments: an error that names the argument, on every rank, for every argument."""

from __future__ import annotations

import inspect
import re
import time
from dataclasses import fields
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn.parallel import DistributedDataParallel

import sharded
import thinwire
from harness import on_ranks
from nets import Net, make
from pipelines import needs_pipelines
from ranks import assert_alike
from thinwire.local import DiLoCo
from thinwire.pipeline.stage import compress_stage

NETWORK: dict[str, Any] = {
    "algorithm": "ring",
    "transport": "group",
    "aggregator": "127.0.0.1:9",
    "timeout": timedelta(seconds=19),
    "streams": 2,
}
CHECKS = {"parity_every": 0, "resync_every": 10, "measure_every": 5}
COMMON: dict[str, Any] = {
    "exclude": ["embed"],
    "min_numel": 100,
    "start": 1,
    "seed": 1,
    "adapt": "lgreco(every=500)",
    "grad_scaler": torch.amp.GradScaler("cpu"),
    "optimizer": torch.optim.SGD,
    "skip_if_slower": False,
}
DDP: dict[str, Any] = {"compressor": "minmax(bits=2)", "simulate": True}
FSDP: dict[str, Any] = {
    "weights": "raw",
    "gradients": "raw",
    "across": "minmax(bits=8)",
    "master": False,
    "overlap": False,
}
STAGE: dict[str, Any] = {
    "forward": "maxabs(bits=4)",
    "backward": "maxabs(bits=4)",
    "store": thinwire.store.Memory(budget_bytes=1 << 20),
    "precision": 16,
    "seed": 1,
    "warmup_epochs": 1,
    "check_every": 10,
    "evaluation": "maxabs(bits=4)",
    "max_length": 8,
    "adapt": thinwire.policies.ByLink(),
}


def differing(arguments: dict[str, Any], *, checks: bool) -> dict[str, dict[str, Any]]:
    """By the name that the error is to have, what rank 1 alone is given."""
    cases = {name: {name: value} for name, value in arguments.items()}
    cases |= {f"network.{name}": {"network": thinwire.Network(**{name: value})} for name, value in NETWORK.items()}
    if checks:
        cases |= {f"checks.{name}": {"checks": thinwire.Checks(**{name: value})} for name, value in CHECKS.items()}
    return cases


def parameters_of(function: Any) -> set[str]:
    return set(inspect.signature(function).parameters) - {"model", "stage"}


def test_the_cases_are_all_arguments() -> None:
    assert {*COMMON, *DDP, "network", "checks"} == parameters_of(thinwire.compress_ddp)
    assert {*COMMON, *FSDP, "network"} == parameters_of(thinwire.compress_fsdp)
    assert set(STAGE) == parameters_of(compress_stage)
    assert set(NETWORK) == {field.name for field in fields(thinwire.Network)}
    assert set(CHECKS) == {field.name for field in fields(thinwire.Checks)}


def assert_named(name: str, call: Any) -> None:
    """The error names the argument, and is the same on all ranks."""
    with pytest.raises(thinwire.DisagreementError, match=f"'{re.escape(name)}") as error:
        call()
    assert_alike(str(error.value))


@on_ranks(2, timeout_s=110.0)
def test_every_argument_of_compress_ddp(rank: int) -> None:
    model = make(rank)
    for name, given in differing({**COMMON, **DDP, "auto": None}, checks=True).items():
        if name == "optimizer":
            given = {"optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
        elif name == "auto":
            name, given = "compressor", {"compressor": "auto"}
        assert_named(f"{name}: ", partial(thinwire.compress, model, **(given if rank else {})))
    compressor = "minmax(bits=4)" if rank else thinwire.compressors.MinMax(bits=4)
    thinwire.compress(model, compressor, exclude=[("bias")], network=thinwire.Network("sra" if rank else None)).detach()


@on_ranks(2, timeout_s=110.0)
def test_every_argument_of_compress_fsdp(rank: int) -> None:
    model = sharded.build()
    for name, given in differing({**COMMON, **FSDP}, checks=False).items():
        assert_named(f"{name}: ", partial(thinwire.compress, model, **(given if rank else {})))
    thinwire.compress(model).detach()


@needs_pipelines
@on_ranks(2)
def test_every_argument_of_compress_stage(rank: int) -> None:
    x = torch.randn(4, 4)
    for name, value in STAGE.items():
        stage = PipelineStage(nn.Linear(4, 4), rank, 2, torch.device("cpu"))
        compressed = thinwire.compress(stage, **({name: value} if rank else {}))
        schedule = ScheduleGPipe(compressed, 2, loss_fn=nn.functional.mse_loss)
        if rank == 0:
            compressed.set_sample_ids(range(4))
        assert_named(name, partial(schedule.step, target=x) if rank else partial(schedule.step, x))


def _local(group: Any = None, **options: Any) -> DiLoCo:
    model = nn.Linear(4, 4)
    return DiLoCo(model, torch.optim.SGD(model.parameters(), lr=0.1), total_steps=100, group=group, **options)


@on_ranks(3, group_timeout_s=30.0, timeout_s=100.0)
def test_an_argument_that_is_wrong_on_one_rank_stops_the_others_in_every_function(rank: int) -> None:
    part = dist.new_group([1, 2])
    over_a_part = DistributedDataParallel(Net(), process_group=part) if rank else None
    mesh = DeviceMesh("cpu", [1, 2])  # a collective call of all ranks
    sharded_over_a_part = sharded.build(mesh) if rank else None
    calls: list[tuple[bool, Any, dict[str, Any]]] = [
        (True, partial(thinwire.compress, make(rank)), {"network": 5}),
        (True, partial(thinwire.compress_ddp, make(rank)), {"network": 5}),
        (False, partial(thinwire.compress_ddp, over_a_part), {"network": 5}),
        (True, partial(thinwire.compress_fsdp, sharded.build()), {"network": 5}),
        (False, partial(thinwire.compress_fsdp, sharded_over_a_part), {"network": 5}),
        (False, partial(thinwire.compress, sharded_over_a_part), {"network": 5}),
        (True, _local, {"every": 0}),
        (False, partial(_local, part), {"every": 0}),
    ]
    for of_all, call, wrong in calls:
        if of_all or rank:
            started = time.monotonic()
            with pytest.raises((TypeError, ValueError) if rank == 1 else thinwire.PeerFailedError) as error:
                call(**wrong if rank == 1 else {})
            assert time.monotonic() - started < 15.0
            assert rank == 1 or error.value.rank == 1
    # Ranks have counted alike, and meet.
    thinwire.compress(make(rank))
    _local()
