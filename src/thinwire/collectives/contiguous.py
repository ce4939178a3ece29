"""Tensors of any strides for PyTorch's collectives: gloo reads and writes memory from a tensor's first element on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


@contextmanager
def contiguous_values(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the real values of a tensor in one piece, in the order of its indices. Changes by the body are copied to
    the tensor when it ends."""
    values = tensor.detach()
    values = torch.view_as_real(values) if values.is_complex() else values  # gloo supports no complex numbers
    whole = values.contiguous()
    yield whole
    if whole is not values:
        overwrite(values, whole)


def overwrite(tensor: Tensor, values: Tensor) -> None:
    """Copy values of its shape into a tensor. Elements that an expanded tensor repeats take the first one's value."""
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if stride == 0 and size > 1:
            # PyTorch refuses to write elements that share their memory.
            tensor, values = tensor.narrow(dim, 0, 1), values.narrow(dim, 0, 1)
    tensor.copy_(values)
