"""`thinwire.kernels.rows` in PyTorch's operations, segment by segment."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from thinwire.kernels.format import before_sum
from thinwire.kernels.table import Table


def raw_encode(x: Tensor, table: Table, message: Tensor) -> None:
    """See :func:`thinwire.kernels.raw_encode`."""
    for values, payload in _views(x, table, message):
        payload.copy_(values)


def raw_decode(message: Tensor, table: Table, y: Tensor, *, add: bool = False, scale: float = 1.0) -> None:
    """See :func:`thinwire.kernels.raw_decode`."""
    wide = torch.promote_types(y.dtype, torch.float32)
    for values, payload in _views(y, table, message):
        if add:
            values.copy_(values.to(wide) + payload.to(wide) * scale)
        elif scale == 1.0:
            values.copy_(payload)
        else:
            torch.mul(payload, scale, out=values)


def raw_sum(
    messages: Sequence[Tensor], own: Tensor, table: Table, y: Tensor, *, scale: float, out_message: Tensor | None = None
) -> None:
    """See :func:`thinwire.kernels.raw_sum`."""
    wide = torch.promote_types(own.dtype, torch.float32)
    payloads = [[payload for _, payload in _views(y, table, message)] for message in messages]
    before = before_sum(scale)
    for i, span in enumerate(_spans(table)):
        total = own[span].to(wide, copy=True).mul_(before)
        for received in payloads:
            total.add_(received[i].to(wide) * before)
        y[span].copy_(total.mul_(scale / before))
    if out_message is not None:
        raw_encode(y, table, out_message)


def rows_add(x: Tensor, other: Tensor, table: Table, out: Tensor, *, alpha: float = 1.0) -> None:
    """See :func:`thinwire.kernels.rows_add`."""
    wide = torch.promote_types(torch.promote_types(x.dtype, other.dtype), torch.float32)
    for span in _spans(table):
        # Rounded twice: with alpha=, an addition of PyTorch's may be fused with the product.
        out[span] = x[span].to(wide) + other[span].to(wide) * alpha


def rows_scale(x: Tensor, table: Table, out: Tensor, *, by: float = 1.0, over: float = 1.0) -> None:
    """See :func:`thinwire.kernels.rows_scale`."""
    for span in _spans(table):
        if by != 1.0:
            torch.mul(x[span].to(torch.float32), by, out=out[span])
        elif over != 1.0:
            torch.div(x[span], over, out=out[span])
        else:
            out[span] = x[span]


def _spans(table: Table) -> Iterator[slice]:
    return (slice(row.start, row.start + row.numel) for row in table.segments)


def _views(values: Tensor, table: Table, message: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the values of each segment in the flat tensor, and its payload as a tensor of their dtype."""
    for row in table.segments:
        payload = message[row.payload : row.payload + row.numel * values.element_size()]
        yield values[row.start : row.start + row.numel], payload.view(values.dtype)
