"""PyTorch's own methods of compressing gradients, which QuantizedAdam is compared with."""

# No `from __future__ import annotations` here: DDP checks the annotations of a communication hook as objects.

from typing import Literal

import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from thinwire_tools.compare.variants import POWERSGD_RANK, send_bf16

_POWERSGD_START = 2
"""The least that PyTorch takes with error feedback."""


def hook(ddp: DistributedDataParallel, name: Literal["bf16", "powersgd"], group: dist.ProcessGroup) -> None:
    """Register one on ``ddp``, whose process group is the whole world.

    Raises:
        ValueError: it is not: these hooks divide by the size of the world.
    """
    if dist.get_world_size(group) != dist.get_world_size():
        raise ValueError("PyTorch's hooks are compared among all ranks, without a pipeline")
    if name == "bf16":
        send_bf16(ddp)
        return
    state = powerSGD_hook.PowerSGDState(
        group, matrix_approximation_rank=POWERSGD_RANK, start_powerSGD_iter=_POWERSGD_START
    )
    ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
