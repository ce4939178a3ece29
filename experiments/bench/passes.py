"""Gradients of a real training run, recorded for measuring compressors, and what one message of each is worth."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from experiments.tasks.images import ImageTask
from thinwire.compressors import (
    CodecCall,
    Coded,
    Compressor,
    Indexed,
    Key,
    Parts,
    Piece,
    Segments,
    State,
    StepEnd,
    SumCall,
    Summed,
    Wrapper,
    find_mixin,
    first_state,
    parse,
    unwrap,
    used_bytes,
)
from thinwire.plan import Filter, Plan
from thinwire_tools.compare.tasks import SIZES, Task
from thinwire_tools.compare.train import learning_rate, train

TaskName = Literal["gpt", "digits"]


@dataclass(frozen=True)
class Moment:
    """One step's gradient and that of the step before, from which what compressors keep or learn is made: fp32, flat,
    all layers end to end."""

    step: int
    before: Tensor
    now: Tensor


@dataclass(frozen=True)
class Gradients:
    """``layers`` (name to shape, in their order in the flat tensors) are those that a plan compresses."""

    layers: dict[str, tuple[int, ...]]
    moments: tuple[Moment, ...]

    @property
    def numel(self) -> int:
        return self.moments[0].now.numel()


def make_task(name: TaskName, *, smoke: bool = False) -> Task:
    """The training whose gradients are recorded: the demo's GPT, or the CNN of ``python -m experiments fft``."""
    return SIZES["smoke" if smoke else "demo"] if name == "gpt" else ImageTask()


def record(task: Task, steps: Sequence[int]) -> Gradients:
    """Train ``task`` in this process and keep the gradients of ``steps`` (ascending, from 1) and of those before them.

    Biases, norms and other layers that a plan leaves raw are left out.
    """
    model, keep = task.build(0), Filter()
    chosen = {n: p for n, p in model.named_parameters() if not keep.keeps_raw(n, p.shape)}
    wanted, kept = {at for step in steps for at in (step - 1, step)}, {}
    batches, rate = islice(task.batches(0, 0, 1), steps[-1] + 1), partial(learning_rate, task.learning_rate)
    for step, _ in enumerate(train(task, model, task.optimizer(model), batches, partial(rate, steps=task.steps))):
        if step in wanted:
            gradients = (torch.zeros_like(p) if p.grad is None else p.grad for p in chosen.values())
            kept[step] = torch.cat([gradient.flatten() for gradient in gradients])
    layers = {name: tuple(p.shape) for name, p in chosen.items()}
    return Gradients(layers, tuple(Moment(step, kept[step - 1], kept[step]) for step in steps))


class Sizes(NamedTuple):
    """Bytes that all layers take, and how many of them only say which elements are sent."""

    num_bytes: int
    index_bytes: int


@dataclass
class _Group:
    """Layers of one compressor, and its state."""

    compressor: Any
    segments: Segments
    state: State | None = field(default=None, init=False)

    def start(self, x: Tensor) -> None:
        self.state = first_state(self.compressor, x, self.segments)

    def end_step(self) -> None:
        if self.state is not None:
            if (deciding := find_mixin(self.compressor, StepEnd)) is not None:
                deciding.end_step(list(self.state.layers.values()), self.state.loss_scale)
            self.state = self.state.swapped()


@dataclass
class _Coded(_Group):
    """Layers of one coded compressor: one message."""

    message: Tensor

    def encode(self, x: Tensor, y: Tensor, key: Key) -> None:
        self.compressor.encode(x, self.message, CodecCall(self.segments, key, state=self.state))

    def decode(self, y: Tensor, key: Key) -> None:
        self.compressor.decode(self.message, y, CodecCall(self.segments))

    def sizes(self) -> Sizes:
        pieces = self.segments.pieces
        used = sum(used_bytes(self.compressor, self.message, piece) for piece in pieces)
        indexed = find_mixin(self.compressor, Indexed)
        return Sizes(used, sum(indexed.index_bytes(self.message, piece) for piece in pieces) if indexed else 0)


@dataclass
class _Summed(_Group):
    """Layers of one summed compressor: a buffer for the sum of each round."""

    rounds: list[tuple[Tensor, Parts]]
    running: Iterator[None] = field(default_factory=lambda: iter(()))

    def encode(self, x: Tensor, y: Tensor, key: Key) -> None:
        buffers, parts = zip(*self.rounds, strict=True)
        self.running = self.compressor.rounds(x, y, SumCall(parts, buffers, key, self.state))
        for _ in self.rounds:
            next(self.running)

    def decode(self, y: Tensor, key: Key) -> None:
        next(self.running, None)

    def sizes(self) -> Sizes:
        return Sizes(sum(buffer.numel() * buffer.element_size() for buffer, _ in self.rounds), 0)


class Pass:
    """What ``spec`` makes of gradients, without error feedback: the error is that of one message."""

    def __init__(self, spec: str | Compressor, layers: Mapping[str, Sequence[int]]) -> None:
        asked = parse(spec)
        self.feedback = asked.traits.wants_feedback or isinstance(asked, Wrapper)
        plan = Plan.build(layers, asked, Filter(min_numel=0, min_dim=0))
        starts, at = {}, 0
        for name, shape in layers.items():
            starts[name], at = at, at + math.prod(shape)
        groups: dict[Compressor, list[str]] = {}
        for name in layers:
            groups.setdefault(unwrap(plan[name]), []).append(name)
        self._groups = [
            _group(compressor, [(name, starts[name], tuple(layers[name])) for name in names])
            for compressor, names in groups.items()
        ]
        # What most elements get: what a schedule or a shape has made of the spec.
        self.compressor = max(groups, key=lambda c: sum(math.prod(layers[name]) for name in groups[c]))

    def start(self, x: Tensor) -> None:
        """Begin with fresh state; what is learned is learned from ``x``."""
        for group in self._groups:
            group.start(x)

    def encode(self, x: Tensor, y: Tensor, key: Key) -> None:
        """Messages of the flat tensor ``x``; ``y`` is where summed compressors work, and what `decode` is given."""
        for group in self._groups:
            group.encode(x, y, key)

    def decode(self, y: Tensor, key: Key) -> None:
        """Set ``y`` to what was encoded last."""
        for group in self._groups:
            group.decode(y, key)

    def end_step(self) -> None:
        for group in self._groups:
            group.end_step()

    def sizes(self) -> Sizes:
        """Of what was encoded last."""
        sizes = [group.sizes() for group in self._groups]
        return Sizes(sum(f.num_bytes for f in sizes), sum(f.index_bytes for f in sizes))


def _group(compressor: Compressor, layers: Sequence[tuple[str, int, tuple[int, ...]]]) -> _Coded | _Summed:
    if isinstance(compressor, Summed):
        segments = Segments.build([Piece(name, at, math.prod(shape), 0, 0, shape) for name, at, shape in layers])
        rounds = []
        sums = [compressor.sums(piece.shape, torch.float32) for piece in segments.pieces]
        for of_layers in zip(*sums, strict=True):
            parts = Parts.build(zip(segments.pieces, (part.numel for part in of_layers), strict=True))
            rounds.append((torch.zeros(parts.where.stop, dtype=of_layers[0].dtype), parts))
        return _Summed(compressor, segments, rounds)
    if not isinstance(compressor, Coded):
        raise TypeError(f"{compressor} is neither coded nor summed")
    pieces, payload = [], 0
    for name, at, shape in layers:
        numel = math.prod(shape)
        pieces.append(Piece(name, at, numel, 0, payload, shape))
        payload += compressor.payload_bytes(numel, torch.float32)
    return _Coded(compressor, Segments.build(pieces), torch.zeros(payload, dtype=torch.uint8))


class Quality(NamedTuple):
    """What one message of a gradient is worth."""

    relative_error: float
    cosine: float
    bytes_per_element: float
    values_per_element: float
    """The same without the bytes that only say which elements are sent, as the FFT paper counts."""


def measure_quality(subject: Pass, gradients: Gradients) -> list[Quality]:
    """Errors and sizes at each recorded moment, each after a step whose gradient is that of the step before.

    State is kept from moment to moment; what is learned is learned once, from the very first gradient.
    """
    y, qualities = torch.zeros(gradients.numel), []
    subject.start(gradients.moments[0].before)
    for moment in gradients.moments:
        for x, key in ((moment.before, Key.derive(moment.step, 0)), (moment.now, Key.derive(moment.step, 1))):
            subject.encode(x, y, key)
            subject.decode(y, key)
            sizes = subject.sizes()
            subject.end_step()
        x, y64 = moment.now.double(), y.double()
        norms = float(x.norm()), float(y64.norm())
        qualities.append(
            Quality(
                relative_error=float((y64 - x).norm()) / norms[0],
                cosine=float(x @ y64) / (norms[0] * norms[1]) if norms[1] else 0.0,
                bytes_per_element=sizes.num_bytes / gradients.numel,
                values_per_element=(sizes.num_bytes - sizes.index_bytes) / gradients.numel,
            )
        )
    return qualities
