"""A small pipeline's training script, as a user has it, for ``thinwire doctor`` to look at."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

WIDTH = 256


class Slow(nn.Linear):
    """A layer that takes its time."""

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(0.003)
        return super().forward(x).tanh()


def train(steps: int, schedule: str = "1f1b", batch: int = 64) -> dict[str, Tensor]:
    """The weights of this rank's stage after so many steps."""
    torch.set_num_threads(1)
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    block = nn.Sequential(Slow(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    stage = PipelineStage(block, rank, num_ranks, torch.device("cpu"))
    kind = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}[schedule]
    plan = kind(stage, n_microbatches=4, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.SGD(block.parameters(), lr=0.01)
    for step in range(steps):
        x = torch.randn(4 * batch, WIDTH, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        if rank == 0:
            plan.step(x)
        else:
            plan.step(target=x if stage.is_last else None)
        optimizer.step()
        if step == 3:
            with torch.no_grad():
                plan.eval(*([x] if rank == 0 else []), target=x if stage.is_last else None)
    return block.state_dict()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    try:
        train(int(sys.argv[1]))
    finally:
        Path(f"{sys.argv[2]}.ended.{dist.get_rank()}").touch()
        dist.destroy_process_group()
