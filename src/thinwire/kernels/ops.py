"""The kernels of buckets and of plain values: they check arguments in constant time, and call what computes them."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from types import ModuleType

from torch import Tensor

from thinwire.kernels import native, reference
from thinwire.kernels.format import Format, Residual
from thinwire.kernels.native import MASK64
from thinwire.kernels.table import Table


def torch_or_triton(tensor: Tensor) -> ModuleType:
    """Return the implementation for a tensor that the core does not process: Triton's, imported on a GPU only."""
    # Only `raw` takes fp64, whose scalars would lose half of their digits as arguments of a kernel.
    on_gpu = native.asynchronous(tensor) and tensor.dtype in native.CODES
    return import_module("thinwire.kernels.gpu") if on_gpu else reference


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
    given = native.segments("x", x, table, x)
    to = native.message("message", message, table.extent(form), x)
    both = native.residual(residual, table, x)
    if native.computes(x):
        native.core().encode(*given, *table.native, to, *form.packed, key & MASK64, *both)
    else:
        torch_or_triton(x).bucketed_encode(x, table, message, form, key=key, residual=residual)


def bucketed_decode(
    message: Tensor, table: Table, y: Tensor, form: Format, *, add: bool = False, scale: float = 1.0
) -> None:
    """Write ``v · scale`` into the table's segments of ``y``, or add it, with ``v = lo + code · unit``.

    Each operation is rounded to fp32; a bf16 or fp16 ``y`` is rounded once more, to nearest even. Elements outside
    the segments are left alone. Any bytes decode to something; only the size of ``message`` is checked.

    Shapes and errors are those of :func:`bucketed_encode`.
    """
    to = native.segments("y", y, table, y)
    received = native.message("message", message, table.extent(form), y)
    if native.computes(y):
        native.core().decode(received, *table.native, *to, *form.packed, add, scale)
    else:
        torch_or_triton(y).bucketed_decode(message, table, y, form, add=add, scale=scale)


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
    to, given = native.segments("y", y, table, y), native.segments("own", own, table, y)
    num_bytes = table.extent(form)
    received = [native.message("each message", message, num_bytes, y) for message in messages]
    out = native.message("out_message", out_message, num_bytes, y)
    both = native.residual(residual, table, y)
    if native.computes(y):
        coding = *form.packed, scale, key & MASK64, *both
        native.core().reduce(*given, *table.native, out, *to, *coding, *received)
    else:
        how = {"scale": scale, "key": key, "residual": residual}
        torch_or_triton(y).bucketed_reduce(messages, own, table, out_message, y, form, **how)


def bucketed_sum(
    messages: Sequence[Tensor], own: Tensor | None, table: Table, y: Tensor, form: Format, *, scale: float = 1.0
) -> None:
    """Set ``y = scale · (own + Σ v_j)`` over ``messages`` in the order given; without ``own`` the sum starts at 0.

    Where the scale is below 1, as of a mean, terms are multiplied by a power of two first: the sum of finite values
    overflows only if their mean does.

    Shapes and errors are those of :func:`bucketed_encode`; ``y`` may be ``own``.
    """
    to, given = native.segments("y", y, table, y), (0, 0) if own is None else native.segments("own", own, table, y)
    num_bytes = table.extent(form)
    received = [native.message("each message", message, num_bytes, y) for message in messages]
    if native.computes(y):
        native.core().sum(*given, *table.native, *to, *form.packed, scale, *received)
    else:
        torch_or_triton(y).bucketed_sum(messages, own, table, y, form, scale=scale)


def checksum(message: Tensor) -> int:
    """Return ``Σ w_i · (2i + 1) mod 2^64`` over the little-endian 32-bit words of a message.

    Any one or two flipped bits change it (for messages below 2^31 words).
    ``message`` is a contiguous uint8 tensor of shape (bytes,), bytes a multiple of 4. Raises ``TypeError`` or
    ``ValueError`` otherwise.
    """
    at, num_bytes = native.message("message", message, 0, message), message.numel()
    if num_bytes % 4:
        raise ValueError(f"a checksum takes whole 32-bit words: pad the {num_bytes} bytes to a multiple of 4")
    return native.core().checksum(at, num_bytes) if native.computes(message) else reference.checksum(message)


# ---- Values without a code --------------------------------------------------------------------------------------

# A DDP bucket has many small layers, and an operation for each would take most of the time: payloads are copied and
# summed by one call of the native core, and on a GPU by one launch.


def raw_encode(x: Tensor, table: Table, message: Tensor) -> None:
    """Write the table's segments of ``x``, in its own dtype, into their payloads in ``message``.

    ``x`` (elements,) of any floating-point dtype; ``message`` (bytes,) uint8. Raises ``TypeError`` for another dtype of
    the message and ``ValueError`` where a payload or a segment lies outside its tensor.
    """
    given, to = _values("x", x, table, x), _payloads("message", message, table, x)
    if given and native.computes(x):
        native.core().raw_encode(*given, *table.native, to)
    else:
        torch_or_triton(x).raw_encode(x, table, message)


def raw_decode(message: Tensor, table: Table, y: Tensor, *, add: bool = False, scale: float = 1.0) -> None:
    """Set (or with ``add`` increase) the segments of ``y`` to their payloads, which have its dtype, times ``scale``.

    Shapes and errors are those of :func:`raw_encode`.
    """
    to, received = _values("y", y, table, y), _payloads("message", message, table, y)
    if to and native.computes(y):
        native.core().raw_decode(received, *table.native, *to, add, scale)
    else:
        torch_or_triton(y).raw_decode(message, table, y, add=add, scale=scale)


def raw_sum(
    messages: Sequence[Tensor], own: Tensor, table: Table, y: Tensor, *, scale: float, out_message: Tensor | None = None
) -> None:
    """Set ``y = scale · (own + Σ messages)``, in fp32 (or wider), in their order, and the same to ``out_message``.

    ``y`` may be ``own``, which may be of a wider dtype; messages have that of ``y``. Shapes and errors are those of
    :func:`raw_encode`.
    """
    given, to = _values("own", own, table, y), _values("y", y, table, y)
    received = [_payloads("each message", message, table, y) for message in messages]
    out = 0 if out_message is None else _payloads("out_message", out_message, table, y)
    if given and to and native.computes(y):
        native.core().raw_sum(*given, *table.native, *to, out, scale, *received)
    else:
        torch_or_triton(y).raw_sum(messages, own, table, y, scale=scale, out_message=out_message)


def rows_add(x: Tensor, other: Tensor, table: Table, out: Tensor, *, alpha: float = 1.0) -> None:
    """Set ``out = x + alpha · other`` on the table's segments, in fp32. ``out`` may be either. Flat, fp32 or narrower.

    Raises ``ValueError`` where a segment lies outside a tensor.
    """
    given, added, to = _values("x", x, table, out), _values("other", other, table, out), _values("out", out, table, out)
    if given and added and to and native.computes(out):
        native.core().rows_add(*given, *table.native, *added, *to, alpha)
    else:
        torch_or_triton(out).rows_add(x, other, table, out, alpha=alpha)


def rows_scale(x: Tensor, table: Table, out: Tensor, *, by: float = 1.0, over: float = 1.0) -> None:
    """Set ``out = x · by / over`` on the table's segments; ``out`` may be ``x``. One of the two factors is 1. Products
    are taken in fp32; ``x`` is fp32 where ``over`` is not 1. Errors are those of :func:`rows_add`."""
    if out is x and by == over == 1.0:
        return
    given, to = _values("x", x, table, out), _values("out", out, table, out)
    if given and to and native.computes(out):
        native.core().rows_scale(*given, *table.native, *to, by, over)
    else:
        torch_or_triton(out).rows_scale(x, table, out, by=by, over=over)


def _values(name: str, tensor: Tensor, table: Table, like: Tensor) -> tuple[int, int] | None:
    """Return values as the core takes them. None, if of another dtype or not contiguous: PyTorch takes those."""
    if tensor.dtype in native.CODES and tensor.is_contiguous():
        return native.segments(name, tensor, table, like)
    if table.num_elements > tensor.numel():
        raise ValueError(f"segments reach to element {table.num_elements} of a tensor of {tensor.numel()}")
    return None


def _payloads(name: str, message: Tensor, table: Table, values: Tensor) -> int:
    size = values.element_size()
    return native.message(name, message, table.message_bytes(("raw", size), lambda numel: numel * size), values)
