"""What the thesis's chapter 5 trains, and how it sends weights and gradients, as a rank process takes them."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Literal

from torch import nn

import thinwire
from experiments.papers.qsdp.sharding import Shards, cut_short, quantize_flat
from experiments.tasks import words
from experiments.tasks.images import Model
from thinwire.compressors import parse
from thinwire_tools.compare.gpt import GPTConfig
from thinwire_tools.compare.tasks import SIZES as TASKS, GPTTask

BUCKET = 1024
"""The thesis's universal choice (section 5.6.1)."""
LARGE_BUCKET = 16384
"""Of figure C.4."""
UNBUCKETED = 2**31 - 1
"""One scale for all of a layer that a rank sends: "directly using INT8 quantization, without bucketing" (5.7.1)."""
_NOT_COMPRESSED = 32
_MOST_LEARNED_BITS = 6
"""Learning "has no effect for bit-widths higher than 6 bits" (section 5.7.1)."""

Rounding = Literal["stochastic", "nearest"]


@dataclass(frozen=True)
class Method:
    """How weights and gradients are sent.

    ``stock``: as FSDP2 sends them, with gradients in fp16 if ``half``; with ratios above 1 only so many times
    fewer elements do, and with infinite ones none. ``flat``: each buffer of FSDP2's as the spec ``weights`` says,
    which is that of gradients, too. ``thinwire``: layer by layer as the specs ``weights`` and ``gradients`` say.
    """

    name: str
    title: str
    color: str
    kind: Literal["stock", "flat", "thinwire"] = "thinwire"
    weights: str = "raw"
    gradients: str = "raw"
    half: bool = False
    weights_ratio: float = 1.0
    gradients_ratio: float = 1.0
    algorithm: str = "sra"
    transport: Literal["auto", "group", "shared"] = "group"
    adapt: str | None = None
    """The policy that gives layers compressors of their own while training."""

    @property
    def warm_up_steps(self) -> int:
        return 3

    @property
    def exact(self) -> bool:
        """Whether its loss is a result: False where a part of what was to be sent is missing."""
        return self.weights_ratio == self.gradients_ratio == 1.0

    def attached(self, task: GPTTask, seed: int, **options: Any) -> Shards:
        """Shard the model of ``task``, and send its weights and gradients so; ``num_micro`` is the parts of a step."""
        return Shards(task, self, seed, **options)

    def attach(self, model: nn.Module, seed: int = 0) -> thinwire.Wire | None:
        """Send the weights and gradients of a sharded ``model`` so; the Wire where there is one."""
        if self.kind == "stock":
            if not self.exact:
                cut_short(model, self.weights_ratio, self.gradients_ratio)
            return None
        if self.kind == "flat":
            quantize_flat(model, parse(self.weights), seed)
            return None
        return thinwire.compress(
            model,
            weights=self.weights,
            gradients=self.gradients,
            adapt=self.adapt,
            seed=seed,
            skip_if_slower=False,
            network=thinwire.Network(algorithm=self.algorithm, transport=self.transport),
        )


FP16 = Method("fp16", "FSDP2, weights fp32, gradients fp16", "#555555", kind="stock", half=True)
"""The thesis's baseline (section 5.7.1)."""
FP32 = Method("fp32", "FSDP2, all fp32", "#222222", kind="stock")
RAW = Method("raw", "thinwire's exchange, all fp32", "#8250c4")
NOTHING = Method("nothing", "nothing sent", "#aaaaaa", kind="stock", weights_ratio=math.inf, gradients_ratio=math.inf)
"""The ceiling: the same ranks on the same cores, without communication."""


def uniform(weights: int, gradients: int, *, bucket: int = BUCKET, rounding: Rounding | None = None) -> Method:
    """Min-max of so many bits, as W8G8; 32 bits are left as they are.

    Without ``rounding``, weights of up to 6 bits are rounded to the nearest, and all else stochastically, as
    thinwire does.
    """
    name = f"W{weights}G{gradients}"
    if bucket != BUCKET:
        name += " unbucketed" if bucket == UNBUCKETED else f" bucket {bucket}"
    if rounding is not None:
        name += f" {rounding}"
    of_weights, of_gradients = (_minmax(bits, bucket, rounding) for bits in (weights, gradients))
    return Method(name, name, "#0a7d4f", weights=of_weights, gradients=of_gradients)


def learned(weights: int, gradients: int, learn_at: Sequence[int]) -> Method:
    """The same with levels that are learned at these steps, where they have any effect: of layers of any size, since
    none of these networks' has the thesis's 10^5 elements."""

    def spec(bits: int) -> str:
        if bits > _MOST_LEARNED_BITS:
            return _minmax(bits, BUCKET, None)
        return f"levels(bits={bits}, bucket={BUCKET}, learn_at={tuple(learn_at)}, min_numel=0)"

    name = f"W{weights}G{gradients} learned"
    return Method(name, name, "#1f6fb2", weights=spec(weights), gradients=spec(gradients))


def shortened(weights_ratio: float, gradients_ratio: float) -> Method:
    """So many times fewer elements are sent, at no cost: the thesis's synthetic experiment (C.2)."""
    title = f"weights 1/{weights_ratio:g}, gradients 1/{gradients_ratio:g}"
    return Method(title, title, "#0a7d4f", kind="stock", weights_ratio=weights_ratio, gradients_ratio=gradients_ratio)


def _minmax(bits: int, bucket: int, rounding: Rounding | None) -> str:
    if bits == _NOT_COMPRESSED:
        return "raw"
    suffix = "" if rounding is None else f", rounding={rounding}"
    return f"minmax(bits={bits}, bucket={bucket}{suffix})"


W8G8 = uniform(8, 8)
W4G4 = uniform(4, 4)
W2G2 = uniform(2, 2)
LGRECO = replace(W4G4, name="W4G4 lgreco", title="L-GreCo, reference W4G4", adapt="lgreco(every=20)")
"""Trainings of other than 140 steps decide as often (`measurements.lgreco_over_qsdp`)."""

NAIVE = {bits: uniform(bits, bits, bucket=UNBUCKETED) for bits in (8, 4)}
BLOCKWISE = Method("blockwise", "W8G8, one scale a block", "#c0392b", kind="flat", weights=_minmax(8, UNBUCKETED, None))
"""8 bits without buckets of flat buffers, in which FSDP had all weights of a block, norms and biases included, when the
thesis was written."""
CONTROL = NAIVE[4]
"""Must fail: where it does not, a training forgives everything."""
LARGE = {bits: uniform(bits, bits, bucket=LARGE_BUCKET) for bits in (8, 4)}
BUCKETED = {8: W8G8, 4: W4G4}

FLAT = replace(W8G8, name="flat", title="W8G8, flat", transport="auto", color="#8250c4")
HIERARCHICAL = replace(
    W8G8, name="hierarchical", title="W8G8, hierarchical", transport="auto", algorithm="hierarchical"
)
"""Between nodes (section 5.6.1)."""

BITS = (6, 5, 4)
_PERPLEXITIES = (35.74, 36.08, 35.84, 36.01, 35.94, 36.36, 37.11, 37.38, 37.61)
THESIS_GRID: dict[tuple[int, int], float] = dict(zip(product(BITS, BITS), _PERPLEXITIES, strict=True))
"""Table 5.2, by bits of weights and of gradients."""

RATIOS = (1, 2, 4, 8)
_SECONDS = (23.23, 21.36, 20.62, 20.2, 19.27, 17.17, 16.26, 15.95)
_SECONDS += (17.50, 15.35, 14.6, 14.08, 16.62, 14.52, 13.66, 13.21)
THESIS_RATIOS: dict[tuple[int, int], float] = dict(zip(product(RATIOS, RATIOS), _SECONDS, strict=True))
"""Seconds of a step by ratio of weights and of gradients, GPT 1.3B at 100 Gbit/s."""


@dataclass(frozen=True)
class Pair:
    """Bits of weights and gradients (32: not compressed), and the thesis's perplexities of GPT 125M: with uniform
    levels and with learned ones."""

    table: str
    weights: int
    gradients: int
    uniform: float
    learned: float

    @property
    def name(self) -> str:
        return f"W{self.weights}G{self.gradients}"


PAIRS = (
    Pair("table 5.3", 6, 4, 35.81, 35.75),
    Pair("table 5.3", 5, 4, 36.34, 36.01),
    Pair("table 5.3", 4, 4, 37.61, 36.94),
    Pair("table 5.3", 4, 32, 37.11, 36.55),
    Pair("table C.3", 3, 32, 45.53, 42.31),
    Pair("table C.3", 2, 32, 57.92, 56.54),
    Pair("table C.3", 8, 3, 39.91, 37.72),
    Pair("table C.3", 8, 2, 44.79, 44.65),
)
THESIS_BASELINE = 35.81


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
