"""The kernels that callers use: arguments checked in constant time, then handed to the execution of their device."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor

from thinwire.kernels import native, reference
from thinwire.kernels.table import Table

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def minmax_encode(
    x: Tensor, table: Table, message: Tensor, *, bits: int, bucket: int, key: int, nearest: bool = False
) -> None:
    """Quantise the table's segments of ``x`` into their payloads in ``message`` (thesis, section 5.6.1).

    Per bucket of ``bucket`` elements, ``lo = min`` and ``unit = (max − min)/(2^bits − 1)`` in fp32, and a code of
    ``bits`` bits an element, rounded stochastically (unbiased) with draws that depend only on ``key``, the row's site
    and the element's index in its layer, or to nearest. A bucket that holds NaN or Inf, or whose range overflows
    fp32, gets NaN for both; one with a range below 2^-100 decodes to its minimum.

    Shapes: ``x`` (elements,) fp32, bf16 or fp16; ``message`` (bytes,) uint8; both contiguous and on one device.
    Bytes of ``message`` outside the payloads are left alone. ``key`` is taken modulo 2^64.

    Raises ``TypeError`` for a wrong dtype and ``ValueError`` for a format, a size, a device or a layout that cannot
    work.
    """
    run = _execution(x, table)
    _check_values("x", x, table, x)
    _check_message("message", message, table.extent(bits, bucket).message_bytes, x)
    run.minmax_encode(x, table, message, bits=bits, bucket=bucket, key=key, nearest=nearest)


def minmax_decode(
    message: Tensor, table: Table, y: Tensor, *, bits: int, bucket: int, add: bool = False, scale: float = 1.0
) -> None:
    """Write ``v · scale`` into the table's segments of ``y``, or add it, with ``v = lo + code · unit``.

    Each operation is rounded to fp32; a bf16 or fp16 ``y`` is rounded once more, to nearest even. Elements outside
    the segments are left alone. Every content of ``message`` decodes to something: its size is all that is checked.

    Shapes and errors are those of :func:`minmax_encode`.
    """
    run = _execution(y, table)
    _check_values("y", y, table, y)
    _check_message("message", message, table.extent(bits, bucket).message_bytes, y)
    run.minmax_decode(message, table, y, bits=bits, bucket=bucket, add=add, scale=scale)


def minmax_reduce(
    messages: Sequence[Tensor],
    own: Tensor,
    table: Table,
    out_message: Tensor,
    y: Tensor,
    *,
    bits: int,
    bucket: int,
    scale: float,
    key: int,
    nearest: bool = False,
) -> None:
    """The owner's stage of a scatter-reduce-all-gather: sum, encode again, and keep what the others will decode.

    ``s = scale · (own + Σ v_j)`` over ``messages`` in the order given, in fp32; ``out_message`` receives the payloads
    of ``s``, ``y`` its decoded value. ``y`` may be ``own`` itself; otherwise the two must not overlap, and
    ``out_message`` must be none of ``messages``. All messages share the table.

    Shapes and errors are those of :func:`minmax_encode`.
    """
    run = _execution(y, table)
    _check_values("y", y, table, y)
    _check_values("own", own, table, y)
    num_bytes = table.extent(bits, bucket).message_bytes
    for message in messages:
        _check_message("each message", message, num_bytes, y)
    _check_message("out_message", out_message, num_bytes, y)
    run.minmax_reduce(
        messages,
        own,
        table,
        out_message,
        y,
        bits=bits,
        bucket=bucket,
        scale=scale,
        key=key,
        nearest=nearest,
    )


def minmax_sum(
    messages: Sequence[Tensor],
    own: Tensor | None,
    table: Table,
    y: Tensor,
    *,
    bits: int,
    bucket: int,
    scale: float = 1.0,
) -> None:
    """``y = scale · (own + Σ v_j)`` over ``messages`` in the order given; without ``own`` the sum starts at 0.

    Shapes and errors are those of :func:`minmax_encode`; ``y`` may be ``own``.
    """
    run = _execution(y, table)
    _check_values("y", y, table, y)
    if own is not None:
        _check_values("own", own, table, y)
    num_bytes = table.extent(bits, bucket).message_bytes
    for message in messages:
        _check_message("each message", message, num_bytes, y)
    run.minmax_sum(messages, own, table, y, bits=bits, bucket=bucket, scale=scale)


def checksum(message: Tensor) -> int:
    """``Σ w_i · (2i + 1) mod 2^64`` over the little-endian 32-bit words of a message.

    Any one or two flipped bits change it (for messages below 2^31 words).
    ``message`` is a contiguous uint8 tensor of shape (bytes,), bytes a multiple of 4. Raises ``TypeError`` or
    ``ValueError`` otherwise.
    """
    _check_message("message", message, 0, message)
    if message.numel() % 4:
        raise ValueError(f"a checksum takes whole 32-bit words: pad the {message.numel()} bytes to a multiple of 4")
    if native.CORE is not None and message.is_cpu:
        return native.checksum(message)
    return reference.checksum(message)


def _execution(tensor: Tensor, table: Table) -> ModuleType:
    """The module that computes on the tensor's device."""
    if not isinstance(table, Table):
        raise TypeError(f"table must be a thinwire.kernels.Table, not {type(table).__name__}")
    if not isinstance(tensor, Tensor):
        raise TypeError(f"expected a tensor, not {type(tensor).__name__}")
    if tensor.is_cpu:
        return reference if native.CORE is None else native
    if tensor.is_cuda:
        from thinwire.kernels import gpu

        return gpu
    return reference


def _check_values(name: str, tensor: Tensor, table: Table, like: Tensor) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a tensor, not {type(tensor).__name__}")
    if tensor.dtype not in DTYPES:
        raise TypeError(f"{name} is {tensor.dtype}; the kernels take float32, bfloat16 and float16: convert it first")
    _check_flat(name, tensor, like)
    if tensor.numel() < table.num_elements:
        raise ValueError(
            f"{name} has {tensor.numel()} elements, but the table's segments reach to element {table.num_elements}"
        )


def _check_message(name: str, tensor: Tensor, num_bytes: int, like: Tensor) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a tensor, not {type(tensor).__name__}")
    if tensor.dtype is not torch.uint8:
        raise TypeError(f"{name} must be uint8, not {tensor.dtype}")
    _check_flat(name, tensor, like)
    if tensor.numel() < num_bytes:
        raise ValueError(f"{name} has {tensor.numel()} bytes, but the table's payloads take {num_bytes}")


def _check_flat(name: str, tensor: Tensor, like: Tensor) -> None:
    if tensor.dim() != 1 or not tensor.is_contiguous():
        raise ValueError(f"{name} must be 1-D and contiguous; its shape is {tuple(tensor.shape)}: flatten it first")
    if tensor is not like and tensor.device != like.device:
        raise ValueError(f"{name} is on {tensor.device}, but the values are on {like.device}: move one of them")
