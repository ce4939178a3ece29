"""Launch options of the Triton kernels."""

# Triton is not installed everywhere, and its language has types of its own.
# pyright: reportMissingImports=false
from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

TILE = 2048
"""Number of elements of one program."""


def options(bits: int) -> dict[str, int | bool]:
    """Return launch options; the narrow parts of odd widths need fewer warps for loads of 128 bits a thread."""
    return {"enable_fp_fusion": False, "num_warps": 2 if bits % 2 else 4}


def on(tensor: Tensor) -> AbstractContextManager[None]:
    """Make the tensor's device the current one, on which Triton launches."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


def words(key: int) -> tuple[int, int]:
    """Return the two halves of a key, less 2^31 each: int32, whatever the key."""
    return (key & 0xFFFFFFFF) - 2**31, (key >> 32 & 0xFFFFFFFF) - 2**31


def check_aligned(message: Tensor) -> None:
    """Raise ``ValueError`` unless the kernels can read 32-bit words of a message."""
    if message.data_ptr() % 4:
        raise ValueError("a message on a GPU must start at a multiple of 4 bytes: slice it at a multiple of 64")


def runs(messages: Sequence[Tensor]) -> list[tuple[Tensor, int, int]]:
    """Return messages as runs that lie evenly in memory: the first message, the bytes between two, and the number.

    One launch reads a run. Messages that were received together are one.
    """
    found: list[tuple[Tensor, int, int]] = []
    for message in messages:
        check_aligned(message)
        first, stride, count = found.pop() if found else (message, 0, 0)
        apart = message.data_ptr() - first.data_ptr()
        if count <= 1 or apart == count * stride:
            found.append((first, apart, count + 1) if count <= 1 else (first, stride, count + 1))
        else:
            found += [(first, stride, count), (message, 0, 1)]
    return found
