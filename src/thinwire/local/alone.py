"""DDP models whose ranks keep their own gradients, for trainers that wrap every model in DDP."""

# No `from __future__ import annotations` here: DDP checks the annotations of a communication hook as objects.

import weakref

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from thinwire.arguments import warn_caller

_silent: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()
"""Models that send nothing."""


def send_nothing(ddp: DistributedDataParallel) -> None:
    """Make ``ddp`` leave each rank its own gradients. It must have no communication hook yet."""
    ddp.register_comm_hook(None, _keep)
    _silent.add(ddp)


def warn_of_averaged_gradients(ddp: DistributedDataParallel, group: dist.ProcessGroup | None) -> None:
    """Warn where ``ddp`` averages the gradients of all workers of ``group``, who are to train alone."""
    workers, averaged = (set(dist.get_process_group_ranks(g)) for g in (group, ddp.process_group))
    if len(workers) == 1 or not workers <= averaged or ddp in _silent:
        return
    warn_caller(
        "DistributedDataParallel all-reduces the gradients of all workers in every step, which local updates are to "
        "save: train the module unwrapped, and pass that, or call thinwire.local.send_nothing(model) first. For "
        "workers of a node that average gradients, wrap the model over the node's ranks: process_group="
    )


def _keep(state, bucket):
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future
