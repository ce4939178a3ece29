"""Sparse payloads of all segments of a table at once, where the host cannot look at values without waiting.

The same bytes as `select_topk`, `select_threshold` and `pack_indices` give segment by segment, behind a header of 64
bytes (u32: whether a value was not finite, how many elements are sent, how many more found no room). Only on a GPU
(:func:`thinwire.kernels.asynchronous`): elsewhere it is faster segment by segment.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from thinwire.kernels.format import align
from thinwire.kernels.ops import _check_message, _check_values
from thinwire.kernels.reference_floats import HEADER
from thinwire.kernels.reference_sparse import BLOCK
from thinwire.kernels.sparse import draw_sample, index_bytes, packs_bitmap
from thinwire.kernels.table import Table


def rows_choose(
    x: Tensor,
    table: Table,
    message: Tensor,
    rooms: tuple[int, ...],
    *,
    floats: bool = True,
    bounded: bool = False,
    limits: Tensor | None = None,
    asked: Tensor | None = None,
    sample_keys: Sequence[int] | None = None,
) -> Tensor:
    """Write header and indices of each segment's largest elements, up to its room, and (``floats``) their values.

    - ``rooms``: elements that each segment's payload has room for; ``limits`` (segments,) int32: of which so many.
    - ``asked`` (segments,) int32: only what reaches this magnitude (`magnitude_keys`); 0 asks for none in particular.
    - ``sample_keys``: a threshold is guessed from a sample of each segment, as ``select_topk(sampled=True)`` does.
    - ``bounded``: the header has the room, not the number of elements: its message is sent whole.

    Returns, unless they are in the message, the values: fp32, segment by segment, each in its room, zeros behind.

    Shapes: ``x`` (elements,) fp32, bf16 or fp16; ``message`` (bytes,) uint8. Raises ``TypeError`` for a wrong dtype,
    ``ValueError`` for a size or a device.
    """
    from thinwire.kernels import gpu_select

    _check_values("x", x, table, x)
    _check_message("message", message, _bytes(table, rooms, floats), x)
    if limits is None:
        limits = table.kept(
            ("rooms", x.device, rooms), lambda: torch.tensor(rooms, dtype=torch.int32, device="cpu").to(x.device)
        )
    samples = None
    if sample_keys is not None:
        given = zip(table.segments, rooms, sample_keys, strict=True)
        samples = [draw_sample(row.numel, room, key, 1.0) for row, room, key in given]
    places = _places(table, rooms, x.device, floats)
    options = {"limits": limits, "asked": asked, "samples": samples, "floats": floats, "bounded": bounded}
    return gpu_select.choose(x, table, places, message, **options)


def rows_unpack(message: Tensor, table: Table, rooms: tuple[int, ...]) -> Tensor:
    """The indices that each payload holds, segment by segment in its room (int32, ascending), −1 where there is none.

    Every content of ``message`` gives indices inside their segments. Errors are those of :func:`rows_choose`.
    """
    from thinwire.kernels import gpu_unpack

    _check_message("message", message, _bytes(table, rooms, False), message)
    return gpu_unpack.unpack(message, table, _places(table, rooms, message.device, False))


def rows_add_at(
    y: Tensor,
    message: Tensor,
    table: Table,
    rooms: tuple[int, ...],
    indices: Tensor,
    values: Tensor | None,
    *,
    add: bool,
    scale: float,
) -> None:
    """Set (or with ``add`` increase) the segments of ``y`` to values · scale at their indices and to 0 elsewhere.

    ``indices`` are those of :func:`rows_unpack`, ``values`` lie as they do, or None: those in the message. A segment
    whose header says that it was not finite becomes NaN. Errors are those of :func:`rows_choose`.
    """
    from thinwire.kernels import gpu_unpack

    _check_values("y", y, table, y)
    _check_message("message", message, _bytes(table, rooms, values is None), y)
    places = _places(table, rooms, y.device, values is None)
    gpu_unpack.add(y, message, table, places, indices, values, add=add, scale=scale)


def rows_zero_at(y: Tensor, table: Table, rooms: tuple[int, ...], indices: Tensor) -> None:
    """Zero the segments of ``y`` at ``indices``, those of :func:`rows_unpack`."""
    from thinwire.kernels import gpu_unpack

    _check_values("y", y, table, y)
    gpu_unpack.zero(y, table, _places(table, rooms, y.device, False), indices)


def rows_histograms(x: Tensor, table: Table) -> Tensor:
    """`abs_histogram` of every segment: int32 (segments, 2048)."""
    from thinwire.kernels import gpu_select

    _check_values("x", x, table, x)
    return gpu_select.histograms(x, table)


def magnitude_keys(thresholds: Tensor) -> Tensor:
    """What magnitudes above these (fp32, not negative) reach: integers (int32) that order as magnitudes do."""
    return thresholds.view(torch.int32) + 1


def header_words(message: Tensor, table: Table, word: int) -> Tensor:
    """A word of the header of every payload, int32 (segments,); 0 of segments without elements."""
    rows = table.on(message.device)
    at = torch.where(rows[:, 1] > 0, rows[:, 3] // 4 + word, 0)
    return torch.where(rows[:, 1] > 0, message.view(torch.int32)[at], 0)


def _bytes(table: Table, rooms: tuple[int, ...], floats: bool) -> int:
    def make() -> int:
        rows = [row for row in zip(table.segments, rooms, strict=True) if row[0].numel]
        return max((row.payload + _payload(row.numel, room, floats) for row, room in rows), default=0)

    return table.kept(("bytes", rooms, floats), make)


def _payload(numel: int, room: int, floats: bool) -> int:
    return HEADER + index_bytes(numel, room) + (align(4 * room) if floats else 0)


def _places(table: Table, rooms: tuple[int, ...], device: torch.device, floats: bool) -> Any:
    from thinwire.kernels import gpu_select

    def make() -> gpu_select.Places:
        marks, cleared, start = [], [], 0
        for row, room in zip(table.segments, rooms, strict=True):
            blocks = 0 if packs_bitmap(row.numel, room) else -(-row.numel // BLOCK)
            words = _payload(row.numel, room, floats) // 4 if row.numel else 0
            marks.append((room, start, blocks, row.payload + HEADER + index_bytes(row.numel, room), words))
            cleared.append((0, 1, words))
            start += room
        starts = [(mark[1], 1, mark[0]) for mark in marks]
        return gpu_select.Places(
            torch.tensor(marks, dtype=torch.int64, device="cpu").reshape(len(marks), 5).to(device),
            gpu_select.spans_of(starts, device),
            gpu_select.spans_of(cleared, device),
            start,
        )

    return table.kept(("places", device, rooms, floats), make)
