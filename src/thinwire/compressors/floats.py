"""Floats of few bits: signs and exponents alone, or a format for a given range that uses all of its codes."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.arguments import check_choice, check_int
from thinwire.compressors._core.coded import Coded
from thinwire.compressors._core.compressor import Count, Traits
from thinwire.compressors._core.mixins import Learned, Saturating
from thinwire.compressors._core.segments import CodecCall, Segments
from thinwire.compressors._core.slots import Slot
from thinwire.kernels import rangefloat_eps

_HEADROOM = 2.0
_LEAST_RANGE, _MOST_RANGE = 2.0**-60, 2.0**127
_SAMPLE = 1 << 14
_USUAL_EXPONENT_BITS = 5
"""Bits of sign and exponent of the format that the search for a mantissa begins with."""
_FORMAT = Slot("format", shape=lambda layer: (2,), shared=True, learned=True)


@dataclass(frozen=True)
class Natural(Coded, Saturating):
    """Natural compression (Horváth et al. 2019): a sign and a power of two, in one byte an element.

    A value x becomes ``sign(x) · 2^(e + b)`` with ``e = floor(log2 |x|)`` and ``b ~ Bernoulli((|x| − 2^e) / 2^e)``.
    Unbiased; the variance is at most ``x²/8``. Magnitudes above 2^18 saturate and are counted, and those below 2^-108
    are received as zero; with a loss scale these limits are those of the unscaled values.
    """

    spec_name: ClassVar[str] = "natural"

    @property
    def traits(self) -> Traits:
        return Traits(unbiased=True, keeps_constants=False, largest=2.0**18, absolute=True)

    @property
    def grain(self) -> int:
        return kernels.bucketed_grain(1)

    def payload_bytes(self, numel: int, dtype: torch.dtype) -> int:
        return kernels.natural_bytes(numel)

    def encode(self, x: Tensor, message: Tensor, call: CodecCall) -> None:
        kernels.natural_encode(x, call.table, message, key=call.key.own, scale=call.loss_scale)

    def decode(self, message: Tensor, y: Tensor, call: CodecCall, *, add: bool = False) -> None:
        kernels.natural_decode(message, call.table, y, add=add, scale=call.scale)

    def limits(self, message: Tensor, segments: Segments) -> tuple[Count, Count]:
        return saturated(message, segments), 0


def saturated(message: Tensor, segments: Segments) -> Count:
    """Return how many values saturated, from the headers of a message."""
    if kernels.asynchronous(message):
        return kernels.header_words(message, segments.table, 1).sum()
    return sum(int(message[p.payload + 4 : p.payload + 8].view(torch.int32)) for p in segments.pieces if p.numel)


@dataclass(frozen=True)
class RangeFloat(Coded, Learned, Saturating):
    """Range-based float (Wang et al. 2020, section 3.2.1, Algorithm 1): ``bits`` bits, ``mantissa`` of them mantissa.

    The other bits number exponents downwards from the upper end of the range, so that the smallest magnitude ``eps``
    has a closed form. Values below it round to ``eps`` or zero; values above the range saturate and are counted.
    ``range=auto`` is twice the largest magnitude of the layer's gradient, measured in its first step with a gradient
    and in the steps ``learn_at``; ``range=1.0`` fixes it, as in the paper's experiments. ``mantissa=auto`` has the
    least squared error on a sample. With a loss scale, ranges are those of the unscaled gradient.
    """

    spec_name: ClassVar[str] = "rangefloat"

    bits: int = field(default=10, metadata={"shown": True})
    mantissa: int | Literal["auto"] = field(default="auto", metadata={"shown": True})
    range: float | Literal["auto"] = "auto"
    rounding: Literal["nearest", "truncate", "stochastic"] = "nearest"
    learn_at: tuple[int, ...] = (0, 10, 100, 1000)

    def __post_init__(self) -> None:
        check_int("bits", self.bits, 3, 15)
        check_choice("rounding", self.rounding, ("nearest", "truncate", "stochastic"))
        if self.range != "auto" and not _LEAST_RANGE <= float(self.range) <= _MOST_RANGE:
            raise ValueError(f"range must be auto or between 2^-60 and 2^127, not {self.range!r}")
        if self.mantissa != "auto":
            check_int("mantissa", self.mantissa, 0, 22)
            rangefloat_eps(self.bits, self.mantissa, 1.0 if self.range == "auto" else self.range)

    @property
    def traits(self) -> Traits:
        unbiased = self.rounding == "stochastic" and self.range == "auto"
        largest = math.inf if self.range == "auto" else float(self.range)
        return Traits(unbiased=unbiased, keeps_constants=False, largest=largest, absolute=True)

    @property
    def grain(self) -> int:
        return kernels.bucketed_grain(1)

    @property
    def slots(self) -> tuple[Slot, ...]:
        return (_FORMAT,) if self.learns_at else ()

    @property
    def learns_at(self) -> tuple[int, ...]:
        # Without a format nothing can be sent: the first step is one of them.
        return tuple(sorted({0, *self.learn_at})) if "auto" in (self.range, self.mantissa) else ()

    def learn(self, values: Tensor, slots: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return {_FORMAT.name: torch.tensor(self.chosen(values), dtype=torch.float32, device="cpu")}

    def chosen(self, values: Tensor) -> tuple[float, float]:
        """Return the range and the bits of mantissa for a layer with these ``values`` (flat, fp32)."""
        finite = values[torch.isfinite(values)]
        top = float(finite.abs().max()) * _HEADROOM if finite.numel() else 1.0
        top = min(max(top, _LEAST_RANGE), _MOST_RANGE) if self.range == "auto" else float(self.range)
        return top, best_mantissa(finite, top, self.bits, self.rounding) if self.mantissa == "auto" else self.mantissa

    def payload_bytes(self, numel: int, dtype: torch.dtype) -> int:
        return kernels.rangefloat_bytes(numel, self.bits)

    def encode(self, x: Tensor, message: Tensor, call: CodecCall) -> None:
        params = self._formats(x, call)
        kernels.rangefloat_encode(
            x, call.table, message, params, bits=self.bits, rounding=self.rounding, key=call.key.own
        )

    def _formats(self, x: Tensor, call: CodecCall) -> Tensor:
        """Return the range, in units of ``x``, and the bits of mantissa of each piece: fp32 [pieces, 2]."""
        if self.learns_at:
            assert call.state is not None, "a range that is learned is kept in a slot"
            formats = torch.stack([call.state.layers[piece.name].now[_FORMAT.name] for piece in call.pieces])
            formats = self._completed(formats, x, call)
        else:
            formats = self._fixed(x, call)
        if call.loss_scale == 1.0:
            return formats
        ranges, mantissas = formats.unbind(1)
        return torch.stack(((ranges * call.loss_scale).clamp(_LEAST_RANGE, _MOST_RANGE), mantissas), 1)

    def _completed(self, formats: Tensor, x: Tensor, call: CodecCall) -> Tensor:
        """Return ``formats`` with one for pieces whose layer has learned none: no rank had a gradient of it yet, under
        FSDP2 not this one."""
        unknown = formats[:, 0] == 0
        if kernels.asynchronous(x):
            # Layers of zeros, for which any format will do.
            return torch.where(unknown[:, None], self._fixed(x, call), formats)
        for at in unknown.nonzero()[:, 0].tolist():
            values = x[call.pieces[at].elements].float() / call.loss_scale
            formats[at] = torch.tensor(self.chosen(values), dtype=torch.float32, device="cpu")
        return formats

    def _fixed(self, x: Tensor, call: CodecCall) -> Tensor:
        top = 1.0 if self.range == "auto" else float(self.range)
        mantissa = max(0, self.bits - _USUAL_EXPONENT_BITS) if self.mantissa == "auto" else self.mantissa
        row = torch.tensor([[top, float(mantissa)]], dtype=torch.float32, device="cpu")
        return call.table.kept((self, x.device), lambda: row.repeat(len(call.segments), 1).to(x.device))

    def decode(self, message: Tensor, y: Tensor, call: CodecCall, *, add: bool = False) -> None:
        kernels.rangefloat_decode(message, call.table, y, bits=self.bits, add=add, scale=call.scale)

    def limits(self, message: Tensor, segments: Segments) -> tuple[Count, Count]:
        return saturated(message, segments), 0


def best_mantissa(values: Tensor, top: float, bits: int, rounding: str) -> int:
    """Return the bits of mantissa with the least squared error on a sample of ``values`` (flat, finite).

    A mantissa of one bit more halves the errors of large values and raises the least magnitude, so the error falls and
    then grows: from one that is usually best the search goes where it falls, as a rule in three or four trials.
    """
    sample = values[:: max(1, values.numel() // _SAMPLE)].float().contiguous()
    table = kernels.Table(torch.tensor([[0, sample.numel(), 0, 0, 0]], dtype=torch.int64, device="cpu"))
    message = torch.zeros(kernels.rangefloat_bytes(sample.numel(), bits), dtype=torch.uint8, device=values.device)
    received = torch.empty_like(sample)

    @functools.cache
    def error(mantissa: int) -> float:
        try:
            rangefloat_eps(bits, mantissa, top)
        except ValueError:
            return math.inf
        params = torch.tensor([[top, float(mantissa)]], dtype=torch.float32, device=values.device)
        kernels.rangefloat_encode(sample, table, message, params, bits=bits, rounding=rounding, key=0)
        kernels.rangefloat_decode(message, table, received, bits=bits)
        return float(torch.linalg.vector_norm(received - sample))

    best = max(0, bits - _USUAL_EXPONENT_BITS)
    while best and error(best - 1) < error(best):
        best -= 1
    while best + 1 < bits and error(best + 1) <= error(best):
        best += 1
    return best
