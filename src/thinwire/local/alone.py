"""DDP models whose ranks keep their own gradients, for trainers that wrap every model in DDP."""

# No `from __future__ import annotations` here: DDP checks the annotations of a communication hook as objects.

import torch
from torch.nn.parallel import DistributedDataParallel


def send_nothing(ddp: DistributedDataParallel) -> None:
    """Have ``ddp`` leave each rank its own gradients. It must have no communication hook yet."""
    ddp.register_comm_hook(None, _keep)


def _keep(state, bucket):
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future
