"""What is fine-tuned: a GPT that was first trained on one half of the corpus, on samples of the other half."""

# No `from __future__ import annotations` here: ranks make tasks again of plain values.

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from thinwire.data import Share
from thinwire_tools.compare.data import even_offsets, windows
from thinwire_tools.compare.gpt import GPT, GPTConfig, next_token_loss
from thinwire_tools.compare.tasks import GPTTask
from thinwire_tools.compare.train import learning_rate

_WARM_UP_SHARE = 0.1
_EPOCH_SEEDS = 1_000_003
_REPLACED = 0.2
"""Share of bytes in whose place others are put."""


@dataclass(frozen=True)
class FineTuning(GPTTask):
    """``samples`` windows of the corpus's second half, each visited once an epoch, in batches of ``batch`` samples that
    are cut into ``num_micro`` micro-batches. The first half is what ``first_steps`` steps of ``first_batch`` windows
    were drawn from before; without any, training starts from random weights. ``half``: blocks compute, and activations
    cross, in bf16 or fp16. ``labels``: the network classifies each byte, as the text's or as one that was put in
    its place, instead of the next one.
    """

    samples: int = 192
    num_micro: int = 4
    first_steps: int = 400
    first_batch: int = 32
    first_rate: float = 6e-3
    half: Literal["", "bf16", "fp16"] = ""
    labels: bool = False
    replicas: int = 1

    def __post_init__(self) -> None:
        if self.samples % self.batch or self.held_out_windows % self.batch or self.batch % self.num_micro:
            raise ValueError(
                f"{self.samples} samples and {self.held_out_windows} that are held out must fill batches of "
                f"{self.batch}, and these {self.num_micro} micro-batches"
            )

    @property
    def steps_per_epoch(self) -> int:
        return self.samples // (self.replicas * self.batch)

    @property
    def epochs(self) -> int:
        return self.steps // self.steps_per_epoch

    @property
    def micro_batch(self) -> int:
        """Samples of a micro-batch."""
        return self.batch // self.num_micro

    @property
    def message_values(self) -> int:
        """Of the activation of a micro-batch."""
        return self.micro_batch * self.model.context * self.model.width

    @property
    def first(self) -> "FineTuning":
        """The same for all trainings that start from the same weights."""
        plain = FineTuning(self.model)
        return replace(plain, first_steps=self.first_steps, first_batch=self.first_batch, first_rate=self.first_rate)

    def rate(self, step: int) -> float:
        """Learning rate of ``step`` (from 0): a linear warm-up over the first tenth, then linearly to zero (appendix
        C)."""
        warm_up = max(1, round(_WARM_UP_SHARE * self.steps))
        if step < warm_up:
            return self.learning_rate * (step + 1) / warm_up
        return self.learning_rate * (self.steps - step) / (self.steps - warm_up)

    def share(self, seed: int, epoch: int, replica: int) -> tuple[Tensor, ...]:
        """Ids of each batch of a pipeline's epoch: shape (batch,)."""
        generator = torch.Generator().manual_seed(seed * _EPOCH_SEEDS + epoch)
        return torch.randperm(self.samples, generator=generator).split(self.batch)

    def tuned_on(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs and targets of samples."""
        if self.labels:
            tokens, labels, _, _ = _judged(self.model.context, self.samples, self.held_out_windows)
            return tokens[ids], labels[ids]
        second, offsets, _ = _second(self.model.context, self.samples, self.held_out_windows)
        return windows(second, offsets[ids], self.model.context)

    def held_out(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Batches of windows of the second half that are no samples."""
        if self.labels:
            _, _, tokens, labels = _judged(self.model.context, self.samples, self.held_out_windows)
            yield from zip(tokens.split(self.batch), labels.split(self.batch), strict=True)
            return
        second, _, offsets = _second(self.model.context, self.samples, self.held_out_windows)
        for starts in offsets.split(self.batch):
            yield windows(second, starts, self.model.context)

    def loss_of(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Of a micro-batch: of every next byte, or of the labels."""
        return next_token_loss(logits[..., :2] if self.labels else logits, targets)

    def share_right(self, logits: Tensor, targets: Tensor) -> float:
        """Of labels, or of next bytes, that the network finds likeliest."""
        picked = (logits[..., :2] if self.labels else logits).argmax(-1)
        return float((picked == targets).float().mean())

    def first_training(self, model: GPT) -> Iterator[float]:
        """Train ``model`` on the first half; yields each step's loss."""
        tokens = self.text.train
        half = tokens[: tokens.numel() // 2]
        generator = torch.Generator().manual_seed(0)
        optimizer = self.optimizer(model)
        for step in range(self.first_steps):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(self.first_rate, step, self.first_steps)
            starts = torch.randint(half.numel() - self.model.context, (self.first_batch,), generator=generator)
            inputs, targets = windows(half, starts, self.model.context)
            optimizer.zero_grad(set_to_none=True)
            loss = next_token_loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
            yield loss.item()


@functools.cache
def _second(context: int, samples: int, held_out: int) -> tuple[Tensor, Tensor, Tensor]:
    """The second half of the corpus, where samples start in it, and where held-out windows do: none overlap."""
    tokens = FineTuning().text.train
    second = tokens[tokens.numel() // 2 :]
    grid = even_offsets(second.numel(), count=samples + held_out, context=context)
    mixed = grid[torch.randperm(samples + held_out, generator=torch.Generator().manual_seed(0))]
    return second, mixed[:samples], mixed[samples:]


@functools.cache
def _judged(context: int, samples: int, held_out: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Samples, of whose bytes a share was replaced by bytes of any sample, with labels of all bytes, and those that are
    held out."""
    second, *both = _second(context, samples, held_out)
    generator = torch.Generator().manual_seed(1)
    tensors = []
    for offsets in both:
        text, _ = windows(second, offsets, context)
        others = text.flatten()[torch.randint(text.numel(), text.shape, generator=generator)]
        tokens = torch.where(torch.rand(text.shape, generator=generator) < _REPLACED, others, text)
        tensors += [tokens, (tokens == text).long()]
    return tensors[0], tensors[1], tensors[2], tensors[3]


_SMALL = GPTConfig(width=64, layers=4, heads=2)
SMALL = FineTuning(
    model=_SMALL, steps=120, samples=384, batch=16, learning_rate=2e-3, held_out_windows=256, first_steps=150
)
"""Of 0.2 million parameters: five epochs, in micro-batches of 4."""
SCRATCH = replace(SMALL, samples=SMALL.samples // 2, first_steps=0, learning_rate=6e-3)
"""From random weights, twice as many epochs of half as many samples (appendix H.3: 20 epochs for 10)."""
LABELS = replace(SMALL, labels=True, samples=2 * SMALL.samples, steps=2 * SMALL.steps, learning_rate=4e-3)
"""The same network tells the text's bytes from others, as CoLA asks whether a sentence can be said."""
DEEP = replace(SMALL, model=GPTConfig(width=64, layers=8, heads=2))
"""Of 0.4 million parameters, in 8 blocks: one for each of 8 stages."""
LARGE = replace(SMALL, model=GPTConfig(width=128, layers=4, heads=4), learning_rate=1e-3)
"""Of 0.8 million."""
_RANDOM = replace(SMALL, first_steps=0, learning_rate=1e-3)
TIMED = replace(
    _RANDOM, model=GPTConfig(width=256, layers=6), steps=1, samples=32, batch=32, num_micro=16, held_out_windows=32
)
"""What steps are timed of. Its samples are one batch: every step visits all of them."""
TO_LOSS = replace(TIMED, samples=256, steps=80, first_steps=24, first_rate=1e-3)
"""The same network, trained for the time that it takes."""

_SMOKE = GPTConfig(context=16, width=32, layers=4, heads=2)
SMALL_SMOKE = replace(SMALL, model=_SMOKE, steps=4, samples=8, batch=4, num_micro=2, held_out_windows=8, first_steps=4)
LABELS_SMOKE = replace(SMALL_SMOKE, labels=True)
DEEP_SMOKE = replace(SMALL_SMOKE, model=GPTConfig(context=16, width=32, layers=8, heads=2), first_steps=2)
SCRATCH_SMOKE = replace(SMALL_SMOKE, first_steps=0)
LARGE_SMOKE = replace(SMALL_SMOKE, model=GPTConfig(context=16, width=64, layers=4, heads=2))
_LONGER_SMOKE = GPTConfig(context=32, width=64, layers=2, heads=2)
TIMED_SMOKE = replace(_RANDOM, model=_LONGER_SMOKE, steps=1, samples=8, batch=8, num_micro=2, held_out_windows=8)
TO_LOSS_SMOKE = replace(TIMED_SMOKE, samples=16, steps=4, first_steps=2)

# --- in several pipelines that share their gradients


@dataclass(frozen=True)
class Stacked(FineTuning):
    """A fine-tuning in ``replicas`` pipelines. ``batch`` and ``num_micro`` are those of one of them, ``samples`` are
    those of all: each has its own share. The first ``exact_steps`` are QuantizedAdam's warm-up."""

    replicas: int = 2
    exact_steps: int = 24

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.samples % (self.replicas * self.batch):
            raise ValueError(
                f"{self.samples} samples must fill batches of {self.batch} in each of {self.replicas} pipelines"
            )

    def share(self, seed: int, epoch: int, replica: int) -> tuple[Tensor, ...]:
        """Ids of each batch of a pipeline's epoch: shape (batch,)."""
        share = Share(range(self.samples), replica, self.replicas, seed=seed)
        share.set_epoch(epoch)
        return torch.tensor(list(share)).split(self.batch)


STACKED_SMALL = Stacked(
    model=_SMALL, steps=120, samples=384, batch=8, learning_rate=2e-3, held_out_windows=256, first_steps=150
)
"""Of 0.2 million parameters, in five epochs; the first is the warm-up."""
_STACKED_RANDOM = replace(STACKED_SMALL, steps=1, learning_rate=1e-3, first_steps=0, exact_steps=1)
STACKED_TIMED = replace(
    _STACKED_RANDOM, model=GPTConfig(width=128, layers=4, heads=4), samples=64, batch=32, held_out_windows=64
)
"""What steps are timed of: of 0.8 million parameters. A stage's gradient has about as many values as the activations
that cross in a step, as in the paper's networks. Every step visits all samples."""
STACKED_TO_LOSS = replace(STACKED_TIMED, samples=128, steps=32, first_steps=24, first_rate=1e-3, exact_steps=4)
"""What is trained over a slow link, for the time that it takes."""
_REPLICATED = replace(STACKED_SMALL, num_micro=1, replicas=4, bucket_cap_mb=0.5)
REPLICATED = replace(
    _REPLICATED, model=GPTConfig(width=96, layers=4, heads=4), steps=192, samples=768, batch=4, exact_steps=38
)
"""Of half a million parameters, without a pipeline: four replicas. A fifth of the steps is the warm-up."""

_STACKED_SMOKE = replace(STACKED_SMALL, model=GPTConfig(context=16, width=32, layers=2, heads=2), num_micro=2)
STACKED_SMALL_SMOKE = replace(
    _STACKED_SMOKE, steps=6, samples=12, batch=2, held_out_windows=4, first_steps=4, exact_steps=2
)
STACKED_TIMED_SMOKE = replace(STACKED_SMALL_SMOKE, steps=1, samples=4, first_steps=0, exact_steps=1)
STACKED_TO_LOSS_SMOKE = replace(STACKED_SMALL_SMOKE, steps=4, samples=8, first_steps=2)
REPLICATED_SMOKE = replace(
    STACKED_SMALL_SMOKE, samples=16, batch=2, num_micro=1, replicas=4, steps=4, held_out_windows=8
)
