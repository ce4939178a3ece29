"""Copies of one model that train in turn, so that a machine that slows down slows all of them down."""

from __future__ import annotations

import time
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from thinwire_tools.compare.gpt import GPT, GPTConfig, next_token_loss

_WARM_UP = 4
_VOCABULARY = 256


def gpt(cap_mb: float, group: dist.ProcessGroup | None = None) -> DistributedDataParallel:
    """Return the demo's GPT, the same each time and on every rank."""
    torch.manual_seed(0)
    return DistributedDataParallel(GPT(GPTConfig()), bucket_cap_mb=cap_mb, process_group=group)


def token_batch(batch: int) -> Tensor:
    """Return ``[batch, context + 1]`` random tokens, different on each rank."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    return torch.randint(
        0, _VOCABULARY, (batch, GPTConfig().context + 1), generator=generator, dtype=torch.int64, device="cpu"
    )


def backward(model: nn.Module, tokens: Tensor) -> None:
    """Leave the mean gradient of a batch in the model's parameters."""
    model.zero_grad()
    next_token_loss(model(tokens[:, :-1]), tokens[:, 1:]).backward()


class Turns:
    """Models that differ in how gradients are sent, each with an optimizer, and their times in turn."""

    def __init__(self, models: Mapping[str, nn.Module]) -> None:
        self.models = models
        self._optimizers = {name: torch.optim.AdamW(m.parameters(), lr=1e-4) for name, m in models.items()}

    def seconds(self, tokens: Tensor, rounds: int, steps: int) -> dict[str, list[float]]:
        """Return the seconds of a step on the slowest rank, after some warm-up steps, by model and round."""
        for name in self.models:
            for _ in range(_WARM_UP):
                self.step(name, tokens)
        times: dict[str, list[float]] = {name: [] for name in self.models}
        for _ in range(rounds):
            for name, by_round in times.items():
                by_round.append(self._turn(name, tokens, steps))
        return times

    def processor_seconds(self, tokens: Tensor, rounds: int, steps: int) -> dict[str, float]:
        """Return the processor time of a step in this process, by model, all threads together; run `seconds` before."""
        taken = dict.fromkeys(self.models, 0.0)
        for _ in range(rounds):
            for name in taken:
                dist.barrier()
                started = time.process_time()
                for _ in range(steps):
                    self.step(name, tokens)
                taken[name] += (time.process_time() - started) / (rounds * steps)
        return taken

    def _turn(self, name: str, tokens: Tensor, steps: int) -> float:
        dist.barrier()
        started = time.perf_counter()
        for _ in range(steps):
            self.step(name, tokens)
        mine = torch.tensor((time.perf_counter() - started) / steps, dtype=torch.float32, device="cpu")
        dist.all_reduce(mine, op=dist.ReduceOp.MAX)
        return float(mine)

    def step(self, name: str, tokens: Tensor) -> None:
        """Run one step of one of the models."""
        backward(self.models[name], tokens)
        self._optimizers[name].step()
