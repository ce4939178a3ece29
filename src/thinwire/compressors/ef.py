"""Error feedback: what a step could not send is added to the next one (thesis, Algorithm 2.1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from thinwire.compressors.base import Coded, Compressor, Piece, Segments, Slot, State, Summed

RESIDUAL = Slot("residual")


def ef(inner: Compressor) -> Compressor:
    """``inner`` with error feedback: ``p = g + e; c = Q(p); e = p − Q⁻¹(c)``, in fp32, one value an element.

    A coded compressor keeps the residual on both sides. The worker's holds for the chunks of other owners; the owner
    of a chunk adds its own exact values, so the same tensor holds the error of the mean that it encodes again. For a
    summed one the residual is what went in minus the final result.

    Raises:
        TypeError: there is error feedback in it already, or it is none of the two kinds.
    """
    if isinstance(inner, EfCoded | EfSummed):
        raise TypeError(f"{inner} has error feedback already")
    if isinstance(inner, Coded):
        return EfCoded(inner)
    if isinstance(inner, Summed):
        # What is fed back must not be blown up to be unbiased: it would diverge.
        return EfSummed(replace(inner, scaled=False) if hasattr(inner, "scaled") else inner)
    raise TypeError(f"{inner} is neither coded nor summed")


@dataclass(frozen=True)
class EfCoded(Coded):
    """See `ef`."""

    spec_name: ClassVar[str] = "ef"

    inner: Coded

    @property
    def largest(self) -> float:
        return self.inner.largest

    @property
    def dense(self) -> bool:
        return self.inner.dense

    @property
    def unbiased(self) -> bool:
        return False

    @property
    def grain(self) -> int | None:
        return self.inner.grain

    @property
    def slots(self) -> tuple[Slot, ...]:
        return (*self.inner.slots, RESIDUAL)

    def payload_bytes(self, numel: int, dtype: torch.dtype) -> int:
        return self.inner.payload_bytes(numel, dtype)

    def encode(self, x: Tensor, segments: Segments, message: Tensor, *, key: int, state: State | None = None) -> None:
        now, after, loss_scale = _residuals(state)
        for part in _parts(segments):
            torch.add(x[part], now[part], alpha=loss_scale, out=after[part])
        self._encode_rest(segments, message, after, key=key, loss_scale=loss_scale, y=None)

    def decode(self, message: Tensor, segments: Segments, y: Tensor, *, add: bool = False, scale: float = 1.0) -> None:
        self.inner.decode(message, segments, y, add=add, scale=scale)

    def reduce(
        self,
        messages: Sequence[Tensor],
        own: Tensor,
        segments: Segments,
        out_message: Tensor,
        y: Tensor,
        *,
        key: int,
        scale: float,
        state: State | None = None,
    ) -> None:
        now, after, loss_scale = _residuals(state)
        for part in _parts(segments):
            after[part] = own[part]
        for message in messages:
            self.inner.decode(message, segments, after, add=True)
        for part in _parts(segments):
            after[part].mul_(scale).add_(now[part], alpha=loss_scale)
        self._encode_rest(segments, out_message, after, key=key, loss_scale=loss_scale, y=y)

    def _encode_rest(
        self, segments: Segments, message: Tensor, after: Tensor, *, key: int, loss_scale: float, y: Tensor | None
    ) -> None:
        """Encode what stands in ``after`` and leave there what was not sent."""
        self.inner.encode(after, segments, message, key=key)
        if y is not None:
            self.inner.decode(message, segments, y)
        self.inner.decode(message, segments, after, add=True, scale=-1.0)
        if loss_scale != 1.0:
            for part in _parts(segments):
                after[part].div_(loss_scale)

    def roundtrip(self, x: Tensor, key: int = 0) -> Tensor:
        """Of a first step: the residual is zero."""
        return self.inner.roundtrip(x, key)

    def __str__(self) -> str:
        return f"ef({self.inner})"


@dataclass(frozen=True)
class EfSummed(Summed):
    """See `ef`."""

    spec_name: ClassVar[str] = "ef"

    inner: Summed

    @property
    def largest(self) -> float:
        return self.inner.largest

    @property
    def dense(self) -> bool:
        return self.inner.dense

    @property
    def unbiased(self) -> bool:
        return False

    @property
    def slots(self) -> tuple[Slot, ...]:
        return (*self.inner.slots, RESIDUAL)

    def part_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return self.inner.part_dtype(dtype)

    def part_numel(self, round: int, numel: int) -> int:
        return self.inner.part_numel(round, numel)

    def part(
        self,
        round: int,
        x: Tensor,
        piece: Piece,
        out: Tensor,
        *,
        key: int,
        scale: float,
        state: State | None = None,
    ) -> None:
        now, after, loss_scale = _residuals(state)
        if round == 0:
            torch.add(x[piece.elements], now[piece.elements], alpha=loss_scale, out=after[piece.elements])
        self.inner.part(round, after, piece, out, key=key, scale=scale)

    def absorb(
        self, round: int, total: Tensor, x: Tensor, piece: Piece, *, key: int, state: State | None = None
    ) -> None:
        self.inner.absorb(round, total, x, piece, key=key)
        if round == self.rounds - 1:
            _, after, loss_scale = _residuals(state)
            after[piece.elements].sub_(x[piece.elements]).div_(loss_scale)

    def roundtrip(self, x: Tensor, key: int = 0) -> Tensor:
        """Of a first step: the residual is zero."""
        return self.inner.roundtrip(x, key)

    def __str__(self) -> str:
        return f"ef({self.inner})"


def _residuals(state: State | None) -> tuple[Tensor, Tensor, float]:
    if state is None:
        raise ValueError("error feedback needs its residual: pass state=")
    return state.now[RESIDUAL.name], state.next[RESIDUAL.name], state.loss_scale


def _parts(segments: Segments) -> list[slice]:
    return [piece.elements for piece in segments.pieces]
