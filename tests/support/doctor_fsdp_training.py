"""A small sharded training, as a user has it, for ``thinwire doctor`` to look at."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard


def build() -> nn.Sequential:
    """Three blocks, each sharded, and what is around them."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(128, 64), *(nn.Sequential(nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 64)) for _ in range(3))
    )
    for block in list(model)[1:]:
        fully_shard(block)
    fully_shard(model)
    return model


def train(steps: int) -> dict[str, Tensor]:
    """The weights after so many steps."""
    torch.set_num_threads(1)
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(steps):
        x = torch.randn(16, 128, generator=torch.Generator().manual_seed(2 * step + dist.get_rank()))
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    return {name: tensor.full_tensor() for name, tensor in model.state_dict().items()}


if __name__ == "__main__":
    dist.init_process_group("gloo")
    weights = train(int(sys.argv[1]))
    if dist.get_rank() == 0:
        torch.save(weights, sys.argv[2])
    dist.barrier()
    dist.destroy_process_group()
