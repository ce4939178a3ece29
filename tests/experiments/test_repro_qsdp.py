"""``python -m experiments qsdp``: micro-batches under FSDP2."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from experiments.papers.qsdp.methods import FP32, RAW, TIMED_SMOKE
from experiments.papers.qsdp.sharding import backward, shard
from harness import run_ranks


def _gradients(rank: int) -> None:
    torch.set_num_threads(1)
    found = []
    for method, num_micro in ((RAW, 1), (RAW, 4), (FP32, 4)):
        model = shard(TIMED_SMOKE, init_device_mesh("cpu", (2,)), 0, half=method.half)
        wire = method.attach(model)
        loss = backward(TIMED_SMOKE, model, next(iter(TIMED_SMOKE.batches(0, rank, 2))), num_micro)
        gradients = [p.grad.full_tensor() for p in model.parameters()]  # pyright: ignore
        found.append((gradients, wire.stats if wire else None, loss))
    (whole, once, loss), (parts, counted, loss_of_parts), (stock, _, _) = found
    for a, b, c in zip(whole, parts, stock, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-6)
        torch.testing.assert_close(b, c, rtol=1e-5, atol=1e-7)
    assert loss == pytest.approx(loss_of_parts, rel=1e-4)
    num_modules = TIMED_SMOKE.model.layers + 1
    assert (counted.gathers, counted.reductions, once.reductions) == (5 * num_modules, num_modules, num_modules)


def test_micro_batches_make_the_gradient_of_the_whole_batch() -> None:
    run_ranks(_gradients, 2)
