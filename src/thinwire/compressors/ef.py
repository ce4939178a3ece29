"""Error feedback: what a step could not send is added to the next one (thesis, Algorithm 2.1)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from thinwire.compressors.base import Coded, Compressor, Count, Reduction, Summed
from thinwire.compressors.pieces import Key, LayerState, Part, Piece, Segments, Slot, State

RESIDUAL = Slot("residual")


def ef(inner: Compressor) -> Compressor:
    """``inner`` with error feedback: ``p = g + e; c = Q(p); e = p − Q⁻¹(c)``, in fp32, one value an element.

    A coded compressor keeps the residual on both sides. The worker's holds for the chunks of other owners; the owner
    of a chunk adds its own exact values, so the same tensor holds the error of the mean that it encodes again. What is
    gathered is encoded once, and has the worker's alone. For a summed one the residual is what went in minus the final
    result. What errs by more than its input (`Compressor.contracts`: TernGrad, QSGD of few steps in large buckets) must
    not be in it: what is owed would grow without end. `thinwire.compress` warns of that.

    Raises:
        TypeError: there is error feedback in it already, or it is none of the two kinds.
    """
    if isinstance(inner, Wrapper):
        raise TypeError(f"{inner} keeps what it does not send already")
    if isinstance(inner, Coded):
        return EfCoded(inner)
    if isinstance(inner, Summed):
        # What is fed back must not be blown up to be unbiased: it would diverge.
        return EfSummed(replace(inner, scaled=False) if hasattr(inner, "scaled") else inner)
    raise TypeError(f"{inner} is neither coded nor summed")


@dataclass(frozen=True)
class Wrapper(Compressor):
    """A compressor around another, of which it is one in all but what it says itself."""

    inner: Compressor

    @property
    def exact_bits(self) -> bool:
        return self.inner.exact_bits

    @property
    def size(self) -> Literal["fixed", "bounded"]:
        return self.inner.size

    @property
    def largest(self) -> float:
        return self.inner.largest

    @property
    def dense(self) -> bool:
        return self.inner.dense

    @property
    def keeps_constants(self) -> bool:
        return self.inner.keeps_constants

    @property
    def unbiased(self) -> bool:
        return False

    def fit(self, shape: Sequence[int]) -> Compressor:
        inner = self.inner.fit(shape)
        return self if inner is self.inner else self.around(inner)

    def at(self, step: int, learning_rate: float | None) -> Compressor:
        inner = self.inner.at(step, learning_rate)
        return self if inner is self.inner else self.around(inner)

    def among(self, num_ranks: int, numel: int) -> Compressor:
        inner = self.inner.among(num_ranks, numel)
        return self if inner is self.inner else self.around(inner)

    @property
    def opening(self) -> Compressor | None:
        inner = self.inner.opening
        return None if inner is None else self.around(inner)

    @property
    def takes_every_layer(self) -> bool:
        return self.inner.takes_every_layer

    def follow(self, mean: Tensor, layer: str, state: State) -> None:
        self.inner.follow(mean, layer, state)

    @property
    def follows_optimizer(self) -> bool:
        return self.inner.follows_optimizer

    def updated(self, changes: Sequence[tuple[LayerState, float]]) -> None:
        self.inner.updated(changes)

    @property
    def settles(self) -> bool:
        return self.inner.settles

    def end_step(self, layers: Sequence[LayerState], loss_scale: float) -> None:
        self.inner.end_step(layers, loss_scale)

    @abstractmethod
    def around(self, inner: Compressor) -> Compressor:
        """The same around another compressor."""

    def roundtrip(self, x: Tensor, key: int = 0) -> Tensor:
        """Of a first step: nothing is owed yet."""
        return self.inner.roundtrip(x, key)

    def __str__(self) -> str:
        return f"{self.spec_name}({self.inner})"


def bare(compressor: Compressor) -> Compressor:
    """A compressor without what keeps what it does not send."""
    return compressor.inner if isinstance(compressor, Wrapper) else compressor


@dataclass(frozen=True)
class WrappedCoded(Wrapper, Coded):
    """A `Wrapper` of a coded compressor: the same messages."""

    inner: Coded

    @property
    def grain(self) -> int | None:
        return self.inner.grain

    @property
    def gathered(self) -> bool:
        return self.inner.gathered

    @property
    def plain_sum(self) -> bool:
        return self.inner.plain_sum

    def payload_bytes(self, numel: int, dtype: torch.dtype) -> int:
        return self.inner.payload_bytes(numel, dtype)

    def decode(self, message: Tensor, segments: Segments, y: Tensor, *, add: bool = False, scale: float = 1.0) -> None:
        self.inner.decode(message, segments, y, add=add, scale=scale)

    def mean(self, messages: Sequence[Tensor], segments: Segments, y: Tensor, *, scale: float) -> None:
        self.inner.mean(messages, segments, y, scale=scale)

    @property
    def learns_at(self) -> tuple[int, ...]:
        return self.inner.learns_at

    def learn(self, values: Tensor, slots: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return self.inner.learn(values, slots)

    def used_bytes(self, message: Tensor, piece: Piece) -> int:
        return self.inner.used_bytes(message, piece)

    def index_bytes(self, message: Tensor, piece: Piece) -> int:
        return self.inner.index_bytes(message, piece)

    def limits(self, message: Tensor, segments: Segments) -> tuple[Count, Count]:
        return self.inner.limits(message, segments)


@dataclass(frozen=True)
class EfCoded(WrappedCoded):
    """See `ef`."""

    spec_name: ClassVar[str] = "ef"

    def around(self, inner: Compressor) -> Compressor:
        return ef(inner)

    @property
    def slots(self) -> tuple[Slot, ...]:
        return (*self.inner.slots, RESIDUAL)

    def encode(self, x: Tensor, segments: Segments, message: Tensor, *, key: Key, state: State | None = None) -> None:
        now, after, loss_scale = _residuals(state)
        self.inner.encode_rest(x, segments, message, now, after, key=key, loss_scale=loss_scale, state=state)

    def reduce(
        self,
        messages: Sequence[Tensor],
        own: Tensor,
        segments: Segments,
        out_message: Tensor,
        y: Tensor,
        *,
        key: Key,
        scale: float,
        state: State | None = None,
    ) -> None:
        now, after, loss_scale = _residuals(state)
        self.inner.reduce_rest(
            messages,
            own,
            segments,
            out_message,
            y,
            now,
            after,
            key=key,
            scale=scale,
            loss_scale=loss_scale,
            state=state,
        )


@dataclass(frozen=True)
class EfSummed(Wrapper, Summed):
    """See `ef`."""

    spec_name: ClassVar[str] = "ef"

    inner: Summed

    def around(self, inner: Compressor) -> Compressor:
        return ef(inner)

    @property
    def slots(self) -> tuple[Slot, ...]:
        return (*self.inner.slots, RESIDUAL)

    @property
    def rounds(self) -> int:
        return self.inner.rounds

    def part_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return self.inner.part_dtype(dtype)

    def operation(self, round: int) -> Reduction:
        return self.inner.operation(round)

    def part_numel(self, round: int, shape: Sequence[int]) -> int:
        return self.inner.part_numel(round, shape)

    def part(
        self,
        round: int,
        x: Tensor,
        parts: Sequence[Part],
        out: Tensor,
        *,
        key: Key,
        scale: float,
        state: State | None = None,
    ) -> None:
        now, after, loss_scale = _residuals(state)
        for piece, _ in parts if round == 0 else ():
            torch.add(x[piece.elements], now[piece.elements], alpha=loss_scale, out=after[piece.elements])
        self.inner.part(round, after, parts, out, key=key, scale=scale, state=state)

    def absorb(
        self,
        round: int,
        total: Tensor,
        x: Tensor,
        parts: Sequence[Part],
        *,
        key: Key,
        state: State | None = None,
    ) -> None:
        self.inner.absorb(round, total, x, parts, key=key, state=state)
        if round < self.rounds - 1:
            return
        _, after, loss_scale = _residuals(state)
        for piece, _ in parts:
            after[piece.elements].sub_(x[piece.elements])
            if loss_scale != 1.0:
                after[piece.elements].div_(loss_scale)

    def clipped(self, parts: Sequence[Part], state: State | None) -> Count | None:
        return self.inner.clipped(parts, state)


def _residuals(state: State | None) -> tuple[Tensor, Tensor, float]:
    if state is None:
        raise ValueError("error feedback needs its residual: pass state=")
    return state.now[RESIDUAL.name], state.next[RESIDUAL.name], state.loss_scale
