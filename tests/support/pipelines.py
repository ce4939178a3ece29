"""Small pipelines for tests: a stack of blocks cut into stages, samples with ids, a loop that trains."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)

from thinwire.compat import tells_stage_tensors
from thinwire.pipeline.stage import compress_stage

needs_pipelines = pytest.mark.skipif(not tells_stage_tensors(), reason="pipelines need PyTorch 2.12")

WIDTH, LENGTH, SAMPLES, BATCH, CHUNKS = 16, 6, 16, 8, 4
MULTI = {
    "interleaved": ScheduleInterleaved1F1B,
    "looped": ScheduleLoopedBFS,
    "zero bubble": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
}
SINGLE = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}


class Block(nn.Module):
    """Mixes a sample's positions and its width, with a residual: (batch, length, width) to the same."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.outer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + torch.tanh(self.inner(x)) + x.mean(1, keepdim=True) * 0.1
        return x + torch.tanh(self.outer(x))


def block(index: int, kind: Callable[[], nn.Module] = Block) -> nn.Module:
    torch.manual_seed(100 + index)
    return kind()


def samples(num: int = SAMPLES, length: int = LENGTH) -> tuple[Tensor, Tensor]:
    """Inputs and targets of all samples."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(num, length, WIDTH, generator=generator)
    return x, torch.tanh(x @ torch.randn(WIDTH, WIDTH, generator=generator))


def loss_fn(y: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(y, target)


def stages_of(rank: int, num_ranks: int, per_rank: int, name: str) -> list[int]:
    if name == "zbv":
        return [rank, 2 * num_ranks - 1 - rank]
    return [rank + i * num_ranks for i in range(per_rank)]


class Pipe:
    """This rank's stages, their schedule and optimizer. ``arguments`` are PyTorch's, ``options`` thinwire's."""

    def __init__(
        self,
        rank: int,
        num_ranks: int,
        name: str = "gpipe",
        *,
        kind: Callable[[], nn.Module] = Block,
        compress: Callable[..., Any] = compress_stage,
        chunks: int = CHUNKS,
        lr: float = 0.1,
        group: dist.ProcessGroup | None = None,
        loss: Callable[[Tensor, Tensor], Tensor] = loss_fn,
        wrap: Callable[[nn.Module], nn.Module] = lambda module: module,
        arguments: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        per_rank = 2 if name in MULTI else 1
        self.indices = stages_of(rank, num_ranks, per_rank, name)
        total = num_ranks * per_rank
        self.modules = [wrap(block(index, kind)) for index in self.indices]
        cpu = torch.device("cpu")
        self.stages = [
            compress(PipelineStage(module, index, total, cpu, group=group, **(arguments or {})), **options)
            for module, index in zip(self.modules, self.indices, strict=True)
        ]
        self._name, self._chunks, self._loss = name, chunks, loss
        self.schedule = self.new_schedule()
        self.optimizer = torch.optim.SGD([p for module in self.modules for p in module.parameters()], lr=lr)
        self.first = next((stage for stage in self.stages if stage.is_first), None)
        self.last = next((stage for stage in self.stages if stage.is_last), None)

    def new_schedule(self) -> Any:
        name, options = self._name, {"loss_fn": self._loss}
        if name in MULTI:
            return MULTI[name](self.stages, self._chunks, **options)
        return SINGLE[name](self.stages[0], self._chunks, **options)

    def step(self, x: Tensor, y: Tensor, ids: Sequence[int] | Tensor | None, **more: Any) -> float | None:
        """Train on some samples; the loss, where the last stage is."""
        if ids is not None and self.first is not None:
            self.first.set_sample_ids(ids, **more)
        self.optimizer.zero_grad()
        losses: list[Tensor] = []
        self.schedule.step(
            *([x] if self.first else []), target=y if self.last else None, losses=losses, return_outputs=False
        )
        self.optimizer.step()
        return float(torch.stack(losses).detach().mean()) if self.last else None

    def epoch(self, epoch: int, x: Tensor, y: Tensor, batch: int = BATCH, **more: Any) -> list[float]:
        """Train on all samples in an order of the epoch's own; the losses, where the last stage is."""
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(epoch))
        losses = [self.step(x[ids], y[ids], ids, **more) for ids in order.split(batch)]
        return [loss for loss in losses if loss is not None]

    def eval(self, x: Tensor, y: Tensor, ids: Sequence[int] | Tensor | None = None) -> Tensor | None:
        if ids is not None and self.first is not None:
            self.first.set_sample_ids(ids)
        with torch.no_grad():
            return self.schedule.eval(*([x] if self.first else []), target=y if self.last else None)

    def digests(self) -> dict[str, int]:
        """By boundary and side, what is kept."""
        return {name: store.digest() for stage in self.stages for name, store in stage.stores.items()}

    def parameters(self) -> list[Tensor]:
        return [p.detach().clone() for module in self.modules for p in module.parameters()]


def check_sides(digests: Sequence[dict[str, int]], boundaries: Sequence[int]) -> None:
    """Assert that both sides of each of these boundaries, and of no others, hold the same."""
    merged = {name: digest for rank_digests in digests for name, digest in rank_digests.items()}
    assert set(merged) == {f"boundary{b}-{side}" for b in boundaries for side in ("earlier", "later")}
    for b in boundaries:
        assert merged[f"boundary{b}-earlier"] == merged[f"boundary{b}-later"]
