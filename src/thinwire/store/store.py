"""The contract of message stores, and the form of the records that they keep: the activations from which one side of
a stage boundary takes changes, in 32, 16 or 2 to 8 bits a value."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from thinwire.arguments import check_int
from thinwire.compressors import CodecCall, Coded, MaxAbs, Piece, Raw, Segments
from thinwire.kernels import align

LARGEST_SAMPLE = 2**62
Half = Literal["float16", "bfloat16"]


class StoreError(RuntimeError):
    """A message store is of another run or shape, full or damaged, or has no room for a sample."""


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

    def pick(self, which: Sequence[int]) -> Rows:
        """Return the rows at these places."""
        samples, lengths = tuple(self.samples[i] for i in which), tuple(self.lengths[i] for i in which)
        return Rows(samples, lengths, self.padded, tuple(self.corners[i] for i in which) if self.corners else ())

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

    @cached_property
    def part_bytes(self) -> tuple[int, ...]:
        """Bytes of each part in a record."""
        return tuple(self.coder.payload_bytes(part.at(part.positions), self.dtype) for part in self.parts)

    @cached_property
    def record_bytes(self) -> int:
        """Bytes of a record: a multiple of 64, the same for every sample."""
        return sum(self.part_bytes)

    def segments(self, rows: Rows) -> Segments:
        """Return the places of the records of ``rows``, one behind the other, and of their values in a flat tensor."""
        stride, pieces = self.numel(rows.padded), []
        for i, (sample, length) in enumerate(zip(rows.samples, rows.lengths, strict=True)):
            at, payload = i * stride, i * self.record_bytes
            for t, (part, num_bytes) in enumerate(zip(self.parts, self.part_bytes, strict=True)):
                pieces.append(Piece(f"{self.site}/{sample}/{t}", at, part.at(length), 0, payload))
                at += part.at(rows.padded)
                payload += num_bytes
        return Segments.build(pieces)

    def encode(self, values: Tensor, rows: Rows) -> Tensor:
        """Return the records of ``rows``: uint8 of shape (samples, `record_bytes`), from fp32 values (elements,).

        The records may share memory with the values.
        """
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
        if self._is_plain(rows.lengths, rows.padded):
            return records.view(-1).view(self.dtype).float()
        values = torch.zeros(len(rows.samples) * self.numel(rows.padded), dtype=self.dtype, device="cpu")
        self.coder.decode(records.reshape(-1), values, CodecCall(self.segments(rows)))
        return values.float()

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


class Store(ABC):
    """Keeps the reference of activations' changes: m(ξ) of each sample ξ, or a substitute for it.

    Its contents depend on the calls alone, not on hashes, clocks or threads, so that the two sides of a boundary,
    which make the same calls, are the same. A step begins with `admit`; its micro-batches are loaded and saved in
    their order.
    """

    chooses: ClassVar[bool] = False
    """Whether the sender chooses the reference of a sample's change. Its choices are sent with the message, so that
    nothing can be loaded ahead."""

    def __init__(self, form: RecordFormat) -> None:
        self.form = form
        self.corrupt = 0
        """Number of records that differed from the bytes that had been written. Their samples count as unseen."""
        self.evicted = 0
        """Number of samples that were dropped to make room for others."""
        self.turned_away = 0
        """Number of visits of samples for which there was no room."""
        self.refused: frozenset[int] = frozenset()
        """Samples of the present step for which there is no room."""

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of samples that are kept."""

    @abstractmethod
    def visits(self, sample: int) -> int:
        """Return the visits since the sample was first kept, that one included; 0 if it is to be sent whole."""

    @abstractmethod
    def view(self, sample: int, *, compare: bool) -> int | None:
        """Return a number that both sides share if they keep the same for the sample; None if nothing is kept. With
        ``compare`` it depends on the kept bytes, otherwise only on when they were written."""

    def check_corners(self, corners: Sequence[tuple[int, int]] | None) -> None:
        """Raise ``ValueError`` unless the crops that a step sees begin where this store can keep them."""
        if corners is not None:
            raise ValueError("corners= are of images that are seen cropped: they go with store=thinwire.store.Crops()")

    @abstractmethod
    def admit(self, samples: Sequence[int]) -> None:
        """Begin a step with these samples, and set `refused`."""

    def choose(self, values: Tensor, rows: Rows) -> Tensor:
        """Return the sender's choice of the reference of values (elements,), which may be on a device: uint8 of shape
        (samples, vectors of each) on the host. Only for a store that `chooses`."""
        raise NotImplementedError

    @abstractmethod
    def load(self, rows: Rows, choices: Tensor | None = None) -> Tensor:
        """Return the values m(ξ) of samples that are all kept: fp32 (elements,), laid out as ``rows``; zero at
        positions that were never seen. ``choices`` are those of `choose`.

        Raises:
            StoreError: a choice refers to something that is not kept.
        """

    def load_known(self, rows: Rows, known: Sequence[int], choices: Tensor | None = None) -> Tensor:
        """Return what `load` does of the rows at the places ``known``, which are kept, and zero for all others."""
        if known and len(known) == len(rows.samples):
            return self.load(rows, choices)
        values = torch.zeros(len(rows.samples), self.form.numel(rows.padded), dtype=torch.float32, device="cpu")
        if known:
            loaded = self.load(rows.pick(known), None if choices is None else choices[known])
            values[known] = loaded.view(len(known), -1)
        return values.view(-1)

    def keep(
        self, records: Tensor, rows: Rows, step: int, finite: Sequence[bool], choices: Tensor | None = None
    ) -> int:
        """Save the records of samples for which there is room, and forget samples whose message is not ``finite``: they
        count as unseen. Returns the number of these."""
        for sample, good in zip(rows.samples, finite, strict=True):
            if not good:
                self.forget(sample)
        kept = [i for i, sample in enumerate(rows.samples) if finite[i] and sample not in self.refused]
        if len(kept) < len(rows.samples):
            records, rows, choices = records[kept], rows.pick(kept), None if choices is None else choices[kept]
        if kept:
            self.save(records, rows, step, choices)
        return list(finite).count(False)

    @abstractmethod
    def save(self, records: Tensor, rows: Rows, step: int, choices: Tensor | None = None) -> None:
        """Keep the records (samples, record_bytes) of samples visited in a step (from 0). They are copied or kept.
        ``choices`` are those of `choose`; None if the samples were sent whole."""

    @abstractmethod
    def forget(self, sample: int) -> None:
        """Drop the record of this sample alone, which counts as unseen from now on."""

    @abstractmethod
    def reset(self, samples: Iterable[int]) -> None:
        """Drop the records of these samples, which the two sides keep differently: they are to be sent whole."""

    @abstractmethod
    def clear(self) -> None:
        """Drop everything."""

    def verify(self, samples: Iterable[int]) -> list[int]:
        """Forget, count and return the samples whose records differ from what was written."""
        return []

    @abstractmethod
    def digest(self) -> int:
        """Return a number that two stores share if, and only if, they keep the same."""

    def prefetch(self, samples: Iterable[int]) -> None:  # noqa: B027 - what is in memory is there
        """Read the records of these samples, which are used next, in the background."""

    def open(self) -> None:  # noqa: B027 - memory needs no opening
        """Open what `close` has closed, with what was kept."""

    def close(self) -> None:  # noqa: B027 - memory needs no closing
        """Close files, once everything is written.

        Raises:
            StoreError: a record could not be written.
        """

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Bytes that the store takes now, in memory or on disk."""

    @abstractmethod
    def state_dict(self) -> dict[str, Tensor]:
        """Return tensors from which `load_state_dict` restores the store."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore the store from a `state_dict`.

        Raises:
            StoreError: the state is not one of such a store.
        """
