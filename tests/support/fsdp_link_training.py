"""A sharded training with compressed weights and gradients, on a rank of an emulated network."""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist

from sharded import Net, build, compress, train


def measure(steps: int, weights: str, gradients: str) -> int:
    """Train for so many steps; the bytes that all ranks together send in one of them, by the formula."""
    model = build(net=partial(Net, width=512, depth=3), reshard_after_forward=False)
    wire = compress(model, weights, gradients)
    train(model, steps)
    num_bytes = torch.tensor([wire.sent_bytes("weights") + wire.sent_bytes()])
    dist.all_reduce(num_bytes)
    return int(num_bytes)
