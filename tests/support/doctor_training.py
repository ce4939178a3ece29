"""A small training script, as a user has it, for ``thinwire doctor`` to look at."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


def train(steps: int, seconds: float) -> dict[str, Tensor]:
    """The weights after so many steps, each of which waits for ``seconds``."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256))
    model = DistributedDataParallel(net, bucket_cap_mb=0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(steps):
        x = torch.randn(4, 256, generator=torch.Generator().manual_seed(2 * step + dist.get_rank()))
        time.sleep(seconds)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    return net.state_dict()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    try:
        weights = train(int(sys.argv[1]), float(sys.argv[2]))
        if dist.get_rank() == 0:
            torch.save(weights, sys.argv[3])
    finally:
        Path(f"{sys.argv[3]}.ended.{dist.get_rank()}").touch()
        dist.destroy_process_group()
