"""The contract of compressors: what every compressor offers, coded or summed."""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from thinwire.compressors._core.slots import Slot


class Traits(NamedTuple):
    """Properties of a compressor. The defaults suit a biased quantizer."""

    unbiased: bool = False
    """Whether the expected value of the decompressed tensor is the tensor."""
    exact_bits: bool = True
    """Whether messages are the same bytes on every machine. False for compressors that use FFTs or matrix products."""
    exact_natively: bool = False
    """Whether the native core computes the same bytes at every instruction-set level and on any number of threads."""
    dense: bool = True
    """Whether every element is sent, not a choice of them."""
    keeps_constants: bool = True
    """Whether a dense compressor decodes a layer with one value to that value, up to rounding."""
    contracts: bool = True
    """Whether residuals of error feedback stay bounded. For normally distributed values the error is smaller than the
    input by the Euclidean norm. For heavy-tailed ones, or one large value among small ones, that of a quantizer of few
    bits may be larger for a while: once it is below the input's largest magnitude, residuals stop growing."""
    wants_feedback: bool = False
    """Whether a plan adds error feedback, because much is dropped or distorted."""
    takes_every_layer: bool = False
    """Whether biases, norms and small layers are compressed, too. A plan leaves these raw otherwise."""
    bounded: bool = False
    """Whether the size of a message has an upper bound, but is not a function of the shape alone; see `Bounded`."""
    plain_sum: bool = True
    """Whether the owner of a chunk adds up the decoded messages. Otherwise the compressor overrides `Coded.add_up`."""
    plain_mean: bool = True
    """Whether a rank that gathers all messages takes their mean. Otherwise the compressor overrides `Coded.mean`."""
    largest: float = math.inf
    """Largest magnitude that can be represented. Larger values saturate or become Inf.

    Where they saturate, it is that of unscaled gradients: what is encoded may be `CodecCall.loss_scale` times as large.
    """
    absolute: bool = False
    """Whether messages depend on the size of values in the gradient's own units, found by `CodecCall.loss_scale`."""


Count = int | Tensor
"""A number; a tensor of no dimensions where the host would have to wait for the device to read it."""


class UnsuitedError(ValueError):
    """A compressor cannot take layers of this shape, which are sent raw instead. The message gives the reason."""


@dataclass(frozen=True)
class Compressor(ABC):
    """A compressor is an immutable set of parameters. It has no state: what it must remember is in `slots`.

    ``str(compressor)`` is its spec, and ``thinwire.parse`` returns an equal compressor from it. A compressor is either
    `Coded` or `Summed`. What only some compressors do, such as following a schedule, is in mixins that the contract
    does not know (`thinwire.compressors.mixins`).
    """

    spec_name: ClassVar[str]

    @property
    def traits(self) -> Traits:
        """Properties of the compressor, such as whether it is unbiased."""
        return Traits()

    @property
    def slots(self) -> tuple[Slot, ...]:
        """State that the compressor needs for each layer."""
        return ()

    def fit(self, shape: Sequence[int]) -> Compressor:
        """Return the compressor for a layer of ``shape``: this one, possibly with other parameters, or a simpler one.

        Raises:
            UnsuitedError: it cannot take such a layer.
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


@dataclass(frozen=True)
class Wrapper(Compressor):
    """A compressor that keeps what ``inner`` does not send, and sends it later."""

    inner: Compressor

    @property
    def coder(self) -> Compressor:
        """Compressor that computes the messages: ``inner``, with its rounding set; see `rounded_for`."""
        return self.inner

    @property
    def traits(self) -> Traits:
        return self.inner.traits._replace(unbiased=False, contracts=True, wants_feedback=False)

    def check_rate(self, learning_rate: float | None) -> None:
        """Raise a ValueError if it needs a learning rate, and there is none."""

    @abstractmethod
    def around(self, inner: Compressor) -> Compressor:
        """Return the same wrapper around another compressor."""

    def fit(self, shape: Sequence[int]) -> Compressor:
        return rewrap(self, self.inner.fit(shape))

    def roundtrip(self, x: Tensor, key: int = 0) -> Tensor:
        # Nothing is kept before the first step.
        return self.coder.roundtrip(x, key)

    def __str__(self) -> str:
        return f"{self.spec_name}({self.inner})"


def unwrap(compressor: Compressor) -> Compressor:
    """Return the compressor inside a `Wrapper`, or ``compressor`` itself if it is none."""
    return compressor.inner if isinstance(compressor, Wrapper) else compressor


def rewrap(compressor: Compressor, inner: Compressor) -> Compressor:
    """Return ``inner`` in the wrapper that ``compressor`` has, if it has one."""
    if not isinstance(compressor, Wrapper):
        return inner
    return compressor if inner is compressor.inner else compressor.around(inner)


GRADIENT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of the gradients that compressors take. They compute in fp32."""


def not_finite(values: Tensor) -> Tensor:
    """Return NaN if any of ``values`` is NaN or Inf, else 0. Added to a result, it keeps NaN from being lost."""
    if not values.numel():
        return torch.zeros((), dtype=torch.float32, device=values.device)
    low, high = torch.aminmax(values)  # a tenth of the time that a norm takes
    return low.float() * 0.0 + high.float() * 0.0


def check_dtype(dtype: torch.dtype, compressor: object) -> None:
    """Raise a TypeError if gradients of ``dtype`` cannot be compressed."""
    if dtype not in GRADIENT_DTYPES:
        raise TypeError(
            f"{compressor} takes float32, bfloat16 or float16, not {dtype}. "
            "Leave such layers raw with exclude=[...], or train them in one of these dtypes."
        )
