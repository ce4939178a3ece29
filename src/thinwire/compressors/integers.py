"""What gradients rounded to integers have in common: codes that a native integer all-reduce adds without overflow."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import ClassVar, Literal, Self

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.compressors.base import Count, Summed
from thinwire.compressors.checks import check_choice, check_int
from thinwire.compressors.pieces import Key, Part, Slot, State
from thinwire.kernels import Table, align, int_decode, int_round, site_id

_DTYPES = {8: torch.int8, 32: torch.int32}
_LEAST, _MOST = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max


@dataclass(frozen=True)
class Integers(Summed):
    """``Int(α·g)``, one integer an element, with one α for each layer that all ranks know without being told.

    A rank's integers are at most ``(2^(bits−1) − 1) / n`` in magnitude, so that the sum of n ranks fits: what is larger
    is clipped and counted. Layers are padded to a multiple of 64 bytes.
    """

    spec_name: ClassVar[str] = "integers"

    bits: int = field(default=8, metadata={"shown": True})
    rounding: Literal["random", "determ"] = "random"
    num_ranks: int = field(default=1, kw_only=True)
    """Of the world that it serves: the Wire fills it in."""
    numel: int = field(default=0, kw_only=True)
    """Elements of all its layers; 0 takes each layer by itself. The Wire fills it in."""

    def __post_init__(self) -> None:
        if self.bits not in _DTYPES:
            raise ValueError(f"bits must be 8 or 32, not {self.bits!r}: a native all-reduce adds these")
        check_choice("rounding", self.rounding, ("random", "determ"))
        check_int("num_ranks", self.num_ranks, 1)
        check_int("numel", self.numel, 0)
        if self.clip < 1:
            raise ValueError(
                f"{self.spec_name}(bits={self.bits}) cannot serve {self.num_ranks} ranks: int{self.bits} cannot hold "
                f"the sum of 1 from each. Take {self.spec_name}(bits=32), which serves any number"
            )

    @property
    def clip(self) -> int:
        """Largest magnitude of a rank's integers: the sum over all ranks fits then."""
        return (2 ** (self.bits - 1) - 1) // self.num_ranks

    @property
    def unbiased(self) -> bool:
        """Of random rounding it is, up to what is clipped."""
        return self.rounding == "random"

    @property
    def keeps_constants(self) -> bool:
        return False

    @property
    def contracts(self) -> bool:
        # To the nearest integer nothing errs by more than itself; a small value rounded up at random does.
        return self.rounding == "determ"

    @property
    def takes_every_layer(self) -> bool:
        """So that no float is left to send; a layer's α suits its size."""
        return True

    @property
    def slots(self) -> tuple[Slot, ...]:
        return (Slot("clipped", torch.int64, shape=lambda layer: (1,), scratch=True),)

    def among(self, num_ranks: int, numel: int) -> Self:
        return replace(self, num_ranks=num_ranks, numel=numel)

    def part_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return _DTYPES[self.bits]

    def padded(self, numel: int) -> int:
        """Elements that so many take in a sum."""
        size = self.bits // 8
        return align(numel * size) // size

    def put(self, x: Tensor, parts: Sequence[Part], scales: Tensor, out: Tensor, key: Key, state: State | None) -> None:
        """Write ``Int(scale·x)``, clipped, and note how many were; ``scales`` (parts,) fp32."""
        table = _table(parts, self.bits // 8)
        nearest = self.rounding == "determ"
        clipped = int_round(x, table, scales, out, clip=self.clip, key=key.own, nearest=nearest)
        for at, (piece, _) in enumerate(parts):
            slots_of(state, piece.name)["clipped"].copy_(clipped[at])

    def get(self, total: Tensor, x: Tensor, parts: Sequence[Part], scales: Tensor, finite: Tensor) -> None:
        """Set the layers in ``x`` to ``total / (n·scale)``, those that are not ``finite`` (parts,) to NaN."""
        factors = fp32(1.0 / (scales.double() * self.num_ranks))
        int_decode(total, _table(parts, self.bits // 8), x, torch.where(finite, factors, math.nan))

    def clipped(self, parts: Sequence[Part], state: State | None) -> Count | None:
        counts = [slots_of(state, piece.name)["clipped"] for piece, _ in parts]
        return torch.cat(counts).sum() if kernels.asynchronous(counts[0]) else sum(int(count) for count in counts)

    def sizes(self, parts: Sequence[Part], device: torch.device) -> Tensor:
        """Elements of each layer: fp64, (parts,)."""
        numels = [piece.numel for piece, _ in parts]
        table = _table(parts, self.bits // 8)
        return table.kept(("sizes", device), lambda: torch.tensor(numels, dtype=torch.float64).to(device))


def slots_of(state: State | None, name: str) -> Mapping[str, Tensor]:
    """The slots of a layer."""
    if state is None:
        raise ValueError("integers need the slots of their layers: pass state=")
    return state.layers[name].now


def fp32(values: Tensor) -> Tensor:
    """Positive fp64 values as normal fp32 ones, so that neither they nor their inverses are lost."""
    return values.clamp(_LEAST, _MOST).to(torch.float32)


def _table(parts: Sequence[Part], size: int) -> Table:
    return _cached(tuple((p.start, p.numel, where.start * size, p.name) for p, where in parts))


@lru_cache(maxsize=1024)
def _cached(places: tuple[tuple[int, int, int, str], ...]) -> Table:
    rows = [(start, numel, 0, at, site_id(name)) for start, numel, at, name in places]
    return Table(torch.tensor(rows, dtype=torch.int64).reshape(len(rows), 5))
