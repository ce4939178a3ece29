"""First choose, then code what was chosen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from torch import Tensor

from thinwire.compressors.base import Coded
from thinwire.compressors.pieces import Key, LayerState, Piece, Segments, Slot, State
from thinwire.compressors.sparse import Picked, Sparsifier


@dataclass(frozen=True)
class Chain(Sparsifier):
    """``topk(density=0.01) | minmax(bits=8)``: the values that a sparsifier chose, in codes of another compressor."""

    spec_name: ClassVar[str] = "chain"

    first: Sparsifier
    values: Coded

    def __post_init__(self) -> None:
        values: Any = self.values
        if isinstance(self.first, Chain) or not isinstance(self.first, Sparsifier):
            raise TypeError(f"{self.first} chooses no values: what stands before | is a sparsifier such as topk")
        if not isinstance(values, Coded) or isinstance(values, Sparsifier) or values.slots:
            raise TypeError(f"{values} cannot follow |: what codes chosen values is a quantiser without state")

    @property
    def coder(self) -> Coded:
        return self.values

    @property
    def exact_bits(self) -> bool:
        return self.first.exact_bits and self.values.exact_bits

    @property
    def size(self) -> Literal["fixed", "bounded"]:
        return self.first.size

    @property
    def largest(self) -> float:
        return self.values.largest

    @property
    def wants_feedback(self) -> bool:
        return self.first.wants_feedback

    @property
    def slots(self) -> tuple[Slot, ...]:
        return self.first.slots

    def room(self, numel: int) -> int:
        return self.first.room(numel)

    def pick(self, x: Tensor, piece: Piece, *, key: Key, state: State | None) -> Picked:
        return self.first.pick(x, piece, key=key, state=state)

    def rule(self, x: Tensor, segments: Segments, *, key: Key, state: State | None) -> dict[str, Any]:
        return self.first.rule(x, segments, key=key, state=state)

    @property
    def settles(self) -> bool:
        return self.first.settles

    def end_step(self, layers: Sequence[LayerState], loss_scale: float) -> None:
        self.first.end_step(layers, loss_scale)

    def __str__(self) -> str:
        return f"{self.first} | {self.values}"
