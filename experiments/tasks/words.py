"""The standard library's source as words: what IntSGD's 3-layer LSTM learns, beside its residual network, and a GPT."""

# No `from __future__ import annotations` here: DDP checks the annotations of a communication hook as objects.

import functools
import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from experiments.tasks.images import ImageTask
from thinwire_tools.compare.data import draw_offsets, even_offsets, standard_library, windows
from thinwire_tools.compare.gpt import GPT, GPTConfig
from thinwire_tools.compare.tasks import GPTTask

_WARM_UP_EPOCHS, _EPOCHS = 5, 20
_DROPS = (0.5, 5 / 6)
"""Shares of a run after which the learning rate falls to a tenth: epochs 150 and 250 of 300 (C.1)."""
_TRAIN_BYTES, _HELD_OUT_BYTES = 3_000_000, 600_000
_EVALUATION_BATCH = 128


def scheduled(highest: float, step: int, steps: int, warm_up: int) -> float:
    """Learning rate of ``step``: a linear warm-up, then constant, a tenth after each drop (C.1)."""
    return highest * min(1.0, (step + 1) / warm_up) * 0.1 ** sum(step >= share * steps for share in _DROPS)


@dataclass(frozen=True)
class Pictures(ImageTask):
    """The FFT study's residual network and images, with this paper's schedule: warm-up over the first epochs, two
    drops, and a weight decay that spares norms."""

    width: int = 16
    steps: int = 280
    batch: int = 16
    learning_rate: float = 0.1
    weight_decay: float = 1e-4
    warm_up: int = 280 * _WARM_UP_EPOCHS // _EPOCHS
    probe_every: int = 28

    def rate(self, step: int) -> float:
        return scheduled(self.learning_rate, step, self.steps, self.warm_up)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        parameters = list(model.parameters())
        groups = [
            {"params": [p for p in parameters if p.ndim > 1], "weight_decay": self.weight_decay},
            {"params": [p for p in parameters if p.ndim == 1]},
        ]
        return torch.optim.SGD(groups, lr=self.learning_rate, momentum=self.momentum)


class LSTM(nn.Module):
    """Words ``[batch, context]`` to logits ``[batch, context, words]``: three layers, embedding and softmax tied."""

    def __init__(self, words: int, width: int, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.lstm = nn.LSTM(width, width, num_layers=3, dropout=dropout, batch_first=True)
        self.bias = nn.Parameter(torch.zeros(words))
        self.dropout = nn.Dropout(dropout)
        nn.init.uniform_(self.embedding.weight, -0.1, 0.1)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden, _ = self.lstm(self.dropout(self.embedding(tokens)))
        return functional.linear(self.dropout(hidden), self.embedding.weight, self.bias)


@dataclass(frozen=True)
class Words:
    """The standard library's source as words: ``int64``, 0 for those that are not among the most frequent."""

    train: Tensor
    held_out: Tensor


@functools.lru_cache(maxsize=2)
def words_of_library(words: int) -> Words:
    """Names, numbers, single marks and ends of lines; the vocabulary is that of the training part."""
    text = standard_library()
    train, held_out = (
        re.findall(r"\w+|[^\w\s]|\n", bytes(part[:most].tolist()).decode(errors="replace"))
        for part, most in ((text.train, _TRAIN_BYTES), (text.held_out, _HELD_OUT_BYTES))
    )
    # Of equally frequent ones those first met, on every machine.
    vocabulary = {word: index for index, (word, _) in enumerate(Counter(train).most_common(words - 1), 1)}
    return Words(*(torch.tensor([vocabulary.get(word, 0) for word in part]) for part in (train, held_out)))


@dataclass(frozen=True)
class LanguageTask:
    """Next words of Python source by an `LSTM` (an `experiments.framework.rank.ScoredTask`). ``batch`` is in windows
    of ``context`` words per rank and step; gradients are clipped to a norm of ``clip`` after they are averaged, or,
    with ``clip_each_rank`` as the paper's authors do, each rank's own before it is compressed."""

    words: int = 1024
    width: int = 96
    context: int = 30
    dropout: float = 0.1
    steps: int = 360
    batch: int = 4
    learning_rate: float = 4.0
    momentum: float = 0.9
    clip: float = 0.5
    clip_each_rank: bool = False
    warm_up: int = 60
    bucket_cap_mb: float = 25.0
    held_out_windows: int = 1024
    probe_windows: int = 128
    probe_every: int = 30

    def rate(self, step: int) -> float:
        return scheduled(self.learning_rate, step, self.steps, self.warm_up)

    def build(self, seed: int) -> LSTM:
        torch.manual_seed(seed)
        return LSTM(self.words, self.width, self.dropout)

    def distribute(self, model: nn.Module) -> DistributedDataParallel:
        return DistributedDataParallel(model, bucket_cap_mb=self.bucket_cap_mb)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(model.parameters(), lr=self.learning_rate, momentum=self.momentum)
        if self.clip_each_rank:
            return optimizer

        def clip(*_: Any) -> None:
            nn.utils.clip_grad_norm_(model.parameters(), self.clip)

        optimizer.register_step_pre_hook(clip)
        return optimizer

    def batches(self, seed: int, rank: int, num_ranks: int) -> Iterator[tuple[Tensor, Tensor]]:
        tokens = words_of_library(self.words).train
        offsets = draw_offsets(
            tokens.numel(), steps=self.steps, num_ranks=num_ranks, batch=self.batch, context=self.context, seed=seed
        )
        return (windows(tokens, starts, self.context) for starts in offsets[:, rank])

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        if not (self.clip_each_rank and isinstance(model, DistributedDataParallel)):
            return self._loss(model, batch)
        # DDP sends the first gradients before the last ones are there, so their norm takes a backward pass of its own,
        # with the same dropout.
        with torch.random.fork_rng():
            own = torch.autograd.grad(self._loss(model.module, batch), list(model.parameters()))
        norm = torch.stack([gradient.norm() for gradient in own]).norm()
        factor = torch.clamp(self.clip / norm, max=1.0)
        loss = self._loss(model, batch)
        return loss.detach() + factor * (loss - loss.detach())

    def _loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        inputs, targets = batch
        return functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())

    def evaluate(self, model: nn.Module, rank: int, num_ranks: int, *, probe: bool) -> tuple[float, int]:
        total, _, count = self.score(model, rank, num_ranks, probe=probe)
        return total, count

    @torch.no_grad()
    def score(self, model: nn.Module, rank: int, num_ranks: int, *, probe: bool) -> tuple[float, int, int]:
        """Sum of the loss, number of next words that are the likeliest one, and number of words."""
        tokens = words_of_library(self.words).held_out
        count = self.probe_windows if probe else self.held_out_windows
        starts = even_offsets(tokens.numel(), count=count, context=self.context)[rank::num_ranks]
        model.eval()
        total, right = 0.0, 0
        for at in starts.split(_EVALUATION_BATCH):
            inputs, targets = windows(tokens, at, self.context)
            logits = model(inputs).flatten(0, 1)
            total += float(functional.cross_entropy(logits, targets.flatten(), reduction="sum"))
            right += int((logits.argmax(1) == targets.flatten()).sum())
        model.train()
        return total, right, len(starts) * self.context


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


WORDS = WordsTask()
WORDS_SMOKE = WordsTask(
    model=GPTConfig(vocabulary=512, context=16, width=64, layers=1, heads=2),
    steps=12,
    batch=2,
    bucket_cap_mb=0.05,
    held_out_windows=32,
    probe_windows=16,
    probe_every=4,
)
