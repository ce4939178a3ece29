"""A small sharded training, as a user has it, for ``thinwire doctor`` to look at."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard


def train(steps: int) -> dict[str, Tensor]:
    """The weights after so many steps."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    block = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True, norm_first=True)
    model = nn.TransformerEncoder(block, 3, enable_nested_tensor=False)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(steps):
        x = torch.randn(4, 32, 128, generator=torch.Generator().manual_seed(2 * step + dist.get_rank()))
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    return {name: of.full_tensor() for name, of in model.state_dict().items()}


if __name__ == "__main__":
    dist.init_process_group("gloo")
    weights = train(int(sys.argv[1]))
    if dist.get_rank() == 0:
        torch.save(weights, sys.argv[2])
    dist.barrier()
    dist.destroy_process_group()
