"""A small model under fully_shard, trained by every rank: what tests of FSDP2 have in common."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

import thinwire


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width + 1)
        self.down = nn.Linear(2 * width + 1, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """Sizes that no number of ranks divides; ``tied``: two heads share a weight; ``spare``: a layer that nothing
    uses."""

    def __init__(self, width: int = 35, depth: int = 2, *, tied: bool = False, spare: bool = False) -> None:
        super().__init__()
        self.stem = nn.Linear(7, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, 7, bias=False)
        self.tied = tied
        if tied:
            self.head.weight = nn.Parameter(torch.empty(7, width))
            self.tail = nn.Linear(width, 7, bias=False)
            self.tail.weight = self.head.weight
        if spare:
            self.blocks[0].spare = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        y = self.head(x)
        return y + self.tail(x) if self.tied else y


class Shared(Net):
    """Its first block is used twice."""

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.blocks
        return self.head(second(first(first(self.stem(x)))))


def initialized(seed: int = 0, net: Callable[[], nn.Module] = Net) -> Any:
    torch.manual_seed(seed)
    model = net()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    return model


def build(mesh: DeviceMesh | None = None, *, seed: int = 0, net: Callable[[], nn.Module] = Net, **options: Any) -> Any:
    """A `Net` (or another model with ``blocks``) whose blocks, and the rest, are sharded."""
    model = initialized(seed, net)
    mesh = mesh or init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:  # pyright: ignore[reportGeneralTypeIssues]
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def batch(step: int, rank: int, size: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(size, 7, generator=generator, dtype=torch.float32, device="cpu")
    return x, torch.sin(3 * x)


def train(
    model: nn.Module,
    steps: int,
    *,
    first: int = 0,
    accumulate: int = 1,
    optimizer: torch.optim.Optimizer | None = None,
    before_backward: Callable[[int], object] | None = None,
    rank: int | None = None,
) -> list[float]:
    """Losses of so many steps, each on batches of the rank's own."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.05)
    rank = dist.get_rank() if rank is None else rank
    losses = []
    for step in range(first, first + steps):
        total = 0.0
        optimizer.zero_grad()
        for part in range(accumulate):
            if accumulate > 1:
                assert isinstance(model, FSDPModule)
                model.set_requires_gradient_sync(part == accumulate - 1)
            x, y = batch(step * accumulate + part, rank)
            loss = (model(x) - y).square().mean() / accumulate
            if before_backward is not None:
                before_backward(step)
            loss.backward()
            total += float(loss.detach())
        optimizer.step()
        losses.append(total)
    return losses


def whole(model: nn.Module) -> dict[str, Tensor]:
    """All parameters, put together from all ranks' shards."""
    return {name: p.full_tensor().detach().clone() for name, p in model.named_parameters()}  # pyright: ignore[reportAttributeAccessIssue]


def compress(model: nn.Module, weights: str = "raw", gradients: str = "raw", **options: Any) -> thinwire.Wire:
    """With what tests ask for: nothing declined, and small layers compressed."""
    return thinwire.compress(
        model, weights=weights, gradients=gradients, **{"skip_if_slower": False, "min_numel": 64} | options
    )


def same(values: Sequence[Any]) -> bool:
    """Whether all ranks have the same tensors, to the bit."""
    return all(
        set(value) == set(values[0]) and all(torch.equal(value[name], values[0][name]) for name in value)
        for value in values
    )
