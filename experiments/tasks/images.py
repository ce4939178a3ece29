"""Labeled images and a residual network that learns them, beside the networks that steps are timed of.

The images are CIFAR-10 where its binary files are at hand, else the digits that scikit-learn ships. Nothing is
downloaded and nothing is unpickled."""

from __future__ import annotations

import functools
import stat
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from thinwire_tools.compare.data import draw_offsets
from thinwire_tools.compare.gpt import GPTConfig
from thinwire_tools.compare.tasks import SIZES, GPTTask

NUM_CLASSES = 10
_CIFAR_SHAPE = (3, 32, 32)
_CIFAR_RECORD = 1 + 3 * 32 * 32
_CIFAR_MOST_RECORDS = 10_000
_CIFAR_TRAIN = tuple(f"data_batch_{i}.bin" for i in range(1, 6))
_CIFAR_HELD_OUT = "test_batch.bin"
_CIFAR_FOLDER = "cifar-10-batches-bin"


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
        # A sample: the moments of CIFAR's 50 000 images in fp32 would take 600 MB.
        pixels = self.train[:: max(1, len(self.train) // 5000)].float()
        return pixels.mean((0, 2, 3), keepdim=True), pixels.std((0, 2, 3), keepdim=True).clamp_min(1.0)

    def normalized(self, pixels: Tensor) -> Tensor:
        """``pixels`` as fp32 with the training data's mean and deviation taken out."""
        mean, deviation = self.moments
        return (pixels.float() - mean) / deviation

    def noisy(self, noise: float) -> Images:
        """These images with normal noise on those held out, ``noise`` times the deviation of the pixels of training;
        several draws of each where they are few, so that accuracy depends less on the draw."""
        draws = max(1, 4000 // len(self.held_out))
        pixels = self.held_out.float().repeat(draws, 1, 1, 1)
        drawn = torch.randn(pixels.shape, generator=torch.Generator().manual_seed(0))
        pixels += noise * self.moments[1] * drawn
        return replace(self, held_out=pixels, held_out_labels=self.held_out_labels.repeat(draws))


@functools.lru_cache(maxsize=2)
def load(folder: str | None, noise: float = 0.0) -> Images:
    """CIFAR-10 of ``folder``, or the digits if it is None. Errors are those of `cifar10` and `digits`."""
    images = digits() if folder is None else cifar10(Path(folder))
    return images.noisy(noise) if noise else images


def cifar10(folder: Path) -> Images:
    """CIFAR-10 from its binary version: ``data_batch_1.bin`` to ``5`` to train on, ``test_batch.bin`` held out.

    ``folder`` is the one that holds these files, or the one in which the archive was unpacked. A record is one byte of
    class and 3072 of pixels: red, green, blue, each 32 rows of 32.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a file is no whole number of records, has none, has more than CIFAR-10's 10 000, or a class over 9.
    """
    if not (folder / _CIFAR_HELD_OUT).exists() and (folder / _CIFAR_FOLDER).is_dir():
        folder = folder / _CIFAR_FOLDER
    parts = [_cifar_records(folder / name) for name in _CIFAR_TRAIN]
    held_out, held_out_labels = _cifar_records(folder / _CIFAR_HELD_OUT)
    pixels, labels = zip(*parts, strict=True)
    return Images("CIFAR-10", torch.cat(pixels), torch.cat(labels), held_out, held_out_labels)


def _cifar_records(path: Path) -> tuple[Tensor, Tensor]:
    try:
        status = path.stat()
    except FileNotFoundError:
        raise FileNotFoundError(
            f"{path} is missing: unpack the binary version of CIFAR-10 (cifar-10-binary.tar.gz) and give that folder"
        ) from None
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"{path} is not a file")
    if not 0 < status.st_size <= _CIFAR_MOST_RECORDS * _CIFAR_RECORD or status.st_size % _CIFAR_RECORD:
        raise ValueError(
            f"{path} has {status.st_size} bytes, which is not 1 to {_CIFAR_MOST_RECORDS} records of {_CIFAR_RECORD}: "
            "it is cut short, or not of CIFAR-10's binary version"
        )
    with path.open("rb") as file:
        content = file.read(status.st_size)
    if len(content) != status.st_size:
        raise ValueError(f"{path} changed while it was read: {len(content)} bytes instead of {status.st_size}")
    records = torch.from_numpy(np.frombuffer(content, dtype=np.uint8).reshape(-1, _CIFAR_RECORD).copy())
    labels = records[:, 0].long()
    if int(labels.max()) >= NUM_CLASSES:
        at = int((labels >= NUM_CLASSES).nonzero()[0])
        raise ValueError(f"{path}: record {at} is of class {int(labels[at])}; CIFAR-10 has 0 to {NUM_CLASSES - 1}")
    return records[:, 1:].reshape(-1, *_CIFAR_SHAPE).contiguous(), labels


def digits() -> Images:
    """scikit-learn's 1797 handwritten digits of 8 x 8 pixels; the second half is held out, so that accuracy has
    steps of a ninth of a percent.

    Raises ``ImportError`` without scikit-learn.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ImportError(
            "the digits come with scikit-learn: pip install '.[repro]', or give CIFAR-10 with --data"
        ) from error
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

    ``data`` is CIFAR-10's folder, None for the digits; ``batch`` in images per rank and step. The learning rate falls
    to a tenth at ``drop``, a share of the steps, as the paper's does (ResNet-32: epoch 130 of 180). All gradients share
    a DDP bucket: like the paper's, communication does not hide behind computation. ``noise`` is added to the normalized
    pixels: another draw in each batch, so that images cannot be learned by heart and no training ends at a loss of 0.
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
    noise: float = 0.0

    @property
    def images(self) -> Images:
        return load(self.data, self.noise)

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
        generator = torch.Generator().manual_seed(seed * num_ranks + rank)
        for at in drawn[:, rank]:
            pixels = images.normalized(images.train[at])
            if self.noise:
                pixels += self.noise * torch.randn(pixels.shape, generator=generator)
            yield pixels, images.train_labels[at]

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
