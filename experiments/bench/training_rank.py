"""One rank of ``python -m experiments bench training``."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import thinwire
from thinwire.local import DiLoCo
from thinwire.optim import CompressedAdamW, Muon, QuantizedAdam
from thinwire_tools.bench.rank import serve
from thinwire_tools.compare.gpt import GPTConfig
from thinwire_tools.compare.tasks import GPTTask
from thinwire_tools.compare.train import digest, gradient_bytes, learning_rate, ring_factor

_BETAS, _WEIGHT_DECAY = (0.9, 0.99), 0.1
_WARM_UP = 0.15
"""The share of steps that 1-bit Adam takes in fp32, before its variance is frozen (Tang et al. 2021, section 7)."""


def train(method: dict[str, Any], task: dict[str, Any], lr: float, seed: int) -> dict[str, Any]:
    """Train by a method of `experiments.bench.training` from ``seed``; the held-out loss, and bytes that were sent."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    made = GPTTask(**{**task, "model": GPTConfig(**task["model"])})
    model = made.build(seed)
    optimizer = _optimizer(method, model, lr, made.steps)
    local = wire = None
    trained: nn.Module = model
    dense = 0.0
    if method["every"]:
        local = DiLoCo(
            model, optimizer, every=method["every"], compressor=method["spec"], seed=seed, total_steps=made.steps
        )
    elif method["name"] != "alone":
        trained = made.distribute(model)
        if method["spec"] == "raw":
            dense = gradient_bytes(model) * ring_factor(num_ranks)
        else:
            wire = thinwire.compress(
                trained, method["spec"], optimizer=optimizer, seed=seed, skip_if_slower=False, min_numel=method["least"]
            )
    for step, batch in enumerate(made.batches(seed, rank, num_ranks)):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(lr, step, made.steps)
        optimizer.zero_grad(set_to_none=True)
        made.loss(trained, batch).backward()
        optimizer.step()
        if local is not None:
            local.step()
    if local is not None:
        local.finish()
    used = local.wire if local else wire
    sent = used.stats.payload_sent_bytes if used else dense * made.steps
    model.eval()
    with torch.no_grad():
        if method["name"] == "alone":
            # Each of its own: rank 0's is the answer.
            total, count = made.evaluate(model, 0, 1, probe=False)
        else:
            total, count = made.evaluate(model, rank, num_ranks, probe=False)
            both = torch.tensor([total, count], dtype=torch.float64)
            dist.all_reduce(both)
            total, count = both.tolist()
    digests: list[Any] = [None] * num_ranks
    dist.all_gather_object(digests, digest(model))
    return {"loss": total / count, "sent_bytes": sent / made.steps, "replicas_differ": len(set(digests)) > 1}


def _optimizer(method: dict[str, Any], model: nn.Module, lr: float, steps: int) -> torch.optim.Optimizer:
    match method["optimizer"]:
        case "AdamW":
            return torch.optim.AdamW(model.parameters(), lr, _BETAS, weight_decay=_WEIGHT_DECAY)
        case "QuantizedAdam":
            options: dict[str, Any] = {
                "betas": _BETAS,
                "weight_decay": _WEIGHT_DECAY,
                "warmup": round(_WARM_UP * steps),
            }
            return QuantizedAdam(model.parameters(), lr, **options)
        case "Muon":
            return Muon(model, lr, weight_decay=_WEIGHT_DECAY, betas=_BETAS)
        case order:
            options = {"betas": _BETAS, "weight_decay": _WEIGHT_DECAY, "order": order}
            return CompressedAdamW(model.parameters(), lr, **options)


def main() -> None:
    serve(train)
