"""The main function of a benchmark's ranks."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from thinwire_tools.compare.forked import command_streams

TIMEOUT = timedelta(seconds=240)


def serve(measure: Callable[..., Any]) -> None:
    """Read keyword arguments as a line of JSON, join the process group, and write what ``measure`` returns (rank 0)."""
    commands, answers = command_streams()
    config = json.loads(commands.readline())
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message=".*find_unused_parameters.*")
    dist.init_process_group("gloo", timeout=TIMEOUT)
    answer = measure(**config)
    if dist.get_rank() == 0:
        answers.write(json.dumps(answer))
        answers.flush()
    dist.barrier()
    dist.destroy_process_group()
