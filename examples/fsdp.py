"""FSDP2 with weights and gradients in 8 bits.

torchrun --nproc-per-node 2 examples/fsdp.py
thinwire lab --ranks 2 --rate 100mbit -- python examples/fsdp.py   # over an emulated slow network
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import thinwire


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, batch_first=True, norm_first=True) for _ in range(4))
    )
    for block in model:
        fully_shard(block)
    fully_shard(model)
    wire = thinwire.compress(
        model, skip_if_slower=False
    )  # 8 bits, buckets of 1024; on a slow network leave skip_if_slower out
    thinwire.prefetch(model)

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    draws = torch.Generator().manual_seed(dist.get_rank())
    for step in range(20):
        x = torch.randn(8, 16, 64, generator=draws)
        loss = (model(x) - x.roll(1, 1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0 and step % 5 == 4:
            print(f"step {step + 1}: loss {loss.item():.4f}")
    print(f"rank {dist.get_rank()}: {wire.stats}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
