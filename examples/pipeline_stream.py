"""A pipeline whose samples come once: changes are taken from cluster centers, in 3 bits and a byte for each position.

torchrun --nproc-per-node 2 examples/pipeline_stream.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

import thinwire

BATCH, LENGTH, WIDTH = 16, 16, 64


def main() -> None:
    dist.init_process_group("gloo")
    rank, num_stages = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    block = nn.Sequential(nn.Linear(WIDTH, 128), nn.GELU(), nn.Linear(128, WIDTH))
    stage = PipelineStage(block, rank, num_stages, torch.device("cpu"))
    centers = thinwire.store.Centers(num=64)
    stage = thinwire.compress(stage, forward="delta(maxabs(bits=3))", backward="maxabs(bits=6)", store=centers)
    schedule = ScheduleGPipe(stage, n_microbatches=4, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.AdamW(block.parameters(), lr=3e-3)

    draws = torch.Generator().manual_seed(0)  # every rank draws the same stream
    words = torch.randn(32, WIDTH, generator=draws)
    losses: list[torch.Tensor] = []
    for step in range(100):
        inputs = words[torch.randint(len(words), (BATCH, LENGTH), generator=draws)]
        optimizer.zero_grad()
        if stage.is_first:
            stage.set_sample_ids(range(step * BATCH, (step + 1) * BATCH))  # none comes back
            schedule.step(inputs)
        else:
            schedule.step(target=inputs.flip(2) if stage.is_last else None, losses=losses)
        optimizer.step()
        if stage.is_last and (step + 1) % 20 == 0:
            print(f"step {step + 1}: loss {torch.stack(losses[-4:]).mean().item():.4f}", flush=True)
    expected = thinwire.store.center_bytes(64, (LENGTH, WIDTH))
    print(f"rank {rank}: {stage.stats}; {expected} bytes of centers", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
