"""Tensor parallelism over two ranks, whose sums behind row-wise layers are sent as changes in 4 bits.

torchrun --nproc-per-node 2 examples/tensor_parallel.py
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.utils.data import DataLoader, TensorDataset

import thinwire
from thinwire.data import Indexed

LENGTH, WIDTH = 16, 64


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)  # every rank makes the same model, of which it keeps its part
    model = nn.Sequential(Block(), Block())
    down = thinwire.CompressedRowwiseParallel("delta(maxabs(bits=4))")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    parallelize_module(model, mesh, {"*.up": ColwiseParallel(), "*.down": down})
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    draws = torch.Generator().manual_seed(0)  # every rank draws the same batches
    x = torch.randn(64, LENGTH, WIDTH, generator=draws)
    loader = DataLoader(Indexed(TensorDataset(x, x.flip(1))), batch_size=16, shuffle=True, generator=draws)
    for epoch in range(8):
        losses = []
        for ids, (inputs, targets) in loader:
            down.set_sample_ids(ids)
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        if dist.get_rank() == 0:
            print(f"epoch {epoch + 1}: loss {torch.stack(losses).mean().item():.4f}", flush=True)
    print(f"rank {dist.get_rank()}: {down.stats}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
