"""Spectra of blocks: messages of their largest components, and the signal that a sum of messages gives."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from thinwire.kernels import native
from thinwire.kernels.floats import HEADER
from thinwire.kernels.sparse import MAX_NUMEL, index_bytes, pack_indices, select_topk, unpack_indices
from thinwire.kernels.table import Row, Table

_LEAST_BLOCK, _MOST_BLOCK = 64, 16384
_ROOTS: dict[int, Tensor] = {}
"""Roots of unity by the size of a block, one of the few powers of two that the core transforms."""


class Received(NamedTuple):
    """A message of :func:`spectrum_encode`, and the parts of its components: flat fp32, as they were encoded."""

    message: Tensor
    parts: Tensor


def block_size(numel: int, block: int) -> int:
    """Return the elements of the blocks of a segment: ``block``, or all of a shorter segment, and at least 2."""
    return max(2, min(block, numel))


def num_components(numel: int, block: int) -> int:
    """Return how many components a segment of ``numel`` elements has: of each of its blocks half as many and one."""
    own = block_size(numel, block)
    return -(-numel // own) * (own // 2 + 1)


def spectrum(x: Tensor, block: int) -> Tensor:
    """Return the components of flat values, completed with zeros, block by block: complex64, orthonormal."""
    padded = torch.nn.functional.pad(x.float(), (0, -x.numel() % block)).view(-1, block)
    return torch.fft.rfft(padded, norm="ortho").view(-1)


def signal(components: Tensor, numel: int, block: int) -> Tensor:
    """Return the inverse of :func:`spectrum`: fp32, flat."""
    blocks = components.view(-1, block // 2 + 1)
    return torch.fft.irfft(blocks, n=block, norm="ortho").view(-1)[:numel]


def spectrum_encode(
    x: Tensor, table: Table, message: Tensor, parts: Tensor, *, block: int, kept: Sequence[int]
) -> list[float]:
    """Write the largest components of each segment of ``x``: their indices into ``message``, themselves into ``parts``.

    A segment is cut into blocks of ``block`` elements (a shorter one is a block of its own), the last completed with
    zeros, and each is transformed by an orthonormal real FFT. Of segment i the ``kept[i]`` components of largest
    magnitude are chosen; of equal ones those with the lower index. Its payload is a header of 64 bytes (u32 1 if a
    component is not finite, zeros) and the indices (`pack_indices`); their real and imaginary parts lie in ``parts``,
    segment by segment. Implementations round transforms differently.

    Returns for each segment the largest magnitude among its parts, NaN where a component is not finite.

    Shapes: ``x`` (elements,) fp32, bf16 or fp16; ``message`` (bytes,) uint8; ``parts`` (2 · Σ kept,) fp32; contiguous.
    Raises ``TypeError`` for a wrong dtype and ``ValueError`` for a size or device, a block below 2, or a segment of
    2^31 components or more.
    """
    given = native.segments("x", x, table, x)
    to = _received(table, Received(message, parts), x, block, tuple(kept))
    tops = torch.zeros(len(table.segments), dtype=torch.float32, device="cpu")
    if native.computes(x) and _transforms(block):
        native.core().spectrum_encode(*given, *table.native, *to, *_blocks(table, block, kept, tops))
    for i, row, own in _others(x, table, block, kept):
        components = torch.view_as_real(spectrum(x[row.elements], block_size(row.numel, block)))
        real, imaginary = components[:, 0], components[:, 1]
        # Summing the squares over axis 1 takes ten times as long.
        magnitude = torch.mul(real, real).addcmul_(imaginary, imaginary)
        indices, _, finite = select_topk(magnitude, 0, magnitude.numel(), kept[i])
        picked = torch.index_select(components, 0, indices, out=parts[own].view(-1, 2))
        message[row.payload : row.payload + HEADER] = 0
        message[row.payload] = not finite
        pack_indices(indices, magnitude.numel(), kept[i], message, row.payload + HEADER)
        tops[i] = (picked.abs().max() if kept[i] else 0.0) if finite else math.nan
    return tops.tolist()


def spectrum_decode(
    received: Sequence[Received],
    table: Table,
    y: Tensor,
    *,
    block: int,
    kept: Sequence[int],
    add: bool = False,
    scale: float = 1.0,
) -> None:
    """Set each segment of ``y`` to ``scale`` times the signal of the sum of messages, or add that.

    Components are added before one inverse transform. The imaginary parts of the first and the last component of a
    block are ignored, as of real values. A segment becomes NaN where a message says that it was not finite. Every
    content of the messages is accepted.

    Shapes and errors are those of :func:`spectrum_encode`.
    """
    to = native.segments("y", y, table, y)
    messages = chain(*[_received(table, sent, y, block, tuple(kept)) for sent in received])
    tops = torch.zeros(len(table.segments), dtype=torch.float32, device="cpu")
    if native.computes(y) and _transforms(block):
        native.core().spectrum_decode(*table.native, *to, *_blocks(table, block, kept, tops), add, scale, *messages)
    for i, row, own in _others(y, table, block, kept):
        total, size = num_components(row.numel, block), block_size(row.numel, block)
        sums = torch.zeros(total, dtype=torch.complex64, device=y.device)
        for message, parts in received:
            indices = unpack_indices(message, row.payload + HEADER, total, kept[i])
            sums.index_add_(0, indices, torch.view_as_complex(parts[own].view(-1, 2)[: indices.numel()]))
            if bool(message[row.payload : row.payload + 4].any()):
                tops[i] = math.nan
        signals, out = signal(sums, row.numel, size).mul_(scale).to(y.dtype), y[row.elements]
        out.copy_(out + signals if add else signals)
    for i in tops.isnan().nonzero().flatten().tolist():
        y[table.segments[i].elements] = math.nan


def _others(x: Tensor, table: Table, block: int, kept: Sequence[int]) -> Iterator[tuple[int, Row, slice]]:
    """Yield the segments that the native core leaves out: their number, their row, and where their parts lie."""
    natively = native.computes(x) and _transforms(block)
    if natively and all(row.numel >= block or not row.numel for row in table.segments):
        return
    start = 0
    for i, row in enumerate(table.segments):
        own = slice(start, start + 2 * kept[i])
        start = own.stop
        if row.numel and not (natively and row.numel >= block):
            yield i, row, own


def _received(table: Table, received: Received, like: Tensor, block: int, kept: tuple[int, ...]) -> tuple[int, int]:
    """Return the addresses of a message and its parts. Raise an error unless they have the sizes that they must."""

    def num_bytes() -> int:
        if not isinstance(block, int) or block < 2:
            raise ValueError(f"block must be an int of at least 2, not {block!r}")
        ends = [0]
        for row, count in zip(table.segments, kept, strict=True):
            if row.numel > MAX_NUMEL // 2:
                raise ValueError(f"a segment of {row.numel} elements has too many components: cut it")
            if row.numel:
                ends.append(row.payload + HEADER + index_bytes(num_components(row.numel, block), count))
        return max(ends)

    needed = table.kept(("spectrum", block, kept), num_bytes)
    message = native.message("message", received.message, needed, like)
    return message, native.numbers("parts", received.parts, (2 * sum(kept),), like)


def _transforms(block: int) -> bool:
    """Whether the native core transforms such blocks: those of a power of two."""
    return _LEAST_BLOCK <= block <= _MOST_BLOCK and math.log2(block).is_integer()


def _blocks(table: Table, block: int, kept: Sequence[int], tops: Tensor) -> tuple[int, int, int, int]:
    """Return arguments of the native core: the size of blocks, their roots of unity, how many components are kept, and
    where it writes of each segment."""
    counts = table.kept(("counts", *kept), lambda: torch.tensor(kept, dtype=torch.int64, device="cpu"))
    roots = native.address("roots", _roots(block), torch.float32, 2 * block)
    of_segments = native.address("kept", counts, torch.int64, len(table.segments))
    return block, roots, of_segments, native.address("tops", tops, torch.float32, len(table.segments))


def _roots(block: int) -> Tensor:
    """Return exp(−2πi k / block) for k < block, [2, block]: real and imaginary parts in fp32. It lives as long as the
    process.

    The core gets their address: of threads that ask for a block at the same time, all must get the tensor that is kept.
    """
    if block not in _ROOTS:
        angle = torch.arange(block, dtype=torch.float64, device="cpu") * (-2 * math.pi / block)
        _ROOTS.setdefault(block, torch.stack((angle.cos(), angle.sin())).float().contiguous())
    return _ROOTS[block]
