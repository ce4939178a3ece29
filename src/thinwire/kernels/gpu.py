"""The kernels of buckets in Triton, for CUDA tensors (and, for tests, in its interpreter). Imported when first needed.

A group of 128 codes is held as 2, 4 or 8 register tiles, so many that the fields of a byte of the narrowest plane lie
in different tiles at the same place: packing is then element by element, without a shuffle. Loads and stores are 128
bits wide where a segment starts at a multiple of 8 elements.

The bits are those of :mod:`thinwire.kernels.reference`: hence no fused multiply-add (``enable_fp_fusion=False``) and
correctly rounded division (``tl.div_rn``). Host work is constant per call, and nothing waits for the device.
"""

# Triton is not installed everywhere, and its language has types of its own.
# pyright: reportMissingImports=false, reportArgumentType=false, reportIndexIssue=false
from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
from torch import Tensor

from thinwire.kernels import reference
from thinwire.kernels.format import GROUP, ROUNDINGS, SCHEMES, Format, Residual, before_sum
from thinwire.kernels.gpu_decode import ADD, MEAN, STORE, decode_tiles
from thinwire.kernels.gpu_encode import bucket_extrema, bucket_scales, encode_codes, encode_tiles
from thinwire.kernels.gpu_launch import TILE, check_aligned, on, options, runs, words
from thinwire.kernels.table import Table

MAX_TILE_BUCKET = 4096
"""Largest bucket for a single launch; larger ones, and those that are not a power of two times 128, take two or
three."""


def bucketed_encode(
    x: Tensor, table: Table, message: Tensor, form: Format, *, key: int, residual: Residual | None = None
) -> None:
    """See :func:`thinwire.kernels.bucketed_encode`."""
    check_aligned(message)
    if not table.numel:
        return
    bucket = table.clamped(form.bucket)
    if fits_tile(bucket):
        _encode_tiles(x, table, message, form, bucket, key=key, residual=residual)
    else:
        with on(x):
            _encode_any_bucket(x, table, message, form, bucket, key=key, residual=residual)


def _encode_tiles(
    x: Tensor, table: Table, message: Tensor, form: Format, bucket: int, *, key: int, residual: Residual | None,
    received: tuple[Tensor, int, int] | None = None, scale: float = 1.0, y: Tensor | None = None,
) -> None:  # fmt: skip
    """Encode in one launch; with messages that were received, their mean, and write its decoded values to ``y``."""
    tile = encode_tile_size(form.bits, bucket)
    pieces, before = table.pieces(x.device, tile), before_sum(scale)
    now, next, loss_scale = residual or Residual(x, x)
    with on(x):
        encode_tiles[(len(pieces),)](
            x, now, next, message, pieces, table.on(x.device), *words(key), loss_scale, form.clip,
            *(received or (message, 0, 0)), before, scale / before, x if y is None else y,
            BITS=form.bits, BUCKET=bucket, GROUPS=tile // GROUP, STEPS=form.steps, SUMS=needs_sums(form),
            RESIDUAL=residual is not None, REDUCE=y is not None, **coding_constants(form), **options(form.bits),
        )  # fmt: skip


def _encode_any_bucket(
    x: Tensor, table: Table, message: Tensor, form: Format, bucket: int, *, key: int, residual: Residual | None
) -> None:
    """Encode extrema of all buckets (unless the scheme needs sums), then their scales, then the codes."""
    rows, coding, sums = table.on(x.device), coding_constants(form), needs_sums(form)
    launch = options(form.bits)
    firsts, total = table.bucket_firsts(x.device, bucket)
    inverses = torch.empty(total, dtype=torch.float32, device=x.device)
    now, next, loss_scale = residual or Residual(x, x)
    fused = residual is not None
    low_keys = high_keys = firsts
    if not sums:
        low_keys = torch.full((total,), 0x7FFFFFFF, dtype=torch.int32, device=x.device)
        high_keys = torch.full((total,), -0x80000000, dtype=torch.int32, device=x.device)
        cols = min(triton.next_power_of_2(bucket), TILE)
        slices, across = -(-bucket // cols), TILE // cols
        pieces = table.pieces(x.device, across * bucket, each=slices)
        bucket_extrema[(len(pieces),)](
            x, now, pieces, rows, firsts, low_keys, high_keys, bucket, slices, loss_scale,
            ROWS=across, COLS=cols, SCHEME=coding["SCHEME"], RESIDUAL=fused, **launch,
        )  # fmt: skip
    count = 8 if sums else GROUP
    pieces = table.pieces(x.device, count * bucket)
    bucket_scales[(len(pieces),)](
        x, now, message, pieces, rows, firsts, low_keys, high_keys, inverses, *words(key), bucket, loss_scale,
        form.clip, BITS=form.bits, STEPS=form.steps, SUMS=sums, RESIDUAL=fused, COUNT=count, **coding, **launch,
    )  # fmt: skip
    pieces = table.pieces(x.device, TILE)
    encode_codes[(len(pieces),)](
        x, now, next, message, pieces, rows, firsts, low_keys, inverses, *words(key), bucket, loss_scale,
        BITS=form.bits, GROUPS=TILE // GROUP, RESIDUAL=fused, **coding, **launch,
    )  # fmt: skip


def bucketed_decode(
    message: Tensor, table: Table, y: Tensor, form: Format, *, add: bool = False, scale: float = 1.0
) -> None:
    """See :func:`thinwire.kernels.bucketed_decode`."""
    _decode((message, 0, 1), table, y, y, form, scale=scale, mode=ADD if add else STORE)


def bucketed_sum(
    messages: Sequence[Tensor], own: Tensor | None, table: Table, y: Tensor, form: Format, *, scale: float = 1.0
) -> None:
    """See :func:`thinwire.kernels.bucketed_sum`."""
    if not messages:
        reference.bucketed_sum(messages, own, table, y, form, scale=scale)
        return
    sums = y if y.dtype == torch.float32 else torch.empty(y.shape, dtype=torch.float32, device=y.device)
    base, mode = (y, MEAN) if own is None else (own, ADD)
    before = weight = before_sum(scale)
    *others, last = runs(messages)
    for run in others:
        _decode(run, table, base, sums, form, scale=before, mode=mode, weight=weight)
        base, mode, weight = sums, ADD, 1.0
    _decode(last, table, base, y, form, scale=before, mode=mode, weight=weight, after=scale / before)


def bucketed_reduce(
    messages: Sequence[Tensor],
    own: Tensor,
    table: Table,
    out_message: Tensor,
    y: Tensor,
    form: Format,
    *,
    scale: float,
    key: int,
    residual: Residual | None = None,
) -> None:
    """See :func:`thinwire.kernels.bucketed_reduce`."""
    bucket, received = table.clamped(form.bucket), runs(messages)
    if len(received) == 1 and fits_tile(bucket) and not needs_sums(form) and table.numel:
        check_aligned(out_message)
        fused = {"received": received[0], "scale": scale, "y": y}
        _encode_tiles(own, table, out_message, form, bucket, key=key, residual=residual, **fused)
        return
    mean = y if y.dtype == torch.float32 else torch.empty(y.shape, dtype=torch.float32, device=y.device)
    bucketed_sum(messages, own, table, mean, form, scale=scale)
    bucketed_encode(mean, table, out_message, form, key=key, residual=residual)
    bucketed_decode(out_message, table, y, form)


def _decode(
    run: tuple[Tensor, int, int],
    table: Table,
    base: Tensor,
    y: Tensor,
    form: Format,
    *,
    scale: float,
    mode: int,
    weight: float = 1.0,
    after: float = 1.0,
) -> None:
    message, stride, count = run
    check_aligned(message)
    pieces = table.pieces(y.device, TILE)
    bucket = table.clamped(form.bucket)
    known = bucket if bucket % GROUP == 0 and bucket <= MAX_TILE_BUCKET else 0
    if len(pieces):
        with on(y):
            decode_tiles[(len(pieces),)](
                message, base, y, pieces, table.on(y.device), bucket, stride, count, weight, scale, after,
                BITS=form.bits, BUCKET=known, GROUPS=TILE // GROUP, OFFSET2=int(2 * form.offset), MODE=mode,
                **options(form.bits),
            )  # fmt: skip


def encode_tile_size(bits: int, bucket: int) -> int:
    """Return the elements of a program, 32 a thread: with 16, its row, keys and scales cost a quarter of its time."""
    return max(32 * 32 * int(options(bits)["num_warps"]), bucket)


def coding_constants(form: Format) -> dict[str, int]:
    """Return a kernel's constants for the format. What does not round is compiled once, not per rounding."""
    scheme = SCHEMES.index(form.scheme)
    rounding = ROUNDINGS.index(form.rounding) if scheme <= 2 else ROUNDINGS.index("nearest")
    return {"SCHEME": scheme, "ROUNDING": rounding, "OFFSET2": int(2 * form.offset)}


def fits_tile(bucket: int) -> bool:
    """Return whether a program can encode whole buckets of this size."""
    groups = bucket // GROUP
    return bucket % GROUP == 0 and bucket <= MAX_TILE_BUCKET and groups & (groups - 1) == 0


def needs_sums(form: Format) -> bool:
    return form.scheme in ("norm", "sides", "sign") or form.clip > 0
