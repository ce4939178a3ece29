"""The digits that scikit-learn ships and a residual network that learns them, beside the networks that steps are timed
of."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from thinwire_tools.compare.data import draw_offsets
from thinwire_tools.compare.gpt import GPTConfig
from thinwire_tools.compare.tasks import SIZES, GPTTask

NUM_CLASSES = 10


@dataclass(frozen=True)
class Images:
    """Pixels as ``uint8 [images, channels, height, width]``, classes as ``int64 [images]``."""

    name: str
    train: Tensor
    train_labels: Tensor
    held_out: Tensor
    held_out_labels: Tensor

    @property
    def channels(self) -> int:
        return self.train.shape[1]

    @functools.cached_property
    def moments(self) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of the training pixels by channel, ``[1, channels, 1, 1]`` each."""
        pixels = self.train.float()
        return pixels.mean((0, 2, 3), keepdim=True), pixels.std((0, 2, 3), keepdim=True).clamp_min(1.0)

    def normalized(self, pixels: Tensor) -> Tensor:
        """``pixels`` as fp32 with the training data's mean and deviation taken out."""
        mean, deviation = self.moments
        return (pixels.float() - mean) / deviation


@functools.cache
def digits() -> Images:
    """scikit-learn's 1797 handwritten digits of 8 x 8 pixels; the second half is held out, so that accuracy has
    steps of a ninth of a percent.

    Raises ``ImportError`` without scikit-learn.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ImportError("the digits come with scikit-learn: pip install '.[repro]'") from error
    rows, classes = load_digits(return_X_y=True)
    # Pixels are whole numbers from 0 to 16.
    pixels = torch.from_numpy(np.asarray(rows) * 15).to(torch.uint8).view(-1, 1, 8, 8)
    labels = torch.from_numpy(np.asarray(classes)).long()
    cut = len(pixels) // 2
    return Images("digits", pixels[:cut], labels[:cut], pixels[cut:], labels[cut:])


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

    ``batch`` is in images per rank and step. The learning rate falls to a tenth at ``drop``, a share of the steps, as
    the paper's does (ResNet-32: epoch 130 of 180). All gradients share a DDP bucket: like the paper's, communication
    does not hide behind computation.
    """

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
        return digits()

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


@dataclass(frozen=True)
class Model:
    """A network that is timed, and the thesis's network that it stands for.

    ``powersgd_rank`` is that of section 3.7.2: 4 for convolutional networks, 8 for transformers.
    """

    name: str
    title: str
    thesis: str
    task: GPTTask | ImageTask
    items_per_batch: int
    """Tokens or images that a rank takes in a step."""
    unit: str
    powersgd_rank: int

    @functools.cached_property
    def gradient_bytes(self) -> int:
        """Of one rank's fp32 gradient."""
        return 4 * sum(parameter.numel() for parameter in self.task.build(0).parameters())


def _gpt(task: GPTTask) -> Model:
    return Model("gpt", "GPT", "Transformer-XL", task, task.batch * task.model.context, "tokens/s", 8)


def _cnn(task: ImageTask) -> Model:
    return Model("cnn", "CNN", "ResNet-50", task, task.batch, "images/s", 4)


TIMED = (
    _gpt(GPTTask(model=GPTConfig(width=192, layers=4), batch=12, bucket_cap_mb=1.0)),
    _cnn(ImageTask(width=64, batch=96, bucket_cap_mb=1.0)),
)
"""Gradients of 7 and 5 MB, in several DDP buckets, so that communication hides behind the backward pass."""

TRAINED = (SIZES["small"], ImageTask())
"""What table 3.5 trains until it has learned something."""

TIMED_SMOKE = (
    _gpt(GPTTask(model=GPTConfig(context=32, width=64, layers=2, heads=2), batch=2, bucket_cap_mb=0.1)),
    _cnn(ImageTask(width=16, batch=8, bucket_cap_mb=0.1)),
)
TRAINED_SMOKE = (
    replace(SIZES["smoke"], steps=12, probe_every=6, held_out_windows=64, probe_windows=16),
    ImageTask(width=16, steps=12, batch=8, probe_every=6, probe_images=60),
)
