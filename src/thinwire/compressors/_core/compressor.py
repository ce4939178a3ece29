"""The contract of compressors: what every compressor offers, coded or summed."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from thinwire.compressors._core.slots import Slot
from thinwire.compressors._core.traits import Traits

Count = int | Tensor
"""A number; a tensor of no dimensions where the host would have to wait for the device to read it."""


class Unsuited(ValueError):
    """A compressor cannot take layers of this shape, which are sent raw instead. The message gives the reason."""


@dataclass(frozen=True)
class Compressor(ABC):
    """A compressor is an immutable set of parameters. It holds no state: what it must remember is kept in `slots`.

    ``str(compressor)`` is its spec, and ``thinwire.parse`` returns an equal compressor from it. A compressor is either
    `Coded` or `Summed`. What only some compressors do, such as following a schedule, is in mixins that the contract
    does not know (`thinwire.compressors.mixins`).
    """

    spec_name: ClassVar[str]

    @property
    def traits(self) -> Traits:
        """Its properties, such as whether it is unbiased."""
        return Traits()

    @property
    def slots(self) -> tuple[Slot, ...]:
        """The state that it needs for each layer."""
        return ()

    def fit(self, shape: Sequence[int]) -> Compressor:
        """Return the compressor for a layer of ``shape``: this one, possibly with other parameters, or a simpler one.

        Raises:
            Unsuited: it cannot take such a layer.
        """
        return self

    @abstractmethod
    def wire_bytes(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> int:
        """Return the bytes that a whole layer of ``shape``, with gradients of ``dtype``, takes in a message."""

    @abstractmethod
    def roundtrip(self, x: Tensor, key: int = 0) -> Tensor:
        """Return what a receiver decodes of ``x`` in a first step: fp32, of the shape of ``x``.

        Args:
            x: a layer's gradient, fp32, bf16 or fp16, of any shape.
            key: of the random draws; equal keys repeat them.

        Raises:
            TypeError: the dtype of ``x`` is not supported.
        """

    def __or__(self, other: Compressor) -> Compressor:
        raise TypeError(f"{self} chooses no values for {other} to code: put a sparsifier such as topk first")

    def __str__(self) -> str:
        shown = []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.metadata.get("shown") or value != field.default:
                shown.append(f"{field.name}={value}")
        return f"{self.spec_name}({', '.join(shown)})"


def needs_state(compressor: Compressor) -> bool:
    """Return whether ``compressor`` cannot do without its slots."""
    return not all(slot.optional for slot in compressor.slots)
