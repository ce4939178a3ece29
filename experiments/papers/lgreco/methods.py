"""What the thesis's chapter 4 trains and compresses, at the scale of two cores: networks, compressors, policies."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import nn

from experiments.framework.methods import Method
from experiments.tasks.images import NUM_CLASSES, ImageTask, Model, Residual, ResNet
from experiments.tasks.words import WordsTask
from thinwire.compressors import parse
from thinwire.policies.families import parameter_value
from thinwire_tools.compare.variants import Variant

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


RANK = 32
"""Of PowerSGD on the GPT, as in the thesis."""
LAG = 4
"""Steps that a decision may take here, where steps are short and both cores train."""


@dataclass(frozen=True)
class Family:
    """A kind of compression: the reference of each network, and what the thesis gains over it."""

    name: str
    title: str
    color: str
    gpt: str
    cnn: str
    gain: dict[Name, float]
    """Over uniform compression, in bytes: the smaller of the thesis's two."""
    thesis: dict[Name, str]
    overhead: dict[Name, str]
    """Share of the training time that the thesis's table 4.1 has."""

    def spec(self, name: Name) -> str:
        """The uniform reference."""
        return str(Variant.parse(self.gpt if name == "gpt" else self.cnn))

    def uniform(self, name: Name, warm_up: int) -> str:
        """The same after so many dense steps: by a policy that has nothing else to choose."""
        value = parameter_value(parse(self.spec(name)))
        return with_policy(self.spec(name), settled("lgreco", warm_up, f", bounds={(value, value)}"))

    def adapted(self, name: Name, every: int, warm_up: int = 0) -> str:
        """The same by L-GreCo, a plan every so many steps."""
        return with_policy(self.spec(name), policy_of("lgreco", every, f", warmup={warm_up}"))


BITS = Family(
    "bits",
    "4 bits",
    "#0a7d4f",
    gpt="minmax(bits=4, bucket=128)",
    cnn="minmax(bits=4, bucket=128)",
    gain={"gpt": 1.16, "cnn": 1.10},
    thesis={"gpt": "1.16x and 1.26x, Transformers", "cnn": "1.10x and 1.41x, ResNets"},
    overhead={"gpt": "0.14 %, Transformer", "cnn": "0.04 %, ResNet-50"},
)
TOPK = Family(
    "topk",
    "top-k",
    "#c0392b",
    gpt="topk(density=0.2)",
    cnn="topk(density=0.01)",
    gain={"gpt": 2.61, "cnn": 2.67},
    thesis={"gpt": "2.61x and 5.2x, Transformers", "cnn": "3.78x and 2.67x, ResNets"},
    overhead={"gpt": "0.38 %, Transformer", "cnn": "0.33 %, ResNet-50"},
)
POWERSGD = Family(
    "powersgd",
    "PowerSGD",
    "#8250c4",
    gpt=f"powersgd(rank={RANK})",
    cnn="powersgd(rank=4)",
    gain={"gpt": 1.48, "cnn": 1.44},
    thesis={"gpt": "1.48x and 1.76x, Transformers", "cnn": "1.85x and 1.44x, ResNets"},
    overhead={"gpt": "0.56 %, Transformer", "cnn": "0.15 %, ResNet-50"},
)
FAMILIES = (BITS, TOPK, POWERSGD)


def accordion(every: int, weak: str, strong: str) -> str:
    return policy_of("accordion", every, f", pair={(strong, weak)!r}")


def with_policy(spec: str, policy: str) -> str:
    """A variant's text, as runs are named."""
    return str(Variant.parse(f"{spec} with {policy}"))


def policy_of(name: str, every: int, more: str = "") -> str:
    """The text of a policy as the trainings have it."""
    # Half of the steps are looked at: the thesis sums gradients over all steps between two decisions.
    return f"{name}(every={every}, window={every // 2}, lag={min(LAG, every // 2)}{more})"


def settled(policy: str, warm_up: int, more: str = "") -> str:
    """A policy that looks at the end of ``warm_up`` dense steps, decides once, and then leaves the plan alone."""
    window = max(1, warm_up // 3)
    return f"{policy}(every=100000, warmup={warm_up}, window={window}, lag=2{more})"


def uniform_method(family: Family) -> Method:
    return Method(family.name, f"{family.title}, uniform", f"{family.color}80", spec=family.spec("gpt"))


def adapted_method(family: Family, policy: Literal["lgreco", "kmeans"], warm_up: int) -> Method:
    of_kmeans = "#6b4a1f" if family is BITS else "#d98a00"
    title, color = ("L-GreCo", family.color) if policy == "lgreco" else ("k-means", of_kmeans)
    name, title = f"{family.name} {policy}", f"{family.title}, {title}"
    return Method(name, title, color, spec=family.spec("gpt"), adapt=settled(policy, warm_up))
