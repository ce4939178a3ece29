"""What the thesis's chapter 3 trains, at the scale of two cores: a transformer and a convolutional network."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

from experiments.tasks.resnet import ImageTask
from thinwire_tools.compare.gpt import GPTConfig
from thinwire_tools.compare.tasks import SIZES, GPTTask


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
