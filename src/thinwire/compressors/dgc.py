"""Deep gradient compression: momentum before sparsification."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from thinwire.compressors.base import Compressor
from thinwire.compressors.ef import WrappedCoded
from thinwire.compressors.pieces import Key, Segments, Slot, State
from thinwire.compressors.sparse import Sparsifier

MOMENTUM, VELOCITY = Slot("momentum"), Slot("velocity")


@dataclass(frozen=True)
class DGC(WrappedCoded):
    """Momentum correction with factor masking (Lin et al. 2018) around a sparsifier, instead of error feedback.

    ``u = m·u + g; v = v + u``; the largest of ``v`` are sent, and both are forgotten where they were. Train with plain
    SGD without momentum: the momentum is in here, on each rank, before its gradients are chosen from.
    """

    spec_name: ClassVar[str] = "dgc"

    inner: Sparsifier  # pyright: ignore[reportIncompatibleVariableOverride] - frozen, so narrower is sound
    momentum: float = field(default=0.9)

    def __post_init__(self) -> None:
        if not isinstance(self.inner, Sparsifier):
            raise TypeError(f"dgc takes a sparsifier such as topk(density=0.001), not {self.inner}")
        if not isinstance(self.momentum, int | float) or not 0 <= self.momentum < 1:
            raise ValueError(f"momentum must be at least 0 and below 1, not {self.momentum!r}")

    def around(self, inner: Compressor) -> Compressor:
        assert isinstance(inner, Sparsifier)
        return DGC(inner, self.momentum)

    @property
    def slots(self) -> tuple[Slot, ...]:
        return (*self.inner.slots, MOMENTUM, VELOCITY)

    def encode(self, x: Tensor, segments: Segments, message: Tensor, *, key: Key, state: State | None = None) -> None:
        assert state is not None, "momentum is kept in a slot"
        scale = state.loss_scale
        momentum, owed = state.next[MOMENTUM.name], state.next[VELOCITY.name]
        for piece in segments.pieces:
            part = piece.elements
            u = state.now[MOMENTUM.name][part] * self.momentum
            u.add_(x[part].float(), alpha=1.0 / scale)
            momentum[part] = u
            # In the gradient's units while it is chosen from.
            owed[part] = (state.now[VELOCITY.name][part] + u).mul_(scale)
        self.inner.encode(owed, segments, message, key=key, state=state)
        self.inner.keep_rest(message, segments, owed, scale)
        self.inner.forget_sent(message, segments, momentum)

    def __str__(self) -> str:
        return f"dgc({self.inner}, momentum={self.momentum})"
