"""A training under ``thinwire.compress(model, "auto")``, as every rank of an emulated network."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import thinwire


class Slow(nn.Module):
    """Two layers, and a forward pass that takes ``seconds``."""

    def __init__(self, seconds: float, width: int = 256) -> None:
        super().__init__()
        self.seconds = seconds
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.seconds)
        return self.second(self.first(x).relu())


def wrapped(seconds: float) -> DistributedDataParallel:
    torch.manual_seed(0)
    return DistributedDataParallel(Slow(seconds))


def advance(model: DistributedDataParallel, rank: int, first: int, steps: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(first, first + steps):
        x = torch.randn(8, 256, generator=torch.Generator().manual_seed(100 * step + rank))
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


def train() -> dict[str, object]:
    model = wrapped(0.0)
    wire = thinwire.compress(model, "auto(every=12, warmup=6, window=3, lag=2)")
    advance(model, dist.get_rank(), 0, 20)
    decisions = [{"step": d.step, "plan": d.plan.to_json(), "note": d.note} for d in wire.decisions]
    plans: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(plans, [d["plan"] for d in decisions])
    return {"decisions": decisions, "plans": plans, "stats": wire.stats.to_dict()}
