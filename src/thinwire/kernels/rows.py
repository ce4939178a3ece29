"""Values of a table's segments without a code: into messages, out of them, and their sums.

A DDP bucket has many small layers, and an operation for each would take most of the time: payloads are copied and
summed by one call of the native core, and on a GPU by one launch.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor

from thinwire.kernels import native, reference
from thinwire.kernels.ops import DTYPES
from thinwire.kernels.table import Table


def raw_encode(x: Tensor, table: Table, message: Tensor) -> None:
    """Write the table's segments of ``x``, in its own dtype, into their payloads in ``message``.

    ``x`` (elements,) of any floating-point dtype; ``message`` (bytes,) uint8. Raises ``TypeError`` for another dtype of
    the message and ``ValueError`` where a payload or a segment lies outside its tensor.
    """
    num_bytes = _check(x, table, message)
    if not _computes(x, message):
        torch_or_triton(x).raw_encode(x, table, message)
        return
    to = native.address("message", message, torch.uint8, num_bytes)
    native.core().raw_encode(*native.source("x", x, table), to)


def raw_decode(message: Tensor, table: Table, y: Tensor, *, add: bool = False, scale: float = 1.0) -> None:
    """Set (or with ``add`` increase) the segments of ``y`` to their payloads, which have its dtype, times ``scale``.

    Shapes and errors are those of :func:`raw_encode`.
    """
    num_bytes = _check(y, table, message)
    if not _computes(y, message):
        torch_or_triton(y).raw_decode(message, table, y, add=add, scale=scale)
        return
    received = native.address("message", message, torch.uint8, num_bytes)
    native.core().raw_decode(received, *native.target(table, y), add, scale)


def raw_sum(
    messages: Sequence[Tensor], own: Tensor, table: Table, y: Tensor, *, scale: float, out_message: Tensor | None = None
) -> None:
    """Set ``y = scale · (own + Σ messages)``, in fp32 (or wider), in their order, and the same to ``out_message``.

    ``y`` may be ``own``, which may be of a wider dtype; messages have that of ``y``. Shapes and errors are those of
    :func:`raw_encode`.
    """
    payloads = messages if out_message is None else (*messages, out_message)
    num_bytes = max((_check(y, table, message) for message in payloads), default=0)
    for values in (own, y):
        _check_reach(values, table)
    if not _computes(own, y, *payloads):
        torch_or_triton(y).raw_sum(messages, own, table, y, scale=scale, out_message=out_message)
        return
    out = 0 if out_message is None else native.address("out_message", out_message, torch.uint8, num_bytes)
    to = *native.values("y", y, table.num_elements), out
    native.core().raw_sum(*native.source("own", own, table), *to, scale, *native.messages(messages, num_bytes))


def rows_add(x: Tensor, other: Tensor, table: Table, out: Tensor, *, alpha: float = 1.0) -> None:
    """Set ``out = x + alpha · other`` on the table's segments, in fp32. ``out`` may be either. Flat, fp32 or narrower.

    Raises ``ValueError`` where a segment lies outside a tensor.
    """
    for values in (x, other, out):
        _check_reach(values, table)
    if not _computes(x, other, out):
        torch_or_triton(out).rows_add(x, other, table, out, alpha=alpha)
        return
    given = *native.values("other", other, table.num_elements), *native.values("out", out, table.num_elements)
    native.core().rows_add(*native.source("x", x, table), *given, alpha)


def rows_scale(x: Tensor, table: Table, out: Tensor, *, by: float = 1.0, over: float = 1.0) -> None:
    """Set ``out = x · by / over`` on the table's segments; ``out`` may be ``x``. One of the two factors is 1. Products
    are taken in fp32; ``x`` is fp32 where ``over`` is not 1. Errors are those of :func:`rows_add`."""
    if out is x and by == over == 1.0:
        return
    for values in (x, out):
        _check_reach(values, table)
    if not _computes(x, out):
        torch_or_triton(out).rows_scale(x, table, out, by=by, over=over)
        return
    to = native.values("out", out, table.num_elements)
    native.core().rows_scale(*native.source("x", x, table), *to, by, over)


def torch_or_triton(tensor: Tensor) -> ModuleType:
    """Return the implementation for a tensor that the native core does not process."""
    # Only `raw` takes fp64, whose scalars would lose half of their digits as arguments of a kernel.
    takes = tensor.dtype in DTYPES
    return native.torch_or_triton(reference, "gpu_rows", tensor) if takes else reference


def _computes(*tensors: Tensor) -> bool:
    """Whether the native core takes these values and messages."""
    return all(
        native.computes(tensor) and tensor.is_contiguous() and (tensor.dtype in DTYPES or tensor.dtype is torch.uint8)
        for tensor in tensors
    )


def _check(values: Tensor, table: Table, message: Tensor) -> int:
    """Return the bytes that the payloads take. Raise an error where they, or the segments, do not fit."""
    if message.dtype != torch.uint8:
        raise TypeError(f"a message is a uint8 tensor, not {message.dtype}")
    size = values.element_size()
    num_bytes = table.message_bytes(("raw", size), lambda numel: numel * size)
    if num_bytes > message.numel():
        raise ValueError(f"a message of {message.numel()} bytes is too short: its payloads end at byte {num_bytes}")
    _check_reach(values, table)
    return num_bytes


def _check_reach(values: Tensor, table: Table) -> None:
    if table.num_elements > values.numel():
        raise ValueError(f"segments reach to element {table.num_elements} of a tensor of {values.numel()}")
