"""Records: a store's form of the activations of one sample, in 32, 16 or 2 to 8 bits a value."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from thinwire.arguments import check_int
from thinwire.compressors import CodecCall, Coded, MaxAbs, Piece, Raw, Segments
from thinwire.kernels import align

Half = Literal["float16", "bfloat16"]


class Part(NamedTuple):
    """One tensor's share of a sample."""

    positions: int
    """Number of positions of the longest sample: the size of the second dimension, or 1 if there is only the batch."""
    width: int
    """Number of elements of one position."""
    grows: bool
    """Whether the number of positions is the length of the sample; otherwise it is fixed."""

    def at(self, length: int) -> int:
        """Return the elements of a sample of ``length`` positions."""
        return self.vectors(length) * self.width

    def vectors(self, length: int) -> int:
        """Return the vectors of ``width`` elements in a sample of ``length`` positions: one for each."""
        return length if self.grows else self.positions


class Rows(NamedTuple):
    """The samples in a flat tensor: one after the other, each with all its parts, padded to a common length."""

    samples: tuple[int, ...]
    lengths: tuple[int, ...]
    """Number of valid positions of each sample. Those behind them are zero, and are neither sent nor kept."""
    padded: int
    """Number of positions of each sample in the flat tensor."""
    corners: tuple[tuple[int, int], ...] = ()
    """Corners of the samples' crops, if they are cropped images: pixels down and to the right; else empty."""

    def vectors(self, parts: Sequence[Part]) -> Tensor:
        """Return which vectors of samples with these parts are no padding: bool of shape (samples, vectors)."""
        lengths = torch.tensor(self.lengths, dtype=torch.int64, device="cpu").view(-1, 1)
        of_parts = (torch.arange(part.vectors(self.padded), dtype=torch.int64, device="cpu") for part in parts)
        valid = [(at < lengths) | (not part.grows) for at, part in zip(of_parts, parts, strict=True)]
        return torch.cat(valid, dim=1) if valid else torch.zeros(len(self.samples), 0, dtype=torch.bool, device="cpu")

    @staticmethod
    def uniform(samples: Iterable[int], length: int) -> Rows:
        """Return rows of samples that all have the same length."""
        kept = tuple(samples)
        return Rows(kept, (length,) * len(kept), length)


@dataclass(frozen=True)
class RecordFormat:
    """The format of the messages m(ξ) of one stage boundary (AQ-SGD, section 3.3).

    ``precision`` is 32 (fp32), 16 (``half``), or 2 to 8 bits: max-abs codes in buckets of 128, rounded to the nearest.
    Two bits are four intervals and their midpoints: with zero for a level there would be three.
    """

    parts: tuple[Part, ...]
    precision: int = 32
    half: Half = "bfloat16"
    site: str = "m"
    """Name of the boundary, so that one store is not taken for another."""
    coder: Coded = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_precision(self.precision)
        bits = self.precision
        coder = MaxAbs(bits=bits, rounding="nearest", midrise=bits == 2) if bits <= 8 else Raw()
        object.__setattr__(self, "coder", coder)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the values in a record; for 2 to 8 bits, that of the decoded values."""
        return getattr(torch, self.half) if self.precision == 16 else torch.float32

    @cached_property
    def length(self) -> int:
        """Number of positions of the longest sample; 0 if no part depends on the length."""
        return max((part.positions for part in self.parts if part.grows), default=0)

    def numel(self, length: int) -> int:
        """Return the elements of a sample of ``length`` positions."""
        return sum(part.at(length) for part in self.parts)

    def part_bytes(self, part: Part, length: int) -> int:
        return self.coder.payload_bytes(part.at(length), self.dtype)

    @cached_property
    def record_bytes(self) -> int:
        """Bytes of a record: a multiple of 64, the same for every sample."""
        return sum(self.part_bytes(part, part.positions) for part in self.parts)

    def segments(self, rows: Rows) -> Segments:
        """Return the places of the records of ``rows``, one behind the other, and of their values in a flat tensor."""
        stride, pieces = self.numel(rows.padded), []
        for i, (sample, length) in enumerate(zip(rows.samples, rows.lengths, strict=True)):
            at, payload = i * stride, i * self.record_bytes
            for t, part in enumerate(self.parts):
                pieces.append(Piece(f"{self.site}/{sample}/{t}", at, part.at(length), 0, payload))
                at += part.at(rows.padded)
                payload += self.part_bytes(part, part.positions)
        return Segments.build(pieces)

    def encode(self, values: Tensor, rows: Rows) -> Tensor:
        """Return the records of ``rows``: uint8 of shape (samples, `record_bytes`), from fp32 values (elements,).

        The records may share memory with the values.
        """
        self._check(values, rows)
        if self._is_plain(rows.lengths, rows.padded):
            return values.to(self.dtype).view(torch.uint8).view(len(rows.samples), self.record_bytes)
        records = torch.zeros(len(rows.samples) * self.record_bytes, dtype=torch.uint8, device="cpu")
        self.coder.encode(values.to(self.dtype), records, CodecCall(self.segments(rows)))
        return records.view(len(rows.samples), self.record_bytes)

    def decode(self, records: Tensor, kept: Sequence[int], rows: Rows) -> Tensor:
        """Return the values in records, as fp32 (elements,) laid out as ``rows``; zero where they have none.

        ``kept`` are the positions in each record: those of the sample when it was kept. A position that was
        never seen is zero, so that its change is its value. The values may share memory with the records.
        """
        if tuple(kept) == rows.lengths:
            return self._decode(records, rows)
        longest = max(*kept, rows.padded)
        stored = self._decode(records, Rows(rows.samples, tuple(kept), longest))
        values = torch.zeros(len(rows.samples) * self.numel(rows.padded), dtype=torch.float32, device="cpu")
        from_stride, to_stride = self.numel(longest), self.numel(rows.padded)
        for i, (had, has) in enumerate(zip(kept, rows.lengths, strict=True)):
            source, target = i * from_stride, i * to_stride
            for part in self.parts:
                shared = part.at(min(had, has))
                values[target : target + shared] = stored[source : source + shared]
                source += part.at(longest)
                target += part.at(rows.padded)
        return values

    def _is_plain(self, lengths: Sequence[int], padded: int) -> bool:
        """Whether records are just the values, one after the other."""
        whole = all(length == padded for length in lengths)
        return whole and self.precision > 8 and self.record_bytes == self.numel(padded) * self.dtype.itemsize

    def _decode(self, records: Tensor, rows: Rows) -> Tensor:
        if tuple(records.shape) != (len(rows.samples), self.record_bytes):
            raise ValueError(f"{len(rows.samples)} records of {self.record_bytes} bytes are not {tuple(records.shape)}")
        if self._is_plain(rows.lengths, rows.padded):
            return records.view(-1).view(self.dtype).float()
        values = torch.zeros(len(rows.samples) * self.numel(rows.padded), dtype=self.dtype, device="cpu")
        self.coder.decode(records.reshape(-1), values, CodecCall(self.segments(rows)))
        return values.float()

    def _check(self, values: Tensor, rows: Rows) -> None:
        longest = max(rows.lengths, default=0)
        if longest > self.length and any(part.grows for part in self.parts):
            raise ValueError(
                f"a sample of {longest} positions does not fit into a record of {self.length}: pass max_length="
            )
        if values.numel() != len(rows.samples) * self.numel(rows.padded):
            raise ValueError(f"{values.numel()} values are not those of {len(rows.samples)} samples")

    def describe(self) -> dict[str, object]:
        """Return the facts that two stores must share for one to read the records of the other."""
        return {
            "parts": [list(part) for part in self.parts],
            "precision": self.precision,
            "dtype": str(self.dtype).removeprefix("torch."),
            "record_bytes": self.record_bytes,
        }


def check_precision(precision: int) -> None:
    """Raise ``ValueError`` unless a message can be kept in ``precision`` bits a value."""
    check_int("precision", precision, 2, 32)
    if precision not in (16, 32) and precision > 8:
        raise ValueError(f"precision must be 32, 16 or 2 to 8 bits, not {precision}")


def store_bytes(num_samples: int, shape: Sequence[int], precision: int = 32, *, snapshots: int = 0) -> int:
    """Return the bytes of the messages of ``num_samples`` samples on one side of one stage boundary.

    ``shape`` is that of one sample's activation without the batch, such as (length, hidden). On disk, a store reserves
    this size ``snapshots`` times more (1 by default, see `Disk`).
    """
    numel = torch.Size(shape).numel()
    record = RecordFormat((Part(1, numel, False),), precision).record_bytes
    return align(num_samples * record * (1 + snapshots))
