"""What a tensor may become on the wire: the contract that every compressor keeps."""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from thinwire.kernels import Table, derive_key, site_id

GRADIENT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes that compressors take. Arithmetic is in fp32 whatever comes in."""


@dataclass(frozen=True)
class Slot:
    """Named state that a compressor asks for: one value for each element of a layer.

    The `Wire` owns it, checkpoints it by parameter name and reshards it; nothing else holds state.
    """

    name: str
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True)
class State:
    """The slots of one flat tensor in one step, each a tensor aligned with it.

    A compressor reads ``now`` and writes all elements of its segments in ``next``, which replaces ``now`` only when the
    whole step turned out finite. Slots are in unscaled units; gradients are ``loss_scale`` times as large.
    """

    now: Mapping[str, Tensor]
    next: Mapping[str, Tensor]
    loss_scale: float = 1.0


class Piece(NamedTuple):
    """A run of consecutive elements of one layer."""

    name: str
    """Name of the layer's parameter."""
    start: int
    """Where it starts in the flat tensor, in elements."""
    numel: int
    index0: int
    """Index of its first element inside its layer: draws are keyed by it, so cutting changes no bit."""
    payload: int
    """Where its payload starts in the message (or in the buffer that is summed), in bytes."""

    @property
    def elements(self) -> slice:
        """Its place in the flat tensor."""
        return slice(self.start, self.start + self.numel)


@dataclass(frozen=True)
class Segments:
    """The pieces of layers that one compressor handles in one message: one kernel call for all of them."""

    pieces: tuple[Piece, ...]
    table: Table

    @staticmethod
    def build(pieces: Sequence[Piece]) -> Segments:
        rows = [(p.start, p.numel, p.index0, p.payload, site_id(p.name)) for p in pieces]
        table = Table(torch.tensor(rows, dtype=torch.int64).reshape(len(rows), 5))
        return Segments(tuple(pieces), table)

    def __len__(self) -> int:
        return len(self.pieces)


@dataclass(frozen=True)
class Compressor(ABC):
    """A frozen set of parameters. ``str(c)`` is its spec and ``thinwire.parse`` gives it back."""

    spec_name: ClassVar[str]
    exact_bits: ClassVar[bool] = True
    """Whether its bytes are the same on any machine. False for FFT, SVD and matrix products."""
    size: ClassVar[Literal["fixed", "bounded"]] = "fixed"
    """Whether a message's size is a function of the shape alone."""

    @property
    def largest(self) -> float:
        """Largest magnitude that can be received; beyond it a value saturates or arrives as Inf."""
        return math.inf

    @property
    def dense(self) -> bool:
        """Whether every element is sent, not a choice of them."""
        return True

    @property
    @abstractmethod
    def unbiased(self) -> bool:
        """Whether the expectation of what is received is what was sent."""

    @abstractmethod
    def wire_bytes(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> int:
        """Bytes that a whole layer of this shape takes in a message."""

    @abstractmethod
    def roundtrip(self, x: Tensor, key: int = 0) -> Tensor:
        """What the receiver will see of ``x``, as fp32 of the same shape."""

    @property
    def slots(self) -> tuple[Slot, ...]:
        """The state that it needs for each layer."""
        return ()

    def __str__(self) -> str:
        shown = []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.metadata.get("shown") or value != field.default:
                shown.append(f"{field.name}={value}")
        return f"{self.spec_name}({', '.join(shown)})"


@dataclass(frozen=True)
class Coded(Compressor):
    """Becomes bytes that must be decoded to be added. Travels by scatter-reduce-all-gather and its like."""

    @property
    @abstractmethod
    def grain(self) -> int | None:
        """Elements at whose multiples a layer may be cut among owners; None if it must stay whole."""

    @abstractmethod
    def payload_bytes(self, numel: int, dtype: torch.dtype) -> int:
        """Bytes of the payload of a piece of ``numel`` elements of gradients of ``dtype``."""

    @abstractmethod
    def encode(self, x: Tensor, segments: Segments, message: Tensor, *, key: int, state: State | None = None) -> None:
        """Write the payload of every segment of the flat tensor ``x`` (fp32, bf16 or fp16) into ``message`` (uint8).

        ``state`` is given if, and only if, the compressor asks for `slots`.
        ``key`` names the random draws: they depend on it, on the layer's site and on the element's index only.

        Raises:
            TypeError: the dtype of ``x`` or ``message`` is not supported.
            ValueError: a segment or a payload lies outside its tensor.
        """

    @abstractmethod
    def decode(
        self,
        message: Tensor,
        segments: Segments,
        y: Tensor,
        *,
        add: bool = False,
        scale: float = 1.0,
    ) -> None:
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
        key: int,
        scale: float,
        state: State | None = None,
    ) -> None:
        """The owner's stage: encode ``scale · (own + Σ decode(messages))`` and set ``y`` to what that decodes to.

        ``y`` may be ``own``. The sum is taken in fp32 in the order of ``messages``.
        """
        total = own.to(torch.float32, copy=True)
        for message in messages:
            self.decode(message, segments, total, add=True)
        self.encode(total.mul_(scale), segments, out_message, key=key, state=state)
        self.decode(out_message, segments, y)

    def wire_bytes(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> int:
        return self.payload_bytes(torch.Size(shape).numel(), dtype)

    def roundtrip(self, x: Tensor, key: int = 0) -> Tensor:
        check_dtype(x.dtype, self)
        flat = x.detach().reshape(-1).contiguous()
        segments = Segments.build([Piece("roundtrip", 0, flat.numel(), 0, 0)])
        message = torch.zeros(self.payload_bytes(flat.numel(), x.dtype), dtype=torch.uint8, device=x.device)
        self.encode(flat, segments, message, key=derive_key(key))
        y = torch.empty(flat.shape, dtype=torch.float32, device=x.device)
        self.decode(message, segments, y)
        return y.view(x.shape)


@dataclass(frozen=True)
class Summed(Compressor):
    """Becomes tensors that a native all-reduce adds: no decoding on the way, and the same sum on every rank."""

    rounds: ClassVar[int] = 1

    @abstractmethod
    def part_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Dtype in which the parts of gradients of ``dtype`` are added."""

    @abstractmethod
    def part_numel(self, round: int, numel: int) -> int:
        """Elements that a layer of ``numel`` elements contributes to the sum of a round."""

    @abstractmethod
    def part(
        self,
        round: int,
        x: Tensor,
        piece: Piece,
        out: Tensor,
        *,
        key: int,
        scale: float,
        state: State | None = None,
    ) -> None:
        """Write what a layer (``piece`` of the flat tensor ``x``) contributes, times ``scale``, into ``out``.

        ``key`` is the same on all ranks.
        """

    @abstractmethod
    def absorb(
        self, round: int, total: Tensor, x: Tensor, piece: Piece, *, key: int, state: State | None = None
    ) -> None:
        """Take the sum of all ranks' parts. The last round sets the layer in ``x`` to the result."""

    def wire_bytes(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> int:
        numel = torch.Size(shape).numel()
        return sum(self.part_numel(round, numel) for round in range(self.rounds)) * self.part_dtype(dtype).itemsize

    def roundtrip(self, x: Tensor, key: int = 0) -> Tensor:
        check_dtype(x.dtype, self)
        y = x.detach().to(torch.float32, copy=True).reshape(-1)
        piece = Piece("roundtrip", 0, y.numel(), 0, 0)
        for round in range(self.rounds):
            part = torch.empty(self.part_numel(round, y.numel()), dtype=self.part_dtype(x.dtype), device=x.device)
            self.part(round, y, piece, part, key=derive_key(key), scale=1.0)
            self.absorb(round, part, y, piece, key=derive_key(key))
        return y.view(x.shape)


def check_dtype(dtype: torch.dtype, compressor: object) -> None:
    """Raise TypeError if gradients of ``dtype`` cannot be compressed."""
    if dtype not in GRADIENT_DTYPES:
        raise TypeError(
            f"{compressor} takes float32, bfloat16 or float16, not {dtype}. "
            "Leave such layers raw with exclude=[...], or train them in one of these dtypes."
        )


def check_int(name: str, value: Any, low: int, high: int | None = None) -> None:
    """Raise if a parameter of a compressor is not an integer in [low, high]."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} must be an integer, not {value!r}")
    if value < low or (high is not None and value > high):
        bounds = f"at least {low}" if high is None else f"between {low} and {high}"
        raise ValueError(f"{name} must be {bounds}, not {value}")
