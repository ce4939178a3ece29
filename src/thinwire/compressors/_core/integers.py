"""The base of compressors that round gradients to integers, which a native all-reduce adds without overflow."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import ClassVar, Literal, Self

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.arguments import check_choice, check_int
from thinwire.compressors._core.bucketed import Packed
from thinwire.compressors._core.compressor import Count, Traits
from thinwire.compressors._core.mixins import Clipping, WorldSized
from thinwire.compressors._core.segments import Part, SumCall
from thinwire.compressors._core.slots import Slot, State, layer_slots
from thinwire.compressors._core.summed import Summed, SumShape
from thinwire.kernels import Table, align, int_decode, int_round, site_id

_RUN = 1 << 18
_SHORT = 1 << 16
"""Number of elements below which they are added up in one call, in int64."""
_EXACT = 1 << 10
"""Number of squares of int8 values whose sum is below 2^24, which fp32 represents exactly."""


def integer_square_sum(q: Tensor) -> Tensor:
    """Return ``‖q‖²`` of a flat int8 or int32 tensor, exact but for its last roundings to fp64: a scalar."""
    if q.dtype == torch.int8:
        return _int8_square_sum(q)
    high, cross, low = torch.zeros(3, dtype=torch.int64, device=q.device)
    for run in q.split(_RUN):
        wide = run.to(torch.int64)
        top, bottom = wide >> 16, wide & 0xFFFF
        high += (top * top).sum()
        cross += (top * bottom).sum()
        low += (bottom * bottom).sum()
    return high.double() * 2.0**32 + cross.double() * 2.0**17 + low.double()


def _int8_square_sum(q: Tensor) -> Tensor:
    total = torch.zeros((), dtype=torch.float64, device=q.device)
    for run in q.split(_RUN):
        if run.numel() < _SHORT:
            wide = run.to(torch.int32)
            total += wide.mul_(wide).sum()
            continue
        square = run.to(torch.float32)
        square.mul_(square)
        whole = run.numel() // _EXACT * _EXACT
        total += square[:whole].view(-1, _EXACT).sum(1).sum(dtype=torch.float64)
        total += square[whole:].sum(dtype=torch.float64)
    return total


_DTYPES = {2: torch.int8, 4: torch.int8, 8: torch.int8, 32: torch.int32}
_LEAST, _MOST = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max


@dataclass(frozen=True)
class Integers(Summed, WorldSized, Clipping):
    """A compressor to ``Int(α·g)``, an integer for each element, with one scale α for each layer, which all ranks know.

    A rank's integers are at most ``(2^(bits−1) − 1) / n`` in magnitude, so that the sum over n ranks fits. Larger ones
    are clipped and counted. Layers are padded to a multiple of 64 bytes.

    With 2 or 4 bits a rank's integers are at most ``2^(bits−1) − 1``, whatever n is, and their sums travel with as many
    bits as they need: see `Packed`.
    """

    spec_name: ClassVar[str] = "integers"
    widths: ClassVar[tuple[int, ...]] = (8, 32)

    bits: int = field(default=8, metadata={"shown": True})
    rounding: Literal["random", "determ"] = "random"
    num_ranks: int = field(default=1, kw_only=True)
    """The world size; the handle sets it."""
    numel: int = field(default=0, kw_only=True)
    """Elements of all layers together; 0 treats each layer by itself. The handle sets it."""

    def __post_init__(self) -> None:
        check_choice("bits", self.bits, self.widths)
        check_choice("rounding", self.rounding, ("random", "determ"))
        check_int("num_ranks", self.num_ranks, 1)
        check_int("numel", self.numel, 0)
        limit, each = torch.iinfo(self.sum_dtype).max, max(1, self.clip)
        if each * self.num_ranks > limit:
            raise ValueError(
                f"{self.spec_name}(bits={self.bits}) cannot serve {self.num_ranks} ranks: {max(8, self.bits)} bits "
                f"hold the sum of {each} from each of {limit // each}, and no more. Take {self.spec_name}(bits=32), "
                "which serves any number"
            )

    @property
    def clip(self) -> int:
        """Largest magnitude of a rank's integers, such that the sum over all ranks fits."""
        most = 2 ** (self.bits - 1) - 1
        return most if self.bits < 8 else most // self.num_ranks

    @property
    def traits(self) -> Traits:
        # The error of rounding to nearest never exceeds the value; that of rounding a small one up at random does.
        return Traits(
            unbiased=self.rounding == "random",
            keeps_constants=False,
            contracts=self.rounding == "determ",
            takes_every_layer=True,
        )

    @property
    def slots(self) -> tuple[Slot, ...]:
        return (Slot("clipped", torch.int64, shape=lambda layer: (1,), scratch=True),)

    def for_world(self, num_ranks: int, numel: int) -> Self:
        return replace(self, num_ranks=num_ranks, numel=numel)

    @property
    def sum_dtype(self) -> torch.dtype:
        return _DTYPES[self.bits]

    def padded(self, numel: int) -> int:
        size = self.sum_dtype.itemsize
        return align(numel * size) // size

    def sum_shape(self, numel: int) -> SumShape:
        """Return the part that ``numel`` integers add, padding included."""
        packed = Packed(self.clip, self.num_ranks) if self.bits < 8 else None
        return SumShape(numel, self.sum_dtype, packed=packed)

    def put(self, x: Tensor, parts: Sequence[Part], scales: Tensor, out: Tensor, call: SumCall) -> None:
        """Write ``Int(scale·x)``, clipped, into ``out`` and count what is clipped. ``scales``: fp32 [parts]."""
        table = _table(parts, out.element_size())
        nearest = self.rounding == "determ"
        clipped = int_round(x, table, scales, out, clip=self.clip, key=call.key.own, nearest=nearest)
        for at, (piece, _) in enumerate(parts):
            call.slots(piece.name).now["clipped"].copy_(clipped[at])

    def get(self, total: Tensor, x: Tensor, parts: Sequence[Part], scales: Tensor, finite: Tensor) -> None:
        """Set the layers of ``x`` to ``total / (n·scale)``, or to NaN where not ``finite`` (bool [parts])."""
        factors = fp32(1.0 / (scales.double() * self.num_ranks))
        int_decode(total, _table(parts, total.element_size()), x, torch.where(finite, factors, math.nan))

    def subtract(self, rest: Tensor, parts: Sequence[Part], scales: Tensor, call: SumCall) -> None:
        """Subtract ``Int(scale·rest) / scale`` from the layers of ``rest``, with the integers of `put`."""
        if parts:
            integers, sent = torch.zeros_like(call.buffers[-1]), torch.empty_like(rest)
            self.put(rest, parts, scales, integers, call)
            int_decode(integers, _table(parts, integers.element_size()), sent, fp32(1.0 / scales.double()))
            for piece, _ in parts:
                rest[piece.elements].sub_(sent[piece.elements])

    def clipped(self, parts: Sequence[Part], state: State | None) -> Count:
        counts = [layer_slots(state, piece.name).now["clipped"] for piece, _ in parts]
        return torch.cat(counts).sum() if kernels.asynchronous(counts[0]) else sum(int(count) for count in counts)

    def sizes(self, parts: Sequence[Part], device: torch.device) -> Tensor:
        """Return the elements of each layer, fp64 [parts]."""
        numels = [piece.numel for piece, _ in parts]
        table = _table(parts, self.sum_dtype.itemsize)
        return table.kept(("sizes", device), lambda: torch.tensor(numels, dtype=torch.float64, device="cpu").to(device))


def fp32(values: Tensor) -> Tensor:
    """Return positive fp64 values as normal fp32 ones, so that neither they nor their inverses become 0 or Inf."""
    return values.clamp(_LEAST, _MOST).to(torch.float32)


def _table(parts: Sequence[Part], size: int) -> Table:
    return _cached(tuple((p.start, p.numel, where.start * size, p.name) for p, where in parts))


@lru_cache(maxsize=1024)
def _cached(places: tuple[tuple[int, int, int, str], ...]) -> Table:
    rows = [(start, numel, 0, at, site_id(name)) for start, numel, at, name in places]
    return Table(torch.tensor(rows, dtype=torch.int64, device="cpu").reshape(len(rows), 5))
