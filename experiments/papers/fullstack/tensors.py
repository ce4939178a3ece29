"""Tensor parallelism (appendix F): sums of activations over ranks, compressed before and after they are added."""

# No `from __future__ import annotations` here: ranks make tasks again of plain values.

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from experiments.papers.aqsgd.stages import build
from experiments.papers.aqsgd.tasks import FineTuning
from experiments.papers.fullstack.simulated import Boundary
from thinwire_tools.compare.gpt import GPT, Block, next_token_loss


class Sum:
    """``A_Q = Q[Q(A_1) + … + Q(A_N)]`` (F.2) of one layer. With ``delta(...)`` each of these N + 1 messages is what
    changed of its sample's since the last visit (F, with equations 3 and 4 of Tang et al. 2019)."""

    def __init__(self, spec: str, name: str, shape: Sequence[int], num_ranks: int, seed: int) -> None:
        self.parts = [Boundary(spec, f"{name} part {rank}", shape, seed) for rank in range(num_ranks)]
        self.whole = Boundary(spec, f"{name} sum", shape, seed)

    @property
    def boundaries(self) -> list[Boundary]:
        return [*self.parts, self.whole]

    def reduce(self, parts: Sequence[Tensor], samples: Sequence[int]) -> Tensor:
        """The sum as it arrives on every rank: parts and sum are (samples, length, width)."""
        arrived = [boundary.send(part, samples) for boundary, part in zip(self.parts, parts, strict=True)]
        return self.whole.send(torch.stack(arrived).sum(0), samples)


class _Summed(torch.autograd.Function):
    """Its gradient is the sum's, for every part: that needs no message where a rank has the whole of it."""

    @staticmethod
    def forward(ctx: Any, made: Sum, samples: Sequence[int], *parts: Tensor) -> Tensor:
        ctx.num = len(parts)
        return made.reduce(parts, samples)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return None, None, *gradients * ctx.num


class RowParallel(nn.Module):
    """A linear layer whose input features lie on several ranks (Shoeybi et al. 2019), each with its part of the sum;
    all of them in one process."""

    def __init__(self, linear: nn.Linear, made: Sum | None, num_ranks: int) -> None:
        super().__init__()
        self.linear, self.made, self.num_ranks = linear, made, num_ranks
        self.samples: Sequence[int] = ()

    def forward(self, x: Tensor) -> Tensor:
        if self.made is None or not self.training:
            return self.linear(x)
        shares = zip(x.chunk(self.num_ranks, -1), self.linear.weight.chunk(self.num_ranks, 1), strict=True)
        parts = [functional.linear(share, weight) for share, weight in shares]
        summed = _Summed.apply(self.made, self.samples, *parts)
        assert isinstance(summed, Tensor)
        return summed + self.linear.bias


class OfSamples(Protocol):
    """A layer that is given the ids of a batch's samples."""

    samples: Sequence[int]


def fine_tune(
    gpt: GPT, task: FineTuning, layers: Sequence[OfSamples], seed: int, tell: Callable[[int, float], None]
) -> tuple[list[float], list[float]]:
    """Train ``gpt`` on all epochs of ``task``: the loss of each step, and of each held-out batch at the end.

    ``tell`` is called with the number of steps so far and the last one's loss.
    """
    optimizer = task.optimizer(gpt)
    losses: list[float] = []
    for ids in (ids for epoch in range(task.epochs) for ids in task.order(seed, epoch)):
        for group in optimizer.param_groups:
            group["lr"] = task.rate(len(losses))
        for layer in layers:
            layer.samples = ids.tolist()
        x, y = task.tuned_on(ids)
        optimizer.zero_grad(set_to_none=True)
        loss = next_token_loss(gpt(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        tell(len(losses), losses[-1])
    gpt.eval()
    with torch.no_grad():
        return losses, [float(next_token_loss(gpt(x), y)) for x, y in task.held_out()]


def run(job: dict[str, Any], tell: Callable[[int, float], None]) -> dict[str, Any]:
    """Fine-tune as ``job`` says: losses by epoch, loss on what is held out, bytes."""
    task, seed, num_ranks = FineTuning.from_json(job["task"]), int(job["seed"]), int(job["num_ranks"])
    gpt = build(task, None if job["weights"] is None else Path(job["weights"]), seed)
    shape, layers = (task.model.context, task.model.width), []
    for index, block in enumerate(gpt.blocks):
        assert isinstance(block, Block)
        for name in ("attention_out", "mlp_out"):
            made = Sum(job["spec"], f"{index} {name}", shape, num_ranks, seed) if job["spec"] else None
            layer = RowParallel(getattr(block, name), made, num_ranks)
            setattr(block, name, layer)
            layers.append(layer)
    losses, held_out = fine_tune(gpt, task, layers, seed, tell)
    boundaries = [boundary for layer in layers if layer.made for boundary in layer.made.boundaries]
    last = losses[-task.steps_per_epoch :]
    return {
        "losses": losses,
        "loss": sum(last) / len(last),
        "held_out": sum(held_out) / len(held_out),
        "sent_bytes": sum(boundary.sent_bytes for boundary in boundaries),
        "dense_bytes": sum(boundary.dense_bytes for boundary in boundaries),
        "alike": all(boundary.alike for boundary in boundaries),
    }
