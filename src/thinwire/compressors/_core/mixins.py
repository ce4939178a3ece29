"""Mixins: interfaces of only some compressors, which the contract does not know.

Use `find_mixin` to look for one: it also looks inside a `Wrapper`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Self, TypeVar

import torch
from torch import Tensor

from thinwire.arguments import check_number
from thinwire.compressors._core.compressor import Compressor, Count, Wrapper, rewrap, unwrap
from thinwire.compressors._core.segments import Part, Piece, Segments
from thinwire.compressors._core.slots import LayerState, State

Mixin = TypeVar("Mixin")


class Scheduled(ABC):
    """A compressor whose parameters depend on the step."""

    @abstractmethod
    def at_step(self, step: int, learning_rate: float | None) -> Compressor:
        """Return the compressor for ``step``, counted from the first compressed one.

        Args:
            step: number of the step.
            learning_rate: the optimizer's learning rate; None if the handle has no optimizer.

        Raises:
            ValueError: it needs a learning rate, and there is none.
        """


class WorldSized(ABC):
    """A compressor whose parameters depend on the number of ranks."""

    @abstractmethod
    def for_world(self, num_ranks: int, numel: int) -> Compressor:
        """Return the compressor for ``num_ranks`` ranks, whose layers have ``numel`` elements in all.

        Raises:
            ValueError: it cannot serve so many ranks. The message names a compressor that can.
        """


class ColdStart(ABC):
    """A compressor whose slots are unknown before the first step, which another compressor takes."""

    @property
    @abstractmethod
    def cold_start(self) -> Compressor:
        """Compressor of a layer until a finite step has set its slots."""

    @abstractmethod
    def follow(self, mean: Tensor, layer: str, state: State) -> None:
        """Set the slots of the next step from ``mean``, the mean gradient of a layer (flat, times ``loss_scale``)."""


class FollowsOptimizer(ABC):
    """A compressor whose slots may depend on the optimizer's steps. It then reads `State.learning_rates`."""

    @property
    @abstractmethod
    def follows_optimizer(self) -> bool:
        """Whether `on_optimizer_step` must be called after each step of the optimizer."""

    @abstractmethod
    def on_optimizer_step(self, changes: Sequence[tuple[LayerState, float]]) -> None:
        """Set slots from each layer's squared change, ``‖x^k − x^{k−1}‖²``, the same on all ranks."""


class StepEnd(ABC):
    """A compressor whose layers share a decision, which is made between two steps."""

    @abstractmethod
    def end_step(self, layers: Sequence[LayerState], loss_scale: float) -> None:
        """Set slots of the next step from what this step left in ``next`` of all ``layers``."""


class Learned(ABC):
    """A compressor that learns parameters of its code from gradients, at a few steps.

    A layer that had no gradient in the first of them (zeros, or none at all) learns in its first step that has one.
    """

    @property
    @abstractmethod
    def learns_at(self) -> tuple[int, ...]:
        """Steps, counted from the first compressed one, before which `learn` is called."""

    @abstractmethod
    def learn(self, values: Tensor, slots: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return new values of the learned slots. One rank learns, and the handle gives the result to all.

        Args:
            values: the gradient of a layer, flat, fp32; not all of them are zero or not finite.
            slots: the present values of its slots.
        """


class Bounded(ABC):
    """A coded compressor whose messages may be smaller than `Coded.payload_bytes`; see `Traits.bounded`."""

    @abstractmethod
    def used_bytes(self, message: Tensor, piece: Piece) -> int:
        """Return how many bytes of the payload of ``piece`` are used, a multiple of 64.

        Raises:
            ValueError: the header of the payload is invalid.
        """


class Indexed(ABC):
    """A coded compressor whose payloads contain indices: those of the elements that are sent."""

    @abstractmethod
    def index_bytes(self, message: Tensor, piece: Piece) -> int:
        """Return the bytes of the indices in the payload of ``piece``."""


class Saturating(ABC):
    """A coded compressor whose messages have a limited range, which values may exceed."""

    @abstractmethod
    def limits(self, message: Tensor, segments: Segments) -> tuple[Count, Count]:
        """Return how many values of a message encoded here saturated, and how many did not fit into it."""


class Clipping(ABC):
    """A summed compressor that clips values, so that sums do not overflow."""

    @abstractmethod
    def clipped(self, parts: Sequence[Part], state: State | None) -> Count:
        """Return how many of this rank's values of these layers the last step clipped."""


def find_mixin(compressor: Compressor, mixin: type[Mixin]) -> Mixin | None:
    """Return ``compressor``, or the one that it wraps, as a ``mixin``; None if it is no such compressor."""
    inner = unwrap(compressor)
    return inner if isinstance(inner, mixin) else None


def at_step(compressor: Compressor, step: int, learning_rate: float | None) -> Compressor:
    """Return ``compressor`` for ``step``; see `Scheduled.at_step`."""
    if isinstance(compressor, Wrapper):
        compressor.check_rate(learning_rate)
        compressor = rewrap(compressor, at_step(compressor.inner, step, learning_rate))
    return compressor.at_step(step, learning_rate) if isinstance(compressor, Scheduled) else compressor


def for_world(compressor: Compressor, num_ranks: int, numel: int) -> Compressor:
    """Return ``compressor`` for ``num_ranks`` ranks; see `WorldSized.for_world`."""
    if isinstance(compressor, Wrapper):
        compressor = rewrap(compressor, for_world(compressor.inner, num_ranks, numel))
    return compressor.for_world(num_ranks, numel) if isinstance(compressor, WorldSized) else compressor


def cold_start(compressor: Compressor) -> Compressor | None:
    """Return the compressor that takes the first step for ``compressor``, with the same wrapper; None if it does."""
    cold = find_mixin(compressor, ColdStart)
    return None if cold is None else rewrap(compressor, cold.cold_start)


def learns_at(compressor: Compressor) -> tuple[int, ...]:
    """Return the steps before which ``compressor`` learns; see `Learned.learns_at`."""
    learned = find_mixin(compressor, Learned)
    return () if learned is None else learned.learns_at


def is_informative(values: Tensor) -> bool:
    """Return whether there is anything to learn from ``values``: one that is finite and not zero."""
    return bool((torch.isfinite(values) & (values != 0)).any())


def first_state(compressor: Compressor, flat: Tensor, segments: Segments, loss_scale: float = 1.0) -> State | None:
    """Return the state of a first step, as if the step before it had had the gradients ``flat``; None without slots.

    Args:
        compressor: of all segments.
        flat: gradients of the segments, flat, ``loss_scale`` times as large as they are.
        segments: the layers, one segment each.
        loss_scale: of ``flat``.
    """
    if not compressor.slots:
        return None
    layers = {piece.name: piece.shape for piece in segments.pieces}
    state = State.fresh(compressor.slots, flat.numel(), loss_scale, layers, device=flat.device)
    if (cold := find_mixin(compressor, ColdStart)) is not None:
        for piece in segments.pieces:
            cold.follow(flat[piece.elements], piece.name, state)
    state = state.swapped()
    if (learned := find_mixin(compressor, Learned)) is not None and learned.learns_at:
        for piece in segments.pieces:
            slots, values = state.layers[piece.name].now, flat[piece.elements].float() / loss_scale
            for name, value in learned.learn(values, slots).items() if is_informative(values) else ():
                slots[name].copy_(value.view_as(slots[name]))
    return state


T = TypeVar("T")


def stages(name: str, value: T | tuple[tuple[int, T], ...]) -> tuple[tuple[int, T], ...]:
    """Return the pairs of a schedule; of a single value the one that begins at step 0.

    Raises:
        ValueError: the steps are not ascending from 0.
    """
    if not isinstance(value, tuple):
        return ((0, value),)
    steps = [stage[0] for stage in value if isinstance(stage, tuple) and len(stage) == 2]
    if len(steps) != len(value) or steps != sorted(set(steps)) or steps[:1] != [0]:
        raise ValueError(f"{name} must be like ((0, 0.9), (1000, 0.1)), steps ascending from 0; not {value!r}")
    return value


def stage_at(schedule: tuple[tuple[int, T], ...], step: int) -> T:
    return [value for begin, value in schedule if begin <= max(step, 0)][-1]


@dataclass(frozen=True)
class WithDensity(Compressor, Scheduled):
    """A compressor of a share of each layer's elements, in (0, 1], which may be a schedule."""

    density: float | tuple[tuple[int, float], ...] = field(default=0.01, metadata={"shown": True})
    """The share, or a schedule: ``((0, 0.25), (100, 0.01))`` is 0.25 up to step 100, then 0.01."""

    def __post_init__(self) -> None:
        for _, share in stages("density", self.density):
            check_number("density", share, above=0, high=1)

    def at_step(self, step: int, learning_rate: float | None) -> Self:
        return replace(self, density=stage_at(self.density, step)) if isinstance(self.density, tuple) else self

    @property
    def share(self) -> float:
        return stages("density", self.density)[0][1]
