"""Coded compressors: their messages must be decoded to be added."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.compressors._core.compressor import Compressor, Wrapper, check_dtype
from thinwire.compressors._core.mixins import Bounded, find_mixin, first_state
from thinwire.compressors._core.segments import CodecCall, Key, Piece, Segments
from thinwire.kernels import Residual


@dataclass(frozen=True)
class Coded(Compressor):
    """A compressor whose messages must be decoded to be added. It needs `payload_bytes`, `encode` and `decode`.

    Its layers are reduced by a scatter-reduce-all-gather or another collective algorithm, or gathered by all ranks.
    """

    @property
    def grain(self) -> int | None:
        """Elements, a multiple of 128, at whose multiples a layer may be cut among owners; None if it stays whole, as
        by default."""
        return None

    @property
    def gathered(self) -> bool:
        """Whether all ranks gather and decode all messages, so that each value is encoded only once.

        This is so for layers that stay whole. For others, an owner adds up what ranks send and encodes the mean.
        """
        return self.grain is None and self.traits.plain_sum

    @abstractmethod
    def payload_bytes(self, numel: int, dtype: torch.dtype) -> int:
        """Return the bytes of the payload of ``numel`` elements with gradients of ``dtype``; an upper bound if bounded.

        Payloads start at multiples of 64 bytes, so it is a multiple of 64.
        """

    @abstractmethod
    def encode(self, x: Tensor, message: Tensor, call: CodecCall) -> None:
        """Write the payload of every segment of ``x`` into ``message``.

        Args:
            x: fp32, bf16 or fp16, flat.
            message: uint8, flat.
            call: the segments, the key of random draws, and the state.

        Raises:
            TypeError: the dtype of ``x`` or ``message`` is not supported.
            ValueError: a segment or a payload lies outside its tensor.
        """

    @abstractmethod
    def decode(self, message: Tensor, y: Tensor, call: CodecCall, *, add: bool = False) -> None:
        """Set every segment of ``y`` to its decoded payload times ``call.scale``, or add that to it.

        Any bytes of the right number decode to something. Shapes and dtypes are those of `encode`.

        Raises:
            ValueError: the message is too short for the segments, or a segment lies outside ``y``.
        """

    def reduce(self, messages: Sequence[Tensor], own: Tensor, out_message: Tensor, y: Tensor, call: CodecCall) -> None:
        """Encode ``call.scale · (own + Σ decode(messages))`` into ``out_message``, and decode that to ``y``.

        This is what the owner of a chunk does. The sum is taken in fp32 in the order of ``messages``; ``y`` may be
        ``own``.
        """
        total = torch.empty(own.numel(), dtype=torch.float32, device=own.device)
        self.add_up(messages, own, total, call)
        self.encode(total, out_message, call)
        self.decode(out_message, y, call._replace(scale=1.0))

    def add_up(self, messages: Sequence[Tensor], own: Tensor, total: Tensor, call: CodecCall) -> None:
        """Set the segments of ``total`` to ``call.scale · (own + Σ decode(messages))``, summed in fp32, in order."""
        sums = total if total.dtype == torch.float32 else torch.empty_like(total, dtype=torch.float32)
        before = kernels.before_sum(call.scale)
        kernels.rows_scale(own, call.table, sums, by=before)
        for message in messages:
            self.decode(message, sums, call._replace(scale=before), add=True)
        kernels.rows_scale(sums, call.table, total, by=call.scale / before)

    def mean(self, messages: Sequence[Tensor], y: Tensor, call: CodecCall) -> None:
        """Set the segments of ``y`` to ``call.scale · Σ decode(messages)``, summed in fp32 in their order.

        This is what every rank does with gathered messages.
        """
        total = torch.empty(y.numel(), dtype=torch.float32, device=y.device) if y.dtype != torch.float32 else y
        before = kernels.before_sum(call.scale)
        for i, message in enumerate(messages):
            self.decode(message, total, call._replace(scale=before), add=i > 0)
        kernels.rows_scale(total, call.table, y, by=call.scale / before)

    def wire_bytes(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> int:
        fitted = self.fit(shape)
        if not isinstance(fitted, Coded):
            return fitted.wire_bytes(shape, dtype)
        return fitted.payload_bytes(torch.Size(shape).numel(), dtype)

    def roundtrip(self, x: Tensor, key: int = 0) -> Tensor:
        check_dtype(x.dtype, self)
        fitted = self.fit(x.shape)
        if not isinstance(fitted, Coded):
            return fitted.roundtrip(x, key)
        flat = x.detach().reshape(-1).contiguous()
        segments = Segments.build([Piece("roundtrip", 0, flat.numel(), 0, 0, tuple(x.shape))])
        message = torch.zeros(fitted.payload_bytes(flat.numel(), x.dtype), dtype=torch.uint8, device=x.device)
        fitted.encode(flat, message, CodecCall(segments, Key.derive(key), first_state(fitted, flat, segments)))
        y = torch.empty(flat.shape, dtype=torch.float32, device=x.device)
        fitted.decode(message, y, CodecCall(segments))
        return y.view(x.shape)


@dataclass(frozen=True)
class OnePass(Coded):
    """A coded compressor whose kernel also adds the residual of error feedback, and sets it to what was not sent."""

    @abstractmethod
    def encode(self, x: Tensor, message: Tensor, call: CodecCall, residual: Residual | None = None) -> None:
        """See `Coded.encode`. The kernel also adds and updates a ``residual`` of error feedback; ``x`` may be its next
        value, unless the compressor overrides `reduce`."""

    def reduce(
        self,
        messages: Sequence[Tensor],
        own: Tensor,
        out_message: Tensor,
        y: Tensor,
        call: CodecCall,
        residual: Residual | None = None,
    ) -> None:
        """See `Coded.reduce`. A ``residual`` is used as in `encode`; it requires `Traits.plain_sum`."""
        if residual is None:
            super().reduce(messages, own, out_message, y, call)
            return
        self.add_up(messages, own, residual.next, call)
        self.encode(residual.next, out_message, call, residual)
        self.decode(out_message, y, call._replace(scale=1.0))


@dataclass(frozen=True)
class CodedWrapper(Wrapper, Coded):
    """A `Wrapper` of a coded compressor, with the same messages."""

    inner: Coded

    @property
    def grain(self) -> int | None:
        return self.inner.grain

    def payload_bytes(self, numel: int, dtype: torch.dtype) -> int:
        return self.inner.payload_bytes(numel, dtype)

    def decode(self, message: Tensor, y: Tensor, call: CodecCall, *, add: bool = False) -> None:
        self.inner.decode(message, y, call, add=add)

    def mean(self, messages: Sequence[Tensor], y: Tensor, call: CodecCall) -> None:
        self.inner.mean(messages, y, call)


def used_bytes(compressor: Coded, message: Tensor, piece: Piece) -> int:
    """Return how many bytes of the payload of ``piece`` are used: all of them, unless the compressor is `Bounded`.

    Raises:
        ValueError: the header of the payload is invalid.
    """
    bounded = find_mixin(compressor, Bounded) if compressor.traits.bounded else None
    if bounded is None:
        return compressor.payload_bytes(piece.numel, torch.float32)
    return bounded.used_bytes(message, piece)
