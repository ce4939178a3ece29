"""Two replicas of a model under fully_shard, which train alone and exchange their shards every 10 steps in 2 bits.

torchrun --nproc-per-node 4 examples/local_fsdp.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import thinwire


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    # Between replicas is the slow network: ranks 0 and 1 are one, 2 and 3 the other.
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicas", "shards"))
    model = nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 64))
    for layer in model:
        fully_shard(layer, mesh=mesh["shards"])
    fully_shard(model, mesh=mesh["shards"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    local = thinwire.local.DiLoCo(model, optimizer, every=10, group=mesh.get_group("replicas"))

    draws = torch.Generator().manual_seed(dist.get_rank())
    for step in range(40):
        x = torch.randn(32, 64, generator=draws)
        loss = (model(x) - x.flip(1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        local.step()
        if dist.get_rank() == 0 and step % 10 == 9:
            print(f"step {step + 1}: loss {loss.item():.4f}")
    local.finish()
    print(f"rank {dist.get_rank()}: {local.bytes_per_step:.0f} bytes a step to the other replica", flush=True)
    local.close()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
