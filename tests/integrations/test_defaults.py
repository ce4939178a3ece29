"""`torch.set_default_dtype` and `torch.set_default_device` are the user's: no training depends on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import thinwire
from harness import on_ranks
from ranks import alike
from thinwire.local import DiLoCo
from thinwire.optim import CompressedAdamW, Muon, QuantizedAdam

_OPTIONS: dict[str, Any] = {"min_numel": 0, "skip_if_slower": False}

Attached = tuple[torch.optim.Optimizer, Callable[[], dict[str, Tensor]]]
"""An optimizer of the model, and what gives the state of its compression."""


def _ddp(spec: str, **options: Any) -> Callable[[nn.Module], Attached]:
    def attach(model: nn.Module) -> Attached:
        wire = thinwire.compress(model, spec, **_OPTIONS, **options)
        return torch.optim.SGD(model.parameters(), 0.05), wire.gather_state_dict

    return attach


def _fsdp(model: nn.Module) -> Attached:
    wire = thinwire.compress(model, weights="maxabs(bits=8)", gradients="ef(minmax(bits=4))", **_OPTIONS)
    return torch.optim.SGD(model.parameters(), 0.05), wire.gather_state_dict


def _diloco(model: nn.Module) -> Attached:
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    local = DiLoCo(model, optimizer, every=2)
    optimizer.register_step_post_hook(lambda *_: local.step())
    return optimizer, local.gather_state_dict


def _optimizer(make: Callable[[nn.Module], torch.optim.Optimizer]) -> Callable[[nn.Module], Attached]:
    def attach(model: nn.Module) -> Attached:
        optimizer = make(model)
        wire = thinwire.compress(model, "minmax(bits=8)", optimizer=optimizer, **_OPTIONS)
        return optimizer, wire.gather_state_dict

    return attach


WAYS: dict[str, Callable[[nn.Module], Attached]] = {
    "ef": _ddp("ef(minmax(bits=3))"),
    "topk": _ddp("ef(topk(density=0.1))"),
    "fft": _ddp("fft(theta=0.5)"),
    "rangefloat": _ddp("rangefloat(bits=8)"),
    "powersgd": _ddp("ef(powersgd(rank=2))"),
    "intsgd": _ddp("intsgd(bits=8)"),
    "lgreco": _ddp("minmax(bits=4)", adapt="lgreco(every=2, window=1, lag=1)"),
    "FSDP2": _fsdp,
    "DiLoCo": _diloco,
    "QuantizedAdam": _optimizer(lambda model: QuantizedAdam(model.parameters(), lr=1e-3, warmup=2)),
    "CompressedAdamW": _optimizer(lambda model: CompressedAdamW(model.parameters(), lr=1e-3)),
    "Muon": _optimizer(lambda model: Muon(model, lr=1e-3)),
}


@contextmanager
def _defaults(dtype: torch.dtype, device: str) -> Iterator[None]:
    torch.set_default_dtype(dtype)
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)


def _train(rank: int, way: str, dtype: torch.dtype, device: str) -> dict[str, Tensor]:
    """Weights and state after some steps of a model that was made before the defaults were others."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(24, 40), nn.Tanh(), nn.Linear(40, 24))
    model = net if way == "DiLoCo" else fully_shard(net) if way == "FSDP2" else DistributedDataParallel(net)
    with _defaults(dtype, device):
        optimizer, state = WAYS[way](model)
        for step in range(4):
            generator = torch.Generator().manual_seed(10 * step + rank)
            x = torch.randn(8, 24, generator=generator, dtype=torch.float32, device="cpu")
            optimizer.zero_grad()
            (model(x) - x.flip(1)).square().mean().backward()
            optimizer.step()
        values = dict(net.named_parameters()) | state()
    values.pop("adapt/rates", None)  # they are measured
    return {name: (v.to_local() if isinstance(v, DTensor) else v).detach().clone() for name, v in values.items()}


@on_ranks(2)
def test_no_training_depends_on_the_default_dtype_or_device(rank: int) -> None:
    for way in WAYS:
        # What is kept for the process must not be of the dtype that the first training happens to have.
        others = [_train(rank, way, torch.bfloat16, "meta"), _train(rank, way, torch.float64, "cpu")]
        plain = _train(rank, way, torch.float32, "cpu")
        assert all(alike(other, plain) for other in others), way
