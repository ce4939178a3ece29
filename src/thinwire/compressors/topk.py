"""The largest elements, and nothing else."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.compressors.checks import check_choice, check_share
from thinwire.compressors.pieces import Key, LayerState, Piece, Segments, Slot, State
from thinwire.compressors.sparse import Picked, Sparsifier
from thinwire.kernels import derive_key, site_id

_BINS = 2048
_BIN_SHIFT = 20


@dataclass(frozen=True)
class TopK(Sparsifier):
    """The ``ceil(density · d)`` elements of each layer with the largest magnitude (S3, 2.2; Aji, Heafield 2017).

    Of elements alike the first. ``select=sampled`` guesses their least magnitude from a sample of the layer: at most as
    many elements are sent, a few per cent fewer at times, and what is sent is larger than what is not. Biased: a plan
    puts error feedback around it unless ``feedback=False``.
    """

    spec_name: ClassVar[str] = "topk"

    density: float = field(default=0.01, metadata={"shown": True})
    select: Literal["exact", "sampled"] = "exact"
    feedback: bool = True

    def __post_init__(self) -> None:
        check_share("density", self.density)
        check_choice("select", self.select, ("exact", "sampled"))

    @property
    def wants_feedback(self) -> bool:
        return self.feedback

    def room(self, numel: int) -> int:
        return min(numel, math.ceil(self.density * numel))

    def pick(self, x: Tensor, piece: Piece, *, key: Key, state: State | None) -> Picked:
        sampled, draw = self.select == "sampled", derive_key(key.own, site_id(piece.name))
        return Picked(
            *kernels.select_topk(x, piece.start, piece.numel, self.room(piece.numel), sampled=sampled, key=draw)
        )

    def rule(self, x: Tensor, segments: Segments, *, key: Key, state: State | None) -> dict[str, Any]:
        if self.select == "exact":
            return {}
        return {"sample_keys": [derive_key(key.own, site_id(piece.name)) for piece in segments.pieces]}


@dataclass(frozen=True)
class Threshold(Sparsifier):
    """All elements of a magnitude above ``lam`` (Rethink-GS: Sahu et al. 2021).

    How many that are is not known beforehand: ranks tell each other one size a bucket. There is room for a share
    ``capacity`` of each layer; if there are more, the largest go, the others are counted and stay with error feedback,
    which a plan puts around it unless ``feedback=False``.
    """

    spec_name: ClassVar[str] = "threshold"

    lam: float = field(default=0.01, metadata={"shown": True})
    capacity: float = 0.1
    feedback: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.lam, int | float) or not 0 <= self.lam < math.inf:
            raise ValueError(f"lam must be at least 0 and finite, not {self.lam!r}: it is a magnitude")
        check_share("capacity", self.capacity)

    @property
    def size(self) -> Literal["fixed", "bounded"]:
        return "bounded"

    @property
    def wants_feedback(self) -> bool:
        return self.feedback

    def room(self, numel: int) -> int:
        return min(numel, math.ceil(self.capacity * numel))

    def pick(self, x: Tensor, piece: Piece, *, key: Key, state: State | None) -> Picked:
        # Gradients come loss_scale times as large; lam is in their own units.
        lam = self.lam * (state.loss_scale if state else 1.0)
        return Picked(*kernels.select_threshold(x, piece.start, piece.numel, lam, self.room(piece.numel)))

    def rule(self, x: Tensor, segments: Segments, *, key: Key, state: State | None) -> dict[str, Any]:
        lam = self.lam * (state.loss_scale if state else 1.0)
        reach = int(kernels.magnitude_keys(torch.tensor([lam])))
        return {"asked": torch.full((len(segments),), reach, dtype=torch.int32, device=x.device)}


@dataclass(frozen=True)
class GlobalTopK(Sparsifier):
    """The largest ``density · D`` elements of all layers together, ``D`` in all, on each rank.

    Layers leave while others are still being computed, so the least magnitude is that of the step before: each step
    counts magnitudes in steps of an eighth of a power of two, and their sum over all layers gives the next one's. The
    first step takes each layer's own. A layer has room for ``capacity`` times its share; what finds none is counted and
    stays with error feedback, which a plan puts around it unless ``feedback=False``.
    """

    spec_name: ClassVar[str] = "globaltopk"

    density: float = field(default=0.01, metadata={"shown": True})
    capacity: float = 8.0
    feedback: bool = True

    def __post_init__(self) -> None:
        check_share("density", self.density)
        if not isinstance(self.capacity, int | float) or not 1 <= self.capacity < math.inf:
            raise ValueError(f"capacity must be at least 1 (times a layer's share), not {self.capacity!r}")

    @property
    def size(self) -> Literal["fixed", "bounded"]:
        return "bounded"

    @property
    def wants_feedback(self) -> bool:
        return self.feedback

    @property
    def slots(self) -> tuple[Slot, ...]:
        return (
            Slot("histogram", torch.int32, shape=lambda layer: (_BINS,)),
            Slot("threshold", shape=lambda layer: (1,)),
        )

    def room(self, numel: int) -> int:
        return min(numel, math.ceil(self.capacity * self.density * numel))

    def pick(self, x: Tensor, piece: Piece, *, key: Key, state: State | None) -> Picked:
        assert state is not None, "the threshold is kept in a slot"
        of = state.layers[piece.name]
        of.next["histogram"].copy_(kernels.abs_histogram(x, piece.start, piece.numel))
        of.next["threshold"].copy_(of.now["threshold"])
        least = float(of.now["threshold"]) * state.loss_scale
        if least == 0.0:
            share = min(piece.numel, math.ceil(self.density * piece.numel))
            return Picked(*kernels.select_topk(x, piece.start, piece.numel, share))
        return Picked(*kernels.select_threshold(x, piece.start, piece.numel, least, self.room(piece.numel)))

    def rule(self, x: Tensor, segments: Segments, *, key: Key, state: State | None) -> dict[str, Any]:
        assert state is not None, "the threshold is kept in a slot"
        layers = [state.layers[piece.name] for piece in segments.pieces]
        for of, counts in zip(layers, kernels.rows_histograms(x, segments.table), strict=True):
            of.next["histogram"].copy_(counts)
            of.next["threshold"].copy_(of.now["threshold"])
        least = torch.cat([of.now["threshold"] for of in layers]) * state.loss_scale

        def limits() -> Tensor:
            sizes = [piece.numel for piece in segments.pieces]
            shares = [min(numel, math.ceil(self.density * numel)) for numel in sizes]
            return torch.tensor([shares, [self.room(numel) for numel in sizes]], dtype=torch.int32).to(x.device)

        shares, rooms = segments.table.kept((self, x.device), limits)
        first = least == 0.0
        asked = torch.where(first, 0, kernels.magnitude_keys(least))
        return {"asked": asked, "limits": torch.where(first, shares, rooms)}

    @property
    def settles(self) -> bool:
        return True

    def end_step(self, layers: Sequence[LayerState], loss_scale: float) -> None:
        """Give all layers the least magnitude of this step's largest elements."""
        counts = torch.stack([of.next["histogram"] for of in layers]).sum(0, dtype=torch.int64)
        # In tensors, so that nobody waits where they lie on a device.
        wanted = torch.ceil(self.density * counts.sum().double())
        from_top = counts.flip(0).cumsum(0)
        bin = (_BINS - 1 - (from_top < wanted).sum()).clamp(min=1).to(torch.int32)
        least = (bin << _BIN_SHIFT).view(1).view(torch.float32) / loss_scale
        for of in layers:
            of.next["threshold"].copy_(least)
