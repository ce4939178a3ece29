"""What a tensor may become on the wire: what every compressor says of itself."""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from thinwire.compressors.pieces import LayerState, Slot, State


class Unsuited(ValueError):
    """A compressor cannot take layers of this shape: they travel raw. The text says why."""


@dataclass(frozen=True)
class Compressor(ABC):
    """A frozen set of parameters. ``str(c)`` is its spec and ``thinwire.parse`` gives it back."""

    spec_name: ClassVar[str]

    @property
    def exact_bits(self) -> bool:
        """Whether its bytes are the same on any machine. False for FFT, SVD and matrix products."""
        return True

    @property
    def size(self) -> Literal["fixed", "bounded"]:
        """Whether a message's size is a function of the shape alone, or has but an upper bound."""
        return "fixed"

    @property
    def largest(self) -> float:
        """Largest magnitude that can be received; beyond it a value saturates or arrives as Inf."""
        return math.inf

    @property
    def dense(self) -> bool:
        """Whether every element is sent, not a choice of them."""
        return True

    @property
    def keeps_constants(self) -> bool:
        """Whether a layer of one value is received as it is, up to rounding."""
        return self.dense

    @property
    @abstractmethod
    def unbiased(self) -> bool:
        """Whether the expectation of what is received is what was sent."""

    @property
    def contracts(self) -> bool:
        """Whether its error is smaller than its input, as error feedback needs: else what is owed grows without end."""
        return True

    @property
    def wants_feedback(self) -> bool:
        """Whether a plan puts error feedback around it: it drops or distorts so much that training needs it."""
        return False

    @property
    def slots(self) -> tuple[Slot, ...]:
        """The state that it needs for each layer."""
        return ()

    def fit(self, shape: Sequence[int]) -> Compressor:
        """What a layer of this shape gets: this compressor with what depends on the shape filled in, or a simpler one.

        Raises:
            Unsuited: it cannot take such a layer.
        """
        return self

    def at(self, step: int, learning_rate: float | None) -> Compressor:
        """This compressor as it is in a step (counted from the first compressed one), where it has a schedule.

        ``learning_rate`` is the optimizer's, if the Wire was given one.
        """
        return self

    def among(self, num_ranks: int, numel: int) -> Compressor:
        """This compressor as it is in a world of so many ranks, where its layers have ``numel`` elements in all.

        Raises:
            ValueError: it cannot serve so many ranks; what can is named.
        """
        return self

    @property
    def opening(self) -> Compressor | None:
        """What each layer has until a finite step has set its slots; None where that needs no other compressor."""
        return None

    @property
    def takes_every_layer(self) -> bool:
        """Whether biases, norms and small layers are for it, too, which a plan leaves raw otherwise."""
        return False

    def follow(self, mean: Tensor, layer: str, state: State) -> None:  # noqa: B027 - most follow nothing
        """Set slots of the next step from the mean gradient of a layer, as all ranks received it: flat, scaled."""

    @property
    def follows_optimizer(self) -> bool:
        """Whether `updated` is to be called after each step of the optimizer, and `State.learning_rates` are there."""
        return False

    def updated(self, changes: Sequence[tuple[LayerState, float]]) -> None:  # noqa: B027 - most follow no optimizer
        """Set present slots from what the optimizer did: of each layer ``‖x^k − x^{k−1}‖²``, the same on all ranks."""

    @property
    def settles(self) -> bool:
        """Whether `end_step` is to be called: its layers decide something together."""
        return False

    def end_step(self, layers: Sequence[LayerState], loss_scale: float) -> None:  # noqa: B027 - most decide nothing
        """Between two steps: set slots of the next one from what this step left in ``next`` of all layers."""

    @abstractmethod
    def wire_bytes(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> int:
        """Bytes that a whole layer of this shape takes in a message."""

    @abstractmethod
    def roundtrip(self, x: Tensor, key: int = 0) -> Tensor:
        """What the receiver will see of ``x``, as fp32 of the same shape; ``x`` itself where it travels raw."""

    def __or__(self, other: Compressor) -> Compressor:
        raise TypeError(f"{self} chooses no values that {other} could code: put a sparsifier such as topk first")

    def __str__(self) -> str:
        shown = []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.metadata.get("shown") or value != field.default:
                shown.append(f"{field.name}={value}")
        return f"{self.spec_name}({', '.join(shown)})"
