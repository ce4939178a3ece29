"""What a tensor may become on the wire: the contract that every compressor keeps."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from thinwire.compressors.checks import check_dtype
from thinwire.compressors.compressor import Compressor, Unsuited
from thinwire.compressors.pieces import Key, Part, Piece, Segments, State

Reduction = Literal["sum", "max"]


@dataclass(frozen=True)
class Coded(Compressor):
    """Becomes bytes that must be decoded to be added. Travels by scatter-reduce-all-gather, all-gather and the like."""

    @property
    @abstractmethod
    def grain(self) -> int | None:
        """Elements at whose multiples a layer may be cut among owners; None if it must stay whole."""

    @property
    def gathered(self) -> bool:
        """Whether every rank decodes what every other one encoded (an all-gather: each value is encoded once), instead
        of an owner who sums and encodes again. So it is where layers stay whole."""
        return self.grain is None

    @property
    def plain_sum(self) -> bool:
        """Whether an owner adds up what ranks send; `add_up` says what else it may do."""
        return True

    @abstractmethod
    def payload_bytes(self, numel: int, dtype: torch.dtype) -> int:
        """Bytes of the payload of a piece of ``numel`` elements of gradients of ``dtype``, at most."""

    @abstractmethod
    def encode(self, x: Tensor, segments: Segments, message: Tensor, *, key: Key, state: State | None = None) -> None:
        """Write the payload of every segment of the flat tensor ``x`` (fp32, bf16 or fp16) into ``message`` (uint8).

        ``state`` is given if, and only if, the compressor asks for `slots`.

        Raises:
            TypeError: the dtype of ``x`` or ``message`` is not supported.
            ValueError: a segment or a payload lies outside its tensor.
        """

    @abstractmethod
    def decode(self, message: Tensor, segments: Segments, y: Tensor, *, add: bool = False, scale: float = 1.0) -> None:
        """Set (or with ``add`` increase) every segment of ``y`` to its decoded payload times ``scale``.

        Raises:
            ValueError: the message is too short for the segments, or a segment lies outside ``y``.
        """

    def reduce(
        self,
        messages: Sequence[Tensor],
        own: Tensor,
        segments: Segments,
        out_message: Tensor,
        y: Tensor,
        *,
        key: Key,
        scale: float,
        state: State | None = None,
    ) -> None:
        """The owner's stage: encode ``scale · (own + Σ decode(messages))`` and set ``y`` to what that decodes to.

        ``y`` may be ``own``. The sum is taken in fp32 in the order of ``messages``.
        """
        total = torch.empty(own.numel(), dtype=torch.float32, device=own.device)
        self.add_up(messages, own, segments, total, scale=scale)
        self.encode(total, segments, out_message, key=key, state=state)
        self.decode(out_message, segments, y)

    def add_up(
        self, messages: Sequence[Tensor], own: Tensor, segments: Segments, total: Tensor, *, scale: float
    ) -> None:
        """Set the segments of ``total`` to ``scale · (own + Σ decode(messages))``, summed in fp32 in their order."""
        sums = total if total.dtype == torch.float32 else torch.empty_like(total, dtype=torch.float32)
        for piece in segments.pieces:
            sums[piece.elements] = own[piece.elements]
        for message in messages:
            self.decode(message, segments, sums, add=True)
        for piece in segments.pieces:
            total[piece.elements] = sums[piece.elements].mul_(scale)

    def mean(self, messages: Sequence[Tensor], segments: Segments, y: Tensor, *, scale: float) -> None:
        """The receiver's stage of an all-gather: set ``y`` to ``scale · Σ decode(messages)``, summed in their order."""
        total = torch.empty(y.numel(), dtype=torch.float32, device=y.device) if y.dtype != torch.float32 else y
        for i, message in enumerate(messages):
            self.decode(message, segments, total, add=i > 0)
        for piece in segments.pieces:
            y[piece.elements] = total[piece.elements].mul_(scale)

    def encode_rest(
        self,
        x: Tensor,
        segments: Segments,
        message: Tensor,
        now: Tensor,
        after: Tensor,
        *,
        key: Key,
        loss_scale: float,
        state: State | None = None,
    ) -> None:
        """Encode ``x + loss_scale · now`` and leave in ``after``, in unscaled units, what was not sent of it."""
        for piece in segments.pieces:
            part = piece.elements
            torch.add(x[part], now[part], alpha=loss_scale, out=after[part])
        self.encode(after, segments, message, key=key, state=state)
        self.keep_rest(message, segments, after, loss_scale)

    def reduce_rest(
        self,
        messages: Sequence[Tensor],
        own: Tensor,
        segments: Segments,
        out_message: Tensor,
        y: Tensor,
        now: Tensor,
        after: Tensor,
        *,
        key: Key,
        scale: float,
        loss_scale: float,
        state: State | None = None,
    ) -> None:
        """`reduce` of ``scale · (own + Σ decode(messages)) + loss_scale · now``, leaving its rest as `encode_rest`."""
        self.add_up(messages, own, segments, after, scale=scale)
        for piece in segments.pieces:
            after[piece.elements].add_(now[piece.elements], alpha=loss_scale)
        self.encode(after, segments, out_message, key=key, state=state)
        self.decode(out_message, segments, y)
        self.keep_rest(out_message, segments, after, loss_scale)

    def keep_rest(self, message: Tensor, segments: Segments, after: Tensor, loss_scale: float) -> None:
        self.decode(message, segments, after, add=True, scale=-1.0)
        if loss_scale != 1.0:
            for piece in segments.pieces:
                after[piece.elements].div_(loss_scale)

    @property
    def learns_at(self) -> tuple[int, ...]:
        """Steps, counted from the first compressed one, before which `learn` is called."""
        return ()

    def learn(self, values: Tensor, slots: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """New values of its learned slots from a layer's gradient (flat, fp32) and their present values.

        One rank learns and the Wire gives the result to all.
        """
        return {}

    def used_bytes(self, message: Tensor, piece: Piece) -> int:
        """Bytes of a payload that mean something, a multiple of 64; of a bounded compressor fewer than it may take.

        Raises:
            ValueError: the payload says something impossible.
        """
        return self.payload_bytes(piece.numel, torch.float32)

    def index_bytes(self, message: Tensor, piece: Piece) -> int:
        """Bytes of a payload that only say which elements it carries."""
        return 0

    def limits(self, message: Tensor, segments: Segments) -> tuple[int, int]:
        """How many values of a message that was encoded here saturated, and how many did not fit into it."""
        return 0, 0

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
        fitted.encode(flat, segments, message, key=Key.of(key), state=first_state(fitted, flat, segments))
        y = torch.empty(flat.shape, dtype=torch.float32, device=x.device)
        fitted.decode(message, segments, y)
        return y.view(x.shape)


@dataclass(frozen=True)
class Summed(Compressor):
    """Becomes tensors that a native all-reduce adds: no decoding on the way, and the same sum on every rank."""

    @property
    def rounds(self) -> int:
        """Sums that it takes, one after the other."""
        return 1

    def operation(self, round: int) -> Reduction:
        """What becomes of the ranks' parts in a round: their sum, or the largest of each element."""
        return "sum"

    @abstractmethod
    def part_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Dtype in which the parts of gradients of ``dtype`` are added."""

    @abstractmethod
    def part_numel(self, round: int, shape: Sequence[int]) -> int:
        """Elements that a layer of this shape contributes to the sum of a round."""

    @abstractmethod
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
        """Write what layers of the flat tensor ``x`` contribute, times ``scale``, each to its place in ``out``."""

    @abstractmethod
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
        """Take the sum of all ranks' parts. The last round sets the layers in ``x`` to the result."""

    def clipped(self, parts: Sequence[Part], state: State | None) -> int | None:
        """How many of this rank's values of these layers the last step clipped; None if it never clips."""
        return None

    def wire_bytes(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> int:
        return sum(self.part_numel(r, shape) for r in range(self.rounds)) * self.part_dtype(dtype).itemsize

    def roundtrip(self, x: Tensor, key: int = 0) -> Tensor:
        check_dtype(x.dtype, self)
        try:
            fitted = self.fit(x.shape)
        except Unsuited:
            return x.detach().to(torch.float32, copy=True)
        if not isinstance(fitted, Summed):
            return fitted.roundtrip(x, key)
        y = x.detach().to(torch.float32, copy=True).reshape(-1)
        piece = Piece("roundtrip", 0, y.numel(), 0, 0, tuple(x.shape))
        state = first_state(fitted, y, Segments.build([piece]))
        sum_alone(fitted, y, piece, x.dtype, key=Key.of(key), state=state)
        return y.view(x.shape)


def sum_alone(
    compressor: Summed, x: Tensor, piece: Piece, dtype: torch.dtype, *, key: Key, state: State | None
) -> None:
    """All rounds of a world of one: replace the layer in ``x`` by what arrives of it."""
    for round in range(compressor.rounds):
        numel = compressor.part_numel(round, piece.shape)
        buffer = torch.zeros(numel, dtype=compressor.part_dtype(dtype), device=x.device)
        parts = [Part(piece, slice(0, numel))]
        compressor.part(round, x, parts, buffer, key=key, scale=1.0, state=state)
        compressor.absorb(round, buffer, x, parts, key=key, state=state)


def first_state(compressor: Compressor, flat: Tensor, segments: Segments, loss_scale: float = 1.0) -> State | None:
    """The state of a first step, as if ``flat`` had been seen before; None if the compressor asks for none."""
    if not compressor.slots:
        return None
    layers = {piece.name: piece.shape for piece in segments.pieces}
    state = State.fresh(compressor.slots, flat.numel(), loss_scale, layers)
    for piece in segments.pieces:
        compressor.follow(flat[piece.elements], piece.name, state)
    state = state.swapped()
    if isinstance(compressor, Coded) and compressor.learns_at:
        for piece in segments.pieces:
            of = state.layers[piece.name].now
            for name, value in compressor.learn(flat[piece.elements].float() / loss_scale, of).items():
                of[name].copy_(value.view_as(of[name]))
    return state
