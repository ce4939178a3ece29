"""Split learning (appendix H.6): clients in turn train both ends of a network, a server what lies between them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from experiments.papers.aqsgd.simulated import Boundary, Window, cross
from experiments.tasks.images import NUM_CLASSES, Images, load


class SplitNet(nn.Module):
    """Images ``[batch, channels, size, size]`` to logits ``[batch, 10]``, in three parts.

    ``strides`` are pixels to a position at the first cut and at the second; both have ``width`` channels behind a ReLU.
    """

    strides = 1, 2

    def __init__(self, channels: int, size: int, width: int) -> None:
        super().__init__()
        self.front = nn.Sequential(nn.Conv2d(channels, width, 3, padding=1), nn.ReLU())
        self.middle = nn.Sequential(
            nn.Conv2d(width, 2 * width, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(2 * width, width, 3, padding=1),
            nn.ReLU(),
        )
        self.back = nn.Sequential(nn.Flatten(), nn.Linear(width * (size // 2) ** 2, NUM_CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        return self.back(self.middle(self.front(x)))


_EVALUATION_BATCH = 256
_CONCENTRATION = 0.5
_DECAY, _DECAY_ROUNDS = 0.1, 32


@dataclass(frozen=True)
class Splitting:
    """One training. ``cifar``: a folder with CIFAR-10, of whose images the first ``most_images`` are taken; the digits
    if None. ``padding``: pixels by which a random crop moves at most, either method."""

    cifar: str | None = None
    most_images: int = 4096
    width: int = 16
    clients: int = 16
    rounds: int = 40
    local_epochs: int = 3
    batch: int = 64
    learning_rate: float = 0.01
    momentum: float = 0.9
    probe_every: int = 2

    @property
    def images(self) -> Images:
        return load(self.cifar)

    @property
    def padding(self) -> int:
        """An eighth of an image: 4 pixels of CIFAR's 32."""
        return self.images.train.shape[-1] // 8

    def rate(self, round: int) -> float:
        return self.learning_rate * _DECAY ** (round // _DECAY_ROUNDS)

    def shares(self, seed: int) -> list[Tensor]:
        """Ids of each client's images: of every class a share that is drawn from a Dirichlet distribution."""
        random = np.random.default_rng(seed)
        labels = self.images.train_labels[: self.most_images].numpy()
        shares: list[list[int]] = [[] for _ in range(self.clients)]
        for kind in range(NUM_CLASSES):
            ids = random.permutation(np.nonzero(labels == kind)[0])
            drawn = random.dirichlet([_CONCENTRATION] * self.clients)
            for client, part in enumerate(np.split(ids, (drawn.cumsum()[:-1] * len(ids)).astype(int))):
                shares[client] += part.tolist()
        return [torch.tensor(share, dtype=torch.int64) for share in shares]


@dataclass(frozen=True)
class Views:
    """How images of a batch are seen: mirrored or not, then moved by a random crop, by 0 to twice the padding."""

    flipped: Tensor
    down: Tensor
    right: Tensor

    @staticmethod
    def draw(count: int, padding: int, generator: torch.Generator) -> Views:
        down, right = torch.randint(2 * padding + 1, (2, count), generator=generator)
        return Views(torch.randint(2, (count,), generator=generator).bool(), down, right)

    def apply(self, pixels: Tensor, padding: int) -> Tensor:
        """The batch as it is seen: same shape."""
        height, width = pixels.shape[2:]
        mirrored = torch.where(self.flipped.view(-1, 1, 1, 1), pixels.flip(3), pixels)
        padded = functional.pad(mirrored, (padding,) * 4)
        corners = zip(padded, self.down.tolist(), self.right.tolist(), strict=True)
        return torch.stack([image[:, y : y + height, x : x + width] for image, y, x in corners])

    def samples(self, ids: Tensor) -> list[int]:
        """Names of messages: an image's mirror image has one of its own."""
        return (2 * ids + self.flipped).tolist()

    def windows(self, size: int, stride: int) -> list[Window]:
        """Where activations of ``size`` positions a side lie in messages, ``stride`` pixels to a position."""
        corners = zip(self.down.tolist(), self.right.tolist(), strict=True)
        places = [(round(y / stride), round(x / stride)) for y, x in corners]
        return [(slice(None), slice(y, y + size), slice(x, x + size)) for y, x in places]


class Cut:
    """Both directions of one cut."""

    def __init__(self, name: str, forward: str, backward: str, channels: int, size: int, more: int, seed: int) -> None:
        self.size = size
        frame = (channels, size + more, size + more)
        self.there = Boundary(forward, f"{name} forward", frame, seed)
        self.back = Boundary(backward, f"{name} backward", (), seed + 1)


class Training:
    """One training of one method from one seed."""

    def __init__(self, task: Splitting, forward: str, backward: str, seed: int) -> None:
        self.task, self._seed = task, seed
        torch.manual_seed(seed)
        images = task.images
        self.model = SplitNet(images.channels, images.train.shape[-1], task.width)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=task.learning_rate, momentum=task.momentum)
        self.shares = task.shares(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.cuts = []
        for index, stride in enumerate(self.model.strides):
            size = images.train.shape[-1] // stride
            more = round(2 * task.padding / stride)
            self.cuts.append(Cut(f"cut{index}", forward, backward, task.width, size, more, 2 * seed + 4 * index))

    def round(self, number: int) -> float:
        """All clients in turn, each on its own images; the mean loss of a step."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.task.rate(number)
        losses = []
        for share in self.shares:
            for _ in range(self.task.local_epochs):
                order = share[torch.randperm(len(share), generator=self.generator)]
                losses += [self._step(ids) for ids in order.split(self.task.batch) if len(ids)]
        return sum(losses) / len(losses)

    def _step(self, ids: Tensor) -> float:
        images, padding = self.task.images, self.task.padding
        views = Views.draw(len(ids), padding, self.generator)
        seen, labels = views.apply(images.normalized(images.train[ids]), padding), images.train_labels[ids]
        samples = views.samples(ids)
        self.optimizer.zero_grad(set_to_none=True)
        x = seen
        for cut, part, stride in zip(self.cuts, (self.model.front, self.model.middle), self.model.strides, strict=True):
            x = cross(part(x), cut.there, cut.back, samples, views.windows(cut.size, stride))
        loss = functional.cross_entropy(self.model.back(x), labels)
        loss.backward()
        self.optimizer.step()
        return loss.item()

    @torch.no_grad()
    def accuracy(self) -> float:
        """Share of the held-out images that are classified rightly, without compression."""
        images, right = self.task.images, 0
        for at in torch.arange(len(images.held_out)).split(_EVALUATION_BATCH):
            logits = self.model(images.normalized(images.held_out[at]))
            right += int((logits.argmax(1) == images.held_out_labels[at]).sum())
        return right / len(images.held_out)


def run_split(job: dict[str, Any], tell: Callable[[int, float], None]) -> dict[str, Any]:
    """Train as ``job`` says: losses by round, accuracies every so many rounds and at the end, bytes."""
    task = Splitting(**job["task"])
    training = Training(task, job["forward"], job["backward"], int(job["seed"]))
    losses, accuracies = [], []
    for number in range(task.rounds):
        losses.append(training.round(number))
        if (number + 1) % task.probe_every == 0 or number + 1 == task.rounds:
            accuracies.append((number + 1, training.accuracy()))
        tell(number + 1, losses[-1])
    boundaries = [boundary for cut in training.cuts for boundary in (cut.there, cut.back)]
    return {
        "losses": losses,
        "accuracies": accuracies,
        "sent_bytes": sum(boundary.sent_bytes for boundary in boundaries),
        "dense_bytes": sum(boundary.dense_bytes for boundary in boundaries),
        "alike": all(boundary.alike for boundary in boundaries),
    }
