"""What is trained: the AQ-SGD repetition's fine-tunings, in several pipelines that share their gradients."""

# No `from __future__ import annotations` here: ranks make tasks again of plain values.

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from experiments.papers.aqsgd.tasks import FineTuning, tuning
from thinwire.data import Share
from thinwire_tools.compare.gpt import GPTConfig


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

    @property
    def steps_per_epoch(self) -> int:
        return self.samples // (self.replicas * self.batch)

    def share(self, seed: int, epoch: int, replica: int) -> tuple[Tensor, ...]:
        """Ids of each batch of a pipeline's epoch: shape (batch,)."""
        share = Share(range(self.samples), replica, self.replicas, seed=seed)
        share.set_epoch(epoch)
        return torch.tensor(list(share)).split(self.batch)


SMALL = Stacked(
    model=GPTConfig(width=64, layers=4, heads=2),
    steps=120,
    samples=384,
    batch=8,
    num_micro=4,
    learning_rate=2e-3,
    held_out_windows=256,
    first_steps=150,
)
"""Of 0.2 million parameters, in five epochs; the first is the warm-up."""
TIMED = Stacked(
    model=GPTConfig(width=128, layers=4, heads=4),
    steps=1,
    samples=64,
    batch=32,
    num_micro=4,
    learning_rate=1e-3,
    held_out_windows=64,
    first_steps=0,
    exact_steps=1,
)
"""What steps are timed of: of 0.8 million parameters. A stage's gradient has about as many values as the activations
that cross in a step, as in the paper's networks. Every step visits all samples."""
TO_LOSS = replace(TIMED, samples=128, steps=32, first_steps=24, first_rate=1e-3, exact_steps=4)
"""What is trained over a slow link, for the time that it takes."""
REPLICATED = replace(
    SMALL,
    model=GPTConfig(width=96, layers=4, heads=4),
    steps=192,
    samples=768,
    batch=4,
    num_micro=1,
    bucket_cap_mb=0.5,
    replicas=4,
    exact_steps=38,
)
"""Of half a million parameters, without a pipeline: four replicas. A fifth of the steps is the warm-up."""
ONLINE = tuning(
    1,
    model=SMALL.model,
    samples=1920,
    batch=16,
    num_micro=1,
    learning_rate=2e-3,
    held_out_windows=256,
    first_steps=SMALL.first_steps,
)
"""One epoch."""
SUMS = tuning(
    5,
    model=SMALL.model,
    samples=192,
    batch=16,
    num_micro=1,
    learning_rate=2e-3,
    held_out_windows=256,
    first_steps=SMALL.first_steps,
)
"""Of the network whose layers are cut among ranks."""

_SMOKE = GPTConfig(context=16, width=32, layers=2, heads=2)
SMALL_SMOKE = Stacked(
    model=_SMOKE,
    steps=6,
    samples=12,
    batch=2,
    num_micro=2,
    learning_rate=2e-3,
    held_out_windows=4,
    first_steps=4,
    exact_steps=2,
)
TIMED_SMOKE = replace(SMALL_SMOKE, steps=1, samples=4, first_steps=0, exact_steps=1)
TO_LOSS_SMOKE = replace(SMALL_SMOKE, steps=4, samples=8, first_steps=2)
REPLICATED_SMOKE = replace(SMALL_SMOKE, samples=16, batch=2, num_micro=1, replicas=4, steps=4, held_out_windows=8)
ONLINE_SMOKE = tuning(
    1, model=_SMOKE, samples=16, batch=8, num_micro=1, learning_rate=2e-3, held_out_windows=8, first_steps=4
)
SUMS_SMOKE = tuning(
    2, model=_SMOKE, samples=8, batch=4, num_micro=1, learning_rate=2e-3, held_out_windows=4, first_steps=4
)
