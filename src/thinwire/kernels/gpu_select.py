"""Sparse payloads of all segments of a table in Triton: chosen and packed without waiting on the host.

The k-th largest magnitude of every segment is found digit by digit (11, 10 and 10 bits of its 31): a histogram of one
digit of those that share the digits above, then the digit at which k are reached. So the number of launches does not
depend on how many segments there are, and nothing needs to be known on the host. Then each tile counts what it will
keep, a scan says where that goes, and a last pass puts it there in order.
"""

# Triton is not installed everywhere, and its language has types of its own.
# pyright: reportMissingImports=false, reportIndexIssue=false, reportArgumentType=false, reportAssignmentType=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportAttributeAccessIssue=false
from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from thinwire.kernels import native
from thinwire.kernels.gpu_launch import TILE, check_aligned, on, options
from thinwire.kernels.gpu_sparse import keys_of
from thinwire.kernels.gpu_tiles import row_of
from thinwire.kernels.reference_sparse import BINS, Sample
from thinwire.kernels.table import Table

DIGITS = ((20, 11), (10, 10), (0, 10))
"""Shift and bits of the digits of a magnitude, highest first."""


class Spans(NamedTuple):
    """Elements ``base + i · stride``, i < num, of a flat tensor, for each segment, and the tiles they fall into."""

    rows: Tensor
    """(segments, 3) int64: base, stride, num."""
    pieces: Tensor
    """(tiles, 2) int64: segment, and tile inside it."""
    firsts: Tensor
    """(segments + 1,) int64: a segment's first tile."""


def spans_of(rows: Sequence[tuple[int, int, int]], device: torch.device) -> Spans:
    counts = torch.tensor([-(-num // TILE) for _, _, num in rows], dtype=torch.int64, device="cpu")
    row = torch.repeat_interleave(torch.arange(len(counts), dtype=torch.int64, device="cpu"), counts)
    ends = counts.cumsum(0)
    pieces = torch.stack((row, torch.arange(len(row), dtype=torch.int64, device="cpu") - (ends - counts)[row]), dim=1)
    firsts = torch.cat((torch.zeros(1, dtype=torch.int64, device="cpu"), ends))
    table = torch.tensor(rows, dtype=torch.int64, device="cpu").reshape(len(rows), 3)
    return Spans(table.to(device), pieces.to(device), firsts.to(device))


class Places(NamedTuple):
    """Where the payloads of a table keep what, if each has room for so many elements."""

    marks: Tensor
    """(segments, 5) int64: room, first place in a flat tensor of all values, blocks of its list of indices (0 if it has
    a bitmap), byte at which its values begin, words of its payload that are cleared."""
    rooms: Spans
    """The places in that flat tensor."""
    cleared: Spans
    """The words of the payloads."""
    num_values: int


@triton.jit
def count_digits(
    x, spans, pieces, prefixes, bins,
    SHIFT: tl.constexpr, BITS: tl.constexpr, WHOLE: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """How many keys that begin with their segment's prefix have which digit next. ``WHOLE``: also beyond NaN's key."""
    pid = tl.program_id(0).to(tl.int64)
    row = tl.load(pieces + 2 * pid)
    at = tl.load(pieces + 2 * pid + 1) * SIZE + tl.arange(0, SIZE)
    base, stride, num = tl.load(spans + 3 * row), tl.load(spans + 3 * row + 1), tl.load(spans + 3 * row + 2)
    value = tl.load(x + base + at * stride, mask=at < num, other=0.0).to(tl.float32)
    key = value.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    if not WHOLE:
        key = tl.minimum(key, 0x7F800001)
    DIGITS: tl.constexpr = 1 << BITS
    alike = at < num
    if SHIFT + BITS < 31:
        alike = alike & ((key >> (SHIFT + BITS)) == tl.load(prefixes + row))
    digit = tl.where(alike, (key >> SHIFT) & (DIGITS - 1), 0)
    counts = tl.histogram(digit, DIGITS)
    bin = tl.arange(0, DIGITS)
    others = SIZE - tl.sum(alike.to(tl.int32))
    counts = tl.where(bin == 0, counts - others, counts)
    tl.atomic_add(bins + row * DIGITS + bin, counts, mask=counts != 0)


@triton.jit
def choose_digit(bins, prefixes, wanted, BITS: tl.constexpr):
    """The largest digit that, with those above, as many keys reach as a segment wants."""
    row = tl.program_id(0).to(tl.int64)
    DIGITS: tl.constexpr = 1 << BITS
    bin = tl.arange(0, DIGITS)
    count = tl.load(bins + row * DIGITS + bin)
    reached = tl.sum(count) - tl.cumsum(count, 0) + count
    k = tl.load(wanted + row)
    digit = tl.maximum(tl.sum((reached >= k).to(tl.int32)) - 1, 0)
    above = tl.sum(tl.where(bin > digit, count, 0))
    tl.store(prefixes + row, (tl.load(prefixes + row) << BITS) | digit)
    tl.store(wanted + row, k - above)


@triton.jit(do_not_specialize=["tiles"])
def count_rows(x, spans, pieces, least, asked, counts, tiles, SIZE: tl.constexpr):
    """Of each tile: keys above ``least``, equal to it, not finite, and at least ``asked`` (0: none is asked for)."""
    pid = tl.program_id(0).to(tl.int64)
    row = tl.load(pieces + 2 * pid)
    base, num = tl.load(spans + 3 * row), tl.load(spans + 3 * row + 2)
    _value, key = keys_of(x + base, tl.load(pieces + 2 * pid + 1) * SIZE + tl.arange(0, SIZE), num)
    bound, reach = tl.load(least + row), tl.load(asked + row)
    tl.store(counts + pid, tl.sum((key > bound).to(tl.int32)))
    tl.store(counts + tiles + pid, tl.sum((key == bound).to(tl.int32)))
    tl.store(counts + 2 * tiles + pid, tl.sum((key >= 0x7F800000).to(tl.int32)))
    tl.store(counts + 3 * tiles + pid, tl.sum(((key >= reach) & (reach > 0)).to(tl.int32)))


@triton.jit
def before(ends, first, tile):
    """What the tiles of a segment up to ``tile`` counted; ``ends`` counts from the first segment on."""
    return tl.load(ends + tile) - tl.load(ends + first - 1, mask=first > 0, other=0)


@triton.jit(do_not_specialize=["tiles"])
def put_chosen(
    x, message, values, pieces, rows, firsts, marks, least, limits, counts, ends, tiles,
    FLOATS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Indices and values of what is above ``least``, and of the first equal to it, up to a limit.

    Values go into the message (``FLOATS``) or to their place among all values.
    """
    pid = tl.program_id(0).to(tl.int64)
    row = tl.load(pieces + 2 * pid)
    piece, start, numel, _index0, payload, _site = row_of(pieces, rows)
    first, last, limit = tl.load(firsts + row), tl.load(firsts + row + 1), tl.load(limits + row)
    at = piece * SIZE + tl.arange(0, SIZE)
    value, key = keys_of(x + start, at, numel)
    bound = tl.load(least + row)
    above = before(ends, first, pid) - tl.load(counts + pid)
    equal = before(ends + tiles, first, pid) - tl.load(counts + tiles + pid)
    wanted = tl.maximum(limit - before(ends, first, last - 1), 0)  # of the equal ones
    same = (key == bound).to(tl.int32)
    rank = equal + tl.cumsum(same, 0) - same
    kept = ((key > bound) | ((key == bound) & (rank < wanted))).to(tl.int32)
    to = above + tl.minimum(equal, wanted) + tl.cumsum(kept, 0) - kept
    mask = (kept > 0) & (to < limit)
    if FLOATS:
        to_message = (message + tl.load(marks + 5 * row + 3)).to(tl.pointer_type(tl.float32))
        tl.store(to_message + to, value, mask=mask)
    else:
        tl.store(values + tl.load(marks + 5 * row + 1) + to, value, mask=mask)
    blocks = tl.load(marks + 5 * row + 2)
    indices = (message + payload + 64).to(tl.pointer_type(tl.int32))
    if blocks == 0:
        bits = tl.reshape(mask.to(tl.int32), (SIZE // 32, 32)) << tl.arange(0, 32)[None, :]
        word = piece * (SIZE // 32) + tl.arange(0, SIZE // 32)
        tl.store(indices + word, tl.sum(bits, axis=1), mask=word * 32 < numel)
    else:
        tl.atomic_add(indices + (piece * SIZE >> 16), tl.sum(mask.to(tl.int32)))
        offsets = (indices + blocks).to(tl.pointer_type(tl.int16))
        tl.store(offsets + to, (at & 0xFFFF).to(tl.int16), mask=mask)


@triton.jit
def clear_words(message, pieces, rows, marks, SIZE: tl.constexpr):
    piece, _start, _numel, _index0, payload, _site = row_of(pieces, rows)
    at = piece * SIZE + tl.arange(0, SIZE)
    num = tl.load(marks + 5 * tl.load(pieces + 2 * tl.program_id(0).to(tl.int64)) + 4)
    tl.store((message + payload).to(tl.pointer_type(tl.int32)) + at, tl.zeros((SIZE,), tl.int32), mask=at < num)


@triton.jit(do_not_specialize=["tiles"])
def put_headers(message, rows, firsts, marks, limits, ends, tiles, BOUNDED: tl.constexpr):
    """Whether a value was not finite, how many are sent, and how many found no room."""
    row = tl.program_id(0).to(tl.int64)
    first, last = tl.load(firsts + row), tl.load(firsts + row + 1)
    if last > first:
        limit = tl.load(limits + row)
        count = tl.minimum(before(ends, first, last - 1) + before(ends + tiles, first, last - 1), limit)
        if BOUNDED:  # there is no telling others how many: the payload takes all of its room
            count = tl.load(marks + 5 * row).to(tl.int32)
        odd = before(ends + 2 * tiles, first, last - 1) > 0
        beyond = tl.maximum(before(ends + 3 * tiles, first, last - 1) - limit, 0)
        at = tl.arange(0, 16)
        words = tl.where(at == 0, odd.to(tl.int32), tl.where(at == 1, count, tl.where(at == 2, beyond, 0)))
        tl.store((message + tl.load(rows + 5 * row + 3)).to(tl.pointer_type(tl.int32)) + at, words)


def whole(table: Table, device: torch.device) -> Spans:
    """All elements of the segments."""
    return table.kept(
        ("spans", device), lambda: spans_of([(row.start, 1, row.numel) for row in table.segments], device)
    )


def kth_keys(x: Tensor, spans: Spans, wanted: Tensor) -> Tensor:
    """The ``wanted``-th largest key of each segment, int32; 2^31 − 1 where none is wanted. ``wanted`` is used up."""
    segments = len(wanted)
    prefixes = torch.zeros_like(wanted)
    for shift, bits in DIGITS:
        bins = torch.zeros(segments << bits, dtype=torch.int32, device=x.device)
        count_digits[(len(spans.pieces),)](
            x, spans.rows, spans.pieces, prefixes, bins, SHIFT=shift, BITS=bits, WHOLE=False, SIZE=TILE, **options(8)
        )
        choose_digit[(segments,)](bins, prefixes, wanted, BITS=bits, **options(8))
    return prefixes


def histograms(x: Tensor, table: Table) -> Tensor:
    """See :func:`thinwire.kernels.sparse_rows.histograms`."""
    spans = whole(table, x.device)
    bins = torch.zeros(len(table), BINS, dtype=torch.int32, device=x.device)
    if table.numel:
        with on(x):
            count_digits[(len(spans.pieces),)](
                x, spans.rows, spans.pieces, bins, bins, SHIFT=20, BITS=11, WHOLE=True, SIZE=TILE, **options(8)
            )
    return bins


def choose(
    x: Tensor,
    table: Table,
    places: Places,
    message: Tensor,
    *,
    limits: Tensor,
    asked: Tensor | None,
    samples: Sequence[Sample] | None,
    floats: bool,
    bounded: bool,
) -> Tensor:
    """See :func:`thinwire.kernels.sparse_rows.choose`."""
    check_aligned(message)
    values = torch.zeros(0 if floats else places.num_values, dtype=torch.float32, device=x.device)
    if not table.numel:
        return values
    spans, rows = whole(table, x.device), table.on(x.device)
    tiles = len(spans.pieces)
    with on(x):
        least = kth_keys(x, spans, limits.clone())
        if samples is not None:
            least = torch.maximum(least, _sampled(x, table, tuple(samples)))
        if asked is None:
            asked = torch.zeros_like(least)
        else:
            least = torch.maximum(least, asked)
        counts = torch.empty(4, tiles, dtype=torch.int32, device=x.device)
        count_rows[(tiles,)](x, spans.rows, spans.pieces, least, asked, counts, tiles, SIZE=TILE, **options(8))
        ends = counts.cumsum(1, dtype=torch.int32)
        cleared = places.cleared
        clear_words[(len(cleared.pieces),)](message, cleared.pieces, rows, places.marks, SIZE=TILE, **options(8))
        put_chosen[(tiles,)](
            x, message, values, spans.pieces, rows, spans.firsts, places.marks, least, limits, counts, ends, tiles,
            FLOATS=floats, SIZE=TILE, **options(8),
        )  # fmt: skip
        put_headers[(len(table),)](
            message, rows, spans.firsts, places.marks, limits, ends, tiles, BOUNDED=bounded, **options(8)
        )
    return values


def _sampled(x: Tensor, table: Table, samples: tuple[Sample, ...]) -> Tensor:
    """The keys that samples of the segments suggest; 0 where there is none."""
    firsts = [row.start + sample.offset for row, sample in zip(table.segments, samples, strict=True)]
    looked = tuple((sample.stride, sample.num, sample.rank) for sample in samples)

    def make() -> tuple[Spans, Tensor]:
        spans = spans_of([(0, stride, num) for stride, num, _ in looked], x.device)
        return spans, torch.tensor([rank for _, _, rank in looked], dtype=torch.int32, device="cpu").to(x.device)

    spans, ranks = table.kept(("sample", x.device, looked), make)
    if not len(spans.pieces):
        return torch.zeros_like(ranks)
    # Where to look changes from step to step; all else is the same.
    begins = native.to_device(torch.tensor(firsts, dtype=torch.int64, device="cpu"), x.device)
    rows = torch.stack((begins, spans.rows[:, 1], spans.rows[:, 2]), dim=1)
    keys = kth_keys(x, spans._replace(rows=rows), ranks.clone())
    return torch.where(ranks > 0, keys, 0)
