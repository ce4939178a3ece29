"""What the FFT paper's section 4 trains, two sizes smaller: a residual network on small images, by momentum SGD."""

# No `from __future__ import annotations` here: DDP checks the annotations of a communication hook as objects.

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from experiments.tasks.images import NUM_CLASSES, Images, load
from thinwire_tools.compare.data import draw_offsets

_EVALUATION_BATCH = 256
_NORM_GROUPS = 8


class Residual(nn.Module):
    """Two 3 x 3 convolutions added to the input, which is halved in size where ``stride`` is 2."""

    def __init__(self, narrow: int, wide: int, stride: int) -> None:
        super().__init__()
        self.stride, self.wide = stride, wide
        self.first = nn.Conv2d(narrow, wide, 3, stride=stride, padding=1, bias=False)
        self.first_norm = nn.GroupNorm(_NORM_GROUPS, wide)
        self.second = nn.Conv2d(wide, wide, 3, padding=1, bias=False)
        self.second_norm = nn.GroupNorm(_NORM_GROUPS, wide)

    def forward(self, x: Tensor) -> Tensor:
        """``[batch, narrow, height, width]`` to ``[batch, wide, height / stride, width / stride]``."""
        y = functional.relu(self.first_norm(self.first(x)))
        y = self.second_norm(self.second(y))
        # The shortcut without parameters of the CIFAR ResNets (He et al. 2016, section 4.2): every other pixel, and
        # zeros for the channels that are new.
        shortcut = x[:, :, :: self.stride, :: self.stride]
        shortcut = functional.pad(shortcut, (0, 0, 0, 0, 0, self.wide - x.shape[1]))
        return functional.relu(y + shortcut)


class ResNet(nn.Module):
    """Images ``[batch, channels, height, width]`` to logits ``[batch, 10]``: ResNet-32's kind, with three blocks.

    Groups are normalized, not batches: replicas hold nothing but parameters, and a loss depends on nothing else.
    """

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(channels, width, 3, padding=1, bias=False)
        self.stem_norm = nn.GroupNorm(_NORM_GROUPS, width)
        self.blocks = nn.Sequential(
            Residual(width, width, 1), Residual(width, 2 * width, 2), Residual(2 * width, 4 * width, 2)
        )
        self.head = nn.Linear(4 * width, NUM_CLASSES)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        x = functional.relu(self.stem_norm(self.stem(x)))
        return self.head(self.blocks(x).mean((2, 3)))


@dataclass(frozen=True)
class ImageTask:
    """Classification of images by a `ResNet` (a `thinwire_tools.compare.tasks.Task`).

    ``data`` is CIFAR-10's folder, None for the digits; ``batch`` in images per rank and step. The learning rate falls
    to a tenth at ``drop``, a share of the steps, as the paper's does (ResNet-32: epoch 130 of 180). All gradients share
    a DDP bucket: like the paper's, communication does not hide behind computation.
    """

    data: str | None = None
    width: int = 32
    steps: int = 400
    batch: int = 32
    learning_rate: float = 0.02
    momentum: float = 0.9
    drop: float = 0.72
    bucket_cap_mb: float = 25.0
    probe_every: int = 25
    probe_images: int = 1000

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> Self:
        return cls(**record)

    @property
    def images(self) -> Images:
        return load(self.data)

    @property
    def drop_step(self) -> int:
        """The first step with the lower learning rate."""
        return round(self.drop * self.steps)

    def rate(self, step: int) -> float:
        """Learning rate of ``step`` (from 0)."""
        return self.learning_rate * (0.1 if step >= self.drop_step else 1.0)

    def build(self, seed: int) -> ResNet:
        torch.manual_seed(seed)
        return ResNet(self.images.channels, self.width)

    def distribute(self, model: nn.Module) -> DistributedDataParallel:
        return DistributedDataParallel(model, bucket_cap_mb=self.bucket_cap_mb)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=self.learning_rate, momentum=self.momentum)

    def batches(self, seed: int, rank: int, num_ranks: int) -> Iterator[tuple[Tensor, Tensor]]:
        images = self.images
        drawn = draw_offsets(
            len(images.train), steps=self.steps, num_ranks=num_ranks, batch=self.batch, context=0, seed=seed
        )
        return ((images.normalized(images.train[at]), images.train_labels[at]) for at in drawn[:, rank])

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        pixels, labels = batch
        return functional.cross_entropy(model(pixels), labels)

    def evaluate(self, model: nn.Module, rank: int, num_ranks: int, *, probe: bool) -> tuple[float, int]:
        total, _, count = self.score(model, rank, num_ranks, probe=probe)
        return total, count

    @torch.no_grad()
    def score(self, model: nn.Module, rank: int, num_ranks: int, *, probe: bool) -> tuple[float, int, int]:
        """Sum of the loss, number of images classified rightly, and number of images, over this rank's share."""
        images = self.images
        every = max(1, len(images.held_out) // self.probe_images) if probe else 1
        mine = torch.arange(0, len(images.held_out), every)[rank::num_ranks]
        total, right = 0.0, 0
        for at in mine.split(_EVALUATION_BATCH):
            logits, labels = model(images.normalized(images.held_out[at])), images.held_out_labels[at]
            total += float(functional.cross_entropy(logits, labels, reduction="sum"))
            right += int((logits.argmax(1) == labels).sum())
        return total, right, len(mine)
