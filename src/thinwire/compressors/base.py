"""What a tensor may become on the wire: the contract that every compressor keeps."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from thinwire.kernels import Table, derive_key, site_id

GRADIENT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes that compressors take. Arithmetic is in fp32 whatever comes in."""

PAYLOAD_ALIGNMENT = 64
"""Bytes at which every payload of a message starts, so that a vector register never straddles two of them."""

SlotTensors = Sequence[Mapping[str, Tensor]]
"""For each segment, the slots of its layer by name."""


@dataclass(frozen=True)
class Slot:
    """Named state that a compressor asks for. The `Wire` owns it, checkpoints it and reshards it.

    ``per`` says what it is kept for. A ``shared`` slot holds the same values on every rank.
    """

    name: str
    dtype: torch.dtype = torch.float32
    shared: bool = False
    per: Literal["parameter", "sample"] = "parameter"


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
    """Where its payload starts in the message, in bytes."""


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
    @abstractmethod
    def unbiased(self) -> bool:
        """Whether the expectation of what is received is what was sent."""

    @abstractmethod
    def wire_bytes(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> int:
        """Bytes that a whole layer of this shape takes in a message."""

    @abstractmethod
    def roundtrip(self, x: Tensor, key: int = 0) -> Tensor:
        """What the receiver will see of ``x``, as fp32 of the same shape."""

    def slots(self, shape: Sequence[int]) -> tuple[Slot, ...]:
        """The state that it needs for a layer of this shape."""
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
    def encode(
        self, x: Tensor, segments: Segments, message: Tensor, *, key: int, slots: SlotTensors | None = None
    ) -> None:
        """Write the payload of every segment of the flat tensor ``x`` (fp32, bf16 or fp16) into ``message`` (uint8).

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
        slots: SlotTensors | None = None,
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
        slots: SlotTensors | None = None,
    ) -> None:
        """The owner's stage: encode ``scale · (own + Σ decode(messages))`` and set ``y`` to what that decodes to.

        ``y`` may be ``own``. The sum is taken in fp32 in the order of ``messages``.
        """
        total = own.to(torch.float32, copy=True)
        for message in messages:
            self.decode(message, segments, total, add=True)
        self.encode(total.mul_(scale), segments, out_message, key=key, slots=slots)
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
