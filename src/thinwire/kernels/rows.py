"""Values of a table's segments without a code: into messages, out of them, and their sums.

On a CPU segments are processed one by one; on a GPU by one launch, because a DDP bucket has many small layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from thinwire.kernels import native
from thinwire.kernels.format import before_sum
from thinwire.kernels.ops import DTYPES
from thinwire.kernels.table import Table


def raw_encode(x: Tensor, table: Table, message: Tensor) -> None:
    """Write the table's segments of ``x``, in its own dtype, into their payloads in ``message``.

    ``x`` (elements,) of any floating-point dtype; ``message`` (bytes,) uint8. Raises ``TypeError`` for another dtype of
    the message and ``ValueError`` where a payload or a segment lies outside its tensor.
    """
    _check(x, table, message)
    if _at_once(x):
        from thinwire.kernels import gpu_rows

        gpu_rows.raw_encode(x, table, message)
        return
    for values, payload in _views(x, table, message):
        payload.copy_(values)


def raw_decode(message: Tensor, table: Table, y: Tensor, *, add: bool = False, scale: float = 1.0) -> None:
    """Set (or with ``add`` increase) the segments of ``y`` to their payloads, which have its dtype, times ``scale``.

    Shapes and errors are those of :func:`raw_encode`.
    """
    _check(y, table, message)
    if _at_once(y):
        from thinwire.kernels import gpu_rows

        gpu_rows.raw_decode(message, table, y, add=add, scale=scale)
        return
    for values, payload in _views(y, table, message):
        if add:
            values.add_(payload, alpha=scale)
        elif scale == 1.0:
            values.copy_(payload)
        else:
            torch.mul(payload, scale, out=values)


def raw_sum(
    messages: Sequence[Tensor], own: Tensor, table: Table, y: Tensor, *, scale: float, out_message: Tensor | None = None
) -> None:
    """``y = scale · (own + Σ messages)``, summed in fp32 (or wider) in their order, and the same to ``out_message``.

    ``y`` may be ``own``, which may be of a wider dtype; messages have that of ``y``. Shapes and errors are those of
    :func:`raw_encode`.
    """
    for message in messages if out_message is None else (*messages, out_message):
        _check(y, table, message)
    if _at_once(y):
        from thinwire.kernels import gpu_rows

        gpu_rows.raw_sum(messages, own, table, y, scale=scale, out_message=out_message)
        return
    wide = torch.promote_types(own.dtype, torch.float32)
    payloads = [[payload for _, payload in _views(y, table, message)] for message in messages]
    before = before_sum(scale)
    for i, span in enumerate(_spans(table)):
        total = own[span].to(wide, copy=True).mul_(before)
        for received in payloads:
            total.add_(received[i], alpha=before)
        y[span].copy_(total.mul_(scale / before))
    if out_message is not None:
        raw_encode(y, table, out_message)


def rows_add(x: Tensor, other: Tensor, table: Table, out: Tensor, *, alpha: float = 1.0) -> None:
    """``out = x + alpha · other`` on the table's segments; ``out`` may be either. Flat, fp32 or narrower."""
    if _at_once(out):
        from thinwire.kernels import gpu_rows

        gpu_rows.rows_add(x, other, table, out, alpha=alpha)
        return
    for span in _spans(table):
        torch.add(x[span], other[span], alpha=alpha, out=out[span])


def rows_scale(x: Tensor, table: Table, out: Tensor, *, by: float = 1.0, over: float = 1.0) -> None:
    """``out = x · by / over`` on the table's segments; ``out`` may be ``x``. One of the two factors is 1. Products are
    taken in fp32; ``x`` is fp32 where ``over`` is not 1."""
    if _at_once(out):
        from thinwire.kernels import gpu_rows

        gpu_rows.rows_scale(x, table, out, by=by, over=over)
        return
    for span in _spans(table):
        if by != 1.0:
            torch.mul(x[span].to(torch.float32), by, out=out[span])
        elif over != 1.0:
            torch.div(x[span], over, out=out[span])
        elif out is not x:
            out[span] = x[span]


def _at_once(tensor: Tensor) -> bool:
    # Only `raw` takes fp64, whose scalars would lose half of their digits as arguments of a kernel.
    return native.asynchronous(tensor) and tensor.dtype in DTYPES


def _spans(table: Table) -> Iterator[slice]:
    return (slice(row.start, row.start + row.numel) for row in table.segments)


def _check(values: Tensor, table: Table, message: Tensor) -> None:
    if message.dtype != torch.uint8:
        raise TypeError(f"a message is a uint8 tensor, not {message.dtype}")
    size = values.element_size()
    num_bytes = table.message_bytes(("raw", size), lambda numel: numel * size)
    if num_bytes > message.numel():
        raise ValueError(f"a message of {message.numel()} bytes is too short: its payloads end at byte {num_bytes}")
    if table.num_elements > values.numel():
        raise ValueError(f"segments reach to element {table.num_elements} of a tensor of {values.numel()}")


def _views(values: Tensor, table: Table, message: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the values of each segment in the flat tensor, and its payload as a tensor of their dtype."""
    for row in table.segments:
        payload = message[row.payload : row.payload + row.numel * values.element_size()]
        yield values[row.start : row.start + row.numel], payload.view(values.dtype)
