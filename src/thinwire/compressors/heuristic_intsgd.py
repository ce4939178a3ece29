"""SwitchML's integers: scaled by the largest gradient of all ranks, which costs a round of its own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from thinwire.compressors.base import Reduction
from thinwire.compressors.integers import Integers, fp32, slots_of
from thinwire.compressors.pieces import Key, Part, Slot, State

_ZERO, _LOWEST, _HIGHEST, _NOT_FINITE = -127, -126, 126, 127
"""Exponents fit into one byte: what is all zero and what is not finite have codes of their own."""


@dataclass(frozen=True)
class HeuristicIntSGD(Integers):
    """SwitchML's profiled scale (Sapio et al. 2021; S4, section 5.2): ``α = (2^(bits−1) − 1) / (n · 2^ceil(log2 M))``.

    ``M`` is the largest magnitude of a layer on any rank: an all-reduce of maxima tells its exponent, one integer a
    layer, before the integers can be sent. ``rounding`` is determ (to the nearest integer), as SwitchML has it, or
    random. It has no proof of convergence: one large value leaves few codes to all others.
    """

    spec_name: ClassVar[str] = "heuristic_intsgd"

    rounding: Literal["random", "determ"] = "determ"

    @property
    def rounds(self) -> int:
        return 2

    @property
    def largest(self) -> float:
        return 2.0**_HIGHEST

    @property
    def slots(self) -> tuple[Slot, ...]:
        return (Slot("exponent", torch.int32, shape=lambda layer: (1,), scratch=True), *super().slots)

    def operation(self, round: int) -> Reduction:
        return "sum" if round else "max"

    def part_numel(self, round: int, shape: Sequence[int]) -> int:
        numel = math.prod(shape)
        return 0 if not numel else self.padded(numel) if round else 1

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
        parts = [part for part in parts if part.piece.numel]
        if round and parts:
            self.put(x, parts, self._scales(parts, state), out, key, state)
            return
        for piece, where in parts:
            out[where] = _exponent(x[piece.elements])

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
        parts = [part for part in parts if part.piece.numel]
        if round and parts:
            self.get(total, x, parts, self._scales(parts, state), self._exponents(parts, state) != _NOT_FINITE)
            return
        for piece, where in parts:
            slots_of(state, piece.name)["exponent"].copy_(total[where])

    @staticmethod
    def _exponents(parts: Sequence[Part], state: State | None) -> Tensor:
        return torch.cat([slots_of(state, piece.name)["exponent"] for piece, _ in parts])

    def _scales(self, parts: Sequence[Part], state: State | None) -> Tensor:
        powers = torch.exp2(self._exponents(parts, state).clamp(_LOWEST, _HIGHEST).double())
        return fp32((2 ** (self.bits - 1) - 1) / (powers * self.num_ranks))


def _exponent(values: Tensor) -> Tensor:
    """``ceil(log2(max|values|))`` as an integer from −126 to 126, or a code."""
    low, high = torch.aminmax(values)
    largest = torch.maximum(-low, high).to(torch.float64)
    mantissa, exponent = torch.frexp(torch.where(torch.isfinite(largest), largest, 1.0))
    exponent = (exponent - (mantissa == 0.5).int()).clamp(_LOWEST, _HIGHEST)
    exponent = torch.where(largest == 0, _ZERO, exponent)
    return torch.where(torch.isfinite(largest), exponent, _NOT_FINITE)
