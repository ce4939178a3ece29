"""DistributedDataParallel with gradients in 4 bits: two lines more than without.

torchrun --nproc-per-node 2 examples/ddp.py
"""

import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thinwire


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 64))
    model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    wire = thinwire.compress(
        model, "minmax(bits=4, bucket=128)", skip_if_slower=False
    )  # on a slow network leave skip_if_slower out

    draws = torch.Generator().manual_seed(dist.get_rank())
    for step in range(40):
        x = torch.randn(32, 64, generator=draws)
        loss = (model(x) - x.flip(1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0 and step % 10 == 9:
            print(f"step {step + 1}: loss {loss.item():.4f}")
    state = {"model": model.module.state_dict(), "wire": wire.gather_state_dict()}  # on every rank
    if dist.get_rank() == 0:
        with tempfile.TemporaryFile() as file:
            torch.save(state, file)
    print(f"rank {dist.get_rank()}: {wire.stats}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
