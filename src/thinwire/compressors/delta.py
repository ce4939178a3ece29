"""Activations of a pipeline: by themselves, or by how they changed since their sample was last seen (AQ-SGD)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from thinwire.compressors.base import Coded, Compressor
from thinwire.compressors.checks import check_dtype


@dataclass(frozen=True)
class Delta(Compressor):
    """What changed since the same sample's last visit (AQ-SGD; S0, Algorithm 1): ``m(ξ) ← m(ξ) + Q(a(ξ) − m(ξ))``.

    ``inner`` is Q, unbiased in the seed's Theorem 3.1. The first visit of a sample travels in full precision. Both
    sides of a stage boundary keep m(ξ) in a `thinwire.store.Store`, so this is for `thinwire.PipelineStage`: gradients
    of parameters have no samples.
    """

    spec_name: ClassVar[str] = "delta"

    inner: Coded

    def __post_init__(self) -> None:
        check_stateless(self.inner)

    @property
    def unbiased(self) -> bool:
        return self.inner.unbiased

    @property
    def exact_bits(self) -> bool:
        return self.inner.exact_bits

    def among(self, num_ranks: int, numel: int) -> Compressor:
        raise ValueError(
            f"{self} compares a sample with its last visit, and gradients belong to no sample: it is for the "
            f"activations of a thinwire.PipelineStage. For gradients take {self.inner}, or ef({self.inner})"
        )

    def wire_bytes(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> int:
        """Of every visit but the first."""
        return self.inner.wire_bytes(shape, dtype)

    def roundtrip(self, x: Tensor, key: int = 0) -> Tensor:
        """Of a first visit: ``x`` itself."""
        check_dtype(x.dtype, self)
        return x.detach().to(torch.float32, copy=True)

    def __str__(self) -> str:
        return f"{self.spec_name}({self.inner})"


def direct(inner: Coded) -> Coded:
    """``inner`` on the activations themselves (DirectQ, the baseline of S0): the word that says it is not `Delta`."""
    check_stateless(inner)
    return inner


def check_stateless(inner: Any) -> None:
    """Raise unless a compressor's messages have a size known beforehand and need no state of a parameter."""
    if not isinstance(inner, Coded) or inner.slots:
        raise TypeError(
            f"{inner} cannot code activations: that takes a compressor whose bytes are decoded by themselves, such as "
            "maxabs(bits=4), minmax(bits=4) or topk(density=0.2) | maxabs(bits=8)"
        )
    if inner.size != "fixed":
        raise ValueError(
            f"{inner} cannot code activations: both sides of a stage boundary know a message's size beforehand. "
            "topk(density=0.2) has one"
        )
