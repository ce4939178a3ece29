"""The training that doctor watches where it is given no script, and the error that ends one."""

from __future__ import annotations

import contextlib
import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from thinwire_tools.compare.gpt import GPT, GPTConfig, next_token_loss

_TIMEOUT = timedelta(seconds=300)
_BATCH = 8
_CAP_MB = 5.0


class StopScript(SystemExit):
    """Ends the script once enough was seen: scripts do not catch `SystemExit`."""


def train_probe() -> None:
    """Train the demo's GPT on random tokens until somebody ends it; needs the variables that torchrun sets."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    if not dist.is_initialized():
        dist.init_process_group("gloo", timeout=_TIMEOUT)
    torch.manual_seed(0)
    config = GPTConfig()
    model = DistributedDataParallel(GPT(config), bucket_cap_mb=_CAP_MB, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    generator = torch.Generator().manual_seed(dist.get_rank())
    with contextlib.suppress(StopScript):
        while True:
            tokens = torch.randint(
                0, config.vocabulary, (_BATCH, config.context + 1), generator=generator, dtype=torch.int64, device="cpu"
            )
            optimizer.zero_grad(set_to_none=True)
            next_token_loss(model(tokens[:, :-1]), tokens[:, 1:]).backward()
            optimizer.step()
