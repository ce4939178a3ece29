"""The way through a device, on CPU tensors: the same bytes as the CPU's own way, over threads and over gloo."""

from __future__ import annotations

import pytest
import torch

from device_cases import MIXED, SHAPES, layers_of, same, through_the_device, through_the_host
from harness import run_threads
from test_laws import SPECS
from thinwire import parse
from thinwire.collectives import (
    DeviceLoopbackTransport,
    Layout,
    LoopbackTransport,
)

CPU = torch.device("cpu")
FIXED = [spec for spec in SPECS if parse(spec).size == "fixed"]


def on_threads(layout: Layout, num_ranks: int, steps: int, **options) -> list[list[torch.Tensor]]:
    devices = DeviceLoopbackTransport.world(LoopbackTransport.world(num_ranks), CPU)
    return run_threads(lambda t: through_the_device(devices[t.rank], layout, steps, **options), num_ranks)


def check_alike(layout: Layout, num_ranks: int, steps: int, **options) -> None:
    got = on_threads(layout, num_ranks, steps, **options)
    wanted = run_threads(lambda t: through_the_host(t, layout, steps, **options), num_ranks)
    for mine, theirs in zip(got, wanted, strict=True):
        for step in range(steps):
            assert same(mine[step], theirs[step]), f"step {step}"
            assert same(mine[step], got[0][step])


@pytest.mark.parametrize("spec", FIXED)
def test_the_bytes_of_the_cpu(spec: str) -> None:
    check_alike(Layout.build(layers_of([spec]), 3, torch.float32), 3, 3)


@pytest.mark.parametrize("num_ranks", [2, 4, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_kinds_in_one_bucket(num_ranks: int, dtype: torch.dtype) -> None:
    layers = layers_of(MIXED, (*SHAPES, *SHAPES, (3000, 10)))
    check_alike(Layout.build(layers, num_ranks, dtype), num_ranks, 3)
