"""Positions of the segments of one message: checked once, reused at every step."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from thinwire.kernels import native
from thinwire.kernels.format import ALIGN, GROUP, Format, bucketed_bytes, bucketed_grain, check_format

LIMIT = 2**62
"""Offsets stay below this, so that sums of two of them cannot leave 64 bits."""


class Row(NamedTuple):
    """One segment: ``numel`` elements from ``start`` of a flat tensor, coded at byte ``payload`` of the message."""

    start: int
    numel: int
    index0: int
    payload: int
    site: int

    @property
    def elements(self) -> slice:
        """Place of the segment in the flat tensor."""
        return slice(self.start, self.start + self.numel)


class Table:
    """The static layout of the segments of one message.

    ``rows`` is an int64 CPU tensor of shape (S, 5) with the columns

    - ``start``: first element of the segment in the flat tensor;
    - ``numel``: its elements (0 is allowed and codes to nothing);
    - ``index0``: index of its first element inside its layer, a multiple of the format's grain
      (:func:`bucketed_grain`), so that a cut layer gets the codes and draws of the whole one;
    - ``payload``: byte at which its payload starts in the message, a multiple of 64;
    - ``site``: number of its layer (:func:`site_id`), which separates the draws of layers.

    Raises ``TypeError`` for another dtype or device and ``ValueError`` for another shape, negative or unaligned
    values, or segments that overlap. The rows are copied: changing the given tensor afterwards has no effect.
    """

    def __init__(self, rows: Tensor) -> None:
        if not isinstance(rows, Tensor) or rows.dtype != torch.int64 or rows.device.type != "cpu":
            raise TypeError("rows must be an int64 CPU tensor: torch.tensor(rows, dtype=torch.int64)")
        if rows.dim() != 2 or rows.shape[1] != len(Row._fields):
            raise ValueError(f"rows must have shape (segments, 5), not {tuple(rows.shape)}")
        self.rows = rows.detach().clone(memory_format=torch.contiguous_format)
        self.segments = tuple(Row(*row) for row in self.rows.tolist())
        self.filled = tuple((number, row) for number, row in enumerate(self.segments) if row.numel)
        """Segments that have elements, by their number."""
        self._check()
        self.numel = sum(row.numel for row in self.segments)
        self.largest = max((row.numel for row in self.segments), default=0)
        self.num_elements = max((row.start + row.numel for _, row in self.filled), default=0)
        """Least number of elements of a tensor that contains all segments."""
        self.native = native.address("rows", self.rows, torch.int64, self.rows.numel()), len(self.segments)
        """The table as the native core takes it."""
        self._sizes: dict[Hashable, int] = {}
        self._kept: dict[Hashable, Any] = {}

    def __len__(self) -> int:
        return len(self.segments)

    def __reduce__(self) -> tuple[type[Table], tuple[Tensor]]:
        return Table, (self.rows,)  # a copy has rows of its own, and their address

    def __repr__(self) -> str:
        return f"Table({len(self)} segments, {self.numel} elements)"

    def on(self, device: torch.device | str) -> Tensor:
        """Return the rows as a tensor on ``device``, copied there once."""
        where = torch.device(device)
        return self.rows if where.type == "cpu" else self.kept(("rows", where), lambda: self.rows.to(where))

    def extent(self, form: Format) -> int:
        """Return the least bytes of a message in the format ``form``.

        Raises ``ValueError`` for an ``index0`` off the format's grain, or payloads that overlap.
        """
        known = self._sizes.get(form)
        if known is None:
            check_format(form)
            known = self.message_bytes(form, partial(bucketed_bytes, form=form), form.bucket)
        return known

    def _check(self) -> None:
        for i, row in enumerate(self.segments):
            for name, value in row._asdict().items():
                if value < 0 or (name != "site" and value > LIMIT):
                    raise ValueError(f"row {i}: {name} must be between 0 and 2**62, not {value}")
            if row.index0 % GROUP:
                raise ValueError(
                    f"row {i}: index0 {row.index0} is not a multiple of {GROUP}: cut layers at bucketed_grain(bucket)"
                )
            if row.payload % ALIGN:
                raise ValueError(f"row {i}: payload {row.payload} is not a multiple of {ALIGN} bytes")
        _check_apart("elements", [(row.start, row.start + row.numel) for _, row in self.filled])

    def pieces(self, device: torch.device, size: int, each: int = 1) -> Tensor:
        """Cut the segments into pieces of ``size`` elements, each counted ``each`` times.

        Returns an int64 tensor (pieces, 2) on ``device`` of (row, piece inside the row): the work of the programs of a
        GPU launch. Made once.
        """

        def make() -> Tensor:
            counts = self._counts(size) * each
            rows = torch.repeat_interleave(torch.arange(len(counts), dtype=torch.int64, device="cpu"), counts)
            inside = torch.arange(len(rows), dtype=torch.int64, device="cpu") - (counts.cumsum(0) - counts)[rows]
            return torch.stack((rows, inside), dim=1).to(device)

        return self.kept(("pieces", device, size, each), make)

    def bucket_firsts(self, device: torch.device, bucket: int) -> tuple[Tensor, int]:
        """Return the number of buckets before each segment (int64, on ``device``), and the number of all. Made once."""

        def make() -> tuple[Tensor, int]:
            counts = self._counts(bucket)
            return (counts.cumsum(0) - counts).to(device), int(counts.sum())

        return self.kept(("firsts", device, bucket), make)

    def _counts(self, size: int) -> Tensor:
        return -(-self.rows[:, 1] // size)

    def kept(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """Return the result of ``make``, kept for each ``key``: for what else the programs of a GPU launch look up.

        The core gets addresses of it: of threads that ask for it at the same time, all must get the one that is kept.
        """
        if key in self._kept:
            return self._kept[key]
        return self._kept.setdefault(key, make())

    def clamped(self, bucket: int) -> int:
        """Return ``bucket``, or if it is larger than every segment the largest segment, rounded up to whole groups."""
        return min(bucket, -(-self.largest // GROUP) * GROUP or GROUP)

    def message_bytes(self, form: Hashable, num_bytes: Callable[[int], int], bucket: int = 1) -> int:
        """Return the bytes of a message in a format, named by ``form``, of payloads of ``num_bytes(numel)``. Made once.

        Raises ``ValueError`` for an ``index0`` off the grain of ``bucket``, or payloads that overlap.
        """
        if form not in self._sizes:
            grain, spans = bucketed_grain(bucket), []
            for i, row in self.filled:
                if row.index0 % grain:
                    raise ValueError(
                        f"row {i}: index0 {row.index0} is not a multiple of {grain}, the grain of bucket {bucket}: "
                        "cut layers at bucketed_grain(bucket)"
                    )
                spans.append((row.payload, row.payload + num_bytes(row.numel)))
            _check_apart("payload bytes", spans)
            self._sizes[form] = max((end for _, end in spans), default=0)
        return self._sizes[form]


def _check_apart(what: str, spans: list[tuple[int, int]]) -> None:
    spans.sort()
    for (_, end), (start, _) in pairwise(spans):
        if start < end:
            raise ValueError(f"two rows share {what}: one ends at {end}, the next starts at {start}")
