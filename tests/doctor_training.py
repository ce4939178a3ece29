"""A small training script, as a user has it, for ``thinwire doctor`` to look at."""

from __future__ import annotations

import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

if __name__ == "__main__":
    steps, seconds, path = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256))
    model = DistributedDataParallel(net, bucket_cap_mb=0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    try:
        for step in range(steps):
            x = torch.randn(4, 256, generator=torch.Generator().manual_seed(2 * step + dist.get_rank()))
            time.sleep(seconds)
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    finally:
        if dist.get_rank() == 0:
            torch.save(net.state_dict(), path)
        dist.destroy_process_group()
