"""Tasks of a comparison: the protocol of a task, and the GPT that is the task where none is given."""

# No `from __future__ import annotations` here: DDP checks the annotations of a communication hook as objects.

import dataclasses
import functools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from thinwire_tools.compare.data import Text, draw_offsets, even_offsets, standard_library, windows
from thinwire_tools.compare.gpt import GPT, GPTConfig, next_token_loss

BETAS = (0.9, 0.99)
WEIGHT_DECAY = 0.1
_EVALUATION_BATCH = 32


class Task(Protocol):
    """One training, the same for every variant and seed. A dataclass at the top of a module that rank processes can
    import: each gets a copy of it."""

    @property
    def steps(self) -> int:
        """Number of training steps of a run."""
        ...

    @property
    def learning_rate(self) -> float:
        """Highest learning rate of a run: after a warm-up, before a cosine to zero (`train.learning_rate`)."""
        ...

    @property
    def probe_every(self) -> int:
        """Number of steps between two evaluations on a part of the held-out data."""
        ...

    def build(self, seed: int) -> nn.Module:
        """Return the model with its initial weights: a function of ``seed`` alone."""
        ...

    def distribute(self, model: nn.Module) -> DistributedDataParallel:
        """Return ``model`` in DDP, without a communication hook."""
        ...

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return the optimizer; its learning rate is set before every step."""
        ...

    def batches(self, seed: int, rank: int, num_ranks: int) -> Iterator[Any]:
        """Yield ``steps`` batches of this rank: a function of the arguments alone."""
        ...

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the loss: a scalar, the mean over this rank's batch."""
        ...

    def evaluate(self, model: nn.Module, rank: int, num_ranks: int, *, probe: bool) -> tuple[float, int]:
        """Return the sum of the loss over this rank's share of the held-out data, and its terms (tokens, samples).

        ``probe``: only over the part that is evaluated along the way.
        """
        ...


class Tokens(Protocol):
    """A corpus: integers of any dtype, those that are learned and those that are held out."""

    @property
    def train(self) -> Tensor: ...

    @property
    def held_out(self) -> Tensor: ...


@dataclass(frozen=True)
class GPTTask:
    """A byte-level GPT that learns the standard library's own source. ``batch`` is in windows of ``model.context``
    tokens per rank and step; modules that are held out are never trained on."""

    model: GPTConfig = field(default_factory=lambda: GPTConfig(width=128, layers=4))
    steps: int = 200
    batch: int = 8
    learning_rate: float = 6e-3
    bucket_cap_mb: float = 1.0
    held_out_windows: int = 768
    probe_windows: int = 128
    probe_every: int = 10

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> Self:
        return cls(**{**record, "model": GPTConfig(**record["model"])})

    @property
    def text(self) -> Tokens:
        """Corpus of tokens, split into training and held-out ones."""
        return library_text()

    def build(self, seed: int) -> GPT:
        torch.manual_seed(seed)
        return GPT(self.model)

    def distribute(self, model: nn.Module) -> DistributedDataParallel:
        # The only buffers are constants, which need no broadcast before every step.
        options: dict[str, Any] = {"broadcast_buffers": False, "gradient_as_bucket_view": True}
        return DistributedDataParallel(model, bucket_cap_mb=self.bucket_cap_mb, **options)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), betas=BETAS, weight_decay=WEIGHT_DECAY, fused=True)

    def batches(self, seed: int, rank: int, num_ranks: int) -> Iterator[tuple[Tensor, Tensor]]:
        tokens, context = self.text.train, self.model.context
        offsets = draw_offsets(
            tokens.numel(), steps=self.steps, num_ranks=num_ranks, batch=self.batch, context=context, seed=seed
        )
        return (windows(tokens, starts, context) for starts in offsets[:, rank])

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        inputs, targets = batch
        return next_token_loss(model(inputs), targets)

    def evaluate(self, model: nn.Module, rank: int, num_ranks: int, *, probe: bool) -> tuple[float, int]:
        tokens, context = self.text.held_out, self.model.context
        count = self.probe_windows if probe else self.held_out_windows
        mine = even_offsets(tokens.numel(), count=count, context=context)[rank::num_ranks]
        return evaluate(model, tokens, mine, context), mine.numel() * context


SIZES = {
    "tiny": GPTTask(model=GPTConfig(width=128, layers=2), batch=4, steps=150, probe_every=15),
    "small": GPTTask(),
    "demo": GPTTask(model=GPTConfig(), learning_rate=1e-3, bucket_cap_mb=5.0),
    "smoke": GPTTask(
        model=GPTConfig(context=32, width=64, layers=2, heads=2),
        steps=60,
        learning_rate=3e-3,
        bucket_cap_mb=0.1,
        held_out_windows=256,
        probe_windows=64,
        probe_every=10,
    ),
}


@functools.cache
def library_text() -> Text:
    """Return `standard_library`, read once."""
    return standard_library()


@torch.no_grad()
def evaluate(model: nn.Module, tokens: Tensor, offsets: Tensor, context: int) -> float:
    """Return the sum of the loss, in nats, over all windows that start at ``offsets [windows]``."""
    total = 0.0
    for starts in offsets.split(_EVALUATION_BATCH):
        inputs, targets = windows(tokens, starts, context)
        total += float(next_token_loss(model(inputs), targets, reduction="sum"))
    return total


def probe_steps(task: Task) -> list[int]:
    """Return the steps after which the held-out probe is evaluated; the last step is one of them."""
    return sorted({*range(task.probe_every, task.steps, task.probe_every), task.steps})


def describe(task: Task) -> dict[str, Any]:
    """Return the class and the fields of ``task``, for records.

    Raises ``TypeError`` if the task is no dataclass at the top of a module that another process can import.
    """
    kind = type(task)
    if not dataclasses.is_dataclass(task) or kind.__module__ == "__main__" or "." in kind.__qualname__:
        raise TypeError(
            f"{kind.__qualname__} of {kind.__module__} cannot be made again in the processes of the ranks: "
            "a task is a dataclass at the top of a module that they can import"
        )
    return {"module": kind.__module__, "name": kind.__qualname__, "fields": dataclasses.asdict(task)}
