"""What the thesis's chapter 4 trains, at the scale of two cores: a transformer of words, and a residual network."""

# No `from __future__ import annotations` here: DDP checks the annotations of a communication hook as objects.

import math
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor, nn

from experiments.tasks.images import NUM_CLASSES
from experiments.tasks.models import Model
from experiments.tasks.resnet import ImageTask, Residual, ResNet
from experiments.tasks.words import Words, words_of_library
from thinwire.compare.gpt import GPT, GPTConfig
from thinwire.compare.tasks import GPTTask

Name = Literal["gpt", "cnn"]


class WordsGPT(GPT):
    """A `GPT` with the tied embedding of PaLM (Chowdhery et al. 2022, section 2): of variance one, and logits divided
    by the root of the width. The gradient of so many words is small then, for its size, beside that of the blocks."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__(config)
        nn.init.normal_(self.embedding.weight)

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) / math.sqrt(self.config.width)


@dataclass(frozen=True)
class WordsTask(GPTTask):
    """A GPT that learns the standard library's source word by word: as in the thesis's Transformer-XL, the embedding is
    by far the largest layer, and the one that sends last."""

    model: GPTConfig = field(default_factory=lambda: GPTConfig(vocabulary=6144, context=32, width=128, layers=2))
    steps: int = 280
    batch: int = 8
    learning_rate: float = 0.01
    bucket_cap_mb: float = 0.5
    held_out_windows: int = 640
    probe_windows: int = 64
    probe_every: int = 40

    @property
    def text(self) -> Words:
        return words_of_library(self.model.vocabulary)

    def build(self, seed: int) -> GPT:
        torch.manual_seed(seed)
        return WordsGPT(self.model)


@dataclass(frozen=True)
class PicturesTask(ImageTask):
    """The FFT study's images, and its residual network with four stages of widths that double, as ResNet-18 has: half
    of all parameters are in the last convolution."""

    def build(self, seed: int) -> ResNet:
        torch.manual_seed(seed)
        model = ResNet(self.images.channels, self.width)
        stages = [(1, 1, 1), (1, 2, 2), (2, 4, 1), (4, 8, 2)]
        model.blocks = nn.Sequential(*(Residual(a * self.width, b * self.width, s) for a, b, s in stages))
        model.head = nn.Linear(8 * self.width, NUM_CLASSES)
        for module in model.blocks.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        return model


WORDS = WordsTask()
PICTURES = PicturesTask(width=16, steps=280, batch=32, learning_rate=0.05, bucket_cap_mb=0.3, probe_every=40)

WORDS_SMOKE = WordsTask(
    model=GPTConfig(vocabulary=512, context=16, width=64, layers=1, heads=2),
    steps=12,
    batch=2,
    bucket_cap_mb=0.05,
    held_out_windows=32,
    probe_windows=16,
    probe_every=4,
)
PICTURES_SMOKE = PicturesTask(width=8, steps=12, batch=8, bucket_cap_mb=0.1, probe_every=4, probe_images=60)


def timed(task: WordsTask) -> Model:
    """The transformer that is timed: with a smaller batch, so that what is sent counts."""
    task = replace(task, batch=max(1, task.batch // 2))
    return Model("gpt", "GPT", "Transformer-XL", task, task.batch * task.model.context, "tokens/s", 8)
