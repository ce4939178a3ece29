"""The training that doctor looks at: the user's own script, or a built-in one."""

from __future__ import annotations

import contextlib
import os
import runpy
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from thinwire.doctor.watched import DoctorError
from thinwire.repro.gpt import GPT, GPTConfig, next_token_loss

_TIMEOUT = timedelta(seconds=300)
_BATCH = 8


class Seen(SystemExit):
    """Ends the script once enough was seen: no script catches what ends an interpreter."""


def run_script(command: Sequence[str]) -> None:
    """Run ``train.py args`` or ``-m package.module args`` here, as ``python`` would.

    Raises:
        DoctorError: there is no such script.
        SystemExit: the script ended itself, or was ended.
    """
    command = list(command)
    if Path(command[0]).name.startswith("python") and len(command) > 1:
        # As `thinwire lab` is called: the interpreter is this one.
        command = command[1:]
    before = sys.argv, list(sys.path)
    try:
        if command[0] == "-m" and len(command) > 1:
            sys.argv = command[1:]
            sys.path.insert(0, os.getcwd())
            runpy.run_module(command[1], run_name="__main__", alter_sys=True)
            return
        path = Path(command[0])
        if not path.is_file():
            raise DoctorError(f"there is no script {command[0]!r}: give what python would run, -- train.py --epochs 1")
        sys.argv = command
        sys.path.insert(0, str(path.resolve().parent))
        runpy.run_path(str(path), run_name="__main__")
    finally:
        sys.argv, sys.path[:] = before


def train_probe(config: GPTConfig | None = None, cap_mb: float = 5.0, batch: int = _BATCH) -> None:
    """Train the demo's GPT on random tokens until somebody ends it; needs the variables that torchrun sets."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    if not dist.is_initialized():
        dist.init_process_group("gloo", timeout=_TIMEOUT)
    torch.manual_seed(0)
    config = config or GPTConfig()
    model = DistributedDataParallel(GPT(config), bucket_cap_mb=cap_mb, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    generator = torch.Generator().manual_seed(dist.get_rank())
    with contextlib.suppress(Seen):
        while True:
            tokens = torch.randint(0, config.vocabulary, (batch, config.context + 1), generator=generator)
            optimizer.zero_grad(set_to_none=True)
            next_token_loss(model(tokens[:, :-1]), tokens[:, 1:]).backward()
            optimizer.step()
