"""Sparsification in the frequency domain."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.arguments import check_choice, check_int, check_number
from thinwire.compressors._core.coded import Coded
from thinwire.compressors._core.compressor import Compressor, Traits
from thinwire.compressors._core.mixins import Indexed, Scheduled, stage_at, stages
from thinwire.compressors._core.segments import CodecCall, Piece, Segments
from thinwire.compressors._core.slots import LayerState, Slot
from thinwire.compressors._core.sparsifier import HEADER, check_place, put_floats
from thinwire.compressors.floats import best_mantissa

_FP32 = 32
_WHOLE = 2**31
"""Number of elements of a block larger than any layer."""
_GRID = 64
_LEAST_RANGE = 2.0**-60
_SEARCH_EVERY = 50
"""Number of messages of a layer with the same mantissa."""
_MANTISSA = Slot("mantissa", shape=lambda layer: (1,), optional=True)
"""Bits of mantissa times `_SEARCH_EVERY`, plus the number of further messages of the layer that use them."""


@dataclass(frozen=True)
class FFT(Coded, Scheduled, Indexed):
    """FFT sparsification (Wang et al. 2020, section 3.1): the share ``1 − θ`` of largest components of the spectrum.

    The flat layer is cut into blocks of ``block`` elements (``whole``: one block, as in the paper), and each is
    transformed by an orthonormal real FFT. The ``ceil((1 − θ)·C)`` components of largest magnitude out of all C are
    kept. Their real and imaginary parts are sent as range-based floats of ``bits`` bits (`RangeFloat`; 32: in fp32)
    whose range is that of the kept components, with a bitmap or a list of indices, whichever is shorter. ``cast=True``
    rounds to fp16 first, as in the paper. Messages are added in the frequency domain, and one inverse transform gives
    the mean. ``mantissa=auto`` has the least squared error on a sample of a message; the next 49 messages of the layer
    keep it. Where no state is kept, as in process groups, it is chosen for each message.

    ``theta`` is constant, or stepwise: ``((0, 0.9), (1000, 0.0))``, counted from the first compressed step, or
    ``diminishing``: ``θ = sqrt(lipschitz · learning rate)`` (Theorem 3.5), which needs ``compress(optimizer=...)``. The
    theorem holds for θ² ≤ ¼ and a learning rate of at most 1/(4L), which excludes the paper's 0.85. Biased; a plan adds
    error feedback unless ``feedback=False``, as in the paper's experiments.
    """

    spec_name: ClassVar[str] = "fft"

    theta: float | tuple[tuple[int, float], ...] | Literal["diminishing"] = field(
        default=0.85, metadata={"shown": True}
    )
    bits: int = field(default=10, metadata={"shown": True})
    block: int | Literal["whole"] = 512
    mantissa: int | Literal["auto"] = "auto"
    cast: bool = False
    lipschitz: float = 1.0
    feedback: bool = True

    def __post_init__(self) -> None:
        if self.bits != _FP32:
            check_int("bits (or 32 for fp32)", self.bits, 4, 15)
        if self.block != "whole":
            check_int("block (or whole)", self.block, 2)
        if self.mantissa != "auto":
            check_int("mantissa", self.mantissa, 0, self.bits)
            if self.bits != _FP32:
                # All ranges allow the same mantissas as 1.
                kernels.rangefloat_eps(self.bits, self.mantissa, 1.0)
        if isinstance(self.theta, str):
            check_choice("theta", self.theta, ("diminishing",))
        for share in [share for _, share in self._stages]:
            check_number("theta", share, low=0, below=1)
        check_number("lipschitz", self.lipschitz, above=0)

    @property
    def _stages(self) -> tuple[tuple[int, float], ...]:
        """Pairs of a step and the theta from that step on."""
        if isinstance(self.theta, str):
            return ((0, 0.0),)
        return stages("theta", self.theta)

    @property
    def traits(self) -> Traits:
        # Sums of squares, and twice the largest component, must stay finite in fp32.
        largest = 65504.0 if self.cast else 2.0**60
        return Traits(exact_bits=False, dense=False, wants_feedback=self.feedback, largest=largest)

    @property
    def slots(self) -> tuple[Slot, ...]:
        return (_MANTISSA,) if self.mantissa == "auto" and self.bits != _FP32 else ()

    def at_step(self, step: int, learning_rate: float | None) -> Compressor:
        if not isinstance(self.theta, str | tuple):
            return self
        if isinstance(self.theta, tuple):
            return replace(self, theta=stage_at(self._stages, step))
        if learning_rate is None:
            raise ValueError(f"{self} follows the learning rate: pass optimizer= to thinwire.compress()")
        # On a grid, rounded down, because ranks must agree on new message sizes whenever theta changes.
        share = math.sqrt(self.lipschitz * learning_rate)
        return replace(self, theta=min(math.floor(share * _GRID), _GRID - 1) / _GRID)

    @property
    def _block(self) -> int:
        return _WHOLE if self.block == "whole" else self.block

    def _sizes(self, numel: int) -> tuple[int, int]:
        """Return the number of components of a layer of ``numel`` elements, and how many are kept."""
        components = kernels.num_components(numel, self._block)
        return components, max(1, math.ceil((1 - self._stages[0][1]) * components - 1e-9))

    def payload_bytes(self, numel: int, dtype: torch.dtype) -> int:
        if not numel:
            return 0
        kept = self._sizes(numel)[1]
        values = kernels.align(8 * kept) if self.bits == _FP32 else kernels.rangefloat_bytes(2 * kept, self.bits)
        return HEADER + self._index_bytes(numel) + values

    def _filled(self, segments: Segments) -> Segments:
        return segments.table.kept((self, "filled"), lambda: Segments.build([p for p in segments.pieces if p.numel]))

    def _kept(self, filled: Segments) -> tuple[int, ...]:
        return filled.table.kept((self, "kept"), lambda: tuple(self._sizes(piece.numel)[1] for piece in filled.pieces))

    def _parts(self, filled: Segments) -> Segments:
        """Return the places of the kept components' parts: end to end in a flat tensor, and in the message."""

        def build() -> Segments:
            placed, start = [], 0
            for piece, kept in zip(filled.pieces, self._kept(filled), strict=True):
                at = piece.payload + HEADER + self._index_bytes(piece.numel)
                placed.append(Piece(piece.site, start, 2 * kept, 0, at))
                start += 2 * kept
            return Segments.build(placed)

        return filled.table.kept((self, "parts"), build)

    def _index_bytes(self, numel: int) -> int:
        components, kept = self._sizes(numel)
        return kernels.index_bytes(components, kept)

    def index_bytes(self, message: Tensor, piece: Piece) -> int:
        return self._index_bytes(piece.numel) if piece.numel else 0

    def spectrum(self, x: Tensor) -> Tensor:
        """Return the components of a flat layer, block by block, as complex64."""
        block = kernels.block_size(x.numel(), self._block)
        return kernels.spectrum(x.to(torch.float16) if self.cast else x, block)

    def encode(self, x: Tensor, message: Tensor, call: CodecCall) -> None:
        filled = self._filled(call.segments)
        places = self._parts(filled)
        parts = torch.empty(places.table.num_elements, dtype=torch.float32, device=x.device)
        values, kept = x.to(torch.float16) if self.cast else x, self._kept(filled)
        tops = kernels.spectrum_encode(values, filled.table, message, parts, block=self._block, kept=kept)
        if self.bits == _FP32:
            for place in places.pieces:
                put_floats(message, place.payload, parts[place.elements], place.numel)
            return
        formats = []
        for place, top in zip(places.pieces, tops, strict=True):
            layer = call.state and call.state.layers.get(place.name)
            finite = not math.isnan(top)
            top = max(top, _LEAST_RANGE) if finite else 1.0  # what is not finite is received as NaN in any format
            formats.append((top, float(self._mantissa(parts, place, top, finite, layer))))
        if formats:
            params = torch.tensor(formats, dtype=torch.float32, device=x.device)
            kernels.rangefloat_encode(parts, places.table, message, params, bits=self.bits, rounding="nearest", key=0)

    def _mantissa(self, parts: Tensor, place: Piece, top: float, finite: bool, layer: LayerState | None) -> int:
        if self.mantissa != "auto":
            return self.mantissa
        mantissa, messages_left = divmod(round(layer.now[_MANTISSA.name].item()), _SEARCH_EVERY) if layer else (0, 0)
        if not messages_left:
            mantissa, messages_left = best_mantissa(parts[place.elements], top, self.bits, "nearest"), _SEARCH_EVERY
        if layer:
            layer.next[_MANTISSA.name].fill_(mantissa * _SEARCH_EVERY + (messages_left - 1 if finite else 0))
        return mantissa

    def decode(self, message: Tensor, y: Tensor, call: CodecCall, *, add: bool = False) -> None:
        check_place(message, call.pieces, y, self.payload_bytes)
        self._restore([message], y, call, add=add)

    def mean(self, messages: Sequence[Tensor], y: Tensor, call: CodecCall) -> None:
        for message in messages:
            check_place(message, call.pieces, y, self.payload_bytes)
        self._restore(messages, y, call, add=False)

    def _restore(self, messages: Sequence[Tensor], y: Tensor, call: CodecCall, *, add: bool) -> None:
        """Set layers to the scaled sum of ``messages``, which are added in the frequency domain, or add that."""
        filled = self._filled(call.segments)
        received = [kernels.Received(message, self._received(message, self._parts(filled))) for message in messages]
        how = {"block": self._block, "kept": self._kept(filled), "add": add, "scale": call.scale}
        kernels.spectrum_decode(received, filled.table, y, **how)

    def _received(self, message: Tensor, places: Segments) -> Tensor:
        parts = torch.empty(places.table.num_elements, dtype=torch.float32, device=message.device)
        if self.bits == _FP32:
            kernels.raw_decode(message, places.table, parts)
        else:
            kernels.rangefloat_decode(message, places.table, parts, bits=self.bits)
        return parts
