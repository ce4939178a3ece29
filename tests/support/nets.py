"""A small model with everything that makes attaching hard, and what trains it. Shared by the tests over gloo."""

from __future__ import annotations

import io
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire

DDP_OPTIONS = {
    "default": {},
    "bucket view": {"gradient_as_bucket_view": True},
    "static graph": {"static_graph": True},
    "find unused": {"unused": True},
    "bf16 model": {"dtype": torch.bfloat16},
}
"""Arguments of `make`, by what they are called."""


class Net(nn.Module):
    """Several buckets' worth of layers at a small cap, with biases, a norm, a tied, a frozen and an unused layer."""

    def __init__(self, unused: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 96)
        self.layers = nn.ModuleList([nn.Linear(96, 96) for _ in range(4)])
        self.norm = nn.LayerNorm(96)
        self.head = nn.Linear(96, 64, bias=False)
        self.head.weight = self.embed.weight
        self.never = nn.Linear(96, 96) if unused else None
        self.frozen = nn.Linear(96, 96)
        self.frozen.requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + torch.relu(layer(x))
        return self.head(self.norm(self.frozen(x)))


def make(rank: int, *, unused: bool = False, dtype=torch.float32, bucket_cap_mb: float = 0.05, **options) -> DDP:
    torch.manual_seed(0)
    return DDP(Net(unused).to(dtype), bucket_cap_mb=bucket_cap_mb, find_unused_parameters=unused, **options)


def batch(rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(0, 64, (4, 16), generator=generator, device="cpu")


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    logits = model(tokens[:, :-1])
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def train(
    model: nn.Module,
    rank: int,
    steps: int,
    *,
    first: int = 0,
    lr: float = 0.1,
    optimizer: torch.optim.Optimizer | None = None,
    scheduler: torch.optim.lr_scheduler.LRScheduler | None = None,
) -> list[float]:
    """Losses of so many steps, by default of SGD with momentum."""
    optimizer = optimizer or torch.optim.SGD(trained(model), lr=lr, momentum=0.9)
    losses = []
    for step in range(first, first + steps):
        optimizer.zero_grad()
        loss = loss_of(model, batch(rank, step).to(next(model.parameters()).device))
        loss.backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        losses.append(loss.item())
    return losses


Attach = Callable[[DDP], tuple[torch.optim.Optimizer, thinwire.Wire]]


def resume(
    rank: int, attach: Attach, attach_again: Attach, *, at: int, steps: int
) -> tuple[bytes, bytes, thinwire.Wire]:
    """Weights after so many steps: trained in one go, and resumed from the checkpoint of step ``at``, with its wire."""
    model = make(rank)
    optimizer, wire = attach(model)
    train(model, rank, at, optimizer=optimizer)
    buffer = io.BytesIO()
    torch.save({"m": model.state_dict(), "o": optimizer.state_dict(), "w": wire.state_dict()}, buffer)
    train(model, rank, steps - at, first=at, optimizer=optimizer)

    resumed = make(rank)
    optimizer, wire = attach_again(resumed)
    buffer.seek(0)
    state = torch.load(buffer, weights_only=True)
    resumed.load_state_dict(state["m"])
    optimizer.load_state_dict(state["o"])
    wire.load_state_dict(state["w"])
    train(resumed, rank, steps - at, first=at, optimizer=optimizer)
    return fingerprint(model), fingerprint(resumed), wire


def fingerprint(model: nn.Module) -> bytes:
    return b"".join(p.detach().contiguous().view(torch.uint8).numpy().tobytes() for p in model.parameters())


def assert_replicas_identical(model: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    flat = torch.cat([p.detach().reshape(-1).view(torch.uint8) for p in model.parameters()])
    all_of_them = [torch.empty_like(flat) for _ in range(dist.get_world_size(group))]
    dist.all_gather(all_of_them, flat, group=group)
    for other in all_of_them:
        assert torch.equal(other, all_of_them[0])
