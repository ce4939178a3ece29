"""Workers that train alone for 25 steps at a time and exchange what they have learned in 2 bits.

torchrun --nproc-per-node 2 examples/local.py
"""

import torch
import torch.distributed as dist
from torch import nn

import thinwire


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    local = thinwire.local.DiLoCo(model, optimizer, every=25)

    draws = torch.Generator().manual_seed(dist.get_rank())
    for step in range(100):
        x = torch.randn(32, 64, generator=draws)
        loss = (model(x) - x.flip(1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        local.step()
        if dist.get_rank() == 0 and step % 25 == 24:
            print(f"step {step + 1}: loss {loss.item():.4f}")
    local.finish()
    gradients = 4 * sum(p.numel() for p in model.parameters())
    print(
        f"rank {dist.get_rank()}: {local.bytes_per_step:.0f} bytes a step; gradients in fp32 take {gradients}",
        flush=True,
    )
    local.close()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
