"""The public kernels: they check arguments in constant time, and call the implementation for the device."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from thinwire.kernels import native, reference
from thinwire.kernels.format import Format, Residual
from thinwire.kernels.native import MASK64
from thinwire.kernels.table import Table

torch_or_triton = partial(native.torch_or_triton, reference, "gpu")
"""Returns the implementation for tensors that the native core does not process."""

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def bucketed_encode(
    x: Tensor, table: Table, message: Tensor, form: Format, *, key: int, residual: Residual | None = None
) -> None:
    """Quantize the table's segments of ``x`` into their payloads in ``message``, as :class:`Format` says.

    Codes are rounded with draws that depend only on ``key``, the row's site and the element's index in its layer. A
    bucket with NaN or Inf, or whose decoded values could overflow fp32, decodes to NaN throughout; one
    whose range (minmax) or a (maxabs, norm) is below 2^-100 decodes to its minimum or to zeros.

    With ``residual``, ``x + loss_scale · residual.now`` is encoded, and its error, divided by ``loss_scale``, is
    written to ``residual.next`` in the same pass.

    Shapes: ``x`` (elements,) fp32, bf16 or fp16; ``message`` (bytes,) uint8; all contiguous and on one device. Bytes
    of ``message`` outside the payloads are left alone. ``key`` is taken modulo 2^64.

    Raises ``TypeError`` for a wrong dtype and ``ValueError`` for a size, a device or a layout that cannot work.
    """
    _check_table(table, x)
    _check_values("x", x, table, x)
    num_bytes = table.extent(form).message_bytes
    _check_message("message", message, num_bytes, x)
    if residual is not None:
        _check_residual(residual, table, x)
    if not native.computes(x):
        torch_or_triton(x).bucketed_encode(x, table, message, form, key=key, residual=residual)
        return
    to = native.address("message", message, torch.uint8, num_bytes)
    coding = *form.packed, key & MASK64, *native.addresses(residual, table)
    native.core().encode(*native.source("x", x, table), to, *coding)


def bucketed_decode(
    message: Tensor, table: Table, y: Tensor, form: Format, *, add: bool = False, scale: float = 1.0
) -> None:
    """Write ``v · scale`` into the table's segments of ``y``, or add it, with ``v = lo + code · unit``.

    Each operation is rounded to fp32; a bf16 or fp16 ``y`` is rounded once more, to nearest even. Elements outside
    the segments are left alone. Any bytes decode to something; only the size of ``message`` is checked.

    Shapes and errors are those of :func:`bucketed_encode`.
    """
    _check_table(table, y)
    _check_values("y", y, table, y)
    num_bytes = table.extent(form).message_bytes
    _check_message("message", message, num_bytes, y)
    if not native.computes(y):
        torch_or_triton(y).bucketed_decode(message, table, y, form, add=add, scale=scale)
        return
    received = native.address("message", message, torch.uint8, num_bytes)
    native.core().decode(received, *native.target(table, y), *form.packed, add, scale)


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
    """Sum, encode, and decode as all others will: the work of a chunk's owner in a scatter-reduce-all-gather.

    ``s = scale · (own + Σ v_j)`` over ``messages`` in the order given, in fp32; ``out_message`` receives the payloads
    of ``s``, ``y`` its decoded value. ``y`` may be ``own`` itself; otherwise the two must not overlap, and
    ``out_message`` must be none of ``messages``. All messages share the table. ``residual`` is as in
    :func:`bucketed_encode`, with ``s`` for ``x``.

    Shapes and errors are those of :func:`bucketed_encode`.
    """
    _check_table(table, y)
    _check_values("y", y, table, y)
    _check_values("own", own, table, y)
    num_bytes = table.extent(form).message_bytes
    for message in messages:
        _check_message("each message", message, num_bytes, y)
    _check_message("out_message", out_message, num_bytes, y)
    if residual is not None:
        _check_residual(residual, table, y)
    if not native.computes(y):
        how = {"scale": scale, "key": key, "residual": residual}
        torch_or_triton(y).bucketed_reduce(messages, own, table, out_message, y, form, **how)
        return
    coding = *form.packed, scale, key & MASK64, *native.addresses(residual, table)
    out = native.address("out_message", out_message, torch.uint8, num_bytes)
    to = out, *native.values("y", y, table.num_elements)
    native.core().reduce(*native.source("own", own, table), *to, *coding, *native.messages(messages, num_bytes))


def bucketed_sum(
    messages: Sequence[Tensor], own: Tensor | None, table: Table, y: Tensor, form: Format, *, scale: float = 1.0
) -> None:
    """Set ``y = scale · (own + Σ v_j)`` over ``messages`` in the order given; without ``own`` the sum starts at 0.

    Where the scale is below 1, as of a mean, terms are multiplied by a power of two first: the sum of finite values
    overflows only if their mean does.

    Shapes and errors are those of :func:`bucketed_encode`; ``y`` may be ``own``.
    """
    _check_table(table, y)
    _check_values("y", y, table, y)
    if own is not None:
        _check_values("own", own, table, y)
    num_bytes = table.extent(form).message_bytes
    for message in messages:
        _check_message("each message", message, num_bytes, y)
    if not native.computes(y):
        torch_or_triton(y).bucketed_sum(messages, own, table, y, form, scale=scale)
        return
    start = (0, 0) if own is None else native.values("own", own, table.num_elements)
    received = native.messages(messages, num_bytes)
    native.core().sum(*start, *native.target(table, y), *form.packed, scale, *received)


def checksum(message: Tensor) -> int:
    """Return ``Σ w_i · (2i + 1) mod 2^64`` over the little-endian 32-bit words of a message.

    Any one or two flipped bits change it (for messages below 2^31 words).
    ``message`` is a contiguous uint8 tensor of shape (bytes,), bytes a multiple of 4. Raises ``TypeError`` or
    ``ValueError`` otherwise.
    """
    _check_message("message", message, 0, message)
    if message.numel() % 4:
        raise ValueError(f"a checksum takes whole 32-bit words: pad the {message.numel()} bytes to a multiple of 4")
    if not native.computes(message):
        return reference.checksum(message)
    num_bytes = message.numel()
    return native.core().checksum(native.address("message", message, torch.uint8, num_bytes), num_bytes)


def _check_table(table: Table, tensor: Tensor) -> None:
    if not isinstance(table, Table):
        raise TypeError(f"table must be a thinwire.kernels.Table, not {type(table).__name__}")
    if not isinstance(tensor, Tensor):
        raise TypeError(f"expected a tensor, not {type(tensor).__name__}")


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


def _check_residual(residual: Residual, table: Table, like: Tensor) -> None:
    for name, tensor in (("residual.now", residual.now), ("residual.next", residual.next)):
        _check_values(name, tensor, table, like)
        if tensor.dtype is not torch.float32:
            raise TypeError(f"{name} must be float32, not {tensor.dtype}")
    if not 2.0**-126 <= residual.loss_scale <= 2.0**126:
        raise ValueError(f"loss_scale must be 2^-126 to 2^126, not {residual.loss_scale}")


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
