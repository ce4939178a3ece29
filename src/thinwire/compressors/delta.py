"""Activations of a pipeline: their change since the last visit of their sample (AQ-SGD), or the activations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from thinwire.compressors._core.coded import Coded
from thinwire.compressors._core.compressor import Compressor, Traits, check_dtype, needs_state
from thinwire.compressors._core.mixins import WorldSized
from thinwire.compressors._core.rounding import rounded_for


@dataclass(frozen=True)
class Delta(Compressor, WorldSized):
    """Changes of a tensor since it was last sent, which both sides keep: ``m ← m + Q(a − m)``. The first is sent whole.

    Of activations, m is that of the sample ξ (AQ-SGD, Wang et al. 2022, Algorithm 1). Both sides of a stage boundary
    keep m(ξ) in a `thinwire.store.Store`, for `thinwire.compress_stage`. Theorem 3.1 takes ``inner``, Q, to be
    unbiased. Of weights under FSDP2, every rank keeps m of all of them (SDP4Bit, Jia et al. 2024), for
    ``thinwire.compress(model, weights="delta(...)")``. Gradients belong to no sample, and have error feedback.

    Up to 4 bits are rounded to nearest unless the spec of ``inner`` has ``rounding=``.
    """

    spec_name: ClassVar[str] = "delta"

    inner: Coded

    def __post_init__(self) -> None:
        check_stateless(self.inner)

    @property
    def coder(self) -> Coded:
        """Compressor Q with its rounding set for changes of activations; see `rounded_for`."""
        return rounded_for("deltas", self.inner)

    @property
    def traits(self) -> Traits:
        return Traits(unbiased=self.coder.traits.unbiased, exact_bits=self.inner.traits.exact_bits)

    def for_world(self, num_ranks: int, numel: int) -> Compressor:
        raise ValueError(
            f"{self} compares a sample with its last visit, and gradients belong to no sample: it is for the "
            "activations of a pipeline (thinwire.compress_stage) and the weights of a sharded model. For gradients "
            f"take {self.inner}, or ef({self.inner})"
        )

    def wire_bytes(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> int:
        # A tensor's first message is whole, all others are changes.
        return self.inner.wire_bytes(shape, dtype)

    def roundtrip(self, x: Tensor, key: int = 0) -> Tensor:
        # A tensor's first message is whole.
        check_dtype(x.dtype, self)
        return x.detach().to(torch.float32, copy=True)

    def __str__(self) -> str:
        return f"{self.spec_name}({self.inner})"


def direct(inner: Coded) -> Coded:
    """Return ``inner``, applied to the activations (DirectQ, the baseline of AQ-SGD), in contrast to `Delta`."""
    check_stateless(inner)
    return inner


def message_coder(compressor: Compressor) -> Compressor:
    """Return the compressor that encodes the messages of ``compressor``: Q of ``delta(Q)``, or itself."""
    return compressor.coder if isinstance(compressor, Delta) else compressor


def check_stateless(inner: Any) -> None:
    """Raise an error unless ``inner`` is coded, keeps no state and has messages of a fixed size."""
    if not isinstance(inner, Coded) or needs_state(inner):
        raise TypeError(
            f"{inner} cannot code activations: they need a coded compressor without state, such as "
            "maxabs(bits=4), minmax(bits=4) or topk(density=0.2) | maxabs(bits=8)"
        )
    if inner.traits.bounded:
        raise ValueError(
            f"{inner} cannot code activations: both sides of a stage boundary must know the size of a message. "
            "topk(density=0.2) has a fixed size"
        )
