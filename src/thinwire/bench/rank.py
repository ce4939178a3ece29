"""What every rank of a benchmark does."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from thinwire.repro.forked import conversation

TIMEOUT = timedelta(seconds=240)


def serve(measure: Callable[..., Any]) -> None:
    """Be told keyword arguments as a line of JSON, join the others, ``measure``, and tell what it gives on rank 0."""
    told, answers = conversation()
    config = json.loads(told.readline())
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message=".*find_unused_parameters.*")
    dist.init_process_group("gloo", timeout=TIMEOUT)
    answer = measure(**config)
    if dist.get_rank() == 0:
        answers.write(json.dumps(answer))
        answers.flush()
    dist.barrier()
    dist.destroy_process_group()
