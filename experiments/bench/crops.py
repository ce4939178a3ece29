"""``python -m experiments bench crops``: split learning on images that are cropped and flipped at random."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional

from experiments.bench import keeping
from experiments.papers.fullstack.resnet import SplitResNet
from experiments.papers.fullstack.split import Views
from experiments.tasks.images import Images, load
from thinwire.store import Crops, Memory
from thinwire_tools.results import OutputFile, Results

_BACKWARD = "topk(density=0.2) | maxabs(bits=8)"
_PADDING, _BATCH, _WIDTH = 1, 64, 8
FP32, AWARE = "FP32", "cropped, a copy for flipped images"


@dataclass(frozen=True)
class Method(keeping.Method):
    """As `keeping.Method`, and whether a mirror image is a sample of its own."""

    backward: str = _BACKWARD
    flips: bool = True


METHODS = {FP32: Method("raw", "raw"), "nothing kept": Method("gaussian(bits=2)")}
_DELTA, _CROPS = "delta(gaussian(bits=2))", Crops(8, _PADDING)
METHODS[AWARE] = Method(_DELTA, store=_CROPS)
METHODS["cropped, one for both"] = Method(_DELTA, store=_CROPS, flips=False)
METHODS["as they came, a copy for flipped images"] = Method(_DELTA, store=Memory())
METHODS["as they came, one for both"] = Method(_DELTA, store=Memory(), flips=False)


def crops(*, seeds: int = 3, epochs: int = 40, smoke: bool = False, json: OutputFile = None) -> int:
    """Train a ResNet34 of few channels, cut twice, on digits that each epoch flips and crops (AQ-SGD, H.6).

    All parts are in one process; what crosses a cut goes through both sides of a compressed boundary, as bytes.
    Messages are kept of whole images and cropped as these are, or as they came; with a copy for flipped images, or
    without.

    Examples:
      python -m experiments bench crops
      python -m experiments bench crops --seeds 1 --epochs 5

    Args:
        seeds: trainings of each method.
        epochs: of all images.
        smoke: few images, two epochs: the same path, no figures worth keeping.
        json: write the figures to this file.
    """
    console = Console(highlight=False)
    images, epochs = load(None), 2 if smoke else epochs
    about = {"seeds": seeds, "epochs": epochs, "smoke": smoke, "backward": _BACKWARD}
    results = Results("python -m experiments bench crops", about=about)
    table = Table("messages", "loss", "accuracy", "±", "change", "fewer bytes")
    with console.status("training ...") as status:
        for name, method in METHODS.items():
            status.update(f"training: {name}")
            runs = [_train(images, method, seed, epochs, 96 if smoke else 2000) for seed in range(seeds)]
            accuracy = [run["accuracy"] for run in runs]
            figures = {key: fmean(run[key] for run in runs) for key in ("loss", "accuracy", "moved", "fewer")}
            figures["deviation"] = stdev(accuracy) if seeds > 1 else 0.0
            for figure, value in figures.items():
                results.add(f"{figure}/{name}", value, "")
            shown = [f"{figures['loss']:.3f}", f"{figures['accuracy']:.1%}", f"{figures['deviation']:.1%}"]
            table.add_row(name, *shown, f"{figures['moved']:.2f}", f"{figures['fewer']:.1f}x")
    console.print(table)
    if json:
        results.write(json)
    return 0


class _Cut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, pair: keeping.Pair) -> Tensor:
        ctx.pair = pair
        return pair.send("forward", x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return ctx.pair.send("backward", gradients[0]), None


def _train(images: Images, method: Method, seed: int, epochs: int, most: int) -> dict[str, float]:
    torch.manual_seed(seed)
    size = images.train.shape[-1]
    model = SplitResNet(images.channels, size, _WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    draws = torch.Generator().manual_seed(seed)
    shapes = [(_BATCH, channels, size // s, size // s) for channels, s in zip(model.widths, model.strides, strict=True)]
    pairs = [keeping.Pair(method, shape, 2 * seed + index) for index, shape in enumerate(shapes)]
    count, losses = min(most, len(images.train)), []
    for _ in range(epochs):
        losses = []
        for ids in torch.randperm(count, generator=draws).split(_BATCH):
            if len(ids) < _BATCH:
                continue
            views = Views.draw(_BATCH, _PADDING, draws)
            samples = 2 * ids + views.flipped if method.flips else ids
            corners = torch.stack([views.down, views.right], dim=1)
            for pair in pairs:
                pair.begin(samples, corners if isinstance(method.store, Crops) else None)
            optimizer.zero_grad(set_to_none=True)
            x = views.apply(images.normalised(images.train[ids]), _PADDING)
            for pair, part in zip(pairs, (model.front, model.middle), strict=True):
                x = _Cut.apply(part(x), pair)
            loss = functional.cross_entropy(model.back(x), images.train_labels[ids])
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    stats = [pair.stats for pair in pairs]
    later = [means for own in stats for means in own.epochs[1:]]
    moved = sum(means.delta * means.samples for means in later)
    return {
        "loss": fmean(losses),
        "accuracy": _accuracy(model, images),
        "moved": moved / sum(means.activation * means.samples for means in later) if later else 1.0,
        "fewer": sum(own.dense_bytes for own in stats) / sum(own.sent_bytes for own in stats),
    }


@torch.no_grad()
def _accuracy(model: nn.Module, images: Images) -> float:
    logits = model(images.normalised(images.held_out))
    return float((logits.argmax(1) == images.held_out_labels).float().mean())
