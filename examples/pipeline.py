"""A pipeline of two stages (GPipe) that sends how activations changed, in 3 bits, and their gradients in 6.

torchrun --nproc-per-node 2 examples/pipeline.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.utils.data import DataLoader, TensorDataset

import thinwire
from thinwire.data import Indexed


def main() -> None:
    dist.init_process_group("gloo")
    rank, num_stages = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    block = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))
    stage = PipelineStage(block, rank, num_stages, torch.device("cpu"))
    stage = thinwire.compress(stage, forward="delta(maxabs(bits=3))", backward="maxabs(bits=6)")
    schedule = ScheduleGPipe(stage, n_microbatches=4, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.AdamW(block.parameters(), lr=3e-3)

    draws = torch.Generator().manual_seed(0)  # every rank draws the same batches
    x = torch.randn(64, 16, 64, generator=draws)
    loader = DataLoader(Indexed(TensorDataset(x, x.flip(1))), batch_size=16, shuffle=True, generator=draws)
    for epoch in range(8):
        losses: list[torch.Tensor] = []
        for ids, (inputs, targets) in loader:
            optimizer.zero_grad()
            if stage.is_first:
                stage.set_sample_ids(ids)
                schedule.step(inputs)
            else:
                schedule.step(target=targets if stage.is_last else None, losses=losses)
            optimizer.step()
        if stage.is_last:
            print(f"epoch {epoch + 1}: loss {torch.stack(losses).mean().item():.4f}", flush=True)
    print(f"rank {rank}: {stage.stats}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
