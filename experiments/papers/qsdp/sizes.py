"""What the thesis's chapter 5 trains, at the scale of two cores: a GPT of three sizes, and the one that is timed."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Literal

from experiments.tasks import words
from experiments.tasks.models import Model
from thinwire_tools.compare.gpt import GPTConfig
from thinwire_tools.compare.tasks import SIZES as TASKS, GPTTask

SizeName = Literal["small", "medium", "large", "words"]

_LEARN_SHARES = (400 / 4800, 1900 / 4800, 3800 / 4800)
"""Of a training, after which the thesis learns levels (section 5.7.1, of 4800 steps: C.1)."""


@dataclass(frozen=True)
class Size:
    """A GPT, and the thesis's that it stands for, with what table 5.1 says of that: perplexity with fp32 weights and
    fp16 gradients, and with QSDP."""

    name: SizeName
    thesis: str
    baseline: float
    qsdp: float
    task: GPTTask

    @functools.cached_property
    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.task.build(0).parameters())

    @property
    def title(self) -> str:
        kind = "GPT of words," if isinstance(self.task, words.WordsTask) else "GPT of"
        return f"{kind} {self.num_parameters / 1e6:.1f}M"

    @property
    def learn_at(self) -> tuple[int, ...]:
        """Steps at which levels are learned: as far into the training as the thesis's."""
        return tuple(dict.fromkeys(max(1, round(share * self.task.steps)) for share in _LEARN_SHARES))


def _size(name: SizeName, thesis: str, baseline: float, qsdp: float, width: int, rate: float, steps: int) -> Size:
    task = GPTTask(
        model=GPTConfig(width=width, layers=2), steps=steps, learning_rate=rate, probe_every=20, probe_windows=128
    )
    return Size(name, thesis, baseline, qsdp, task)


SIZES = (
    _size("small", "GPT 125M", 35.81, 35.58, 64, 6e-3, 140),
    _size("medium", "GPT 350M", 23.94, 23.95, 128, 6e-3, 140),
    _size("large", "GPT 1.3B", 18.00, 18.34, 192, 4e-3, 140),
)

WORDS = Size("words", "GPT 125M", 35.81, 35.58, words.WORDS)
"""Most words are in no batch: beside rows of large gradients, the embedding has many of small ones or none."""

_SMOKE_TASK = replace(TASKS["smoke"], steps=8, batch=2, probe_every=4, held_out_windows=32, probe_windows=16)
SIZES_SMOKE = tuple(
    replace(size, task=replace(_SMOKE_TASK, model=GPTConfig(context=32, width=width, layers=1, heads=2)))
    for size, width in zip(SIZES, (32, 40, 48), strict=True)
)
WORDS_SMOKE = replace(WORDS, task=replace(words.WORDS_SMOKE, steps=8))


def timed(task: GPTTask) -> Model:
    """The network whose steps are timed, as timings take it."""
    return Model("gpt", "GPT", "GPT 1.3B", task, task.batch * task.model.context, "tokens/s", 0)


TIMED = GPTTask(model=GPTConfig(width=192, layers=4), batch=8)
"""Weights of 7 MB. Its batch is that of a step, in micro-batches."""
TIMED_SMOKE = GPTTask(model=GPTConfig(context=32, width=64, layers=2, heads=2), batch=4)
