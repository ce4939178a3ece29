"""What the thesis's chapter 4 trains, at the scale of two cores: a transformer of words, and a residual network."""

# No `from __future__ import annotations` here: DDP checks the annotations of a communication hook as objects.

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import nn

from experiments.tasks.images import NUM_CLASSES
from experiments.tasks.models import Model
from experiments.tasks.resnet import ImageTask, Residual, ResNet
from experiments.tasks.words import WordsTask

Name = Literal["gpt", "cnn"]


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


PICTURES = PicturesTask(width=16, steps=280, batch=32, learning_rate=0.05, bucket_cap_mb=0.3, probe_every=40)

PICTURES_SMOKE = PicturesTask(width=8, steps=12, batch=8, bucket_cap_mb=0.1, probe_every=4, probe_images=60)


def timed(task: WordsTask) -> Model:
    """The transformer that is timed: with a smaller batch, so that what is sent counts."""
    task = replace(task, batch=max(1, task.batch // 2))
    return Model("gpt", "GPT", "Transformer-XL", task, task.batch * task.model.context, "tokens/s", 8)
