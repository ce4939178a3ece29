"""One worker of ``python -m experiments bench bursts``."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from torch import nn

from thinwire.local import DiLoCo
from thinwire_tools.bench.rank import serve

_WIDTH = 512


def exchange(size_mb: float, every: int, step_s: float, rounds: int, fragments: int, overlap: int) -> dict[str, float]:
    """Take steps of ``step_s`` that exchange the model ``rounds`` times; when they started, and what a step took."""
    model = nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH) for _ in range(round(size_mb * 1e6 / (4 * _WIDTH**2)))))
    local = DiLoCo(model, torch.optim.SGD(model.parameters()), every=every, fragments=fragments, overlap=overlap)
    draws = torch.Generator().manual_seed(dist.get_rank())
    dist.barrier()
    started = time.monotonic()
    for step in range(1, rounds * every + 1):
        with torch.no_grad():
            # A few at a time, so that no step takes longer than it should.
            for parameter in list(model.parameters())[step % every :: every]:
                parameter.add_(torch.randn(parameter.shape, generator=draws), alpha=1e-3)
        time.sleep(max(0.0, started + step * step_s - time.monotonic()))
        local.step()
    took = time.monotonic() - started
    local.close()
    return {"started": started, "step_s": took / (rounds * every)}


def main() -> None:
    serve(exchange)
